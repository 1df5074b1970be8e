"""docs/comparison.md says what its files say, its sentences follow the numbers, and its code runs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison, MethodDraws
from checkpoints_zoo.methods.comparing.comparison import Comparison, Row
from checkpoints_zoo.methods.comparing.equivalent_size import EquivalentSize
from checkpoints_zoo.methods.comparing.estimates import Estimate
from checkpoints_zoo.methods.fitting import METHODS, method_by_name
from checkpoints_zoo.training.recipes import convnet_digits
from docs.make import comparison as comparison_page
from docs.make import comparison_tables
from docs.make.comparison import COMPACT, PAPER, ROOT, STUDY, page, page_of
from docs.make.comparison_tables import COLUMNS, poster, spearman, values_of
from tests.support.few_draws import few_images

PAGE = ROOT / "docs" / "comparison.md"


def made(**changes: float) -> Comparison:
    """A comparison that says what the poster of CIFAR-100 does, times a number a column."""
    rows = [
        Row(
            method, mode, 10, 100,
            {n: Estimate(x / 100 * changes.get(n, 1), 0.0, 0.1, p=0.5 if n in ("mmd", "ns") else None)
             for n, x in figures.items()},
            corollary=0.001 if mode == "one" else 0.4, corollary_layers={"conv1": 0.002},
            worth={"accuracy": EquivalentSize(4.2, 3.0, 6.0, 64, 0.99)},
        )
        for (method, mode), figures in poster("CIFAR-100").items()
    ]  # fmt: skip
    rows.append(replace(rows[0], method="hmc"))
    fit = {"settings": {"lr": 0.1, "steps": 3}, "seconds": 61.0, "runs": 10, "draws": 100,
           "facts": [{"acceptance": x, "rhat_predictive_all": 1.04, "rhat_predictive_all_max": 1.2}
                     for x in (0.7, 0.9)]}  # fmt: skip
    tried: list[dict[str, Any]] = [
        {"nll": nll, "accuracy": 0.97, "seconds": 2.0, "settings": {}, "failed": ""} for nll in (0.2, 0.1, None)
    ]
    return Comparison("convnet-digits", "cited", 64, "digits/test 00", "", tuple(rows),
                      {"hmc": {"fit": fit, "search": {"tried": tried}}}, {}, {"permutations": 999})  # fmt: skip


def compact() -> CompactComparison:
    """What the paper's table says, without intervals."""
    table: dict[str, dict[str, dict[str, Interval]]] = {}
    columns = [("hmc", "sample"), ("hmc", "q_d"), ("hmc", "q_r"), ("ensemble", "sample"), ("ensemble", "q_d"),
               ("ensemble", "q_r"), ("vi", "q")]  # fmt: skip
    for row, values in PAPER.items():
        scale = 100 if "accuracy" in row else 1
        for (method, column), value in zip(columns, values, strict=True):
            if value != "-":
                table.setdefault(method, {}).setdefault(column, {})[row] = Interval(float(value) / scale, None, None)
    sources = {name: MethodDraws(name, 10, 1000) for name in table}
    halves = {"sample": {"agreement": Interval(0.9, 0.8, 1.0), "total_variation": Interval(0.1, 0.0, 0.2)}}
    return CompactComparison(sources, "the first", "digits/test 00", 540, 100, 20, 0, "", table, halves)


@pytest.mark.parametrize("path", [STUDY, COMPACT, STUDY.with_suffix(".png")])
def test_the_files_are_there(path: Path) -> None:
    assert path.is_file(), "made by the commands in docs/make/comparison.py"


@pytest.mark.skipif(not (STUDY.is_file() and COMPACT.is_file()), reason="without results, which another test says")
def test_the_page_is_the_generated_one() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert page() == written, "run `python -m docs.make`"
    assert str(Path.home()) not in written


def test_results_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.json is missing: run zoo-cli compare"):
        comparison_page.read(ROOT / "docs" / "studies" / "none.json", "zoo-cli compare")


