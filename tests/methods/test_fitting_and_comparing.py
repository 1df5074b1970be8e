"""Methods that are fitted for a comparison: once, with a reason where they are not; and what can't be compared."""

# ruff: noqa: F811 (fixtures are imported, and asked for by name)

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.draws import MethodFits, available_methods
from checkpoints_zoo.methods.comparing.study import prepare_comparison
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.method import Run
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits
from tests.support.few_draws import asked, draws, members  # noqa: F401 (fixtures)


@dataclass(frozen=True)
class Quick:
    """Draws around zero, quick; `scale` is its only setting."""

    scale: float = 0.1
    refuse: bool = False

    name: ClassVar[str] = "quick"
    title: ClassVar[str] = "Quick"
    source: ClassVar[str] = "nobody"
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = False
    fitted: ClassVar[list[str]] = []

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> list[Run]:
        self.fitted.append(f"{self.name} {self.scale}")
        if self.refuse:
            raise UsageError("network", expected="another", found="this one")
        params, _ = problem.modes(runs)
        generator = torch.Generator().manual_seed(seed)
        return [
            Run(
                problem.finish(
                    {n: t[r] + self.scale * torch.randn(draws, *t.shape[1:], generator=generator)
                     for n, t in params.items()}
                ),
                {"acceptance": 0.5 + r / 10, "r_hat": math.nan},
            )
            for r in range(runs)
        ]  # fmt: skip

    @classmethod
    def grid(cls, problem: Problem) -> list[Quick]:
        return [cls(3.0), cls(0.01)]


class Refusing(Quick):
    name: ClassVar[str] = "refusing"

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> list[Run]:
        raise UsageError("network of convnet-digits", expected="norms", found="none")


