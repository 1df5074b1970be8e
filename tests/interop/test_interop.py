"""The room of neighbours where none of them is needed: batches of images, folders of checkpoints, what is missing."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import StorageError, UsageError
from checkpoints_zoo.interop.optional_packages import import_optional
from tests.support import scenarios
from tests.support.commands import run

write = zoo.interop.lightning.write_checkpoints


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("resnet8-digits", n=3)


NEIGHBOURS = {"laplace", "lightning", "lightning_uq_box", "posteriors", "tensordict", "torch_uncertainty"}


def test_no_neighbour_is_imported_but_by_a_call() -> None:
    files = list(Path(zoo.interop.__file__).parent.glob("*.py"))
    assert len(files) > len(NEIGHBOURS)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & NEIGHBOURS, file.name


def test_names_are_resolved_on_first_use() -> None:
    assert all(getattr(zoo.interop, name) is not None for name in zoo.interop.__all__)
    assert {"laplace", "loader"} <= set(dir(zoo.interop))
    with pytest.raises(AttributeError, match=r"module 'checkpoints_zoo\.interop' has no attribute 'nothing'"):
        zoo.interop.nothing  # noqa: B018


CALLS: dict[str, tuple[str, Callable[[zoo.Collection], Any], str]] = {
    "torch_uncertainty": (
        "torch_uncertainty.routines",
        lambda members: zoo.interop.torch_uncertainty.routine(members),
        'torch-uncertainty>=0.7,<1" "lightning>=2.4,<2.7',
    ),
    "lightning_uq_box": (
        "lightning_uq_box.uq_methods",
        lambda members: zoo.interop.lightning_uq_box._resident_class.__wrapped__(),
        "lightning-uq-box>=0.2,<1",
    ),
    "tensordict": ("tensordict", lambda members: zoo.interop.posteriors.stacked(members), "posteriors>=0.1,<0.2"),
}


@pytest.mark.parametrize("package", CALLS)
def test_a_missing_neighbour_is_named(package: str, members: zoo.Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call, requirement = CALLS[package]
    for name in {package, module}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as refused:
        call(members)
    wanted = requirement.replace('" "', " and ")
    assert str(refused.value).startswith(f"module {module}: expected {wanted} to be installed; found no module ")
    assert str(refused.value).endswith(f'. Run: pip install "{requirement}".')


def test_a_neighbour_that_lacks_a_package_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UsageError, match="expected halfway>=1 to be installed; found no module named 'not_there_at_all'"
    ):
        import_optional("halfway", "halfway>=1")


def test_batches_are_the_members_inputs(members: zoo.Collection) -> None:
    images = zoo.images.load("digits")
    batches = list(zoo.interop.loader(members, "digits", batch=100))
    assert [len(x) for x, _ in batches] == [100] * 5 + [40]
    assert torch.equal(torch.cat([x for x, _ in batches]), members.preprocess(images.images))
    assert images.labels is not None
    assert torch.equal(torch.cat([y for _, y in batches]), images.labels)
    photos = list(zoo.interop.loader(members, "photos", ood=True))
    assert sum(len(x) for x, _ in photos) == 2000
    assert all((y == -1).all() for _, y in photos)
    named = list(zoo.interop.lightning_uq_box.loader(members, images, batch=100))
    assert all(
        torch.equal(b["input"], x) and torch.equal(b["target"], y) for b, (x, y) in zip(named, batches, strict=True)
    )
    with pytest.raises(UsageError, match=r"images 'photos' for resnet8-digits: expected labels of the classes"):
        zoo.interop.loader(members, "photos")


def test_batches_of_all_kinds_of_images(members: zoo.Collection, tmp_path: Path) -> None:
    """The classes in another order, inputs that are preprocessed already, a folder, a Dataset of Pillow's images."""
    digits = zoo.images.load("digits")
    assert digits.labels is not None
    wanted, right = members.preprocess(digits.images[:50]), digits.labels[:50]
    moved = zoo.images.of((digits.images[:50], 9 - right), classes=tuple("9876543210"))
    pictures = [(Image.fromarray(x[0].numpy()), str(int(y))) for x, y in zip(digits.images[:50], right, strict=True)]
    prepared = zoo.images.prepared((wanted, right), classes=digits.classes)
    for kind in (moved, prepared, pictures):
        batches = list(zoo.interop.loader(members, kind, batch=20))
        assert torch.equal(torch.cat([x for x, _ in batches]), wanted)
        assert torch.equal(torch.cat([y for _, y in batches]), right)
    ranked = sorted(range(50), key=lambda at: (int(right[at]), at))
    for at in ranked:
        folder = tmp_path / "test" / str(int(right[at]))
        folder.mkdir(parents=True, exist_ok=True)
        pictures[at][0].save(folder / f"{at:02}.png")
    [batch] = zoo.interop.lightning_uq_box.loader(members, tmp_path, "test")
    assert torch.equal(batch["input"], wanted[ranked])
    assert torch.equal(batch["target"], right[ranked])
    with pytest.raises(UsageError, match=r"expected shape \(input, 1, 8, 8\), axes .*; found shape \(input, 1, 9, 9\)"):
        zoo.interop.loader(members, zoo.images.of("digits", size=(9, 9)))


