"""Temperature scaling against scipy, torch and torch-uncertainty, and the figures after it against other packages."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import held_out, metrics, subsets
from checkpoints_zoo.evaluation.evaluating import Report
from checkpoints_zoo.evaluation.figures import SCALED_FIGURES, TEMPERATURE
from checkpoints_zoo.evaluation.metrics import scaling
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.predictions import Predictions, predict, predictions_of
from tests.support.commands import run, values

Oracle = Callable[[str], ModuleType]
COUNT = 6


def drawn(inputs: int, classes: int, sharpness: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels drawn from their softmax at another temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(inputs, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / sharpness).softmax(-1), 1, generator=generator)[:, 0]
    return logits, labels


def by_scipy(log_probs: np.ndarray, labels: np.ndarray) -> float:
    """The temperature by a search over log T that knows values alone."""

    def loss(log_t: float) -> float:
        z = log_probs / math.exp(log_t)
        z = z - z.max(-1, keepdims=True)
        return float((np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), labels]).mean())

    found = minimize_scalar(loss, bounds=(math.log(0.05), math.log(20)), method="bounded", options={"xatol": 1e-9})
    return math.exp(float(found.x))


def by_torch(log_probs: torch.Tensor, labels: torch.Tensor) -> float:
    inverse = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([inverse], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(log_probs * inverse, labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return 1 / inverse.item()


@pytest.mark.parametrize(("inputs", "classes", "sharpness"), [(500, 10, 2.5), (40, 3, 0.4), (2, 2, 1.0), (300, 100, 1)])
def test_the_temperature_is_that_of_the_least_nll(inputs: int, classes: int, sharpness: float) -> None:
    for seed in range(4):
        logits, labels = drawn(inputs, classes, sharpness, seed)
        if inputs == 2:
            labels[0], labels[1] = logits[0].argmin(), logits[1].argmax()
            logits[0] *= 0.3
        found = metrics.temperature(logits.log_softmax(-1), labels).item()
        assert found == pytest.approx(by_scipy(logits.numpy(), labels.numpy()), rel=1e-6)
        if inputs > 2:
            assert found == pytest.approx(by_torch(logits, labels), rel=1e-4)
        single = metrics.temperature(logits.float().log_softmax(-1), labels).item()
        assert single == pytest.approx(found, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # of what it imports
def test_the_temperature_is_torch_uncertaintys(oracle: Oracle) -> None:
    scaling = oracle("torch_uncertainty.post_processing")
    for seed, sharpness in enumerate((0.7, 1.6, 3.0)):
        logits, labels = drawn(400, 10, sharpness, seed)
        scaler = scaling.TemperatureScaler(lr=1, max_iter=500)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(logits.float(), labels), batch_size=100)
        scaler.fit(loader, progress=False)
        wanted = scaler.temperature[0].item()
        assert metrics.temperature(logits.log_softmax(-1), labels).item() == pytest.approx(wanted, abs=1e-4)


def test_where_there_is_no_best_temperature() -> None:
    logits, _ = drawn(50, 4, 1.0)
    log_probs = logits.log_softmax(-1)
    cases = {
        "all are right": (log_probs, log_probs.argmax(-1), 0.05),
        "all are the least probable": (log_probs, log_probs.argmin(-1), 20.0),
        "nothing is said": (torch.full((5, 4), 0.25, dtype=torch.float64).log(), torch.arange(5) % 4, 1.0),
        "one class": (torch.zeros(5, 1, dtype=torch.float64), torch.zeros(5, dtype=torch.int64), 1.0),
        "one input": (log_probs[:1], log_probs[:1].argmax(-1), 0.05),
        "certain and right": (torch.tensor([[0.0, -math.inf]]), torch.tensor([0]), 0.05),
        "certain and wrong": (torch.tensor([[0.0, -math.inf]]), torch.tensor([1]), 20.0),
    }
    for name, (given, labels, wanted) in cases.items():
        assert metrics.temperature(given, labels).item() == wanted, name


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("convnet-digits", n=COUNT)


@pytest.fixture(scope="module")
def report(members: zoo.Collection) -> Report:
    return zoo.evaluate(members, ood="photos", temperature=True, held_out=0.3, subsets=5, within={"nll": 0.05})


@pytest.fixture(scope="module")
def parts(members: zoo.Collection) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions measured and held out, by the rule written down again."""
    images = zoo.images.load("digits")

    def digest(i: int) -> str:
        return hashlib.sha256(f"held-out|{images.fingerprint}|{i}".encode()).hexdigest()

    rank = sorted(range(540), key=digest)
    return torch.tensor(sorted(rank[162:])), torch.tensor(sorted(rank[:162]))


