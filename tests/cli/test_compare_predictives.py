"""`zoo-cli compare-predictives` prints what `zoo.compare_predictives` returns."""

from __future__ import annotations

import json

import checkpoints_zoo as zoo
from tests.support.commands import run, values


def test_halves_and_another_set_are_compared() -> None:
    members = zoo.load("convnet-digits", n=8)
    halves = json.loads(zoo.compare_predictives(members[::2], members[1::2]).to_json())
    assert values(run("compare-predictives", "convnet-digits", "-n", "8", "--format", "json")) == halves
    other = zoo.load("convnet-digits", members="32-35")
    expected = json.loads(zoo.compare_predictives(members[:4], other, "digits/train", subsets=4, seed=1).to_json())
    arguments = ("--data", "digits/train", "--subsets", "4", "--seed", "1", "--format", "json")
    assert values(run("compare-predictives", "convnet-digits", other.citation, "-n", "4", *arguments)) == expected


def test_the_table_and_what_is_refused() -> None:
    shown = run("compare-predictives", "convnet-digits", "-n", "2")
    assert shown.exit_code == 0
    assert "agreement (0..1)" in shown.stdout
    assert "There are no intervals for fewer than 3 members" in shown.stdout
    refused = run("compare-predictives", "convnet-digits", "--other-source", "out/")
    assert (refused.exit_code, "--other-source needs an OTHER." in refused.stderr) == (2, True)
