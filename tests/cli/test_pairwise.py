"""`zoo-cli pairwise`: the library's own numbers on stdout, pairs in a file, stored predictions in place of weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo import predictions
from checkpoints_zoo.errors import StorageError, UsageError
from checkpoints_zoo.populations.pairwise_information import Pairwise
from tests.support.commands import run, values
from tests.support.scenarios import build

SELECTED = ("pairwise", "convnet-digits", "--members", "2,5,6,9")


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("convnet-digits", members="2,5,6,9")


@pytest.fixture(scope="module")
def found(members: zoo.Collection) -> Pairwise:
    return zoo.pairwise(members, "digits", ood="photos", seed=4)


@pytest.mark.slow
def test_json_and_table_are_the_librarys(found: Pairwise, tmp_path: Path) -> None:
    options = (*SELECTED, "--ood", "photos", "--seed", "4")
    picture, pairs = tmp_path / "new" / "p.png", tmp_path / "new" / "pairs.parquet"
    result = run(*options, "--plot", picture, "--out", pairs, "--format", "json")
    assert values(result) == json.loads(found.to_json())
    assert result.stderr == (
        f"convnet-digits: 4 members, 58.53 kB, on digits against photos …\npairs: {pairs}\npicture: {picture}\n"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    pd.testing.assert_frame_equal(pd.read_parquet(pairs), found.to_frame(), check_exact=True)
    lines = run(*options).stdout.splitlines()
    assert lines[0].split() == ["all", "pairs", "lowest", "pair", "highest", "pair"]
    frame = found.to_frame()
    for line, (name, x) in zip(lines[1:6], found.figures.items(), strict=True):
        cells = re.split(r"\s{2,}", line)[1:]
        shown = cells[0].split(" ")[0]
        assert float(shown) == pytest.approx(x.value, abs=0.501 * 10.0 ** -len(shown.partition(".")[2]))
        bounds = ["-", "-"] if name == "correlation" else [f"{frame[name].min():.4g}", f"{frame[name].max():.4g}"]
        assert cells[1:] == bounds
    assert lines[7:] == [
        "6 pairs of 4 members, measured now on digits/test, 540 inputs; OOD: photos/test, 2,000 inputs.",
        "Means over pairs; [ ]: 95 % intervals by a jackknife over members, since pairs share members.",
    ]


def test_stored_predictions(members: zoo.Collection, found: Pairwise, tmp_path: Path) -> None:
    stored = [predictions.predict(members, name, tmp_path) for name in ("digits", "photos")]
    result = run(*SELECTED, "--stored", tmp_path, "--ood", "photos-test", "--seed", "4", "--format", "json")
    assert values(result) == json.loads(zoo.pairwise(stored[0], ood=stored[1], seed=4).to_json())
    assert result.stderr == "convnet-digits: stored predictions of 4 members, digits-test …\n"
    by_figure = {row["figure"]: row["value"] for row in values(result)["figures"]}
    assert by_figure == pytest.approx({name: x.value for name, x in found.figures.items()}, abs=2e-3)
    only = run(*SELECTED, "--stored", tmp_path, "--data", "photos-test", "--format", "json")
    assert values(only)["data"] == found.ood
    missing = run("pairwise", "convnet-digits", "--stored", tmp_path)
    assert missing.exit_code == 3
    assert "found none for members 0-1,3-4" in missing.stderr


def test_pairs_as_csv_and_where_they_can_not_be_written(found: Pairwise, tmp_path: Path) -> None:
    path = found.write(tmp_path / "new" / "pairs.csv")
    assert (
        path.read_text().splitlines()[0] == '"member_a","member_b","mi_id","disagreement","mi_ood","disagreement_ood"'
    )
    read = pd.read_csv(path)
    pd.testing.assert_frame_equal(read, found.to_frame(), check_exact=True)
    with pytest.raises(UsageError) as error:
        found.write(tmp_path / "pairs.xlsx")
    expected = "expected a name that ends in .parquet or .csv; found 'pairs.xlsx'."
    assert str(error.value) == f"table {tmp_path}/pairs.xlsx: {expected}"
    with pytest.raises(StorageError):
        found.write(path / "pairs.csv")
    assert [p.name for p in tmp_path.rglob("*")] == ["new", "pairs.csv"]


def test_two_members_have_no_intervals(tmp_path: Path) -> None:
    built = build(tmp_path, "convnet", range(2))
    result = run("pairwise", "tiny", "--source", built.root)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[4:] == [
        "1 pair of 2 members, measured now on digits/test, 540 inputs.",
        "There are no intervals for fewer than 3 members.",
    ]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("-n", "1"), 2, "pairs of convnet-digits: expected two members or more; found 1."),
        (("--out", "p.txt"), 2, "Invalid value for '-o' / '--out': 'p.txt' does not end in .parquet or .csv."),
        (("--plot", "p.jpg"), 2, "Invalid value for '--plot': 'p.jpg' does not end in .png or .pdf or .svg."),
        (("--data", "digit"), 2, "data set 'digit'"),
        (("--stored", "/nowhere"), 3, "/nowhere"),
    ],
)
def test_what_the_command_cannot_take(options: tuple[str, ...], code: int, text: str) -> None:
    result = run("pairwise", "convnet-digits", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