@pytest.fixture(scope="module")
def probs(members: zoo.Collection) -> dict[str, torch.Tensor]:
    """Probabilities (member, input, class) by a plain loop over modules, float64."""
    found = {}
    for name in ("digits", "photos"):
        inputs = members.preprocess(zoo.images.load(name).images)
        with torch.no_grad():
            found[name] = torch.stack([m.model()(inputs).double().softmax(-1) for m in members])
    return found


def labels() -> torch.Tensor:
    known = zoo.images.load("digits").labels
    assert known is not None
    return known


@pytest.mark.slow
def test_the_inputs_held_out_follow_the_rule_and_are_in_no_figure(
    report: Report, parts: tuple[torch.Tensor, torch.Tensor], members: zoo.Collection
) -> None:
    left, held = held_out.draw_held_out(zoo.images.load("digits").fingerprint, 540, 0.3)
    assert torch.equal(left, parts[0])
    assert torch.equal(held, parts[1])
    assert report.calibrated is not None
    assert (report.inputs, report.calibrated.inputs, report.calibrated.share) == (378, 162, 0.3)
    digits = zoo.images.load("digits")
    measured = ImageData("digits", "test", digits.images[left], labels()[left], digits.classes)
    alone = zoo.evaluate(members, measured, ood="photos", subsets=5)
    assert {n: x.value for n, x in alone.ensemble.items()} == pytest.approx(
        {n: x.value for n, x in report.ensemble.items()}, abs=1e-6
    )


