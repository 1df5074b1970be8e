"""Strings and tensors that nobody expects are answered by errors of the package."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation import metrics
from tests.support.scenarios import SCHEMA, build


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
