"""`zoo-cli compare`: the library's own numbers on stdout, talk on stderr; files; what is left to do."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.fitting import fit
from checkpoints_zoo.training import recipe_files
from tests.support.commands import run, values
from tests.support.few_draws import DRAWS, few_images, noisy

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


@pytest.mark.slow
def test_the_table_is_the_librarys_and_a_second_run_reads_it(asked: tuple[str, ...], place: Path) -> None:
    out = ("--out", str(place / "out"))
    dry = values(run(*asked, *out, "--dry-run", "--format", "json"))
    assert (dry["fits"], len(dry["cells"]), dry["found"], dry["left_out"]) == ([], 2 * 3 + 4 + 4, 0, {})
    assert not (place / "out").exists()
    files = ("--json", place / "new" / "c.json", "--latex", place / "c.tex", "--table", place / "c.parquet")
    result = run(*asked, *out, *files, "--plot", place / "c.png")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "convnet-digits: measuring 14 of 14 cells …",
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
    assert [line.split()[-1] for line in todo.stdout.splitlines()] == ["nothing", "0", "none", "14", "nothing"]


def _fail(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--methods", "swog"), 2, "method 'swog': expected one of dropout, vi, swag, "),
        (("--methods", "swag,swag"), 2, "methods: expected each once; found swag, swag."),
        (("--draws", "1"), 2, "per_run: expected a whole number from 2; found 1."),
        (("--with", "a=b"), 2, "Invalid value for '--with': 'a=b' is no LABEL=NAME@SOURCE with a label of its own."),
        (("--plot", "c.jpg"), 2, "Invalid value for '--plot': 'c.jpg' does not end in .png or .pdf or .svg."),
        (("--table", "c.txt"), 2, "Invalid value for '--table': 'c.txt' does not end in .csv or .parquet."),
        (("--reference", "convnet-digit"), 3, "convnet-digit"),
        (("-n", "3"), 2, "reference convnet-digits: expected 4 members or more"),
        (("--recipe", "none.py"), 2, "recipe file none.py: expected a Python file; found no such file."),
        (("--recipe", "resnet8-digits"), 2, "recipe of convnet-digits: expected the one that its members were trained"),
        (
            ("--reference", "resnet8-digits", "--methods", "swag, snapshot"),
            2,
            "methods fitted to convnet-digits: expected the tensors of resnet8-digits; found others, such as "
            "'bn1.weight'. All draws have to be of the reference's network.",
        ),
    ],
)
def test_what_the_command_cannot_take(options: tuple[str, ...], code: int, text: str, tmp_path: Path) -> None:
    result = run("compare", "convnet-digits", "--out", tmp_path / "out", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_place_that_takes_no_files_is_refused_before_anything_is_fitted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run("compare", "convnet-digits", "--out", folder, "--methods", "none")
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr == (
            f"zoo-cli: error: folder {folder}: expected a place that can be written to; found Not a directory:"
            f" {tmp_path / 'file'}. Give another one.\n"
        )


OWN = """
from dataclasses import replace
from torch import nn
from checkpoints_zoo.training.recipes import mlp_digits

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))

OWN = {"name": "own-digits", "architecture": "own", "build": build, "arguments": {}}
RECIPE = replace(mlp_digits(), **OWN, epochs=1, stack_width=4)
"""


@pytest.mark.slow
def test_a_collection_of_ones_own_and_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's own network draws; --dry-run says where they lie."""
    monkeypatch.chdir(tmp_path)
    Path("own_of_compare.py").write_text(OWN)
    recipe = recipe_files.read_recipe("own_of_compare.py")
    fit("deep-ensemble", recipe, out="own", draws=4)
    asked = (
        "compare", "own-digits-deep-ensemble", "--source", "own", "--architecture", "own_of_compare:build", "--recipe",
        "own_of_compare.py", "--methods", "snapshot", "--runs", "2", "--draws", "2", "--ood", "none", "--out", "out",
        "--permutations", "19", "--workers", "1",
    )  # fmt: skip
    result = run(*asked)
    assert result.exit_code == 0, result.output
    folder = values(run(*asked, "--dry-run", "--format", "json"))["folders"]["snapshot"]
    assert f"own-digits-snapshot-multi in {folder}\n" in result.stderr
    assert len(zoo.load("own-digits-snapshot-multi", source=folder, architecture=recipe.skeleton)) == 4


def test_a_method_that_needs_what_is_missing_is_left_out_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "checkpoints_zoo.methods.comparing.draws._is_installed", lambda need: not need.startswith("posteriors")
    )
    dry = values(run("compare", "convnet-digits", "--out", tmp_path, "--dry-run", "--format", "json"))
    assert "sgld" in dry["left_out"]
    assert 'Run: pip install "posteriors' in dry["left_out"]["sgld"]
    assert "swag" in dry["fits"]
    named = run("compare", "convnet-digits", "--out", tmp_path, "--methods", "swag,sgld")
    assert named.exit_code == 2
    assert "method 'sgld': expected posteriors" in named.stderr
