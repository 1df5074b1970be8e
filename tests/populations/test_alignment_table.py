"""The report of an alignment and `zoo-cli align`: counted and measured again with plain Python and NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.errors import MemberNotFound, UsageError
from checkpoints_zoo.populations.alignment_table import Alignment, alignment, draw_alignment, measure_alignment
from checkpoints_zoo.populations.loss_barrier import barrier
from tests.support.matching_oracles import count_swaps

NAMES = ["convnet-digits", "resnet8-digits"]


def weights(members: zoo.Collection) -> np.ndarray:
    """Return (member, weight) in float64, without running statistics."""
    stacked = {n: t for n, t in members.stack().items() if "running" not in n and "num_batches" not in n}
    return np.concatenate([t.double().flatten(1).numpy() for t in stacked.values()], axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_distances_and_transpositions(name: str) -> None:
    members = zoo.load(name, n=4)
    found, viewed = alignment(members, to=1), members.align(to=1)
    for when, view in ((found.before, members), (found.after, viewed)):
        flat = weights(view)
        assert np.allclose(when, ((flat - flat[1]) ** 2).sum(1), rtol=1e-9)
    for i in range(4):
        element = viewed.symmetry(i)
        counts = {group: count_swaps(p.tolist()) for group, p in element.permutations.items()}
        assert {group: int(found.transpositions[group][i]) for group in found.sizes} == counts
        assert int(found.total[i]) == sum(counts.values())
    assert found.total.tolist()[1] == 0
    assert found.before.tolist()[1] == found.after.tolist()[1] == 0
    assert found.to == "member 1"


def test_to_the_mean_and_to_a_member_of_another_collection() -> None:
    members = zoo.load("convnet-digits", n=5)
    found = alignment(members, to="mean")
    for when, view in ((found.before, members), (found.after, members.align(to="mean"))):
        flat = weights(view)
        assert np.allclose(when, ((flat - flat.mean(0)) ** 2).sum(1), rtol=1e-9)
    assert found.to == "the mean"
    assert float(found.after.sum()) < float(found.before.sum())
    other = alignment(members[1:3], to=members[0])
    assert other.to == "member 0 of convnet-digits"
    assert torch.equal(other.after, alignment(members, to=0).after[1:3])


def test_the_expected_count_is_that_of_random_permutations() -> None:
    found = alignment(zoo.load("convnet-digits", n=2))
    generator = np.random.default_rng(0)
    drawn = [sum(count_swaps(generator.permutation(n).tolist()) for n in found.sizes.values()) for _ in range(400)]
    assert list(found.sizes.values()) == [8, 16, 32]
    assert abs(np.mean(drawn) - found.expected) < 4 * np.std(drawn) / 20


def test_frame_and_json() -> None:
    found = alignment(zoo.load("convnet-digits", n=3))
    frame = found.to_frame()
    assert list(frame.columns[:5]) == ["member", "epoch", "transpositions", "before", "after"]
    groups = [c for c in frame.columns if c.startswith("transpositions of ")]
    assert (frame[groups].sum(axis=1) == frame["transpositions"]).all()
    values = json.loads(found.to_json())
    assert values["members"] == found.rows()
    assert [g["units"] for g in values["groups"]] == [8, 16, 32]


def test_what_was_matched_is_not_matched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints_zoo.symmetry.canonical import alignment as matching

    matched = []

    def counted(table: Any, params: Any, reference: Any) -> Any:
        matched.append(len(next(iter(params.values()))))
        return match(table, params, reference)

    match = matching.match_weights
    monkeypatch.setattr(matching, "match_weights", counted)
    members = zoo.load("convnet-digits", n=4)
    aligned = members.align(to=1)
    found = measure_alignment(aligned)
    aligned.stack()
    aligned.symmetries()
    assert sum(matched) == 3  # all but the reference
    part = measure_alignment(aligned[2:])
    assert sum(matched) == 3
    assert torch.equal(part.after, found.after[2:])
    assert torch.equal(found.before, alignment(members, to=1).before)


def test_refusals() -> None:
    members = zoo.load("convnet-digits", n=2)
    for viewed in (members, members.align().canonicalize(permute="max")):
        with pytest.raises(UsageError, match="alignment of convnet-digits: expected members that were aligned last"):
            measure_alignment(viewed)
    with pytest.raises(MemberNotFound):
        alignment(members, to=7)
    with pytest.raises(UsageError, match=r"picture .*p\.jpg: expected a name that ends in \.png"):
        alignment(members).plot("p.jpg")


@pytest.mark.slow
def test_the_picture_shows_every_member_but_the_reference(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=4)
    found = alignment(members)
    lines = [barrier(view, points=3) for view in (members, members.align())]
    figure = draw_alignment(found, lines)
    distances, counts, losses = figure.axes
    points = np.asarray(distances.collections[0].get_offsets())
    assert np.allclose(points, np.stack([found.before[1:], found.after[1:]], 1))
    assert [t.get_text() for t in counts.get_yticklabels()] == [f"{n} ({size})" for n, size in found.sizes.items()]
    means = [line for line in losses.lines if line.get_linewidth() == 2]
    assert np.allclose(means[0].get_ydata(), lines[0].losses.mean(0))
    assert np.allclose(means[1].get_ydata(), lines[1].losses.mean(0))
    assert [len(draw_alignment(found, None).axes), len(draw_alignment(_of_one(found), None).axes)] == [2, 2]
    assert found.plot(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def _of_one(found: Alignment) -> Alignment:
    one = {name: counts[:1] for name, counts in found.transpositions.items()}
    return Alignment("odd $name", "member 0", found.keys[:1], found.sizes, one, found.before[:1], found.after[:1])


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    saved, picture = tmp_path / "s.parquet", tmp_path / "p.png"
    arguments = ["align", "convnet-digits", "-n", "3", "--to", "1", "--save", str(saved), "--plot", str(picture)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    members = zoo.load("convnet-digits", n=3)
    found = alignment(members, to=1)
    first = next(line.split() for line in result.stdout.splitlines() if line.startswith("     0"))
    assert first[1] == str(int(found.total[0]))
    assert float(first[2]) == pytest.approx(float(found.before[0]), rel=1e-3)
    assert "mean squared distance, aligned" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert pq.read_table(saved).num_rows == 3
    direct, read = members.align(to=1).stack(), members.transform(saved).stack()
    assert all(torch.equal(direct[n], read[n]) for n in direct)


@pytest.mark.slow
def test_the_command_s_json_and_barrier() -> None:
    result = CliRunner().invoke(main, ["align", "convnet-digits", "-n", "2", "--barrier", "--format", "json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert len(values["members"]) == 2
    before, after = (values["barrier"][when]["mean"]["value"] for when in ("before", "after"))
    assert after < before
    table = CliRunner().invoke(main, ["align", "convnet-digits", "-n", "2", "--barrier"])
    assert f"mean loss barrier (nats)                {before:.3f}\n" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--to", "median"], 2, "'median' is neither a member's id nor mean."),
        (["--to", "99"], 3, "member 99"),
        (["--to", "mean", "--barrier"], 2, "--barrier needs --to ID: lines start at a member, not at the mean."),
        (["--plot", "p.jpg"], 2, "'p.jpg' does not end in .png or .pdf or .svg."),
    ],
)
def test_what_the_command_refuses(arguments: list[str], code: int, text: str) -> None:
    result = CliRunner().invoke(main, ["align", "convnet-digits", "-n", "2", *arguments])
    assert result.exit_code == code
    assert text in result.stderr
