"""`zoo-cli compact-table`, and `zoo-cli compact --against`: the library's own numbers on stdout, talk on stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison, compact, fit_and_compare
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.training import recipes
from checkpoints_zoo.training.recipes import mlp_digits
from tests.support.commands import run, values

QUICK = replace(mlp_digits(), epochs=1, stack_width=4, arguments={**mlp_digits().arguments, "widths": (6,)})
VI_QUICK = MeanField(steps=5)
SMALL = (
    "--runs", "3", "--draws", "4", "--samples", "2", "--splits", "2", "--steps", "3", "--warmup", "2", "--workers", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compact-table") / "out"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of one epoch, and few steps of HMC and VI."""
    monkeypatch.setitem(recipes.RECIPES, "mlp-digits", lambda: QUICK)
    monkeypatch.setitem(fit_and_compare.__kwdefaults__ or {}, "vi", VI_QUICK)


@pytest.mark.slow
def test_fits_and_prints(folder: Path, tmp_path: Path) -> None:
    table, latex = tmp_path / "new" / "t.json", tmp_path / "t.tex"
    result = run("compact-table", "mlp-digits", "--out", folder, *SMALL, "--json", table, "--latex", latex)
    assert result.exit_code == 0, result.output
    found = CompactComparison.from_json(table.read_text())
    assert result.stdout == f"{found.to_text()}\n"
    assert latex.read_text() == f"{found.to_latex()}\n"
    assert [(n, s.runs, s.draws) for n, s in found.sources.items()] == [
        ("hmc", 3, 12),
        ("ensemble", 4, 4),
        ("vi", 3, 12),
    ]
    for name, method in (("hmc", "hmc"), ("ensemble", "deep-ensemble"), ("vi", "vi")):
        assert found.sources[name].facts["fit"]["method"] == method
        assert str(folder) not in found.sources[name].citation
    assert found.sources["hmc"].facts["fit"]["settings"]["steps"] == 3
    assert len(found.sources["vi"].facts["fit"]["facts"]) == 3
    assert found["vi", "q", "sample_accuracy"].high is not None
    assert "mlp-digits: fitting " in result.stderr
    again = run("compact-table", "mlp-digits", "--out", folder, *SMALL, "--format", "json")
    assert values(again) == json.loads(found.to_json())
    assert "fitting" not in again.stderr
    hmc_quick = Hmc(steps=3, warmup=2)
    assert fit_and_compare(QUICK, folder, runs=3, draws=4, hmc=hmc_quick, samples=2, splits=2) == found
    # The same of the collections that lie there.
    hmc, ensemble, vi = (zoo.load(n, source=s) for n, s in _places(folder))
    assert compact(ensemble, against=hmc, vi=vi, samples=2, splits=2).table == found.table


def _places(folder: Path) -> list[tuple[str, Path]]:
    names = ("mlp-digits-hmc-multi", "mlp-digits-deep-ensemble", "mlp-digits-vi-multi")
    return [(n, next(p.parents[1] for p in folder.rglob(f"manifests/{n}.parquet"))) for n in names]


@pytest.mark.slow
def test_against_draws_at_hand(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=6)
    for name in ("hmc", "vi"):
        zoo.from_samples(
            members.stack(), "convnet", method=name, out=tmp_path, name=f"c-{name}-multi", run=[0, 0, 1, 1, 2, 2],
            like="convnet-digits",
        )  # fmt: skip
    zoo.from_samples(members.stack(), "convnet", method="independent", out=tmp_path, name="c", like="convnet-digits")
    options = ("--source", tmp_path, "--samples", "2", "--splits", "2", "--format", "json")
    result = run("compact", "c", "-n", "4", "--against", "c-hmc-multi", "--vi", "c-vi-multi", "--to", "mean", *options)
    hmc, ensemble, vi = (zoo.load(n, source=tmp_path) for n in ("c-hmc-multi", "c", "c-vi-multi"))
    found = compact(ensemble[:4], against=hmc, vi=vi, samples=2, splits=2, to="mean")
    assert values(result) == json.loads(found.to_json())
    assert result.stderr == "c: 4 members against 6 draws of c-hmc-multi …\n"
    assert "VI q" not in run("compact", "c", "--against", "c-hmc-multi", *options[:-2]).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("compact-table", "mlp-digit"), 2, "recipe 'mlp-digit': expected one of"),
        (
            ("compact-table", "mlp-digits", "--runs", "0"),
            2,
            "runs of a compact table: expected a whole number from 1; found 0",
        ),
        (("compact-table", "mlp-digits", "--to", "first"), 2, "Invalid value for '--to'"),
        (
            ("compact-table", "mlp-digits", "--steps", "0"),
            2,
            "steps of a compact table: expected a whole number from 1",
        ),
        (
            ("compact-table", "mlp-digits", "--splits", "1"),
            2,
            "splits of a compact table: expected a whole number from 2",
        ),
        (("compact-table", "mlp-digits", "--json", "t.txt"), 2, "Invalid value for '--json': 't.txt' does not end in"),
        (("compact", "convnet-digits", "--vi", "x"), 2, "--vi needs --against, a collection of HMC's draws."),
        (
            ("compact", "convnet-digits", "--against", "convnet-digits", "--plot", "x.png"),
            2,
            "--plot can't draw a comparison",
        ),
        (
            ("compact", "convnet-digits", "--against", "convnet-digits", "--to", "3"),
            2,
            "--to ID can't be combined with --against",
        ),
        (("compact", "convnet-digits", "--against", "convnet-digit"), 3, "collection 'convnet-digit'"),
    ],
)
def test_what_the_commands_cannot_take(arguments: tuple[str, ...], code: int, text: str, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out") if arguments[0] == "compact-table" else ()
    result = run(*arguments, *out)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_as_files(tmp_path: Path, ending: str) -> None:
    members = zoo.load("convnet-digits", n=4)
    found = compact(members[2:], against=members[:2], samples=1)
    path = found.write(tmp_path / f"t.{ending}")
    import pandas as pd

    read = pd.read_csv(path) if ending == "csv" else pd.read_parquet(path)
    assert read["value"].tolist() == pytest.approx(found.to_frame()["value"].tolist())
    with pytest.raises(zoo.ZooError, match=r"table .*: expected a name that ends in \.parquet or \.csv"):
        found.write(tmp_path / "t.pdf")
