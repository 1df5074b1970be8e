"""A leaderboard: methods against a reference in one HTML file, with intervals, equivalent sizes and citations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from checkpoints_zoo.evaluation.figures import MONOTONE_FIGURES
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.formats.text import count_with_noun
from checkpoints_zoo.methods.comparing import Comparison
from checkpoints_zoo.methods.comparing.comparison import COLUMN_NAMES, MODE_TITLES, REFERENCE, Row, explain_comparison
from checkpoints_zoo.methods.comparing.estimates import ALL_FIGURES, COLUMN_TITLES
from checkpoints_zoo.publishing.html_report.markup import bold, markup
from checkpoints_zoo.publishing.html_report.origin import page_day
from checkpoints_zoo.publishing.html_report.page import FactsBlock, NoteBlock, Page, Part, TableBlock, path_of
from checkpoints_zoo.publishing.html_report.summary import cell

LEADING_FIGURES = ("total_variation", "agreement")  # Figures that order the methods, and stand first.


def leaderboard_page(comparison: Comparison, path: str | Path | None = None) -> Page:
    """Put a comparison into one HTML file that needs no other file and no network; return the Page.

    Methods are in the order of their total variation to the reference. The same comparison gives the same bytes.

    Args:
        comparison: what `zoo.compare` returned.
        path: path of the HTML file, which ends in .html; None for a Page that is not saved.

    Raises:
        UsageError: the path does not end in .html, or can't be written to.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits")
    >>> with tempfile.TemporaryDirectory() as out:
    ...     draws = {"others": members[8:12]}
    ...     found = zoo.compare(members[:8], (), ood="none", draws=draws, out=out, permutations=19, workers=1)
    >>> zoo.leaderboard_page(found).title
    'Methods against 8 members of convnet-digits'
    """
    page_path = None if path is None else path_of(path)
    rows = sorted(comparison.rows, key=_rank)
    reference_name = comparison.reference.partition("#")[0].rpartition("/")[2] or comparison.collection
    parts = [
        Part("methods", "Methods against the reference", [_figures_table(rows), _explanation(comparison)]),
        Part("worth", "Worth as many members", [_worth_table(rows)]),
        Part("citations", "Citations", [_citations(comparison)]),
    ]
    origin = {
        "citation": comparison.reference,
        "images": comparison.data,
        "out of distribution": comparison.ood,
        "made with": ", ".join(f"{name} {text}" for name, text in comparison.settings.get("versions", {}).items()),
        "page made": page_day(),
    }
    page = Page(
        f"Methods against {count_with_noun(comparison.members, 'member')} of {reference_name}",
        f"On {comparison.data.split(' ')[0]}",
        parts,
        {name: text for name, text in origin.items() if text},
        {"rows": [row.to_json() for row in rows]},
    )
    return page if page_path is None else replace(page, path=page.save(page_path))


def _rank(row: Row) -> tuple[bool, float]:
    """Return the key that orders rows: by total variation, the reference last."""
    estimate = row.figures.get(LEADING_FIGURES[0])
    return row.method == REFERENCE, float("inf") if estimate is None else estimate.value


def _titles(row: Row) -> tuple[str, str, str]:
    sizes = f"{row.draws:,}" if row.mode == "members" else f"{row.runs:,} × {row.draws:,}"
    return row.method, MODE_TITLES[row.mode], sizes


def _figures_table(rows: Sequence[Row]) -> TableBlock:
    columns = [*LEADING_FIGURES, *(name for name in COLUMN_TITLES if name not in LEADING_FIGURES)]
    columns = [name for name in columns if any(name in row.figures for row in rows)]
    header = ("method", "mode", "runs × draws", *(_column_title(name) for name in columns))
    cells = [(*_titles(row), *(_figure_cell(row, name) for name in columns)) for row in rows]
    caption = (
        bold("Figures of mean predictions, and distances of weights."),
        " Shares in %, other figures in their units; [ ]: 95 % intervals over runs or members. Of the reference,"
        " agreement, total variation, MMD and NS are those of its halves.",
    )
    return TableBlock("figures", header, cells, caption, text_columns=(0, 1, 2), sortable=True)


def _column_title(name: str) -> str:
    figure = ALL_FIGURES[name]
    arrow = {"higher": " ↑", "lower": " ↓"}.get(figure.better, "")
    return f"{COLUMN_TITLES[name]}{' (%)' if figure.scale == 100 else ''}{arrow}"


def _figure_cell(row: Row, name: str) -> Markup:
    if name not in row.figures:
        return markup("{}", "–")
    estimate = row.figures[name]
    return cell(Interval(estimate.value, estimate.low, estimate.high), ALL_FIGURES[name].scale)


def _worth_table(rows: Sequence[Row]) -> TableBlock | NoteBlock:
    columns = [name for name in MONOTONE_FIGURES if any(name in row.worth for row in rows)]
    if not columns:
        return NoteBlock(("The reference has too few members for a curve.",), missing=True)
    cells = [
        (*_titles(row), *(row.worth[name].short if name in row.worth else "–" for name in columns))
        for row in rows
        if row.worth
    ]
    caption = (
        bold("Worth k members."),
        " The size of the ensembles of the reference's members that have the figure on average; [ ] by the figure's"
        " own interval. <1: worse than a single member; >: better than all members at hand.",
    )
    header = ("method", "mode", "runs × draws", *(COLUMN_NAMES[name] for name in columns))
    return TableBlock("worth-table", header, cells, caption, text_columns=(0, 1, 2))


def _explanation(comparison: Comparison) -> NoteBlock:
    return NoteBlock(tuple(f"{line} " for line in explain_comparison(comparison)))


def _citations(comparison: Comparison) -> FactsBlock:
    facts = [("reference", _citation_text(comparison.reference, comparison.settings))]
    for name, record in comparison.methods.items():
        source = ", ".join(str(record[key]) for key in ("title", "source") if record.get(key))
        text = _citation_text(str(record.get("draws", "")), record)
        facts.append((name, f"{source}; draws {text}" if source else text))
    return FactsBlock("cited", tuple(facts), (bold("What to cite."), " `zoo.load` loads members from their citations."))


def _citation_text(citation: str, record: Mapping[str, Any]) -> str:
    return "; ".join(text for text in (str(record.get("cite_as") or ""), citation) if text)
