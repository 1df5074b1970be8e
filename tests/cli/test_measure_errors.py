"""What `evaluate`, `pairwise`, `mmd` and the like can't take, and their commands, is said as a user's error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import SelectionError, UsageError
from tests.support.commands import run, values
from tests.support.report_pages import draw_only, few
from tests.support.reports import measure_few
from tests.support.scenarios import build, load, random_state

SEED = "seed: expected a whole number of at most 64 bits; found "
SUBSETS = "subsets: expected a whole number from 2; found "
SIZE = "size of an ensemble: expected a whole number from 1 to 4; found "
NONE = "members to measure: expected a collection, as `zoo.load` gives it, or stored predictions; found "


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> zoo.Collection:
    return load(build(tmp_path_factory.mktemp("members"), members=range(4)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: zoo.evaluate(m, few(), seed="a"), SEED + "'a'."),
        (lambda m: zoo.evaluate(m, few(), seed=2**64), f"{SEED}{2**64}."),
        (lambda m: zoo.pairwise(m, few(), seed=1.5), SEED + "1.5."),
        (lambda m: zoo.compare_predictives(m[:2], m[2:], few(), seed=None), SEED + "None."),
        (lambda m: zoo.mmd(m, seed=-(2**63) - 1), f"{SEED}{-(2**63) - 1}."),
        (lambda m: zoo.evaluate(m, few(), subsets=1), SUBSETS + "1."),
        (lambda m: zoo.evaluate(m, few(), subsets=2.5), SUBSETS + "2.5."),
        (lambda m: zoo.report_page(m, few(), None, subsets=0), SUBSETS + "0."),
        (lambda m: zoo.compare_predictives(m[:2], m[2:], few(), subsets=0), SUBSETS + "0."),
        (lambda m: zoo.evaluate(m, few(), batch=0), "batch: expected a number of images from 1; found 0."),
        (lambda m: zoo.pairwise(m, few(), batch=-1), "batch: expected a number of images from 1; found -1."),
        (lambda m: zoo.evaluate(m, few(), sizes=8), "sizes of ensembles: expected several, such as [1, 8]; found 8."),
        (lambda m: zoo.evaluate(m, few(), sizes="12"), SIZE + "'1'."),
        (lambda m: zoo.evaluate(m, few(), sizes=[0]), SIZE + "0."),
        (lambda m: zoo.evaluate("tiny"), NONE + "str."),
        (
            lambda m: zoo.evaluate(m.ensemble()),
            NONE + "Ensemble. Give the members themselves, they are run as an ensemble.",
        ),
        (lambda m: zoo.pairwise([m]), NONE + "list."),
        (lambda m: zoo.compare_predictives(m, None), NONE + "NoneType."),
        (lambda m: zoo.report_page("tiny"), NONE + "str."),
        (lambda m: zoo.mmd(m[:1]), "sets of members: expected two members or more in each; found 1 and 0."),
        (lambda m: zoo.ns(m[:3]), "sets of members: expected two members or more in each; found 2 and 1."),
        (lambda m: zoo.mmd(m[9:], m), "sets of members: expected two members or more in each; found 0 and 4."),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(members: zoo.Collection, call: Callable[[Any], object], text: str) -> None:
    with pytest.raises(UsageError) as error:
        call(members)
    assert str(error.value) == text


def test_no_members_make_no_folder(members: zoo.Collection, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="selection of tiny: expected one member or more; found none"):
        members[9:].predict(few(), tmp_path)
    with pytest.raises(UsageError, match=r"^name of a set of predictions '<b>': expected lower-case letters"):
        members.predict(few(), tmp_path, name="<b>")
    with pytest.raises(UsageError, match=r"^batch: expected a number of images from 1; found 0\.$"):
        members.predict(few(), tmp_path, batch=0)
    assert not list(tmp_path.rglob("*.parquet"))


def test_sizes_may_be_numpys(members: zoo.Collection) -> None:
    assert sorted(zoo.evaluate(members, few(), sizes=np.array([1, 2])).curve) == [1, 2, 4]


@pytest.mark.slow
def test_one_figure_need_be_no_list(members: zoo.Collection, tmp_path: Path) -> None:
    report = zoo.evaluate(members, few())
    assert report.plot_curves(tmp_path / "a.png", "nll").read_bytes() == (
        report.plot_curves(tmp_path / "b.png", ["nll"]).read_bytes()
    )
    with pytest.raises(UsageError, match=r"^figure 'nl': expected one of accuracy, nll,"):
        report.plot_curves(tmp_path / "c.png", "nl")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("evaluate", "NAME", "--seed", str(2**64)), 2, f"{SEED}{2**64}."),
        (("mmd", "NAME", "--members", "3"), 2, "sets of members: expected two members or more in each; found 1 and 0."),
        (("predict", "NAME", "--data", "digits", "--out", "OUT", "--batch", "0"), 2, "0 is not in the range x>=1."),
        (("predict", "NAME", "--data", "digits", "--out", "OUT", "--as", "<b>"), 2, "a set of predictions '<b>'"),
        (("evaluate", "NAME", "--within", "nll=1", "--within", "nll=2"), 2, "nll has two distances. Give one."),
        (
            ("evaluate", "NAME", "--stored", "OUT"), 3,
            "expected a folder with predictions/COLLECTION/SET in it; found a folder without predictions/. Give the "
            "folder that `zoo-cli predict` had as --out.",
        ),
        (("pairwise", "NAME", "--stored", "OUT/x"), 3, "SET in it; found nothing there. Give the folder that"),
        (("plot", "NAME", "--figures", "nll,,", "--out", "OUT/a.png"), 2, "figure '': expected one of accuracy, nll,"),
    ],
)  # fmt: skip
def test_commands_say_so(
    members: zoo.Collection, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    named = [a.replace("OUT", str(tmp_path)).replace("NAME", "tiny") for a in arguments]
    result = run(*named, "--source", members.source.root)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
    assert not list(tmp_path.iterdir())


def test_figures_may_have_spaces_between_them(members: zoo.Collection, tmp_path: Path) -> None:
    place = tmp_path / "a.png"
    result = run("plot", "tiny", "--source", members.source.root, "--figures", "nll, brier", "--out", place)
    assert result.exit_code == 0, result.stderr
    assert place.is_file()


@pytest.mark.slow
def test_degenerate_members_give_strict_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member, and members that are all the same: what is not known is null."""
    measure_few(monkeypatch)
    draw_only(monkeypatch)

    def same(member: int, state: dict[str, Any]) -> None:
        state.update({name: tensor.clone() for name, tensor in random_state("convnet", 7).items()})

    source = ("tiny", "--source", build(tmp_path, members=range(4), change=same).root, "--format", "json")
    on = ("--ood", "photos")
    for some in ((), ("--members", "2")):
        values(run("evaluate", *source, *some, *on, "--temperature"))
        page = values(run("report", *source, *some, *on, "--out", tmp_path / "r.html"))
        assert page["evaluation"]["figures"]
    found = values(run("pairwise", *source, *on))
    assert found["figures"][-1] | {"unit": ""} == {
        "figure": "correlation", "value": None, "low": None, "high": None, "unit": "",
    }  # fmt: skip
    values(run("mmd", *source, "--permutations", "9"))
