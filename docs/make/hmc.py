"""The numbers of docs/hmc.md, from docs/studies/hmc-digits-draws.json and docs/studies/hmc-digits.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints_zoo.methods.comparing.comparison import MODE_TITLES, REFERENCE, Comparison, format_estimate
from checkpoints_zoo.methods.comparing.estimates import COLUMN_TITLES
from docs.make.marks import fill

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "hmc.md"
DRAWS, STUDY = DOCS / "studies" / "hmc-digits-draws.json", DOCS / "studies" / "hmc-digits.json"
COLUMNS = ("total_variation", "agreement", "accuracy", "nll", "ece", "mi_id", "mmd", "ns")
WORTH = ("accuracy", "nll", "brier")


def describe_draws(values: dict[str, Any]) -> str:
    """Return sentences on the chains and on the draws that were kept."""
    runs = values["runs"]

    def spread(name: str, digits: int) -> str:
        numbers = [run[name] for run in runs]
        return f"{sum(numbers) / len(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"

    halves, all_halves, to_all = values["halves"], values["halves_of_all"], values["kept_to_all"]
    all_accuracy, kept_accuracy = (100 * values["accuracy"][name] for name in ("all", "kept"))
    common = runs[0]
    return (
        f"Acceptance is {spread('acceptance', 2)} over the chains, and {sum(run['divergences'] for run in runs):.0f} "
        f"trajectories diverge. R-hat of all chains together is {common['rhat_predictive_all']:.2f} for the "
        "probabilities that training images have (median; the largest is "
        f"{common['rhat_predictive_all_max']:.2f}) and {common['rhat_log_posterior_all']:.2f} for the log posterior. "
        f"Within a chain, R-hat of a weight is {spread('rhat', 2)} (median): weights mix more slowly than predictions."
        "\n\n"
        f"Four chains against the other four, all draws: agreement {all_halves['agreement']:.3f}, total variation "
        f"{all_halves['total_variation']:.4f}; with the draws that were kept, {halves['agreement']:.3f} and "
        f"{halves['total_variation']:.4f}. The kept draws against all of them: {to_all['agreement']:.3f} and "
        f"{to_all['total_variation']:.4f}. Accuracy of the ensemble: {all_accuracy:.1f} % of all draws, "
        f"{kept_accuracy:.1f} % of those kept."
    )


def results(comparison: Comparison) -> str:
    """Return the table of methods, and the lines below it."""
    rows = sorted(comparison.rows, key=lambda row: (row.method == REFERENCE, row["total_variation"].value))
    columns = [name for name in COLUMNS if any(name in row.figures for row in rows)]
    titles = ["method", "mode", *(COLUMN_TITLES[name] for name in columns)]
    lines = [titles, ["---", "---", *("---:" for _ in columns)]]
    lines += [
        [row.method, MODE_TITLES[row.mode], *(format_estimate(row.figures.get(name)) for name in columns)]
        for row in rows
    ]
    worth_lines = [
        ["method", "mode", *(COLUMN_TITLES[name] for name in WORTH)],
        ["---", "---", *("---:" for _ in WORTH)],
    ]
    worth_lines += [
        [row.method, MODE_TITLES[row.mode], *(row.worth[n].short if n in row.worth else "-" for n in WORTH)]
        for row in rows
        if row.method != REFERENCE
    ]
    nearest = rows[0]
    reference = comparison[REFERENCE, "members"]
    near = [row for row in rows if row.method != REFERENCE and row["agreement"].value > 0.9]
    informations = [row["mi_id"].value for row in near]
    return "\n\n".join(
        [
            "All figures times 100, ± half of the 95 % interval. Agr and TV: agreement and total variation of mean "
            "predictions with the reference's. MMD and NS: of weights.",
            _table(lines),
            f"Nearest is `{nearest.method}` in {MODE_TITLES[nearest.mode]}, at a total variation of "
            f"{nearest['total_variation'].value:.4f}; the reference's halves are "
            f"{reference['total_variation'].value:.4f} apart. Mean predictions that agree do not come from like "
            f"ensembles: in the {len(near)} rows with an agreement above 90 %, mutual information is "
            f"{100 * min(informations):.2f} to {100 * max(informations):.2f}, the reference's "
            f"{100 * reference['mi_id'].value:.1f} (nats times 100).",
            "Worth as many draws of the reference, by the size of its ensembles that have the figure on average:",
            _table(worth_lines),
        ]
    )


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page() -> str:
    """Return docs/hmc.md with its numbers."""
    return fill(
        PAGE.read_text(encoding="utf-8"),
        {
            "diagnostics": describe_draws(json.loads(DRAWS.read_text(encoding="utf-8"))),
            "results": results(Comparison.from_json(STUDY.read_text(encoding="utf-8"))),
        },
    )
