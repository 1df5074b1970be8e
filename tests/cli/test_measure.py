"""The commands that read weights: the library's own numbers on stdout, talk on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from checkpoints_zoo.sources import finding
from tests.support.commands import run, two_collections, values
from tests.support.reports import draw_nothing, measure_few
from tests.support.scenarios import Built, build, digest_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return two_collections(tmp_path_factory.mktemp("cli") / "out")


def test_verify_says_what_was_checked(tiny: Built) -> None:
    result = run("verify", tiny.root)
    assert result.exit_code == 0
    assert result.stdout == (
        "collection  members     bytes  problems\n"
        "tiny              5  73.16 kB         0\n"
        "wide             23  336.5 kB         0\n\n"
        "tiny: checked bytes and values 5 of 5, hash 5 of 5, accuracy 0 of 5\n"
        "tiny: not checked: accuracy, since the rows do not name the images: 5 members\n"
        "wide: checked bytes and values 23 of 23, hash 23 of 23, accuracy 0 of 23\n"
        "wide: not checked: accuracy, since the rows do not name the images: 23 members\n\n"
        "No problems were found.\n"
    )
    assert result.stderr == "tiny: checking …\nwide: checking …\n"
    found = values(run("verify", "tiny", "--source", tiny.root, "--sample", "0", "--format", "json"))
    size = sum(r["nbytes"] for r in tiny.rows)
    assert found == {
        "checked": [
            {
                "collection": "tiny", "members": 5, "bytes": size, "read": 5, "hashed": 5, "measured": 0,
                "problems": 0, "impossible": {},
            }
        ], "retrained": [],
        "problems": [],
    }  # fmt: skip


def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(3))
    content = bytearray(built.shard.read_bytes())
    content[built.rows[1]["offset"] + 40] ^= 1
    built.shard.write_bytes(content)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "\nmember 1 of tiny: hash: expected sha256 " in result.stdout
    assert "No problems" not in result.stdout
    found = values(run("verify", tmp_path, "--format", "json"))["problems"]
    assert [(p["collection"], p["member"], p["kind"]) for p in found] == [("tiny", 1, "hash")]


def test_verify_goes_on_after_a_damaged_manifest(tmp_path: Path) -> None:
    bad, missing, good = (build(tmp_path, members=[0], name=name) for name in ("bad", "gone", "good"))
    bad.manifest.write_bytes(b"no Parquet")
    missing.json.unlink()
    result = run("verify", tmp_path, "--format", "json")
    assert result.exit_code == 1
    found = values(result)
    assert [(p["collection"], p["member"], p["kind"]) for p in found["problems"]] == [
        ("bad", None, "manifest"), ("gone", None, "manifest"),
    ]  # fmt: skip
    assert [c["collection"] for c in found["checked"]] == [good.name]
    assert run("verify", "bad", "--source", tmp_path).exit_code == 1


def test_verify_of_a_folder_without_collections(tmp_path: Path) -> None:
    result = run("verify", tmp_path)
    assert (result.exit_code, result.stdout) == (3, "")
    (tmp_path / "manifests").mkdir()
    result = run("verify", tmp_path)
    assert result.exit_code == 3
    expected = f"zoo-cli: error: source {tmp_path}: expected manifests/NAME.parquet; found none.\n"
    assert result.stderr == expected


@pytest.mark.slow
def test_evaluate_prints_the_librarys_report(tiny: Built) -> None:
    import checkpoints_zoo as zoo

    options = ("evaluate", "tiny", "--source", tiny.root, "-n", "4", "--ood", "photos", "--sizes", "1,2", "--seed", "3")
    result = run(*options, "--format", "json")
    members = zoo.load("tiny", source=tiny.root, n=4)
    report = zoo.evaluate(members, "digits", ood="photos", sizes=[1, 2], seed=3)
    assert values(result) == json.loads(report.to_json())
    assert result.stderr == "tiny: 4 members, 58.53 kB, on digits against photos …\n"
    lines = run(*options).stdout.splitlines()
    assert lines[0].split() == ["ensemble", "of", "1", "2", "4"]
    for line, (figure, scale) in zip(lines[1:3], (("accuracy", 100), ("nll", 1)), strict=True):
        cells = re.split(r"  +", line.strip())[1:]
        for cell, size in zip(cells, (1, 2, 4), strict=True):
            known = report.curve[size][figure]
            numbers = [x for x in (known.value, known.low, known.high) if x is not None]
            for text, exact in zip(re.findall(r"[0-9.]+", cell), numbers, strict=True):
                rounding = 0.501 * 10.0 ** -len(text.partition(".")[2])
                assert float(text) == pytest.approx(scale * exact, abs=rounding)
    named = ["accuracy", "NLL", "Brier", "ECE", "adaptive", "ACE", "AURC", "mutual", "disagreement", "mutual"]
    assert [line.split()[0] for line in lines[1:14]] == [*named, "AUROC", "AUPR", "FPR95"]
    assert lines[15] == "Measured now on digits/test, 540 inputs; OOD: photos/test, 2,000 inputs."


@pytest.mark.slow
def test_evaluate_without_ood_and_with_a_picture(tiny: Built, tmp_path: Path) -> None:
    result = run("evaluate", "tiny", "--source", tiny.root, "--members", "1,3", "--plot", tmp_path / "new" / "r.png")
    assert result.exit_code == 0
    assert (tmp_path / "new" / "r.png").read_bytes().startswith(b"\x89PNG")
    assert result.stderr.splitlines()[-1] == f"picture: {tmp_path}/new/r.png"
    assert "AUROC" not in result.stdout
    assert "No intervals: they need 3 members or more." in result.stdout


@pytest.mark.slow
def test_a_table_of_many_sizes_shows_some(tiny: Built) -> None:
    options = ("evaluate", "wide", "--source", tiny.root, "-n", "16")
    assert run(*options).stdout.splitlines()[0].split() == ["ensemble", "of", "1", "4", "16"]


@pytest.mark.slow
def test_plot_prints_where_the_picture_is(tiny: Built, tmp_path: Path) -> None:
    options = ("plot", "tiny", "--source", tiny.root, "-n", "2", "-o", tmp_path / "r.png")
    assert run(*options).stdout == f"{tmp_path}/r.png\n"
    assert values(run(*options, "--format", "json")) == {"path": f"{tmp_path}/r.png"}
    assert [p.name for p in tmp_path.iterdir()] == ["r.png"]


@pytest.fixture
def populate(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Built]:
    """Put so many members of random weights in place of the package's own, and measure few random ensembles."""
    from checkpoints_zoo.evaluation import evaluating

    def place(members: int) -> Built:
        built = build(tmp_path_factory.mktemp("embedded"), "convnet", range(members), name="convnet-digits")
        monkeypatch.setattr(finding, "EMBEDDED_ROOT", built.root)
        monkeypatch.setattr(evaluating, "evaluate", partial(evaluating.evaluate, subsets=2))
        return built

    return place