class Lacking(Quick):
    name: ClassVar[str] = "lacking"
    needs: ClassVar[tuple[str, ...]] = ("no-such-package>=1,<2", "torch>=1")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Let there be three methods, and a recipe of one epoch."""
    monkeypatch.setattr(fitting, "METHODS", {kind.name: kind for kind in (Quick, Refusing, Lacking)})
    monkeypatch.setattr(fitting, "CHOSEN_SETTINGS", {})
    Quick.fitted.clear()
    return replace(convnet_digits(), epochs=1)


@pytest.mark.slow
def test_methods_are_fitted_once_and_left_out_with_a_reason(
    members: zoo.Collection, draws: dict[str, zoo.Collection], asked: dict[str, Any], quick: Recipe, tmp_path: Path
) -> None:
    said = list[str]()
    # Rows without a hash of their recipe, which any recipe may be of.
    population = draws["vi"]
    options = asked | {
        "methods": None, "draws": None, "recipe": quick, "runs": 2, "per_run": 3, "reference": members[:8],
        "ood": "none", "out": tmp_path / "out", "say": said.append,
    }  # fmt: skip
    todo = prepare_comparison(population, **options).remaining_work()
    assert (todo.fits, len(todo.cells), todo.found) == (("quick", "refusing"), 4, 0)
    result = zoo.compare(population, **options)
    assert [(row.method, row.mode, row.runs, row.draws) for row in result.rows] == [
        ("quick", "one", 2, 3), ("quick", "multi", 2, 4), ("reference", "members", 8, 8),
    ]  # fmt: skip
    refused = "network of convnet-digits: expected norms; found none."
    lacking = (
        "method 'lacking': expected no-such-package>=1,<2 to be installed; found none such. "
        'Run: pip install "no-such-package>=1,<2".'
    )
    assert result.left_out == {"refusing": refused, "lacking": lacking}
    assert result.to_text().endswith(f"\nLeft out: lacking: {lacking}\nLeft out: refusing: {refused}")
    fit = result.methods["quick"]["fit"]
    assert (fit["settings"], fit["runs"], fit["draws"], fit["seed"]) == ({"scale": 0.1, "refuse": False}, 2, 3, 0)
    assert fit["facts"] == [{"acceptance": 0.5, "r_hat": None}, {"acceptance": 0.6, "r_hat": None}]
    assert Comparison.from_json(result.to_json()) == result
    assert Quick.fitted == ["quick 0.1"]

    again = zoo.compare(population, **options)
    assert again == result
    assert Quick.fitted == ["quick 0.1"]
    other = zoo.compare(population, **(options | {"methods": ["quick"], "seed": 5}))
    assert Quick.fitted == ["quick 0.1"] * 2
    assert other["quick", "one"]["nll"].value != result["quick", "one"]["nll"].value
    zoo.compare(population, **options)
    assert Quick.fitted == ["quick 0.1"] * 2  # what others settings gave lies beside it

    # A fit that was killed before it was whole is begun anew.
    made = (tmp_path / "out" / "draws").glob("quick-*/fits/*.json")
    next(path for path in made if json.loads(path.read_text())["seed"] == 0).unlink()
    assert zoo.compare(population, **options).rows == result.rows
    assert Quick.fitted == ["quick 0.1"] * 3


@pytest.mark.slow
def test_a_search_is_kept_and_its_best_is_fitted(
    members: zoo.Collection, draws: dict[str, zoo.Collection], asked: dict[str, Any], quick: Recipe, tmp_path: Path
) -> None:
    options = asked | {
        "methods": "quick", "draws": None, "recipe": quick, "runs": 2, "per_run": 3, "reference": members[:8],
        "ood": "none", "out": tmp_path, "search": True,
    }  # fmt: skip
    result = zoo.compare(draws["vi"], **options)
    assert Quick.fitted == ["quick 3.0", "quick 0.01", "quick 0.01"]
    facts = result.methods["quick"]
    assert facts["fit"]["settings"]["scale"] == 0.01
    tried = facts["search"]["tried"]
    assert [t["settings"]["scale"] for t in tried] == [3.0, 0.01]
    assert tried[0]["nll"] > tried[1]["nll"]
    assert zoo.compare(draws["vi"], **options) == result
    assert len(Quick.fitted) == 3


def test_members_are_trained_without_a_search(tmp_path: Path) -> None:
    fits = MethodFits(convnet_digits(), tmp_path, 2, 3, 0, search=True)
    assert fits.with_settings(DeepEnsemble()) == DeepEnsemble()
    assert fits.with_settings(Snapshot()) is None


@pytest.mark.slow
def test_draws_that_the_reference_has_are_told_of(members: zoo.Collection, tmp_path: Path) -> None:
    said: list[str] = []
    zoo.compare(
        members[:8], (), ood="none", draws={"own": members[6:12]}, out=tmp_path, permutations=19, workers=1,
        say=said.append,
    )  # fmt: skip
    assert "own: 2 of its draws are members of the reference too: no p-values" in said


def test_methods_that_are_named_must_do(
    members: zoo.Collection, draws: dict[str, zoo.Collection], asked: dict[str, Any], quick: Recipe, tmp_path: Path
) -> None:
    options = asked | {"draws": None, "recipe": quick, "runs": 2, "per_run": 3, "ood": "none", "out": tmp_path}
    refusals = {
        ("lacking",): "method 'lacking': expected no-such-package>=1,<2 to be installed; found none such. Run: pip ",
        ("quack",): "method 'quack': expected one of quick, refusing, lacking; found no such name. Did you mean quick?",
        ("quick", "quick"): "methods: expected each once; found quick, quick.",
    }
    for methods, text in refusals.items():
        with pytest.raises(UsageError, match=re.escape(text)):
            zoo.compare(draws["vi"], **(options | {"methods": methods}))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="method 'refusing': expected one that can be fitted here; found network of"):
        zoo.compare(draws["vi"], **(options | {"methods": ["refusing"]}))


def test_what_can_not_be_compared(
    members: zoo.Collection, draws: dict[str, zoo.Collection], asked: dict[str, Any], quick: Recipe, tmp_path: Path
) -> None:
    other = zoo.load("resnet8-digits")
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (members[:3], {}, "reference convnet-digits: expected 4 members or more: its halves are compared with"),
        (members, {"permutations": 0}, "permutations: expected a whole number from 1; found 0."),
        (members, {"runs": 2.5}, "runs: expected a whole number from 1; found 2.5."),
        (members, {"per_run": 1}, "per_run: expected a whole number from 2; found 1."),
        (members, {"workers": 0}, "workers: expected a whole number from 1; found 0."),
        (members, {"seed": "x"}, "seed: expected a whole number of at most 64 bits; found 'x'."),
        (members[0], {}, "collection: expected a Collection or its name; found Member."),
        (members, {"draws": {"a": other}}, "draws 'a': expected the tensors of convnet-digits; found others, such as"),
        (members, {"draws": {"a": members[:1]}}, "draws of a: expected two or more; found 1."),
        (members, {"draws": members}, "draws: expected a dict of name -> Collection; found Collection."),
        (members, {"draws": {"a b": members}}, "name 'a b' of draws: expected letters, digits, dots and dashes, and"),
        (members, {"draws": {"reference": members}}, "name 'reference' of draws: expected letters"),
        (members, {"draws": {"a": "swag"}}, "draws 'a': expected a Collection, as `zoo.load` and `zoo.from_samples`"),
        (members, {"data": "photos"}, "images 'photos' for convnet-digits: expected labels of the classes 0, 1"),
        (draws["vi"], {"methods": None, "draws": None}, "recipe of convnet-digits-vi-multi: expected a collection of"),
        (members, {"methods": ["quick"], "recipe": quick}, "recipe of convnet-digits: expected the one that its"),
    ]  # fmt: skip
    for collection, options, text in refused:
        with pytest.raises(UsageError) as error:
            prepare_comparison(collection, **(asked | {"out": tmp_path} | options))
        assert str(error.value).startswith(text), str(error.value)
    assert not list(tmp_path.iterdir())


def test_all_methods_are_those_that_this_machine_can_fit(quick: Recipe) -> None:
    found, missing = available_methods(None, "convnet-digits")
    assert [m.name for m in found] == ["quick", "refusing"]
    assert list(missing) == ["lacking"]
