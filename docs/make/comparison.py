"""The page on approximate posteriors: its words are here, its numbers in the files of `docs/studies`.

The files are made anew by

    zoo-cli compare convnet-digits --search --json docs/studies/comparison.json
    zoo-cli compact-table mlp-digits --json docs/studies/compact-mlp.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.methods.comparing import compact_comparison, comparison
from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison
from checkpoints_zoo.methods.comparing.comparison import Comparison, Row
from checkpoints_zoo.methods.comparing.estimates import COLUMN_TITLES
from checkpoints_zoo.methods.fitting import METHODS
from docs.make import comparison_fits as fits
from docs.make import comparison_tables as laid
from docs.make.comparison_tables import JUDGED, Table, markdown

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "comparison.json"
COMPACT = ROOT / "docs" / "studies" / "compact-mlp.json"
SECOND = ROOT / "docs" / "studies" / "second-reference.json"
SECOND_COMMAND = "python -m docs.studies.second_reference --out second/ --json docs/studies/second-reference.json"
LEVEL = 0.01  # of tests: there are as many as rows
# Table 1 of Xiao, Liu & Bamler 2023: HMC sample, q_d, q_r; ensemble sample, q_d, q_r; VI q.
PAPER = {
    "agreement": ("1", "0.1212", "0.8249", "0.9931", "0.5239", "0.9868", "0.9885"),
    "total_variation": ("0", "0.8641", "0.6570", "0.0229", "0.7210", "0.0495", "0.0235"),
    "sample_accuracy": ("98.43", "11.11", "82.34", "98.66", "52.25", "97.72", "98.11"),
    "mean_accuracy": ("-", "28.06", "92.25", "-", "86.40", "97.97", "98.04"),
}
WORDS = (Path(__file__).parent / "comparison_words.md").read_text(encoding="utf-8")


def read(path: Path, command: str) -> str:
    """Read a result file; what is missing is named with the command that makes it."""
    if not path.is_file():
        sys.exit(f"{path.relative_to(ROOT)} is missing: run {command}")
    return path.read_text(encoding="utf-8")


def page() -> str:
    """Return the page, of the results in the files."""
    found = read(STUDY, "zoo-cli compare convnet-digits --search --json docs/studies/comparison.json")
    compact = read(COMPACT, "zoo-cli compact-table mlp-digits --json docs/studies/compact-mlp.json")
    second = json.loads(read(SECOND, SECOND_COMMAND))
    return page_of(Comparison.from_json(found), CompactComparison.from_json(compact), second)


def page_of(found: Comparison, compact: CompactComparison, second: Mapping[str, Any] | None = None) -> str:
    """Return the page, of any results."""
    every = {"digits": laid.values_of(found), "CIFAR-100": laid.poster("CIFAR-100")}
    every["TinyImageNet"] = laid.poster("TinyImageNet")
    parts = {
        "collection": found.collection,
        "members": f"{found.members:,}",
        "runs": str(found.settings.get("runs")),
        "draws": str(found.settings.get("per_run")),
        "meaning": _listed(comparison.explain_comparison(found)),
        "digits": laid.digits_table(found),
        "cifar100": laid.poster_table("CIFAR-100"),
        "tiny": laid.poster_table("TinyImageNet"),
        "ranks": laid.ranks_table(every),
        "ranks_say": laid.ranks_say(every),
        "orders": _listed(orders(every)),
        "agreement": _listed(agreement(every)),
        "best": best_table(every),
        "quality": laid.quality_table(every),
        "null": null(found),
        "second": "" if second is None else second_reference(second),
        "worth": laid.worth_table(found),
        "tests": laid.p_values_table(found),
        "corollary": corollary(found),
        "searched": fits.searched(found.methods),
        "settings": fits.settings_table(found.methods),
        "mixing": fits.mixing(found.methods),
        "facts": fits.facts_table(found.methods),
        "slowest": fits.slowest(found.methods),
        "methods": markdown(
            ("method", "what", "source"), [(f"`{n}`", m.title, m.source) for n, m in METHODS.items()], 3
        ),
        "paper": paper_table(compact),
        "compact": compact_table(compact),
        "halves": halves_table(compact),
        "compact_meaning": _listed(compact_comparison.explain_table(compact)),
        "compact_says": _listed(compact_says(compact)),
        "compact_facts": fits.facts_table({n: s.facts for n, s in compact.sources.items()}),
        "compact_mixing": fits.mixing({n: s.facts for n, s in compact.sources.items()}),
        "compact_settings": fits.settings_table({n: s.facts for n, s in compact.sources.items()}),
    }
    written = WORDS
    for name, part in parts.items():
        written = written.replace(f"<<{name}>>", part)
    return written


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def orders(every: Mapping[str, Table]) -> list[str]:
    """Say in what order MMD and NS put the methods."""
    lines = []
    for column in ("mmd", "ns"):
        for mode in ("one", "multi"):
            texts = [f"{name}: {laid.order(table, mode, column)}" for name, table in every.items()]
            mode_name = comparison.MODE_TITLES[mode]
            lines.append(f"{COLUMN_TITLES[column]} (× 100 on digits), {mode_name}, nearest first. {'; '.join(texts)}.")
    return lines


def agreement(every: Mapping[str, Table]) -> list[str]:
    """Say of how many methods what the posters claim of modes holds."""
    claims = {
        "Multi mode is nearer than one mode by MMD": ("mmd", -1),
        "Multi mode is nearer than one mode by NS": ("ns", -1),
        "Multi mode is more accurate": ("accuracy", 1),
        "Multi mode has the lower ECE": ("ece", -1),
        "Multi mode has the lower ACE": ("ace", -1),
        "Multi mode has the lower Brier score": ("brier", -1),
        "Multi mode detects OOD better, by AUPR": ("aupr", 1),
        "Multi mode detects OOD better, by FPR95": ("fpr95", -1),
        "Multi mode is more diverse on ID images": ("mi_id", 1),
        "Multi mode is more diverse on OOD images": ("mi_ood", 1),
    }
    lines = [
        f"{claim}: {', '.join(f'{laid.counted(table, *of)} methods on {name}' for name, table in every.items())}."
        for claim, of in claims.items()
    ]
    smaller = {name: [x["ns"] < x["mmd"] for x in t.values() if {"ns", "mmd"} <= set(x)] for name, t in every.items()}
    counts = ", ".join(f"{sum(s)} of {len(s)} rows on {name}" for name, s in smaller.items())
    return [*lines, f"NS is below MMD: {counts}."]


def best_table(every: Mapping[str, Table]) -> str:
    """Lay out the best row of each column."""
    rows = [(COLUMN_TITLES[column], *(laid.best(table, column) for table in every.values())) for column in JUDGED]
    return markdown(("best", *every), rows, left=len(every) + 1)


def null(found: Comparison) -> str:
    """Say whether fresh independent members lie within the permutation test's null, and which other rows do."""
    fresh = [row for row in found.rows if row.method == "deep-ensemble"]
    said = []
    for row in fresh:
        p = {n: row.figures[n].p for n in ("mmd", "ns") if n in row.figures}
        outside = [COLUMN_TITLES[n] for n, x in p.items() if x is not None and x < LEVEL]
        texts = ", ".join(f"p = {laid.small(x)} by {COLUMN_TITLES[n]}" for n, x in p.items())
        words = (
            f"differ from it by {' and '.join(outside)}"
            if outside
            else f"can't be told from it at the level of {LEVEL:g}"
        )
        said.append(f"The {row.draws} freshly trained members of `deep-ensemble` {words}: {texts}.")
    others = [row for row in found.rows if row.method not in ("deep-ensemble", "reference")]
    for name in ("mmd", "ns"):
        tested = [row for row in others if name in row.figures and row.figures[name].p is not None]
        if not tested:
            continue
        within = [_named(row).strip() for row in tested if (row.figures[name].p or 0) >= LEVEL]
        count = f"{len(within)} of the {len(tested)} other rows"
        said.append(f"By {COLUMN_TITLES[name]}, {count} can't either{': ' if within else ''}{', '.join(within)}.")
    if not any(x.p is not None for row in others for x in row.figures.values()):
        said.append(
            "The rows of draws have no p-values in this study, which was measured when permutations still exchanged"
            " single draws; their MMD² and NS, and all other figures, are not affected. A new run of the command has"
            " p-values of multi mode."
        )
    return " ".join(said)