@pytest.mark.slow
def test_demo_says_what_it_does_and_writes_one_picture(
    populate: Callable[[int], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    measure_few(monkeypatch)
    draw_nothing(monkeypatch)
    population = populate(64)
    monkeypatch.chdir(tmp_path)
    threads, before = torch.get_num_threads(), digest_of(population.root)
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    assert digest_of(population.root) == before
    assert [p.name for p in tmp_path.iterdir()] == ["zoo-demo.png"]
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert rows[:12] == [
        "ensemble of", "accuracy (%)", "NLL (nats)", "Brier (0..2)", "ECE (0..1)", "mutual information, ID (nats)",
        "mutual information, OOD (nats)", "AUROC (0..1)", "FPR95 (0..1)", "",
        "Measured now on digits/test, 540 inputs; OOD: photos/test, 2,000 inputs.",
        "[ ]: the range of 95 % of new ensembles of that size; for all members, a 95 % jackknife interval.",
    ]  # fmt: skip
    assert result.stdout.splitlines()[0].split() == ["ensemble", "of", "1", "8", "64"]
    first, last = population.rows[0], population.rows[63]
    for row in (first, last):
        place = f"{row['path']}, bytes {row['offset']:,} to {row['offset'] + row['nbytes']:,}"
        assert f"  member {row['member']:2}: {place}, test accuracy {row['test_accuracy']:.2%}\n" in result.stderr
    assert "Stacking them from 1 shard: 936.4 kB, 8 tensors, " in result.stderr
    assert "logits (64, 540, 10) in " in result.stderr
    assert "Picture: zoo-demo.png\nThese members: embedded@" in result.stderr
    assert "/convnet-digits#0-63~" in result.stderr


@pytest.mark.slow
def test_demo_in_json(populate: Callable[[int], Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)
    draw_nothing(monkeypatch)
    populate(9)
    found = values(run("demo", "--format", "json", "--out", tmp_path / "there"))
    assert found["picture"] == f"{tmp_path}/there/zoo-demo.png"
    assert found["citation"].startswith("embedded@")
    sizes = {row["members"] for row in found["figures"] if row["of"] == "ensemble"}
    assert sizes == {1, 2, 4, 8, 9}


def test_the_packages_own_collections() -> None:
    found = [x for x in values(run("list", "--format", "json")) if x["source"] == "embedded"]
    assert [(x["name"], x["members"], x["source"]) for x in found] == [
        ("convnet-digits", 64, "embedded"), ("convnet-digits-varied", 60, "embedded"),
        ("mlp-digits-hmc", 64, "embedded"), ("resnet8-digits", 16, "embedded"),
        ("vit-digits", 32, "embedded"),
    ]  # fmt: skip
    for line in found:
        assert values(run("show", line["name"], "--format", "json"))["bytes"] == line["bytes"]


def test_the_packages_own_members_verify() -> None:
    for name in ("convnet-digits", "resnet8-digits"):
        assert values(run("verify", name, "--sample", "2", "--format", "json"))["problems"] == []
