"""`zoo-cli compact`: the library's own numbers on stdout, talk on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.methods.comparing.compact_comparison import compact
from tests.support.commands import run, values
from tests.support.scenarios import Built, build

SELECTED = ("compact", "convnet-digits", "--members", "2,5,6,9")
OPTIONS = ("--to", "5", "--samples", "2", "--splits", "3", "--seed", "4")


@pytest.fixture(scope="module", autouse=True)
def few_levels() -> Iterator[None]:
    """Prune at few levels: each is a network of its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(compact.__kwdefaults__ or {}, "levels", (0.5,))
        yield


@pytest.fixture(scope="module")
def found(few_levels: None) -> dict[str, object]:
    members = zoo.load("convnet-digits", members="2,5,6,9")
    result: dict[str, object] = json.loads(compact(members, to=5, samples=2, splits=3, seed=4).to_json())
    return result


@pytest.mark.slow
def test_json_is_the_librarys(found: dict[str, object]) -> None:
    result = run(*SELECTED, *OPTIONS, "--format", "json")
    assert values(result) == found
    assert result.stderr == "convnet-digits: 4 members, 58.53 kB …\n"


def test_the_table_is_the_papers(found: dict[str, object]) -> None:
    result = run(*SELECTED, *OPTIONS)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["members", "q_d", "q_r"]
    names = ["agreement (0..1)", "total variation (0..1)", "accuracy of samples (%)", "accuracy of the mean (%)"]
    assert [line.split("  ")[0] for line in lines[1:5]] == names
    table = found["table"]
    assert isinstance(table, dict)
    for line, row, scale in (
        (lines[2], "total_variation", 1), (lines[3], "sample_accuracy", 100), (lines[4], "mean_accuracy", 100),
    ):  # fmt: skip
        cells = re.split(r"\s{2,}", line)[1:]
        for cell, column in zip(cells, ("members", "q_d", "q_r"), strict=True):
            if row not in table[column]:
                assert cell == "-"
                continue
            shown = cell.split(" ")[0]
            rounding = 0.501 * 10.0 ** -len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(scale * table[column][row]["value"], abs=max(rounding, 0.001))
    assert re.fullmatch(r"Alignment changes the accuracy of the mean by .* points\.", lines[6])
    assert lines[8].split()[:5] == ["one", "half", "against", "the", "other"]
    assert lines[12] == "Measured now on digits/test, 540 inputs; 2 samples of each, aligned to member 5."
    assert lines[-1] == "[ ]: 95 % jackknife intervals over members; for halves, the range of 95 % of the splits."
    assert "Running statistics" not in result.stdout


@pytest.mark.slow
def test_running_statistics_are_named_and_a_picture_drawn(tmp_path: Path) -> None:
    built = build(tmp_path / "out", "resnet8", range(2))
    picture = tmp_path / "new" / "c.png"
    result = run("compact", "tiny", "--source", built.root, "--samples", "1", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "Running statistics of means and samples: from 1,257 images of digits/train.\n" in result.stdout
    assert result.stdout.endswith("There are no intervals for fewer than 3 members.\n")
    assert "one half" not in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stderr.splitlines()[-1] == f"picture: {picture}"


@pytest.fixture
def tiny(tmp_path: Path) -> Built:
    return build(tmp_path, "convnet", range(3))


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("-n", "1"), 2, "members of a compact posterior: expected two or more: one has no variance; found 1 of tiny."),
        (("--samples", "0"), 2, "samples of a compact posterior: expected a whole number from 1; found 0."),
        (("--splits", "1"), 2, "splits of a compact posterior: expected a whole number from 2; found 1."),
        (("--to", "first"), 2, "Invalid value for '--to': 'first' is neither a member's id nor mean."),
        (("--plot", "c.jpg"), 2, "Invalid value for '--plot': 'c.jpg' does not end in .png or .pdf or .svg."),
        (("--to", "44"), 3, "member 44"),
        (("--data", "photos"), 2, "expected labels of the classes"),
    ],
)
def test_what_the_command_cannot_take(tiny: Built, options: tuple[str, ...], code: int, text: str) -> None:
    result = run("compact", "tiny", "--source", tiny.root, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
