"""Settings, searches, diagnostics and times of the methods, as docs/comparison.md lays them out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from docs.make.comparison_tables import markdown


def searched(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how settings were found."""
    if not any("search" in known for known in methods.values()):
        return "Settings are those that the package has for the collection; this run searched for none."
    return (
        "Settings are those with the least NLL of one mode's averaged predictions on the last 250 training images (in"
        " rank order), each fitted to the other images; the test split is not looked at."
    )


def settings_table(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out each method's settings, and the search for them where there was one."""
    rows, found = [], False
    for name, known in methods.items():
        settings = settings_text(known.get("fit", {}).get("settings", {})) or "-"
        every = known.get("search", {}).get("tried", [])
        tried = [t for t in every if t["nll"] is not None]
        if tried:
            found, chosen = True, min(tried, key=lambda t: t["nll"])
            failed = len(every) - len(tried)
            count = f"{len(tried)}{f' and {failed} without figures' if failed else ''}"
            worst = max(t["nll"] for t in tried)
            search = (count, f"{chosen['nll']:.4f} ({worst:.3g})", f"{100 * chosen['accuracy']:.1f}")
        else:
            search = ("none", "-", "-")
        rows.append((f"`{name}`", settings, *search))
    header = ("method", "settings", "tried", "held-out NLL, chosen (worst)", "held-out accuracy (%)")
    return markdown(header, rows) if found else markdown(header[:2], [row[:2] for row in rows])


def mixing(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how well HMC's chains have mixed."""
    runs = methods.get("hmc", {}).get("fit", {}).get("facts", [])
    if not runs or runs[0].get("rhat_predictive_all") is None:
        return ""
    of_all = runs[0]
    said = []
    for name, words in (
        ("rhat_predictive_all", "of the probabilities that training images have (median)"),
        ("rhat_predictive_all_max", "of these (largest)"),
        ("rhat_log_posterior_all", "of the log posterior"),
    ):
        value = of_all.get(name)
        if value is not None:
            said.append(f"{value:.3f} {words}")
    middle, most = of_all["rhat_predictive_all"], of_all.get("rhat_predictive_all_max") or math.inf
    verdict = "mostly, not all, below 1.1: the chains have not mixed in full"
    if most < 1.1 or middle >= 1.1:
        verdict = "all below 1.1" if most < 1.1 else "mostly above 1.1: the chains have not mixed"
    acceptance = [run["acceptance"] for run in runs]
    return (
        f"HMC's acceptance is {sum(acceptance) / len(acceptance):.2f} on average ({min(acceptance):.2f} to"
        f" {max(acceptance):.2f}). R-hat of all chains together, of what permutations don't change:"
        f" {', '.join(said)}. Those of probabilities are {verdict}. That of weights means something within a chain"
        " alone: chains are in other permutations."
    )


def facts_table(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out what each fit says of itself, over its runs, and how long it took."""
    rows = []
    for name, known in methods.items():
        fit = known.get("fit")
        if fit is None:
            continue
        words = []
        for fact in dict.fromkeys(n for run in fit["facts"] for n in run):
            values = [run[fact] for run in fit["facts"] if run.get(fact) is not None]
            if not values:
                continue
            several = f" ({_short(min(values))} to {_short(max(values))})" if max(values) > min(values) else ""
            words.append(f"{fact.replace('_', ' ')} {_short(sum(values) / len(values))}{several}")
        size = f"{fit['runs']} × {fit['draws']}" if fit["facts"] else f"{fit['draws']}"
        rows.append((f"`{name}`", size, "; ".join(words) or "-", f"{fit['seconds']:.0f}"))
    return markdown(("method", "runs × draws", "what the fit says: mean over runs (least to most)", "seconds"), rows, 3)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def slowest(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how long the fits and searches took."""
    fits = {n: known["fit"]["seconds"] for n, known in methods.items() if "fit" in known}
    tried = [t["seconds"] for known in methods.values() for t in known.get("search", {}).get("tried", [])]
    if not fits:
        return "No method was fitted."
    name = max(fits, key=lambda n: fits[n])
    return (
        f"All fits together took {sum(fits.values()) / 60:.1f} minutes of work, the longest, `{name}`, {fits[name]:.0f}"
        f" seconds; the {len(tried)} fits of the searches took {sum(tried) / 60:.1f} minutes."
    )


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in settings.items())