def test_what_is_no_members(members: zoo.Collection, tmp_path: Path) -> None:
    interop: Any = zoo.interop
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: interop.loader(members[0], "digits"), "members: expected a Collection; found Member. One member is"),
        (lambda: interop.lightning.write_checkpoints(members[0], tmp_path), r"Collection; found Member\. .*\[3:4\]\."),
        (lambda: interop.laplace.folded(members), "member to be folded: expected a member, .*; found Collection"),
        (lambda: interop.posteriors.forward(members[0]), "members: expected a Collection, or an Ensemble: .* Member"),
        (lambda: interop.torch_uncertainty.loader(members), "predictions: expected stored Predictions; found Coll"),
    ]
    for use, text in refused:
        with pytest.raises(UsageError, match=text):
            use()
    assert not list(tmp_path.iterdir())


def test_members_in_torch_uncertaintys_order(members: zoo.Collection) -> None:
    inputs = members.preprocess(zoo.images.load("digits").images[:7])
    wanted = torch.cat([m.model()(inputs) for m in members])
    for given in (members, members.ensemble(chunk=2), members.ensemble(execution="module")):
        model = zoo.interop.torch_uncertainty.ensemble(given)
        assert model.num_estimators == 3
        assert (model(inputs) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    with pytest.raises(UsageError, match=r"ensemble\.train\(\)"):
        model.train()
    modules = zoo.interop.torch_uncertainty.core_models(members)
    assert torch.equal(torch.cat([m(inputs) for m in modules]), wanted)
    with pytest.raises(UsageError, match=r"members: expected a Collection, or an Ensemble.*; found list"):
        zoo.interop.torch_uncertainty.ensemble([members[0]])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"members: expected a Collection or Predictions; found Ensemble"):
        zoo.interop.torch_uncertainty.routine(members.ensemble())  # type: ignore[arg-type]


def test_stored_predictions_as_batches(members: zoo.Collection, tmp_path: Path) -> None:
    predictions = members.predict("digits", tmp_path)
    model = zoo.interop.torch_uncertainty.ensemble(predictions)
    at = 0
    for logits, labels in zoo.interop.torch_uncertainty.loader(predictions, batch=200):
        block = predictions.block(at, at + len(logits))
        assert torch.equal(model(logits), block.flatten(0, 1))
        assert predictions.labels is not None
        assert torch.equal(labels, predictions.labels[at : at + len(logits)])
        at += len(logits)
    assert at == 540
    unlabelled = members.predict("photos", tmp_path)
    assert all((labels == -1).all() for _, labels in zoo.interop.torch_uncertainty.loader(unlabelled))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_folder_of_checkpoints(
    members: zoo.Collection, tmp_path: Path, prefix: str, dtype: torch.dtype | None
) -> None:
    folder = tmp_path / "not" / "there"
    paths = write(members, folder, prefix=prefix, dtype=dtype)
    assert [p.name for p in paths] == names(folder) == ["000000.ckpt", "000001.ckpt", "000002.ckpt"]
    for member, path in zip(members, paths, strict=True):
        found, wanted = read(path), member.state_dict(dtype=dtype)
        assert found["checkpoints_zoo"] == {
            "collection": "resnet8-digits", "member": member.id, "epoch": member.epoch, "citation": member.citation,
        }  # fmt: skip
        assert list(found["state_dict"]) == [prefix + n for n in wanted]
        for name, tensor in wanted.items():
            assert found["state_dict"][prefix + name].dtype == tensor.dtype
            assert torch.equal(found["state_dict"][prefix + name], tensor)
        if prefix:
            continue
        module = zoo.load("resnet8-digits")[9].model()
        module.load_state_dict(found["state_dict"])
        inputs = members.preprocess(zoo.images.load("digits").images[:10])
        assert torch.equal(module(inputs), member.model()(inputs))


