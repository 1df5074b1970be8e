"""A page: parts put into one HTML file that needs nothing else, the same bytes for the same parts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.figures import FIGURES
from checkpoints_zoo.formats.disk import replacing
from checkpoints_zoo.formats.text import one_line

Text = Sequence[str]  # pieces; those that are no Html are escaped
LONGEST = 4000  # characters of one piece of text
DIGITS = 6  # of a number in a plot
EMPTY = frozenset({"br", "col", "hr", "meta"})
WORDS = {
    "accuracy": (
        "accuracy",
        "Share of inputs whose most probable class is the label; in percent here. The probabilities of an "
        "ensemble are the mean of its members'.",
    ),
    "nll": ("NLL", "Negative log-likelihood of the label under the mean probabilities, nats, mean over inputs."),
    "brier": ("Brier score", "Squared error of the probabilities, summed over classes, mean over inputs, 0 to 2."),
    "ece": (
        "ECE",
        "Expected calibration error of the top label: 15 bins of equal width over the largest probability; the "
        "mean of |accuracy − mean confidence| over bins, each weighed by its inputs (L1).",
    ),
    "adaptive_ece": ("adaptive ECE", "As ECE, with 15 bins of equal mass, so that each holds as many inputs."),
    "ace": (
        "ACE",
        "Adaptive calibration error of each class: for each class 15 bins of equal mass over its probability; "
        "mean over classes.",
    ),
    "aurc": (
        "AURC",
        "Area under the risk-coverage curve: the error rate of the inputs that are kept, mean over all coverages,"
        " the most confident first.",
    ),
    "mi_id": (
        "mutual information, ID",
        "Mutual information of label and member, H(mean p) − mean H(p), nats, mean over the test inputs. 0 where "
        "all members say the same.",
    ),
    "disagreement": (
        "disagreement",
        "Share of inputs on which two members' classes differ, mean over pairs of members.",
    ),
    "mi_ood": ("mutual information, OOD", "The same on the inputs out of distribution (OOD)."),
    "auroc": (
        "AUROC",
        "Area under the ROC curve, out-of-distribution inputs positive, by the score −(largest mean probability)."
        " 1/2 is chance.",
    ),
    "aupr": (
        "AUPR",
        "Area under the precision-recall curve (average precision) of the same. Chance is the share of out-of-"
        "distribution inputs.",
    ),
    "fpr95": (
        "FPR95",
        "False positive rate: share of test inputs that are flagged at the highest threshold that finds 95 % of "
        "the out-of-distribution inputs.",
    ),
    "disagreement_ood": ("disagreement, OOD", "Disagreement on the inputs out of distribution."),
    "correlation": (
        "correlation of pairs",
        "Pearson's correlation of a pair's mutual information in and out of distribution, over all pairs, −1 to 1.",
    ),
    "band": (
        "band",
        "Of an ensemble of k of N members: where the figure of 95 % of fresh ensembles of that size falls. Mean "
        "over random subsets of k without replacement ± t·s·√((1 + k/N)/(1 − k/N)), s the subsets' standard "
        "deviation and t Student's quantile of N − 1 degrees of freedom.",
    ),
    "interval": (
        "interval",
        "[ ]: 95 % intervals over members; the inputs are fixed. Of all members together, and of figures of "
        "pairs: a delete-d jackknife with d = N/2. Of a mean over single members: a bootstrap over members. Fewer"
        " than 3 members say nothing about intervals.",
    ),
    "pair": (
        "mutual information of a pair",
        "H((p + q)/2) − (H(p) + H(q))/2 of two members, nats, mean over inputs: the Jensen-Shannon divergence.",
    ),
    "permutations": (
        "permutations",
        "Orders of the units of hidden layers that leave the function as it is. Units of one group move together "
        "wherever they appear; a group of n has n!.",
    ),
    "scales": (
        "scales",
        "Positive numbers by which the weights into a unit may be multiplied, and those out of it divided, "
        "without any change of the function.",
    ),
    "mmd": (
        "MMD²",
        "Squared maximum mean discrepancy of two sets of weights, unbiased (it may be below 0), mean over ten "
        "Gaussian and ten Laplace kernels with bandwidths on a geometric grid; below 2, no unit. p: share of "
        "permutations of the members at least as far apart.",
    ),
    "ns": ("NS", "The same after symmetries are removed: rows of unit norm, then units sorted by their first weight."),
    "transpositions": (
        "transpositions",
        "Fewest swaps of two units that make the permutation which aligns a member: units − cycles.",
    ),
    "temperature": (
        "temperature",
        "Mean probabilities p become softmax(log p / T), with the T of the least NLL on inputs that are in no figure; "
        "each random ensemble has its own. Above 1 the ensemble was too confident.",
    ),
    "mass": ("mass", "Sum of squared weights, without biases and running statistics."),
    "excess": (
        "excess",
        "How far the mass as trained is above the smallest that positive scales can give, in percent of it.",
    ),
    "residual": (
        "balance residual",
        "The certificate of a minimum, where what comes into a unit and what goes out of it are equal: sum of "
        "their differences as a share of the sum of both.",
    ),
}
_HERE = Path(__file__).parent
ORIGIN = "How this page was made"
LONGEST_CITATION = 2**20  # characters of a citation, which may name thousands of members one by one
SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class Panel:
    """One plot.

    Args:
        name: of its element.
        title: above it.
        told: what it shows, for those who can't see it.
        traces, layout: plotly's, JSON values.
    """

    name: str
    title: str
    told: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """A table.

    Args:
        name: of its element.
        header: of the columns; the first has the names of the rows.
        rows: cells of text, each a piece or several; a row of one cell is a heading over those below it.
        caption: what it shows.
        words: positions of columns whose cells are words, not numbers.
    """

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: Text
    words: Sequence[int] = (0,)


@dataclass(frozen=True)
class Facts:
    """A table of words and what each is.

    Args:
        name: of the element.
        rows: a word and what it is, each.
        caption: what they are of.
    """

    name: str
    rows: Sequence[tuple[str, str]]
    caption: Text


@dataclass(frozen=True)
class Chart:
    """A figure of one or more panels.

    Args:
        name: of its element.
        panels: in reading order.
        caption: what is shown, of how many, on which data, and what intervals mean.
        across: panels beside each other where there is room.
        behind: the numbers, to be unfolded.
    """

    name: str
    panels: Sequence[Panel]
    caption: Text
    across: int = 2
    behind: Rows | None = None


@dataclass(frozen=True)
class Note:
    """A paragraph.

    Args:
        text: of it.
        missing: whether it says why something is not there.
    """

    text: Text
    missing: bool = False


Block = Chart | Facts | Rows | Note


@dataclass(frozen=True)
class Part:
    """A part of a page.

    Args:
        name: of its element.
        title: its heading.
        blocks: in reading order.
    """

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    def values(self) -> dict[str, Any]:
        """Return what the part holds, as JSON values."""
        charts = [block for block in self.blocks if isinstance(block, Chart)]
        return {
            "part": self.name,
            "title": self.title,
            "figures": [panel.name for chart in charts for panel in chart.panels],
            "tables": [block.name for block in self.blocks if isinstance(block, Facts | Rows)],
            "left_out": ["".join(b.text) for b in self.blocks if isinstance(b, Note) and b.missing],
        }


class Html(str):
    """Text that is HTML already. What is joined or formatted with it is plain text again."""

    __slots__ = ()


def escape(text: str, longest: int = LONGEST) -> Html:
    """Write text for an element or an attribute, on one line, without control characters; return it as HTML.

    >>> escape("a<b & 'c'")
    'a&lt;b &amp; &#x27;c&#x27;'
    """
    return text if isinstance(text, Html) else Html(html.escape(_kept_apart(text, longest)))


def _kept_apart(text: str, longest: int) -> str:
    """Put text on one line, but keep a space at its start or end; return it."""
    kept = one_line(text, longest)
    if not kept:
        return " " if text else ""
    before, after = (" " if text[at].isspace() else "" for at in (0, -1))
    return f"{before}{kept}{after}"


def join(pieces: Sequence[str], between: str = "") -> Html:
    """Join pieces, those that are no HTML escaped; return HTML.

    >>> join(["<", Html("<br>")])
    '&lt;<br>'
    """
    return Html(escape(between).join(escape(piece) for piece in pieces))


def tag(name: str, *children: str, **attributes: str | None) -> Html:
    """Make an element; return it.

    Args:
        name: of the element.
        children: text, or HTML.
        attributes: text; `class_` is class, `aria_label` aria-label; None leaves one out.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    given = {key.strip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    inside = "".join(f' {key}="{html.escape(one_line(value, LONGEST))}"' for key, value in given.items())
    if name in EMPTY:
        return Html(f"<{name}{inside}>")
    return Html(f"<{name}{inside}>{join(children)}</{name}>")


def in_plot(text: str, longest: int = 60) -> str:
    """Write text for a title, tick or hover label of plotly, which takes tags in text for markup; return it.

    >>> in_plot("<b>conv1</b>")
    '&lt;b&gt;conv1&lt;/b&gt;'
    """
    return html.escape(one_line(text, longest), quote=False)


def embedded(values: Any) -> Html:
    """Write values as JSON that no browser takes for markup, numbers in six digits; return it.

    What is not finite becomes null.

    >>> embedded({"a": "</script>", "b": [1 / 3, float("nan")]})
    '{"a":"\\\\u003c/script\\\\u003e","b":[0.333333,null]}'
    """
    text = json.dumps(_short(values), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(text)


def _short(values: Any) -> Any:
    """Return values with their numbers rounded."""
    if isinstance(values, Mapping):
        return {key: _short(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_short(value) for value in values]
    if isinstance(values, float):
        if not math.isfinite(values):
            return None
        short = float(f"{values:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return values


def word(name: str, label: str | None = None) -> Html:
    """Name a figure, with its meaning on hover and a link to it; return the HTML."""
    return tag(
        "a", WORDS[name][0] if label is None else label, href=f"#def-{name}", title=WORDS[name][1], class_="word"
    )


def better(name: str) -> Html:
    """Write an arrow that says which way a figure is better; return the HTML, "" where neither way is."""
    way = FIGURES[name].better
    if not way:
        return Html("")
    return tag("span", "↑" if way == "higher" else "↓", title=f"{way} is better", aria_label=f"{way} is better",
               role="img", class_="better")  # fmt: skip


def listed() -> Html:
    """Write all definitions as a list; return the HTML."""
    rows = [tag("dt", WORDS[name][0], id=f"def-{name}") + tag("dd", WORDS[name][1]) for name in WORDS]
    return tag("dl", join([Html(row) for row in rows]), class_="definitions")


@dataclass(frozen=True)
class Page:
    """A report as one HTML file.

    Args:
        title, subtitle: of the page.
        parts: in reading order.
        origin: what the page was made of and with: a word and what it is, each.
        numbers: the figures, "evaluation", "pairwise", "mmd" and "ns": JSON values, as these reports have them.
        path: where it was saved, None for nowhere yet.
    """

    title: str
    subtitle: str
    parts: Sequence[Part]
    origin: Mapping[str, str]
    numbers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    path: Path | None = field(default=None, compare=False)

    @property
    def panels(self) -> Mapping[str, Panel]:
        """Name -> plot, in reading order."""
        charts = [block for part in self.parts for block in part.blocks if isinstance(block, Chart)]
        return {panel.name: panel for chart in charts for panel in chart.panels}

    @cached_property
    def html(self) -> str:
        """The file's text."""
        plots = {name: {"data": panel.traces, "layout": panel.layout} for name, panel in self.panels.items()}
        library, script = f"\n{get_plotlyjs()}\n", (_HERE / "script.js").read_text(encoding="utf-8")
        # No script but these two runs, whatever a name in the page may hold, and nothing is fetched.
        allowed = " ".join(f"'sha256-{_digest(text)}'" for text in (library, script))
        policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
        named = {**{part.name: part.title for part in self.parts}, "definitions": "Definitions", "origin": ORIGIN}
        contents = [tag("li", tag("a", title, href=f"#{name}")) for name, title in named.items()]
        numbers = _Numbers()
        return Template((_HERE / "template.html").read_text(encoding="utf-8")).substitute(
            policy=policy, generator="checkpoints_zoo", title=escape(self.title), subtitle=escape(self.subtitle),
            style=(_HERE / "style.css").read_text(encoding="utf-8"), contents=join(contents),
            parts=join([*(_part(part, numbers) for part in self.parts), _definitions(), _origin(self.origin)], "\n"),
            plots=embedded(plots), library=library, script=script,
        )  # fmt: skip

    def values(self) -> dict[str, Any]:
        """Return what the page holds, and the figures, as JSON values."""
        place = {} if self.path is None else {"path": str(self.path)}
        size = {"bytes": len(self.html.encode())}
        parts = {"parts": [part.values() for part in self.parts]}
        return {**place, **size, "title": self.title, **self.origin, **parts, **self.numbers}

    def save(self, path: str | Path) -> Path:
        """Write the page, by temporary name and rename; return its path.

        Args:
            path: of the file; its folder is made.

        Raises:
            UsageError: a name that is no page's, or a place that can't be written to.
        """
        path = path_of(path)
        try:
            with replacing(path) as temporary:
                temporary.write_text(self.html, encoding="utf-8", newline="\n")
        except OSError as error:
            found = error.strerror or str(error)
            raise UsageError(
                f"page {path}",
                expected="a place that can be written to",
                found=found,
                do="Give another path",
                path=path,
            ) from error
        return path


def path_of(path: str | Path) -> Path:
    """Check the name that a page is to have; return its path.

    Raises:
        UsageError: a name that is no page's.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"page {path}", expected="a name that ends in .html", found=repr(path.name), path=path)
    return path


class _Numbers:
    """Counts figures and tables."""

    def __init__(self) -> None:
        self.figures = self.tables = 0

    def figure(self) -> Html:
        self.figures += 1
        return tag("b", f"Figure {self.figures}.")

    def table(self) -> Html:
        self.tables += 1
        return tag("b", f"Table {self.tables}.")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(part: Part, numbers: _Numbers) -> Html:
    blocks = [_block(block, numbers) for block in part.blocks]
    return tag("section", tag("h2", part.title), *blocks, id=part.name, aria_label=part.title)


def _block(block: Block, numbers: _Numbers) -> Html:
    if isinstance(block, Note):
        return tag("p", *block.text, class_="missing" if block.missing else None)
    if isinstance(block, Rows | Facts):
        caption = tag("figcaption", numbers.table(), " ", *block.caption, id=f"{block.name}-caption")
        rows = _table(block) if isinstance(block, Rows) else _facts(block)
        return tag("figure", caption, rows, class_="table")
    single = len(block.panels) == 1
    panels = [_panel(panel, "" if single else chr(ord("a") + i)) for i, panel in enumerate(block.panels)]
    behind = [] if block.behind is None else [tag("details", tag("summary", "Numbers"), _table(block.behind))]
    drawn = tag("div", *panels, class_=f"panels across-{block.across}")
    caption = tag("figcaption", numbers.figure(), " ", *block.caption)
    return join([tag("figure", drawn, caption, id=block.name), *behind])


def _panel(panel: Panel, letter: str) -> Html:
    named = [tag("span", letter, class_="letter")] if letter else []
    height = f"min-height:{panel.layout.get('height', 300)}px"
    plot = tag("div", class_="plot", id=panel.name, role="img", aria_label=panel.told, style=height)
    return tag("div", tag("h3", *named, panel.title), plot, class_="panel")


def _table(rows: Rows) -> Html:
    def kind(at: int) -> str | None:
        return "words" if at in rows.words else None

    head = [tag("th", cell, scope="col", class_=kind(i)) for i, cell in enumerate(rows.header)]
    body = []
    for cells in rows.rows:
        if len(cells) == 1:
            body.append(tag("tr", tag("th", cells[0], colspan=str(len(rows.header)), scope="colgroup"), class_="over"))
            continue
        first = tag("th", cells[0], scope="row", class_=kind(0))
        body.append(tag("tr", first, *(tag("td", cell, class_=kind(i)) for i, cell in enumerate(cells[1:], 1))))
    named = any(rows.header)
    label = f"{rows.name}-caption" if rows.caption else None
    table = tag(
        "table",
        *([tag("thead", tag("tr", *head))] if named else []),
        tag("tbody", *body),
        id=rows.name,
        aria_labelledby=label,
    )
    return tag("div", table, class_="wide", tabindex="0", role="region", aria_labelledby=rows.name)


def _facts(facts: Facts) -> Html:
    rows = [tag("div", tag("dt", name), tag("dd", told)) for name, told in facts.rows]
    return tag("dl", *rows, class_="facts", id=facts.name, aria_labelledby=f"{facts.name}-caption")


def _definitions() -> Html:
    return tag("section", tag("h2", "Definitions"), listed(), id="definitions", aria_label="Definitions")


def _origin(origin: Mapping[str, str]) -> Html:
    rows = []
    for name, text in origin.items():
        shown = (
            tag("pre", tag("code", escape(text, LONGEST_CITATION))) if name in ("command", "citation") else escape(text)
        )
        rows += [tag("dt", name), tag("dd", shown)]
    return tag("section", tag("h2", ORIGIN), tag("dl", *rows), id="origin", aria_label=ORIGIN)


"""Name of a figure or a term -> how it is written, and what it means."""
