"""A posterior mean from a file of probabilities: what is read, refused and measured, and what is not defined."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import FormatError, SourceNotFound, UsageError
from tests.support.commands import run
from tests.support.web_host import WebHost

DIGITS = zoo.images.of("digits")
MEMBERS = zoo.load("convnet-digits", n=4)


@pytest.fixture(scope="module")
def probabilities() -> np.ndarray[Any, Any]:
    logits = zoo.load("convnet-digits", n=4).ensemble()(MEMBERS.preprocess(DIGITS.images)).double()
    return logits.softmax(-1).mean(0).detach().numpy()


def written(path: Path, values: np.ndarray[Any, Any], delimiter: str = "") -> Path:
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        np.savetxt(path, values, delimiter=delimiter or " ")
    return path


@pytest.mark.parametrize(("name", "delimiter"), [("p.npy", ""), ("p.csv", ","), ("p.csv", " "), ("p.txt", "\t")])
def test_files_of_every_kind(tmp_path: Path, probabilities: np.ndarray[Any, Any], name: str, delimiter: str) -> None:
    mean = zoo.predictions_from_probabilities(written(tmp_path / name, probabilities, delimiter), data="digits")
    np.testing.assert_allclose(mean.probabilities.numpy(), probabilities, rtol=1e-12)
    assert (len(mean), mean.shape, mean.classes) == (1, (1, 540, 10), DIGITS.classes)
    assert repr(mean) == "PosteriorMean('p', 540 inputs × 10 classes, on digits)"
    assert mean.citation.startswith(f"{name}, sha256 ")


def test_figures_are_direct_sums(tmp_path: Path, probabilities: np.ndarray[Any, Any]) -> None:
    rng = np.random.default_rng(0)
    others = rng.dirichlet(np.ones(10) / 5, 540)
    others[0] = np.eye(10)[3]  # with zeros
    with pytest.warns(UserWarning, match="the accuracy on digits/test is .*, about chance. Are the rows in the order"):
        second = zoo.predictions_from_probabilities(written(tmp_path / "two.npy", others), data="digits")
    first = zoo.predictions_from_probabilities(written(tmp_path / "one.npy", probabilities), data="digits")
    found = zoo.compare_predictives(first, second)
    agreement = sum(int(p.argmax() == q.argmax()) for p, q in zip(probabilities, others, strict=True)) / 540
    variation = math.fsum(abs(a - b) for p, q in zip(probabilities, others, strict=True)
                          for a, b in zip(p, q, strict=True)) / 540 / 2  # fmt: skip
    assert found["agreement"].value == pytest.approx(agreement, abs=1e-12)
    assert found["total_variation"].value == pytest.approx(variation, abs=1e-12)
    assert found["agreement"].low is None  # Two means have no members to resample.


def test_it_is_compared_with_members(tmp_path: Path, probabilities: np.ndarray[Any, Any]) -> None:
    mean = zoo.predictions_from_probabilities(written(tmp_path / "p.npy", probabilities), data="digits")
    found = zoo.compare_predictives(MEMBERS, mean, "digits")
    assert found["agreement"].value == 1
    assert found["total_variation"].value < 1e-6
    others = zoo.compare_predictives(zoo.load("convnet-digits")[8:24], mean, "digits")
    x = others["total_variation"]
    assert x.low is not None
    assert x.high is not None
    assert 0 < x.low < x.value < x.high < 0.1
    result = run("compare-predictives", "convnet-digits", "--members", "8-23", "--probabilities", tmp_path / "p.npy")
    assert result.exit_code == 0, result.output
    assert "the mean probabilities of 16 members against the mean in" in result.stdout
    result = run("compare-predictives", "convnet-digits", "resnet8-digits", "--probabilities", tmp_path / "p.npy")
    assert (result.exit_code, "--probabilities stands in place of OTHER" in result.stderr) == (2, True)
    with pytest.raises(UsageError, match=r"predictions p/digits-test: expected 500 inputs, .*found 540 inputs"):
        zoo.compare_predictives(MEMBERS, mean, dataclasses.replace(DIGITS, images=DIGITS.images[:500], labels=None))


@pytest.mark.slow
def test_diversity_is_not_defined(tmp_path: Path, probabilities: np.ndarray[Any, Any]) -> None:
    mean = zoo.predictions_from_probabilities(written(tmp_path / "p.npy", probabilities), data="digits")
    report, wanted = zoo.evaluate(mean), zoo.evaluate(MEMBERS, "digits")
    for figure in ("accuracy", "nll", "brier", "ece", "ace", "aurc"):
        assert report[figure].value == pytest.approx(wanted[figure].value, abs=1e-6)
    for figure in ("mi_id", "disagreement"):
        with pytest.raises(UsageError, match=f"figure '{figure}': expected a figure that is defined without members"):
            report[figure]
    text = "A posterior mean has no members: no intervals, and mutual information, ID; disagreement; mutual information"
    assert report.remarks[0].startswith(text)
    assert "not defined" in report.to_text()
    assert not {"mi_id", "disagreement"} & set(report.to_frame()["figure"])
    assert report.collection == "p"
    report.plot(tmp_path / "p.png")
    with pytest.raises(UsageError, match=r"2 members|two"):
        zoo.pairwise(mean)
    with pytest.raises(UsageError, match=r"members of a report page: .*found a posterior mean"):
        zoo.report_page(mean)
    with pytest.raises(UsageError, match=r"found PosteriorMean. `zoo.compare_predictives` compares"):
        zoo.compare(MEMBERS, (), reference=mean)


ROW = [0.1] * 10


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        (np.full((540, 11), 1 / 11), UsageError, "expected 540 rows, .* and 10 columns, one for each class; found"
         " 540 × 11. If the first column numbers the rows, leave it out."),
        (np.full((500, 10), 0.1), UsageError, "found 500 × 10. Give the images of the rows as `data`, in their order;"
         " digits/test has 540"),
        (np.full((2, 540, 10), 0.1), UsageError, "found 2 × 540 × 10. Average over the members first"),
        (np.array([ROW] * 539 + [[0.2] * 10]), FormatError, r"expected rows that sum to 1 .*; found 2 in row 540\. Give"
         " all classes"),
        (np.array([ROW] * 5 + [[math.nan] * 10] * 535), FormatError, "expected finite probabilities; found nan in row"
         " 6, column 1, and 5,349 more"),
        (np.log(np.full((540, 10), 0.1)), FormatError, "found -2.30259 in row 1, column 1. If these are logits"),
        (np.full((540, 10), "a"), FormatError, "expected numbers; found an array of"),
        (np.full((540, 10), None, object), FormatError, "Object arrays cannot be loaded"),
        (np.array(0.5), UsageError, "found one number"),
    ],
)  # fmt: skip
def test_other_values_are_refused(
    tmp_path: Path, values: np.ndarray[Any, Any], kind: type[Exception], text: str
) -> None:
    np.save(tmp_path / "p.npy", values, allow_pickle=True)
    with pytest.raises(kind, match=text) as error:
        zoo.predictions_from_probabilities(tmp_path / "p.npy", data="digits")
    assert str(error.value).startswith(f"probabilities {tmp_path / 'p.npy'}: expected ")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a,b,c\n1,2,3\n", "could not convert string 'a'.*Leave out headers"),
        (b"0.1,0.9\n0.1\n", "number of columns changed"),
        (b"\x93NUMPY\x01\x00", "expected numbers"),
        (b"\xff\xfe", "expected numbers"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=text):
        zoo.predictions_from_probabilities(path, data="digits")


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"expected a file of probabilities, .npy or .csv; found no such file"):
        zoo.predictions_from_probabilities(tmp_path / "none.csv", data="digits")
    with pytest.raises(UsageError, match="expected classes in the order of the columns; found none"):
        zoo.predictions_from_probabilities(written(tmp_path / "p.npy", np.full((5, 10), 0.1)),
                                           data=zoo.images.of(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)))  # fmt: skip


def test_a_file_on_the_web(web: WebHost, tmp_path: Path, probabilities: np.ndarray[Any, Any]) -> None:
    web.files["/probs.csv"] = written(tmp_path / "p.csv", probabilities).read_bytes()
    mean = zoo.predictions_from_probabilities(f"{web.url}/probs.csv", data="digits")
    np.testing.assert_allclose(mean.probabilities.numpy(), probabilities, rtol=1e-12)
    with pytest.raises(SourceNotFound, match=r"probabilities http.*none.csv: expected a file on .*found 404"):
        zoo.predictions_from_probabilities(f"{web.url}/none.csv", data="digits")