def test_what_is_there_stays(members: zoo.Collection, tmp_path: Path) -> None:
    write(members[:2], tmp_path)
    before = scenarios.digest_of(tmp_path)
    write(members, tmp_path)
    after = scenarios.digest_of(tmp_path)
    assert len(after) == 3
    assert {n: after[n] for n in before} == before
    again = tmp_path / "again"
    write(members, again)
    assert [d for d, _ in scenarios.digest_of(again).values()] == [d for n, (d, _) in after.items()]  # same bytes


def spoil(path: Path, change: str) -> None:
    if change == "garbage":
        path.write_bytes(b"not a checkpoint")
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "a tensor":
        torch.save(torch.zeros(3), path)
    elif change == "a value":
        found = read(path)
        found["state_dict"]["model.fc.bias"][0] += 1
        torch.save(found, path)
    elif change == "a name":
        found = read(path)
        found["state_dict"]["model.more"] = torch.zeros(1)
        torch.save(found, path)
    elif change == "code":
        torch.save({"state_dict": zoo.load("convnet-digits")[0].model()}, path)


@pytest.mark.parametrize("change", ["garbage", "empty", "cut", "a tensor", "a value", "a name", "code", "prefix"])
def test_other_contents_are_refused(members: zoo.Collection, tmp_path: Path, change: str) -> None:
    write(members[1:2], tmp_path)
    spoil(tmp_path / "000001.ckpt", change)
    before = scenarios.digest_of(tmp_path)
    with pytest.raises(UsageError) as refused:
        write(members, tmp_path, prefix="" if change == "prefix" else "model.")
    assert str(refused.value) == (
        f"file {tmp_path}/000001.ckpt: expected no file, or member 1 of resnet8-digits with these options; found other "
        "content. Give another folder, or remove the file."
    )
    assert scenarios.digest_of(tmp_path) == before  # nothing else was written


def test_names_of_a_net_that_upstream_lacks(members: zoo.Collection, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        write(members, tmp_path / "out", upstream=True)
    assert str(refused.value) == (
        "torch-uncertainty's names for resnet8-digits: expected members of resnet18 or resnet20-frn-silu; "
        "found resnet8."
    )
    assert not (tmp_path / "out").exists()


def test_snapshots_have_names_of_their_own(tmp_path: Path) -> None:
    scenarios.build(tmp_path / "source", members=(4, 2), snapshots=(10,))
    members = zoo.load("tiny", source=tmp_path / "source", snapshots=True)
    paths = write(members, tmp_path / "out")
    assert sorted(p.name for p in paths) == ["000002.ckpt", "000002@10.ckpt", "000004.ckpt", "000004@10.ckpt"]
    for member, path in zip(members, paths, strict=True):
        assert read(path)["epoch"] == member.epoch
        assert torch.equal(read(path)["state_dict"]["model.fc2.bias"], member.state_dict()["fc2.bias"])


def test_a_view_is_written_as_it_is_read(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=2).canonicalize(scale="unit-norm")
    state = read(write(members, tmp_path)[1])["state_dict"]
    wanted = members[1].state_dict()
    assert torch.equal(state["model.conv1.weight"], wanted["conv1.weight"])
    assert not torch.equal(state["model.conv1.weight"], zoo.load("convnet-digits", n=2)[1].state_dict()["conv1.weight"])


def test_an_interrupted_write_leaves_whole_files(
    members: zoo.Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, true = [], os.fsync

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        true(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write(members, tmp_path)
    assert names(tmp_path) == ["000000.ckpt"]
    monkeypatch.undo()
    assert len(write(members, tmp_path)) == 3
    assert len(names(tmp_path)) == 3


def test_our_own_reader_reads_the_folder(members: zoo.Collection, tmp_path: Path) -> None:
    """Written for lightning and imported again, members have the hashes that they had."""
    write(members, tmp_path / "checkpoints")
    again = tmp_path / "again"
    options = ("--collection", "again", "--architecture", "resnet8", "--like", "resnet8-digits", "--hash")
    done = run("import", str(tmp_path / "checkpoints"), *options, "--reshard", str(again))
    assert done.exit_code == 0, done.output
    found = zoo.load("again", source=again)
    assert found.rows.column("sha256").to_pylist() == members.rows.column("sha256").to_pylist()
