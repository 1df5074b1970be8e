"""`zoo-cli mmd`: the library's own numbers on stdout, talk on stderr; halves, other collections, citations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.populations.discrepancy import MMD
from tests.support.commands import run, two_collections, values
from tests.support.scenarios import Built

FEW = ("--permutations", "19")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return two_collections(tmp_path_factory.mktemp("cli") / "out")


@pytest.mark.slow
def test_json_is_the_librarys_of_halves(tiny: Built, tmp_path: Path) -> None:
    options = ("mmd", "wide", "--source", tiny.root, "-n", "9", "--seed", "3", *FEW)
    result = run(*options, "--plot", tmp_path / "new" / "m.png", "--format", "json")
    members = zoo.load("wide", source=tiny.root, n=9)
    found = zoo.ns(members, permutations=19, seed=3)
    assert values(result) == json.loads(found.to_json())
    assert found.mmd == zoo.mmd(members[::2], members[1::2], permutations=19, seed=3)
    views = [
        members[some].canonicalize(scale="unit-norm", permute="first") for some in (slice(0, 9, 2), slice(1, 9, 2))
    ]
    assert found.ns == zoo.mmd(*views, permutations=19, seed=3)
    assert result.stderr == (f"wide: 9 members against their other half, 131.7 kB …\npicture: {tmp_path}/new/m.png\n")
    assert (tmp_path / "new" / "m.png").read_bytes().startswith(b"\x89PNG")
    frame = found.to_frame()
    assert list(frame.columns) == ["group", "weights", "mmd2", "p_value", "ns_mmd2", "ns_p_value"]
    assert frame.iloc[-1].tolist() == [
        "all", 3658, found.mmd.value, found.mmd.p_value, found.ns.value, found.ns.p_value,
    ]  # fmt: skip
    lines = run(*options).stdout.splitlines()
    assert lines[0].split() == ["layer", "weights", "MMD²", "p", "NS", "p", "of", "NS"]
    assert [line.split()[0] for line in lines[1:6]] == list(found.mmd.groups)
    for line, row in zip(lines[1:6], found.rows(), strict=True):
        texts = [f"{row[key]:.3g}" for key in ("mmd2", "p_value", "ns_mmd2", "ns_p_value")]
        assert line.split()[1:] == [f"{row['weights']:,}", *texts]
    assert lines[7].startswith("Members: 5 at even positions against 4 at odd positions. MMD² is unbiased")
    assert lines[7].endswith("the mean over 20 kernels.")
    assert lines[8:] == [
        "NS: MMD² with symmetries removed (scale unit-norm, permute first).",
        "p: share of 19 permutations with at least this MMD²; not adjusted for many layers. "
        "Of draws, runs are exchanged, or one draw of each run.",
    ]


def test_another_collection_as_stored(tiny: Built) -> None:
    options = ("mmd", "tiny", "wide", "--source", tiny.root, "--as-stored", "--groups", "tensor", *FEW)
    result = run(*options, "-n", "4", "--format", "json")
    first, second = (zoo.load(name, source=tiny.root, n=4) for name in ("tiny", "wide"))
    found = zoo.mmd(first, second, groups="tensor", permutations=19)
    assert isinstance(found, MMD)
    assert values(result) == json.loads(found.to_json())
    assert result.stderr == "tiny: 4 members against 4 of wide, 117.1 kB …\n"
    lines = run(*options).stdout.splitlines()
    assert lines[0].split() == ["layer", "weights", "MMD²", "p"]
    assert lines[1].split()[0] == "conv1.weight"
    assert lines[-2].startswith("Members: 5 against 23. MMD² is unbiased")


def test_a_citation_and_ways_to_remove_symmetries(tiny: Built) -> None:
    other = zoo.load("wide", source=tiny.root, members="3-7")
    options = ("mmd", "tiny", other.citation, "--source", tiny.root, *FEW)
    result = run(*options, "--scale", "none", "--permute", "norm", "--streams", "--format", "json")
    found = zoo.ns(zoo.load("tiny", source=tiny.root), other, scale=None, permute="norm", streams=True, permutations=19)
    assert values(result) == json.loads(found.to_json())
    elsewhere = run("mmd", "convnet-digits", "tiny", "-n", "3", "--other-source", tiny.root, "--as-stored", *FEW)
    assert elsewhere.exit_code == 0, elsewhere.output
    assert elsewhere.stderr == "convnet-digits: 3 members against 3 of tiny, 87.79 kB …\n"


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("-n", "3"), 2, "sets of members: expected two members or more in each; found 2 and 1."),
        (("--permutations", "0"), 2, "permutations: expected 1 or more; found 0."),
        (("--permute", "size"), 2, "Invalid value for '--permute': 'size' is not one of"),
        (("--permute", "norm"), 2, "norm"),
        (("--plot", "m.jpg"), 2, "Invalid value for '--plot': 'm.jpg' does not end in .png or .pdf or .svg."),
        (("--other-source", "x"), 2, "--other-source needs an OTHER."),
        (("wider",), 3, "wider"),
    ],
)
def test_what_the_command_cannot_take(tiny: Built, options: tuple[str, ...], code: int, text: str) -> None:
    result = run("mmd", "tiny", "--source", tiny.root, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