def second_reference(second: Mapping[str, Any]) -> str:
    """Report the test of the deep ensemble against a second reference, whatever it says."""
    rows, small = [], []
    for name, measures in second.items():
        if not isinstance(measures, dict):
            continue
        p = {measure: groups["all"]["p"] for measure, groups in measures.items()}
        rows.append((name, *(laid.small(p[measure]) for measure in ("mmd", "ns"))))
        small += [f"{COLUMN_TITLES[n]}, {name}: p = {laid.small(x)}" for n, x in p.items() if x < 0.05]
    first, last = second["seeds"]
    text = (
        "Is a small p-value of the deep ensemble chance? All these members are trained by one recipe, so p-values are"
        f" uniform between 0 and 1. A second reference has the 64 seeds {first:,} to {last:,}, the first that the study"
        " does not use, fixed before the training. The deep ensemble is trained again for this test:"
    )
    said = "No p-value is below 0.05." if not small else f"Below 0.05: {'; '.join(small)}."
    said += " Tests against one reference share it, so their p-values are not independent."
    ensemble = second["deep ensemble against the second reference"]
    if small and min(groups["all"]["p"] for groups in ensemble.values()) >= 0.05:
        said += (
            " The deep ensemble and the second reference do not differ. So it is the first reference that differs from"
            " both, by chance or by its training: these tests do not say which."
        )
    return f"{text}\n\n{markdown(('test', 'p of MMD', 'p of NS'), rows, left=1)}\n\n{said}"