def test_posters_are_typed_as_they_are() -> None:
    """Sums of the columns, added apart from here."""
    for name, rows, sums in (
        ("CIFAR-100", 10, (45.8, 59.6, 729, 64.5, 14.8, 382.6, 787.4, 536.8, 177.7, 387)),
        ("TinyImageNet", 8, (45.4, 30.5, 467.8, 66.4, 13.5, 430.7, 521.8, 526, 521.84, 671.4)),
    ):
        table = poster(name)
        assert len(table) == rows
        for column, total in zip(COLUMNS, sums, strict=True):
            assert sum(x[column] for x in table.values()) == pytest.approx(total, abs=0.01), (name, column)


@pytest.mark.slow
def test_spearman_is_scipys() -> None:
    generator = np.random.default_rng(3)
    for count in (5, 9):
        one, other = generator.normal(size=count), generator.integers(0, 4, count).astype(float)

        def statistic(x: np.ndarray, fixed: np.ndarray = other) -> float:
            return float(stats.spearmanr(x, fixed).statistic)

        found = spearman(one.tolist(), other.tolist())
        assert found is not None
        assert found[0] == pytest.approx(stats.spearmanr(one, other).statistic)
        exact = stats.permutation_test(
            (one,), statistic, permutation_type="pairings", n_resamples=3000,
            random_state=0,
        )  # fmt: skip
        assert found[1] == pytest.approx(exact.pvalue, abs=0.03)
    assert spearman([1, 2, 3], [1, 2, 3]) is None
    assert spearman([1, 2, 3, 4], [2, 2, 2, 2]) is None


def test_a_page_of_the_posters_numbers_agrees_with_them() -> None:
    text = page_of(made(), compact())
    assert "<<" not in text
    ranks = text.partition("Spearman's rank correlation")[2]
    for column in ("MMD", "Acc", "ACE"):
        line = next(line for line in ranks.splitlines() if line.startswith(f"| {column} |"))
        assert line.split("|")[2].strip().startswith("+1.00 (")
    assert (
        "Multi mode is nearer than one mode by MMD: 4 of 4 methods on digits, 4 of 4 methods on CIFAR-100, 3 of 3"
        in text
    )
    assert "Multi mode has the lower ECE: 3 of 4 methods on digits, 3 of 4 methods on CIFAR-100" in text
    assert "They differ." not in text.partition("What their table says")[2].partition("## How")[0]
    assert "Alignment brings HMC's Gaussian nearer to HMC, by total variation: paper yes, digits yes." in text
    fresh = (
        "The 100 freshly trained members of `deep-ensemble` can't be told from it at the level of 0.01: p = 0.5 by MMD"
    )
    assert fresh in text
    assert "`hmc` (one mode) fails at the level of 0.01 (p = 0.001), as the paper says." in text
    assert "`deep-ensemble` (members) passes at the level of 0.01 (p = 0.4), as the paper says." in text
    assert "| `hmc` | lr 0.1, steps 3 | 2 and 1 without figures | 0.1000 (0.2) | 97.0 |" in text
    assert "acceptance 0.8 (0.7 to 0.9)" in text
    assert " | 61 |" in text
    assert "With CIFAR-100 the order on digits agrees beyond chance (p < 0.05) in 10 of 10 columns (MMD, NS," in text
    assert "HMC's acceptance is 0.80 on average (0.70 to 0.90)" in text
    assert "Those of probabilities are mostly, not all, below 1.1" in text


