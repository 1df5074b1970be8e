"""Which nets imported members are, and their accuracies, measured as a plain loop does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.interop.ingest import NetSpec, ingest
from checkpoints_zoo.networks.modules import build_architecture
from tests.support.originals import imported, rows_of
from tests.support.scenarios import hash_of


def save_convnets(folder: Path, members: int, wrapper: str = "") -> list[dict[str, torch.Tensor]]:
    folder.mkdir()
    made = [dict(m.state_dict()) for m in zoo.load("convnet-digits", n=members)]
    for i, state in enumerate(made):
        save_file({wrapper + n: t.clone() for n, t in state.items()}, folder / f"seed-{i}.safetensors")
    return made


def figures(state: dict[str, torch.Tensor]) -> tuple[float, float, float, float]:
    """Accuracy, NLL, Brier and ECE of a convnet on the digits' test set, by a plain loop."""
    module = build_architecture("convnet")
    module.load_state_dict(state)
    data = images.load("digits")
    preprocess = zoo.load("convnet-digits", n=1).preprocess
    logits = torch.cat([module(preprocess(some)) for some in data.images.split(7)]).detach().double()
    probs, labels = logits.softmax(-1), data.labels
    assert labels is not None
    confidence, guess = probs.max(-1)
    right = (guess == labels).double()
    ece = 0.0
    for bin in range(15):
        inside = (confidence > bin / 15) & (confidence <= (bin + 1) / 15)
        if inside.any():
            gap = (right[inside].mean() - confidence[inside].mean()).abs()
            ece += float(gap * inside.double().mean())
    brier = (probs - F.one_hot(labels, 10)).square().sum(-1).mean()
    return float(right.mean()), float(F.cross_entropy(logits, labels)), float(brier), ece


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_measured_as_a_plain_loop_does(copied: bool, tmp_path: Path) -> None:
    made, folder = save_convnets(tmp_path / "in", 3, "module._orig_mod."), tmp_path / "in"
    out = tmp_path / "out" if copied else folder
    convnet = {"net": NetSpec("convnet"), "like": "convnet-digits", "evaluate": "digits"}
    done = imported([folder], "mine", reshard=out if copied else None, **convnet)
    assert (done.ok, done.hashed, done.measured) == (3, 3, 3)
    for row, state in zip(rows_of(out, "mine"), made, strict=True):
        assert row["eval_data"] == "digits/test"
        assert row["sha256"] == hash_of(state)
        found = [row[f"test_{figure}"] for figure in ("accuracy", "nll", "brier", "ece")]
        assert found == pytest.approx(figures(state), abs=1e-6)
    assert zoo.verify(zoo.load("mine", source=out)) == []


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    made = save_convnets(folder, 3)
    save_file({n: torch.full_like(t, 1e38) for n, t in made[1].items()}, folder / "seed-1.safetensors")
    done = imported([folder], "mine", net=NetSpec("convnet"), like="convnet-digits", evaluate="digits")
    assert (done.ok, done.failed, done.hashed, done.measured) == (2, 1, 3, 2)
    reason = rows_of(folder, "mine")[1]["reason"]
    assert reason.startswith("logits of members 1: expected finite numbers; found infinite ones or NaN.")


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save_convnets(folder, 2)
    with pytest.raises(LayoutError, match=r"Give --architecture NAME for a net of the package, or --architecture-name"):
        ingest([folder], "mine")
    convnet = NetSpec("convnet")
    with pytest.raises(
        UsageError, match=r"expected classes that the members .*Give like= or classes= \(on .* --classes-from digits if"
    ):
        ingest([folder], "mine", net=convnet, evaluate="digits")
    with pytest.raises(
        UsageError, match=r"mine: expected preprocessing .*Give like= or preprocessing= \(.* --like NAME or --f"
    ):
        ingest([folder], "mine", net=convnet, user_facts={"classes": list("0123456789")}, evaluate="digits")
    with pytest.raises(UsageError, match=r"images 'digits' for mine: expected labels of the classes a, .*; found '0'"):
        ingest([folder], "mine", net=convnet, like="convnet-digits", user_facts={"classes": list("abcdefghij")},
               evaluate="digits")  # fmt: skip
    with pytest.raises(UsageError, match=r"classes of mine: expected 10, as many as the members' logits; found 3"):
        ingest([folder], "mine", net=NetSpec("convnet", {"classes": 10}), user_facts={"classes": list("012")})
    with pytest.raises(UsageError, match="name 'convnet' of a net of your own: expected a name that no architecture"):
        ingest([folder], "mine", net=NetSpec(custom_name="convnet"))
    with pytest.raises(UsageError, match="accuracies of mine: expected a net of the package"):
        ingest([folder], "mine", net=NetSpec(custom_name="my net"), like="convnet-digits", evaluate="digits")
    assert not (folder / "manifests").exists()
    own = {"net": NetSpec(custom_name="my net"), "like": "convnet-digits", "evaluate": "digits"}
    done = imported([folder], "mine", build=lambda: build_architecture("convnet"), **own)
    assert done.measured == 2


def test_a_net_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save_convnets(folder, 3, "inner.")
    other = {"inner.conv1.weight": torch.zeros(3)}
    save_file(other, folder / "seed-1.safetensors")
    imported([folder], "mine", net=NetSpec(custom_name="my net", prefix="inner."))
    rows = rows_of(folder, "mine")
    assert [row["status"] for row in rows] == ["ok", "excluded", "ok"]
    assert rows[1]["reason"].startswith("names of tensors: expected 8 exactly; found missing conv1.bias")
    found = zoo.load("mine", source=folder, architecture=lambda: build_architecture("convnet"))
    assert torch.equal(found.ensemble()(torch.zeros(1, 1, 8, 8))[1],
                       zoo.load("convnet-digits", members="2")[0].model()(torch.zeros(1, 1, 8, 8)))  # fmt: skip


def test_figures_and_hashes_are_taken_along(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    save_convnets(folder, 2)
    net = NetSpec("convnet")
    imported([folder], "mine", net=net, like="convnet-digits", evaluate="digits", user_facts={"title": "Mine"})
    before = rows_of(folder, "mine")
    values = json.loads((folder / "manifests" / "mine.json").read_text())
    (folder / "manifests" / "mine.json").write_text(json.dumps(values | {"citation": "by hand"}))
    imported([folder], "mine", net=net, reshard=out)
    assert [row["test_nll"] for row in rows_of(out, "mine")] == [row["test_nll"] for row in before]
    description = zoo.load("mine", source=out).description
    assert (description.title, description.citation, description.dataset) == ("Mine", "by hand", "digits")
    raw = (folder / "seed-1.safetensors").read_bytes()
    (folder / "seed-1.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(DamagedError, match=r"member 1 in file .*seed-1\.safetensors: expected sha256 .*, as in its"):
        ingest([folder], "mine", net=net, reshard=tmp_path / "again")
    with pytest.raises(UsageError, match=r"collection mine in folder .*out: expected none, or one that an import of"):
        ingest([folder], "mine", net=net, reshard=out)