def _named(row: Row) -> str:
    return f" {row.method} ({comparison.MODE_TITLES[row.mode]})"


def corollary(found: Comparison) -> str:
    """Say who fails the corollary's test."""
    tested = [row for row in found.rows if row.corollary is not None]
    fails = [_named(row).strip() for row in tested if (row.corollary or 0) < LEVEL]
    holds = [_named(row).strip() for row in tested if (row.corollary or 0) >= LEVEL]
    said = []
    for method, wanted in (("hmc", "fail"), ("deep-ensemble", "pass")):
        for row in (r for r in tested if r.method == method):
            has = "fail" if (row.corollary or 0) < LEVEL else "pass"
            word = "as the paper says" if has == wanted else "**which is not what the paper says**"
            said.append(f"`{method}` ({comparison.MODE_TITLES[row.mode]}) {has}es" if has == "pass" else
                        f"`{method}` ({comparison.MODE_TITLES[row.mode]}) fails")  # fmt: skip
            said[-1] += f" at the level of {LEVEL:g} (p = {laid.small(row.corollary)}), {word}."
    said.append(f"In all, {len(fails)} of {len(tested)} rows fail; {', '.join(holds) or 'none'} pass.")
    return " ".join(said)


def paper_table(compact: CompactComparison) -> str:
    """Lay out the paper's table."""
    names = compact_comparison.column_titles(compact)
    rows = [(compact_comparison.ROW_TITLES_AND_SCALES[row][0], *values[: len(names)]) for row, values in PAPER.items()]
    return markdown(("", *names), rows, left=1)


def compact_table(compact: CompactComparison) -> str:
    """Lay out the same of the digits MLP."""
    rows = [(words, *values) for words, values in compact_comparison.table_cells(compact)]
    return markdown(("", *compact_comparison.column_titles(compact)), rows, left=1)


def halves_table(compact: CompactComparison) -> str:
    """Lay out HMC, one half of the chains against the other."""
    rows = [
        (compact_comparison.ROW_TITLES_AND_SCALES[row][0], *(as_text(x[row]) for x in compact.halves.values()))
        for row in ("agreement", "total_variation")
    ]
    return markdown(("one half against the other", *(f"HMC {c}" for c in compact.halves)), rows, left=1)


def compact_says(compact: CompactComparison) -> list[str]:
    """Set the paper's findings beside the digits MLP's."""
    columns = [(m, c) for m, of in compact.table.items() for c in of]
    paper = {row: dict(zip(columns, values, strict=False)) for row, values in PAPER.items()}

    def both(row: str, one: tuple[str, str], other: tuple[str, str]) -> tuple[bool, bool]:
        ours = compact[(*one, row)].value > compact[(*other, row)].value
        return float(paper[row][one]) > float(paper[row][other]), ours

    claims = [
        ("Alignment brings HMC's Gaussian nearer to HMC, by total variation", "total_variation", ("hmc", "q_d"),
         ("hmc", "q_r")),
        ("Alignment brings the ensemble's Gaussian nearer to HMC", "total_variation", ("ensemble", "q_d"),
         ("ensemble", "q_r")),
        ("The ensemble's q_r is nearer to HMC than HMC's own q_r", "total_variation", ("hmc", "q_r"),
         ("ensemble", "q_r")),
        ("The ensemble itself is nearer to HMC than VI", "total_variation", ("vi", "q"), ("ensemble", "sample")),
        ("VI is nearer to HMC than the ensemble's q_r", "total_variation", ("ensemble", "q_r"), ("vi", "q")),
        ("Alignment raises the accuracy of the mean of HMC's draws", "mean_accuracy", ("hmc", "q_r"), ("hmc", "q_d")),
        ("Alignment raises the accuracy of the ensemble's mean", "mean_accuracy", ("ensemble", "q_r"),
         ("ensemble", "q_d")),
        ("Members of the ensemble are more accurate than HMC's draws", "sample_accuracy", ("ensemble", "sample"),
         ("hmc", "sample")),
    ]  # fmt: skip
    lines = []
    for words, row, one, other in claims:
        if {one, other} <= set(columns):
            theirs, ours = both(row, one, other)
            said = {True: "yes", False: "no"}
            agree = "" if theirs == ours else " **They differ.**"
            lines.append(f"{words}: paper {said[theirs]}, digits {said[ours]}.{agree}")
    return lines