def test_sentences_follow_the_numbers() -> None:
    turned = made(accuracy=-1, mmd=-1)
    rows = [
        replace(row, corollary=0.9) if row.method == "hmc" else replace(row, corollary=0.005) for row in turned.rows
    ]
    fresh = next(i for i, row in enumerate(rows) if row.method == "deep-ensemble")
    rows[fresh] = replace(rows[fresh], figures={**rows[fresh].figures, "mmd": Estimate(0.1, p=0.001)})
    text = page_of(replace(turned, rows=tuple(rows)), compact())
    assert "Multi mode is nearer than one mode by MMD: 0 of 4 methods on digits, 4 of 4" in text
    assert "differ from it by MMD: p = 0.001 by MMD" in text
    assert "`hmc` (one mode) passes at the level of 0.01 (p = 0.9), **which is not what the paper says**" in text
    assert (
        "`deep-ensemble` (members) fails at the level of 0.01 (p = 0.005), **which is not what the paper says**" in text
    )
    line = next(x for x in text.partition("Spearman's rank")[2].splitlines() if x.startswith("| Acc |"))
    assert line.split("|")[2].strip().startswith("-1.00 (")
    told = compact()
    swapped = {**told.table["hmc"], "q_d": told.table["hmc"]["q_r"], "q_r": told.table["hmc"]["q_d"]}
    text = page_of(turned, replace(told, table={**told.table, "hmc": swapped}))
    assert (
        "Alignment brings HMC's Gaussian nearer to HMC, by total variation: paper yes, digits no. **They differ.**"
        in text
    )


def test_the_package_has_the_settings_that_the_search_found() -> None:
    methods = json.loads(STUDY.read_text())["methods"]
    assert methods.keys() == METHODS.keys()
    for name, known in methods.items():
        assert known["fit"]["settings"] == asdict(method_by_name(name, "convnet-digits"))
        if name != "deep-ensemble":
            tried = known["search"]["tried"]
            assert len(tried) >= 2
            finite = [t for t in tried if t["nll"] is not None]
            assert min(finite, key=lambda t: t["nll"])["settings"] == known["fit"]["settings"]


def test_every_method_was_fitted_properly() -> None:
    """One mode's predictive has an accuracy of 0.94 and more, and the ensemble is fresh and within the null."""
    found = Comparison.from_json(STUDY.read_text())
    for name in METHODS.keys() - {"deep-ensemble"}:
        assert found[name, "one"]["accuracy"].value >= 0.94
    assert found.methods["deep-ensemble"]["fresh"] is True
    for figure in ("mmd", "ns"):
        p = found["deep-ensemble", "members"][figure].p
        assert p is not None
        assert p > comparison_page.LEVEL
    for run in found.methods["hmc"]["fit"]["facts"]:
        assert 0.3 < run["acceptance"] <= 1
        assert run["rhat"] >= 0.9


def test_a_table_without_some_figures() -> None:
    """No OOD images, no table of symmetries, no VI: what there is is laid out."""
    found = made()
    rows = tuple(
        replace(row, figures={n: x for n, x in row.figures.items() if n not in ("aupr", "fpr95", "mi_ood", "ns")},
                corollary=None, corollary_layers={}, worth={})
        for row in found.rows
    )  # fmt: skip
    told = compact()
    none = {name: of for name, of in told.table.items() if name != "vi"}
    text = page_of(replace(found, rows=rows, methods={}), replace(told, table=none, sources={}))
    assert "No method was fitted." in text
    assert "this run searched for none" in text
    assert values_of(found)["swag", "one"]["accuracy"] == pytest.approx(70.9)


@pytest.mark.slow
def test_the_page_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", comparison_page.WORDS, flags=re.DOTALL)
    assert len(blocks) == 2
    scope["SMALL"], (scope["INSIDE"], scope["OUTSIDE"]) = replace(convnet_digits(), epochs=2), few_images()
    for at, code in enumerate(blocks):
        text = code.replace("recipe = convnet_digits()\n", "recipe = SMALL\n").replace("n=16", "n=8")
        text = text.replace("permutations=99", "permutations=9, workers=1, data=INSIDE, ood=OUTSIDE")
        assert "INSIDE" in text
        exec(compile(text, f"comparison.md, block {at}", "exec"), scope)
    assert isinstance(scope["found"], Comparison)
    assert {t.settings["sigma"] for t in scope["tried"]} == {0.01, 0.03, 0.1}
    assert scope["drawn"].manifest["run"].tolist() == [0] * 4 + [1] * 4
    assert isinstance(scope["mine"], zoo.Collection)


def test_tables_have_one_row_a_method() -> None:
    text = comparison_tables.digits_table(made())
    assert len(text.splitlines()) == 2 + len(made().rows)
    assert text.splitlines()[2].startswith("| dropout | one mode | ")
