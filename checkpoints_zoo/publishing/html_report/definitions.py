"""The definitions of the figures and terms on a page."""

from __future__ import annotations

from markupsafe import Markup

from checkpoints_zoo.evaluation.figures import FIGURES, SCALED_FIGURES, TEMPERATURE
from checkpoints_zoo.publishing.html_report.markup import markup

# Name of a figure or a term -> its title, and its definition.
TERMS = {
    **{name: (figure.title, figure.definition) for name, figure in FIGURES.items()},
    "disagreement_ood": ("disagreement, OOD", "Disagreement on the inputs out of distribution."),
    "correlation": (
        "correlation of pairs",
        "Pearson's correlation of a pair's mutual information in and out of distribution, over all pairs, −1 to 1.",
    ),
    "band": (
        "band",
        "Of an ensemble of k of N members: where the figure of 95 % of new ensembles of that size falls. Mean "
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
    TEMPERATURE: (SCALED_FIGURES[TEMPERATURE].title, SCALED_FIGURES[TEMPERATURE].definition),
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


def term(name: str, label: str | None = None) -> Markup:
    """Return the name of a figure or a term as HTML, with its definition on hover and a link to it.

    Args:
        name: name of the figure or term.
        label: text that is shown in place of the term's title.
    """
    title, definition = TERMS[name]
    template = '<a href="#def-{}" title="{}" class="term">{}</a>'
    return markup(template, name, definition, title if label is None else label)


def better(figure: str) -> Markup:
    """Return an arrow as HTML that shows whether higher or lower values of a figure are better; "" if neither is."""
    direction = FIGURES[figure].better
    if not direction:
        return Markup("")
    template = '<span title="{0} is better" aria-label="{0} is better" role="img" class="better">{1}</span>'
    return markup(template, direction, "↑" if direction == "higher" else "↓")
