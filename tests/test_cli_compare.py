"""`zoo-cli compare`: the library's own numbers on stdout, talk on stderr; files; what is left to do."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.comparing.comparison import Comparison
from tests.commands import run, values
from tests.few_draws import DRAWS, few_images, noisy

FEW = ("--permutations", "19", "--workers", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with draws of a method, `draws`, and images, `images`."""
    root = tmp_path_factory.mktemp("cli")
    noisy(zoo.load("convnet-digits")[40:], "swag", root / "draws", 0.05, runs=2)
    return root


@pytest.fixture(scope="module")
def images(place: Path) -> tuple[str, ...]:
    """Options for a few images."""
    from PIL import Image

    inside, outside = few_images()
    assert inside.labels is not None
    for name, data in (("inside", inside), ("outside", outside)):
        for at, pixels in enumerate(data.images[:60]):
            label = "0" if data.labels is None else str(int(data.labels[at]))
            folder = place / "images" / name / "test" / label
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0].numpy()).save(folder / f"{at:02}.png")
    return ("--data", str(place / "images" / "inside"), "--ood", str(place / "images" / "outside"))


@pytest.fixture(scope="module")
def asked(place: Path, images: tuple[str, ...]) -> tuple[str, ...]:
    given = f"mine=convnet-digits-swag-multi@{place / 'draws'}"
    return ("compare", "convnet-digits", "-n", "8", "--methods", "none", "--with", given, *images, *FEW)


def test_the_table_is_the_librarys_and_a_second_run_reads_it(asked: tuple[str, ...], place: Path) -> None:
    out = ("--out", str(place / "out"))
    dry = values(run(*asked, *out, "--dry-run", "--format", "json"))
    assert (dry["fits"], len(dry["cells"]), dry["found"], dry["left_out"]) == ([], 2 * 2 + 1 + 3 + 3, 0, {})
    assert not (place / "out").exists()
    files = ("--json", place / "new" / "c.json", "--latex", place / "c.tex", "--table", place / "c.parquet")
    result = run(*asked, *out, *files, "--plot", place / "c.png")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "convnet-digits: measuring 11 of 11 cells …",
        f"table: {place / 'new' / 'c.json'}",
        f"table: {place / 'c.tex'}",
        f"table: {place / 'c.parquet'}",
        f"picture: {place / 'c.png'}",
    ]
    members, draws = zoo.load("convnet-digits", n=8), zoo.load("convnet-digits-swag-multi", source=place / "draws")
    found = Comparison.from_json((place / "out" / "comparison.json").read_text())
    expected = zoo.compare(
        members, (), zoo.images.of(place / "images" / "inside"), zoo.images.of(place / "images" / "outside"),
        out=place / "out", draws={"mine": draws}, permutations=19, workers=1, say=_fail,
    )  # fmt: skip
    assert found == expected
    assert result.stdout == found.to_text() + "\n"
    assert Comparison.from_json((place / "new" / "c.json").read_text()) == found
    assert (place / "c.tex").read_text() == found.to_latex() + "\n"
    assert pq.read_table(place / "c.parquet").num_rows == len(found.to_frame())
    assert (place / "c.png").read_bytes().startswith(b"\x89PNG")
    assert [(row.method, row.mode, row.draws) for row in found.rows] == [
        ("mine", "one", DRAWS), ("mine", "multi", DRAWS), ("reference", "members", 8),
    ]  # fmt: skip

    again = run(*asked, *out, "--format", "json")
    assert values(again) == json.loads(found.to_json())
    assert again.stderr == ""
    todo = run(*asked, *out, "--dry-run")
    assert [line.split()[-1] for line in todo.stdout.splitlines()] == ["nothing", "0", "none", "11", "nothing"]


def _fail(text: str) -> None:
    raise AssertionError(text)


def test_another_population_as_the_reference(place: Path, images: tuple[str, ...]) -> None:
    result = run(
        "compare", "convnet-digits-swag-multi", "--source", place / "draws", "--methods", "none", "--ood", "none",
        "--with", "fresh=convnet-digits@embedded", *images[:2], "--reference", "convnet-digits-swag-multi", *FEW,
        "--out", place / "other", "--format", "json",
    )  # fmt: skip
    found = values(result)
    assert [(row["method"], row["draws"]) for row in found["rows"]] == [("fresh", 64), ("reference", 2 * DRAWS)]
    assert "convnet-digits-swag-multi#0-11~" in found["reference"]
    assert found["ood"] == ""


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--methods", "swog"), 2, "method 'swog': expected one of dropout, vi, swag, "),
        (("--methods", "swag,swag"), 2, "methods: expected each once; found swag, swag."),
        (("--draws", "1"), 2, "per_run: expected a whole number from 2; found 1."),
        (("--with", "a=b"), 2, "Invalid value for '--with': 'a=b' is no LABEL=COLLECTION@SOURCE, each label once."),
        (("--plot", "c.pdf"), 2, "Invalid value for '--plot': 'c.pdf' does not end in .png."),
        (("--table", "c.txt"), 2, "Invalid value for '--table': 'c.txt' ends neither in .csv nor in .parquet."),
        (("--reference", "convnet-digit"), 3, "convnet-digit"),
        (("-n", "3"), 2, "reference convnet-digits: expected 4 members or more"),
    ],
)
def test_what_the_command_cannot_take(options: tuple[str, ...], code: int, text: str, tmp_path: Path) -> None:
    result = run("compare", "convnet-digits", "--out", tmp_path / "out", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_method_that_needs_what_is_missing_is_left_out_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints_zoo.comparing.drawn._installed", lambda need: not need.startswith("posteriors"))
    dry = values(run("compare", "convnet-digits", "--out", tmp_path, "--dry-run", "--format", "json"))
    assert "sgld" in dry["left_out"]
    assert 'Run: pip install "posteriors' in dry["left_out"]["sgld"]
    assert "swag" in dry["fits"]
    named = run("compare", "convnet-digits", "--out", tmp_path, "--methods", "swag,sgld")
    assert named.exit_code == 2
    assert "method 'sgld': expected posteriors" in named.stderr
