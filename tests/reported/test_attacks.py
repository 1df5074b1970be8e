"""Strings and tensors that nobody expects are answered by errors of the package."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import yaml

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import TooLargeError, UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.formats.columns import SCHEMA as COLUMNS
from checkpoints_zoo.publishing import cards
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.population import train_stack
from checkpoints_zoo.training.recipes import convnet_digits, recipe_from_options
from tests.formats.test_text import cells, tokens
from tests.publishing.test_cards import ABOUT, ALL, REPO, body, some
from tests.support.commands import run
from tests.support.scenarios import SCHEMA, build
from tests.support.tiny import TINY, stored


@pytest.mark.parametrize("name", ["digits/test/x", "digits/", "digits", "digits/valid", "digits//test", "/test"])
def test_a_manifest_names_no_images_of_the_package(tmp_path: Path, name: str) -> None:
    """Case 44: accuracies on images that nobody has are a finding of `verify`, not a TypeError."""
    built = build(tmp_path, net="convnet", members=range(2))
    for row in built.rows:
        row |= {"eval_data": name, "test_accuracy": 0.5}
    built.write(SCHEMA.append(pa.field("eval_data", pa.string())))
    members = zoo.load("tiny", source=tmp_path)
    problems = [problem for problem in zoo.verify(members) if problem.kind == "accuracy"]
    if name.partition("/")[0] != "digits":
        assert problems == []  # images of the producer
    else:
        assert [problem.text for problem in problems] == [
            f"expected an accuracy on digits/test or digits/train; found {name!r}."
        ] * 2


def test_sparse_tensors_are_refused() -> None:
    """Case 44: each metric says that it takes dense tensors."""
    probs, labels = torch.tensor([[0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1])
    text = r": expected a dense tensor; found layout sparse_coo\. Convert it with "
    for sparse in (probs.to_sparse(), probs.to_sparse(1)):
        for metric in (metrics.accuracy, metrics.brier, metrics.ece, metrics.ace, metrics.aurc):
            with pytest.raises(ValueError, match=f"^probs{text}probs.to_dense"):
                metric(sparse, labels)
        for alone in (metrics.entropy, metrics.ood_score):
            with pytest.raises(ValueError, match=f"^probs{text}"):
                alone(sparse)
    with pytest.raises(ValueError, match=f"^labels{text}"):
        metrics.accuracy(probs, labels.to_sparse())
    with pytest.raises(ValueError, match=f"^scores{text}"):
        metrics.auroc(torch.tensor([0.1, 0.2]).to_sparse(), labels.bool())
    with pytest.raises(ValueError, match=f"^values{text}"):
        metrics.bootstrap_mean(torch.tensor([0.1, 0.2, 0.3]).to_sparse())


STATUS = {"status": "ok"}
BITS = (
    *("|", "`", "``", "\\", "\\|", "<img src=x onerror=alert(1)>", "</code>", "<td>", "\n", "\r", "\u2028", "\t", " "),
    *("*b*", "[x](y)", "$\\frac$", "<!--", "-->", "~~~", "&#124;", "https://e.vil", "@me", "{{7*7}}", "{% raw %}", "a"),
)


@pytest.mark.slow
def test_columns_of_a_manifest_are_text_on_the_card() -> None:
    """Case 43: 200 rows of hostile strings in every column of text."""
    draw = random.Random(0)
    columns = [f.name for f in COLUMNS if pa.types.is_string(f.type) and f.name not in ("path", "layout", "dtype")]
    kinds = ("heading_open", "image", "html_block", "html_inline", "link_open", "td_open")
    usual = [t.type for t in tokens(body(cards.card(some(*[ALL | dict.fromkeys(columns, "a") | STATUS]), REPO)))]
    for _ in range(200):
        row = {name: "".join(draw.choices(BITS, k=draw.randint(1, 5))) for name in columns}
        text = cards.card(some(ALL | row | STATUS), REPO)
        found = [t.type for t in tokens(body(text))]
        assert {k: found.count(k) for k in kinds} == {k: usual.count(k) for k in kinds}, row
        assert all(cells(line) in (2, 3, 6, 7) for line in text.splitlines() if line.startswith("| "))


@pytest.mark.parametrize("field", ["citation", "title", "licence"])
def test_the_marker_of_a_card_in_a_field_does_not_break_the_card(field: str) -> None:
    """Case 43: a text that holds the card's own marker, also with the digest that a draft of the card has."""
    marker = next(line for line in cards.card(some(ALL), REPO).splitlines() if line.startswith("<!-- Written by"))
    for digest in ("0" * 64, "f" * 64):
        hostile = re.sub("[0-9a-f]{64}", digest, marker)
        text = cards.card(some(ALL, about=replace(ABOUT, **{field: hostile})), REPO)
        assert cards.is_generated(text)
        assert not cards.is_generated(text + "Edited.\n")
        assert yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))["configs"][0]["config_name"] == "some"


@pytest.fixture(scope="module")
def report() -> zoo.Report:
    return zoo.evaluate(zoo.load("convnet-digits", n=2), "digits", subsets=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["$\\frac$", "$", "\x1b[31mred", "a\nb", "漢字", "\u202ename", "x" * 500])