def by_others(oracle: Oracle, p: torch.Tensor, q: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Every figure of scaled probabilities p (input, class), q out of distribution, by other packages."""
    sklearn, torchmetrics = oracle("sklearn.metrics"), oracle("torchmetrics.functional.classification")
    tu = oracle("torch_uncertainty.metrics")
    classes = p.shape[-1]
    positive = np.r_[np.zeros(len(p)), np.ones(len(q))]
    scores = -np.r_[p.max(-1).values.numpy(), q.max(-1).values.numpy()]
    found = {
        "nll": sklearn.log_loss(y.numpy(), p.numpy(), labels=list(range(classes))),
        "brier": float(((p.numpy() - np.eye(classes)[y.numpy()]) ** 2).sum(1).mean()),
        "ece": float(torchmetrics.multiclass_calibration_error(p, y, num_classes=classes, n_bins=15, norm="l1")),
        "auroc": sklearn.roc_auc_score(positive, scores),
        "aupr": sklearn.average_precision_score(positive, scores),
    }
    for name, metric in (
        ("adaptive_ece", tu.AdaptiveCalibrationError("multiclass", num_classes=classes, num_bins=15, norm="l1")),
        ("aurc", tu.AURC()),
    ):
        metric.update(p.float(), y)
        found[name] = float(metric.compute())
    fpr = tu.FPR95(pos_label=1)
    fpr.update(torch.from_numpy(scores + 1), torch.from_numpy(positive).long())
    found["fpr95"] = float(fpr.compute())
    classwise = []
    for c in range(classes):
        order = np.argsort(p[:, c].numpy(), kind="stable")
        gaps = [
            abs(float((y.numpy()[part] == c).sum()) - float(p[part, c].sum())) for part in np.array_split(order, 15)
        ]
        classwise.append(sum(gaps) / len(p))
    return {**found, "ace": float(np.mean(classwise))}


def test_figures_after_scaling_are_other_packages(
    report: Report, probs: dict[str, torch.Tensor], parts: tuple[torch.Tensor, torch.Tensor], oracle: Oracle
) -> None:
    assert report.calibrated is not None
    log_means = {name: p.mean(0).log() for name, p in probs.items()}
    left, held = parts
    wanted = by_scipy(log_means["digits"][held].numpy(), labels()[held].numpy())
    assert report.calibrated.temperature.value == pytest.approx(wanted, abs=1e-4)
    p, q = ((log_means[n] / wanted).softmax(-1) for n in ("digits", "photos"))
    found = {n: x.value for n, x in report.calibrated.ensemble.items() if n != "temperature"}
    assert found == pytest.approx(by_others(oracle, p[left], q, labels()[left]), abs=1e-5)
    # Single members, each by its own temperature.
    log_probs = probs["digits"].log()
    own = [by_scipy(x[held].numpy(), labels()[held].numpy()) for x in log_probs]
    assert report.calibrated.member["temperature"].value == pytest.approx(np.mean(own), abs=1e-4)
    losses = [float((x[left] / t).log_softmax(-1)[range(378), labels()[left]].mean()) for x, t in zip(log_probs, own)]  # noqa: B905
    assert report.calibrated.member["nll"].value == pytest.approx(-np.mean(losses), abs=1e-5)
    assert report.calibrated.curve[1]["nll"].value == pytest.approx(-np.mean(losses), abs=1e-5)


def test_scaled_figures_are_in_frame_and_json(report: Report) -> None:
    assert report.calibrated is not None
    facts = json.loads(report.to_json())
    found = facts["temperature"]
    assert found["held_out"] == report.data == f"digits/test {zoo.images.load('digits').fingerprint}"
    assert (found["inputs"], found["share"], found["rule"], found["at_bound"]) == (162, 0.3, "held-out-sha256", False)
    assert found["low"] is found["high"] is None  # too few members
    frame = report.to_frame()
    after = frame[(frame.of == "ensemble, scaled") & (frame.members == COUNT)].set_index("figure")
    assert list(after.index) == list(SCALED_FIGURES)
    for name, x in report.calibrated.ensemble.items():
        assert after.loc[name, "value"] == x.value
    before = frame[(frame.of == "ensemble") & (frame.members == COUNT)].set_index("figure")
    assert before.loc["nll", "value"] == report["nll"].value
    assert "temperature" not in before.index
    plain = zoo.evaluate(zoo.load("convnet-digits", n=2), subsets=2)
    assert plain.calibrated is None
    assert json.loads(plain.to_json())["temperature"] is None


@pytest.mark.slow
def test_an_ensemble_that_is_right_says_that_the_temperature_is_at_its_bound(members: zoo.Collection) -> None:
    everyone = zoo.evaluate(members, subsets=2)
    right = members.ensemble()(members.preprocess(zoo.images.load("digits").images)).softmax(-1).mean(0).argmax(-1)
    at = torch.nonzero(right == labels())[:, 0][:50]
    digits = zoo.images.load("digits")
    easy = ImageData("easy", "test", digits.images[at], labels()[at], digits.classes)
    report = zoo.evaluate(members, temperature=True, held_out=easy, subsets=2)
    assert report.calibrated is not None
    assert report.calibrated.at_bound
    assert report.calibrated.temperature.value == 0.05
    assert (report.inputs, report.calibrated.inputs, report.calibrated.share) == (540, 50, None)
    assert {n: x.value for n, x in report.ensemble.items()} == {n: x.value for n, x in everyone.ensemble.items()}


# ---- stored predictions ----
def half() -> ImageData:
    digits = zoo.images.load("digits", "train")
    return ImageData("half", "test", digits.images[:60], digits.labels[:60], digits.classes)  # type: ignore[index]


def renamed() -> ImageData:
    """The training images under another name."""
    digits = zoo.images.load("digits", "train")
    return ImageData("mine", "test", digits.images, digits.labels, digits.classes)


@pytest.fixture(scope="module")
def folder(members: zoo.Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    for name in ("digits", "photos", "digits/train"):
        predict(members, name, root)
    predict(members, half(), root)
    predict(members, renamed(), root)
    return root


@pytest.fixture(scope="module")
def stored(members: zoo.Collection, folder: Path) -> dict[str, Predictions]:
    names = ("digits-test", "photos-test", "digits-train", "half-test", "mine-test")
    return {name: predictions_of(members, name, source=folder) for name in names}


@pytest.mark.slow
def test_stored_predictions_give_the_same_whatever_the_blocks(
    stored: dict[str, Predictions], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subsets, "BLOCK_BYTES", 7 * 4 * COUNT * 10)
    monkeypatch.setattr(subsets, "MOST_READ_BYTES", 2 * 14 * COUNT * 10)
    found = zoo.evaluate(stored["digits-test"], ood=stored["photos-test"], temperature=True, held_out=0.3, subsets=5)
    assert found.calibrated is not None
    assert report.calibrated is not None
    # Float16 logits up to 32 are off by 1/64 at most.
    assert found.calibrated.temperature.value == pytest.approx(report.calibrated.temperature.value, abs=1e-3)
    smooth = ("nll", "brier", "aurc", "auroc", "aupr")
    for size, figures in report.calibrated.curve.items():
        for name in smooth:
            assert found.calibrated.curve[size][name].value == pytest.approx(figures[name].value, abs=3e-4), name


@pytest.mark.slow
def test_a_part_of_stored_logits_is_those_inputs(
    stored: dict[str, Predictions], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stored["digits-test"].logits()
    at = torch.tensor([0, 3, 4, 100, 101, 300, 539])
    for longest in (1, 50, 1000):
        monkeypatch.setattr(subsets, "MOST_READ_BYTES", longest * COUNT * 10 * 2)
        part = subsets.InputSubset(stored["digits-test"], at)
        assert part.shape == (COUNT, 7, 10)
        for begin in range(7):
            for end in range(begin, 8):
                assert torch.equal(part.block(begin, end, torch.float32), whole[:, at[begin:end]])
        assert torch.equal(part.one(2), whole[2, at])


# ---- what is refused ----
def refusals(members: zoo.Collection, stored: dict[str, Predictions]) -> Iterator[tuple[Callable[[], object], str]]:
    inside = stored["digits-test"]

    def scaled(who: zoo.Collection | Predictions, held: object) -> Callable[[], object]:
        return lambda: zoo.evaluate(who, temperature=True, held_out=held, subsets=2)  # type: ignore[arg-type]

    trained = (
        "images digits/train held out for the temperature: expected images that the members were neither trained on "
        "nor are measured on; found the images that the members were trained on, where their confidence is "
        "too high. Give other images, or a share of the test images such as held_out=0.2, which all figures then leave "
        "out."
    )
    yield scaled(members, "digits/train"), trained
    yield scaled(inside, stored["digits-train"]), trained
    yield scaled(members, renamed()), "images mine/test held out for the temperature: expected"
    mine: dict[str, Any] = {"temperature": True, "held_out": stored["mine-test"], "subsets": 2}
    for data in (None, inside):
        yield lambda data=data: zoo.evaluate(members, data, **mine), "the images that the members were trained on"
        yield (
            lambda data=data: zoo.report_page(members, data, None, **mine),
            "the images that the members were trained on",
        )
    yield (
        lambda: zoo.report_page(members, inside, None, temperature=True, held_out=renamed()),
        "images mine/test held out for the temperature: expected",
    )
    yield (
        lambda: zoo.report_page(members, inside, None, temperature=True, held_out=half()),
        "images for predictions convnet-digits/digits-test: expected stored predictions on them, since no members are "
        "run; found images. Give predictions for all, or images for all.",
    )
    yield (
        scaled(members, "digits"),
        "nor are measured on; found the images that the members are measured on. Give other images",
    )
    yield scaled(inside, inside), "found the images that the members are measured on"
    yield scaled(inside, "digits/train"), "were trained on"
    yield (
        scaled(inside, renamed()),
        "images 'mine' for predictions convnet-digits/digits-test: expected stored predictions",
    )
    yield scaled(inside, stored["half-test"][1:3]), "expected those of the same members"
    yield scaled(members, "photos"), "found no labels"
    yield scaled(inside, stored["photos-test"]), "found no labels"
    for share in (0.0, 1.0, -0.2, 7, float("nan")):
        yield scaled(members, share), f"share of the inputs held out: expected above 0 and below 1; found {share!r}."
    yield scaled(members, 0.0001), "expected one that holds out some of the 540 and leaves some; found 0.0001."
    yield lambda: zoo.evaluate(members, held_out=0.2), "held_out: expected temperature=True with it; found"
    yield (
        lambda: zoo.evaluate(members, temperature=1.5),  # type: ignore[arg-type]
        "temperature: expected True or False: it is fitted; found 1.5.",
    )


def test_bad_held_out_inputs_are_refused(members: zoo.Collection, stored: dict[str, Predictions]) -> None:
    for call, text in refusals(members[:2], {n: x[:2] if n != "half-test" else x for n, x in stored.items()}):
        with pytest.raises(UsageError) as caught:
            call()
        assert text in str(caught.value)


# ---- the command line ----
@pytest.mark.slow
def test_the_command_line_has_scaled_rows(members: zoo.Collection, folder: Path, tmp_path: Path) -> None:
    options = ("evaluate", "convnet-digits", "-n", "4", "--stored", folder, "--temperature", "--within", "brier=20%")
    result = run(*options, "--held-out", "half-test", "--plot", tmp_path / "r.png")
    assert result.exit_code == 0, result.output
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()]
    scaled = ["NLL (nats), scaled", "Brier (0..2), scaled", "ECE (0..1), scaled", "adaptive ECE (0..1), scaled"]
    assert rows[10:14] == scaled
    assert rows.count("temperature (0.05..20)") == 1
    assert len(set(rows[:20])) == 20  # a figure each
    assert "Temperature fitted to 60 inputs of half/test" in result.stdout
    needed = [line for line in rows if line.startswith("members needed for ")]
    assert [line.split(" within ")[0] for line in needed] == [
        "members needed for Brier",
        "members needed for Brier, scaled,",
    ]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    found = values(run(*options, "--held-out", "0.5", "--format", "json"))
    assert (found["inputs"], found["temperature"]["inputs"]) == (270, 270)
    assert [(x["of"], x["figure"]) for x in found["needed"]] == [("ensemble", "brier"), ("ensemble, scaled", "brier")]
    few = ("convnet-digits", "-n", "2", "--temperature", "--held-out")
    page = ("-o", tmp_path / "r.html")
    for words in (
        ("evaluate", *few, "digits/train"),
        ("evaluate", *few, "mine-test", "--stored", folder),
        ("report", *few, "mine-test", "--stored", folder, *page),
    ):
        refused = run(*words)
        assert refused.exit_code == 2
        assert "the members were trained on" in refused.stderr
    assert not (tmp_path / "r.html").exists()


def test_a_tie_of_the_label_and_a_class_stays_a_tie() -> None:
    logits = torch.randn(5, 40, 3, generator=torch.Generator().manual_seed(0))
    logits[..., 1] = logits[..., 0]
    logits[:, 0] = torch.tensor([-300.0, -300.0, 0.0])  # where both underflow the label's is still exact
    side = subsets.DataSetLogits(logits, torch.arange(40) % 2)
    at = torch.arange(5)
    found = side.log_mean_probs(at, logits.softmax(-1).mean(0))
    assert torch.equal(found[1:, 0], found[1:, 1])
    assert found[0, 0].item() == pytest.approx(-300.0, rel=1e-6)


def test_the_range_of_the_figure_is_that_of_the_metric() -> None:
    assert (SCALED_FIGURES[TEMPERATURE].lowest_value, SCALED_FIGURES[TEMPERATURE].highest_value) == (
        scaling.LOWEST_TEMPERATURE,
        scaling.HIGHEST_TEMPERATURE,
    )
