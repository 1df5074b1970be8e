"""How well inputs out of distribution are told from the test inputs."""

from __future__ import annotations

import math

import numpy as np

from checkpoints_zoo.evaluation.drawing import BLUE, GREY, RED
from checkpoints_zoo.evaluation.figures import OOD_FIGURES
from checkpoints_zoo.evaluation.tables import FAINTEST, as_text
from checkpoints_zoo.publishing.html_report.charts import Trace, axis, counts, diagonal, layout, line, stairs
from checkpoints_zoo.publishing.html_report.definitions import word
from checkpoints_zoo.publishing.html_report.gather import Measured
from checkpoints_zoo.publishing.html_report.page import Chart, Note, Panel, Part
from checkpoints_zoo.publishing.html_report.summary import curves
from checkpoints_zoo.publishing.html_report.tags import tag

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
POINTS = 200  # of a curve, at most


def part(found: Measured) -> Part:
    """Return the part on inputs out of distribution."""
    title = "Out-of-distribution detection"
    if found.said_outside is None:
        ask = "No images out of distribution were given: --ood NAME (such as photos, svhn) draws these figures."
        return Part("ood", title, [Note((ask,), True)])
    figures = found.report.ensemble
    names = ("auroc", "aupr", "fpr95")
    told = [piece for n in names for piece in (word(n), f" {as_text(figures[n])}", ", " if n != names[-1] else "")]
    means = f"mean {as_text(figures['mi_id'])} nats in and {as_text(figures['mi_ood'])} nats out of distribution"
    caption = (
        tag("b", "Telling inputs apart. "), f"Of {found.together}; in distribution: {found.on}; out of it: ",
        f"{found.on_ood}. ", *told, f"{found.known}. (a) The score, the largest mean probability with its sign "
        "changed. (b) ", word("mi_id", "Mutual information"), f" of label and member of each input, {means}; what is "
        "below the first bin is in it. (c), (d) ROC and precision-recall curves of the score, inputs out of "
        "distribution positive.",
    )  # fmt: skip
    inside, outside = (-said.largest.double().numpy() for said in (found.said, found.said_outside))
    panels = [_scores(inside, outside), _information(found), *_tradeoffs(found, inside, outside)]
    blocks = [Chart("detection", panels, caption)]
    if found.report.members > 1:
        blocks.append(curves(found, "ood-curves", OOD_FIGURES, 2))
    return Part("ood", title, blocks)


def _overlaid(edges: list[float], inside: Array, outside: Array) -> list[Trace]:
    """Draw two histograms, as shares, one over the other."""
    sets = ((inside, "in distribution", BLUE), (outside, "out of distribution", RED))
    return [stairs(edges, [n / len(v) for n in counts(v.tolist(), edges)], name, c) for v, name, c in sets]


def _scores(inside: Array, outside: Array) -> Panel:
    low = min(inside.min(), outside.min())
    high = max(inside.max(), outside.max())
    edges = np.linspace(low - 1e-9, max(high, low + 1e-6), 41).tolist()
    told = (
        f"Histograms of the score: median {np.median(inside):.3f} in distribution, {np.median(outside):.3f} out of it."
    )
    drawn = layout(axis("score, −(largest mean probability)", nticks=7), axis("share of inputs", tickformat=".0%"))
    return Panel("scores", "Score", told, _overlaid(edges, inside, outside), drawn)


def _information(found: Measured) -> Panel:
    inside, outside = (np.asarray(found.report.drawing[n], np.float64) for n in ("mi_id", "mi_ood"))
    together = np.concatenate([inside, outside])
    y = axis("share of inputs", tickformat=".0%")
    if together.max() <= FAINTEST:
        why = "one member has none" if found.report.members == 1 else "the members agree on all inputs"
        note = {"text": why, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
        drawn = layout(axis("mutual information (nats)"), y, annotations=[note])
        return Panel("information", "Mutual information", f"Nothing to draw: {why}.", [], drawn)
    lowest = 10.0 ** math.floor(math.log10(max(float(np.quantile(together, 0.01)), FAINTEST)))
    edges = np.geomspace(lowest, together.max() * 1.02, 41).tolist()
    clipped = [np.clip(v, lowest, None) for v in (inside, outside)]
    told = f"Histograms of mutual information: mean {inside.mean():.3g} nats in distribution, {outside.mean():.3g} out."
    x = axis("mutual information (nats)", type="log", exponentformat="power", dtick=1)
    return Panel("information", "Mutual information", told, _overlaid(edges, *clipped), layout(x, y))


def _tradeoffs(found: Measured, inside: Array, outside: Array) -> list[Panel]:
    """Draw the ROC and the precision-recall curve."""
    from sklearn.metrics import roc_curve

    truth = np.repeat([0, 1], [len(inside), len(outside)])
    alarms, hits, _ = roc_curve(truth, np.concatenate([inside, outside]), drop_intermediate=False)
    figures = found.report.ensemble
    kept = _thin(alarms, hits)
    roc = line(alarms[kept].tolist(), hits[kept].tolist(), f"AUROC {as_text(figures['auroc'])}", BLUE, "solid",
               hovertemplate="false positives %{x:.2%}, found %{y:.2%}<extra></extra>")  # fmt: skip
    share = len(outside) / (len(inside) + len(outside))
    with np.errstate(invalid="ignore"):
        precision = hits * len(outside) / (hits * len(outside) + alarms * len(inside))
    some = np.flatnonzero(hits > 0)
    some = some[_thin(hits[some], precision[some])]
    pr = line(hits[some].tolist(), precision[some].tolist(), f"AUPR {as_text(figures['aupr'])}", BLUE, "solid",
              hovertemplate="found %{x:.2%}, precision %{y:.2%}<extra></extra>")  # fmt: skip
    percent = {"tickformat": ".0%", "range": [-0.01, 1.01]}
    low = max(0.0, min(float(precision[some].min()), share) - 0.05)
    return [
        Panel("roc", "ROC curve", f"ROC curve, AUROC {as_text(figures['auroc'])}.", [diagonal(0, 1, "chance"), roc],
              layout(axis("test inputs flagged", **percent), axis("found", **percent))),
        Panel("precision-recall", "Precision and recall", f"Precision-recall curve, AUPR {as_text(figures['aupr'])}.",
              [line([0, 1], [share, share], "chance", GREY, "dash", hoverinfo="skip"), pr],
              layout(axis("recall: found", **percent), axis("precision", tickformat=".0%", range=[low, 1.01]))),
    ]  # fmt: skip


def _thin(x: Array, y: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return positions of points of a curve, about as far apart along it, both ends and no more than `POINTS`."""
    along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    wanted = np.linspace(0, along[-1], POINTS)
    return np.unique(np.searchsorted(along, wanted).clip(max=len(along) - 1))