def test_a_name_on_a_figure_is_drawn_as_it_is(name: str, report: zoo.Report, tmp_path: Path) -> None:
    """Case 42: the name of stored predictions, which matplotlib read as a formula."""
    report = replace(report, collection=name, data=name)
    if name in ("$\\frac$", "漢字"):  # a second each
        assert report.plot(tmp_path / "r.png").stat().st_size > 1000
    text = report.plot_curves(tmp_path / "r.svg", ["nll"]).read_text()
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("stack_width=1000000", "from 1 to 4,096; found 1000000"),
        ("epochs=1000000000000000000000000", "from 1 to 1,000,000; found 1000000000000000000000000"),
        ("batch_size=99999999999", "from 1 to 1,000,000; found 99999999999"),
        ("warmup_epochs=10000000", "from 0 to 1,000,000; found 10000000"),
        ("save_every=10000000000", "from 1 to 1,000,000; found 10000000000"),
    ],
)
def test_counts_of_a_recipe_have_bounds(change: str, text: str) -> None:
    """Case 47: numbers that no machine trains are refused before anything is built."""
    with pytest.raises(UsageError, match=f"^{change.partition('=')[0]} of recipe .* a whole number {text}"):
        recipe_from_options("convnet-digits", (change,))


@pytest.mark.slow
def test_a_stack_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 47: a stack whose weights can't be held is refused before its modules are built."""
    monkeypatch.setattr("checkpoints_zoo.training.population.initial_state", None)
    recipe = dataclasses.replace(
        convnet_digits(), architecture="mlp", arguments={"channels": 1, "size": 8, "widths": (8000, 8000)},
        stack_width=4096,
    )  # fmt: skip
    with pytest.raises(TooLargeError, match=r"^a stack of 4,096 members, from member 3: expected at most .*; found \d"):
        train_stack(recipe, (3,), recipe.split("train"))


@pytest.mark.parametrize("change", ["arguments.classes=10", "lr=0.05", "nesterov=false", "init_seed=none", "epochs=40"])
def test_a_change_without_an_effect(change: str) -> None:
    """Case 47: a field that is set to the value that it has is a slip, and is named."""
    with pytest.raises(UsageError) as error:
        recipe_from_options("convnet-digits", ("momentum=0.8", change))
    assert str(error.value) == (
        f"--set {change}: expected another value than the recipe's; found the value that recipe 'convnet-digits' has. "
        "Leave it out."
    )
    with pytest.raises(UsageError, match="expected each field once; found lr twice"):
        recipe_from_options("convnet-digits", ("lr=0.1", "lr=0.2"))
    assert recipe_from_options("convnet-digits", ("arguments.classes=11", "lr=0.1")).arguments["classes"] == 11


@pytest.mark.parametrize("changes", [{"lr": 0.06}, {"title": "Another"}, {"licence": "MIT"}])
def test_another_recipe_in_the_same_folder(tmp_path: Path, changes: dict[str, float | str]) -> None:
    """Case 47: no field that a source states of its members changes between them."""
    out = stored([0], tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="Give another folder"):
        train_into(dataclasses.replace(TINY, **changes), [1], out)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


HOSTILE = "digits\x1b]0;owned\x07\x1b[31m\u202e\x9b2Jq"


@pytest.fixture(scope="module")
def hostile_predictions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a source with stored predictions whose data set has a hostile name; return its folder."""
    folder = tmp_path_factory.mktemp("stored")
    zoo.load("convnet-digits", n=4).predict("digits", folder)
    (description,) = folder.glob("predictions/*/*/manifest.json")
    values = json.loads(description.read_text())
    description.write_text(json.dumps(values | {"data": HOSTILE}))
    return str(folder)


@pytest.mark.parametrize(
    "command",
    [
        "evaluate convnet-digits -n 4 --stored {0} --sizes 2",
        "pairwise convnet-digits -n 4 --stored {0}",
        pytest.param("plot convnet-digits -n 4 --stored {0} --out {1}/p.png", marks=pytest.mark.slow),
        "verify {0}",
        "predict convnet-digits -n 4 --data digits --out {0}",
    ],
    ids=lambda command: command.split()[0],
)
def test_strings_of_a_source_do_not_reach_a_terminal(command: str, hostile_predictions: str, tmp_path: Path) -> None:
    """Case 42: each command, its messages, warnings and errors."""
    result = run(*command.format(hostile_predictions, tmp_path).split())
    for text in (result.stdout, result.stderr):
        assert "".join(c for c in text if not c.isprintable()).strip("\n") == ""
    if command.startswith(("evaluate", "pairwise")):
        assert "owned" in result.output


def test_printed_results_and_errors_have_no_controls() -> None:
    """Case 42, where Python prints: results, `repr`, errors and warnings."""
    members = zoo.load("convnet-digits", n=2)
    report = replace(zoo.evaluate(members, "digits", subsets=2), collection=HOSTILE, data=HOSTILE)
    pairs = replace(zoo.pairwise(members, "digits"), collection=HOSTILE, data=HOSTILE)
    error = zoo.ZooError(HOSTILE, expected=HOSTILE, found=HOSTILE, do=HOSTILE)
    for result in (report, pairs, error):
        for text in (str(result), repr(result) if result is not error else ""):
            assert all(c.isprintable() or c == "\n" for c in text)
