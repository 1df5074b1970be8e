"""What was unclear: texts that name the thing, and arguments that mean what they say."""

from __future__ import annotations

import io
import shutil
import tarfile
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import FormatError, SelectionError, UsageError, ZooError
from checkpoints_zoo.publishing import auditing
from checkpoints_zoo.sources import hub as hub_room
from tests.fuzz import ARCHIVE, make_archive
from tests.hub import Hub
from tests.support.commands import run, values
from tests.support.conditions import rows_where
from tests.support.remote import ADDRESS, published
from tests.support.scenarios import build


def test_members_are_aligned_to_the_first_selected_one() -> None:
    """Issue 16, item 6: a selection without member 0."""
    members = zoo.load("convnet-digits", members="5,7,9")
    aligned, by_id = members.align(), members.align(to=5)
    assert str(aligned) == str(by_id)
    for name, tensor in aligned.stack().items():
        assert torch.equal(tensor, by_id.stack()[name])
        assert torch.equal(tensor[0], members.stack()[name][0])
    summary = zoo.alignment(members)
    assert (summary.to, int(summary.total[0])) == ("member 5", 0)


@pytest.mark.parametrize("shape", [(5, 32, 32, 3), (5, 28, 28, 1), (32, 32, 3), (5, 32, 32, 4)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch", "prepared"])
def test_channels_at_the_other_end_are_refused(shape: tuple[int, ...], last: bool, kind: str) -> None:
    """Case 36: an image of 32 channels, 32 high and 3 wide, is none."""
    array: Any = np.zeros(shape, np.uint8)
    if last:
        array = np.moveaxis(array, -1, -3)
    if kind != "numpy":
        array = torch.from_numpy(np.ascontiguousarray(array))
    read = zoo.images.prepared if kind == "prepared" else zoo.images.of
    given = array.float() if kind == "prepared" else array
    with pytest.raises(UsageError) as error:
        read(given, channels_last=last)
    assert str(error.value).endswith(" Leave channels_last out." if last else " Give `channels_last=True`.")
    assert ": expected axes (input, " in str(error.value)
    images = read(given, channels_last=not last).images
    assert images.shape[1] == shape[-1]


def test_a_name_is_suggested_only_if_it_is_similar() -> None:
    """Case 36: "nothere" is not like "mnist"."""
    with pytest.raises(UsageError) as error:
        zoo.images.of("nothere")
    assert str(error.value).endswith("found 'nothere'. Give another name, or a path that exists or contains a slash.")
    with pytest.raises(UsageError, match=r"Did you mean 'cifar100'\? Give a path that exists or contains a slash\."):
        zoo.images.of("cifar-100")
    with pytest.raises(UsageError, match=r"Did you mean 'cifar100'\?$"):
        zoo.images.load("cifar-100")


@pytest.mark.parametrize("labelled", [True, False])
def test_the_test_set_is_not_out_of_distribution(labelled: bool) -> None:
    """Case 36: its AUROC is 0.5."""
    members, digits = zoo.load("convnet-digits", n=2), zoo.images.load("digits")
    ood = digits if labelled else zoo.images.of(digits.images, name="others")
    with pytest.raises(UsageError) as error:
        zoo.evaluate(members, "digits", ood=ood)
    assert str(error.value) == (
        "images out of distribution: expected others than digits/test; found the same images."
        " Give images of another data set as `ood`."
    )


CALLS: dict[str, Callable[[Any], Any]] = {
    "verify": zoo.verify,
    "corollary": zoo.corollary,
    "compact": zoo.compact,
    "compact against": lambda x: zoo.compact(x, against=x),
    "minimal_mass": zoo.minimal_mass,
    "alignment": zoo.alignment,
    "mmd": zoo.mmd,
    "ns": zoo.ns,
    "evaluate": zoo.evaluate,
    "pairwise": zoo.pairwise,
    "barrier": zoo.barrier,
    "report_page": zoo.report_page,
    "compare_predictives": lambda x: zoo.compare_predictives(x, x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", ["convnet-digits", None, 3])
def test_a_name_where_members_are_needed(name: str, value: object) -> None:
    """Case 25: an AttributeError of some function inside."""
    with pytest.raises(UsageError, match=rf"; found {type(value).__name__}\."):
        CALLS[name](value)


@pytest.mark.slow
def test_seeds_of_numpy_and_torch() -> None:
    """Case 25: a whole number is one whatever its type."""
    members = zoo.load("convnet-digits", members="0-3")
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda s: zoo.mmd(members, permutations=9, seed=s).p_value,
        lambda s: zoo.corollary(members, simulations=50, seed=s).p,
        lambda s: zoo.evaluate(members, "digits", seed=s, subsets=2).to_json(),
        lambda s: zoo.pairwise(members, "digits", seed=s).to_json(),
        lambda s: zoo.compare_predictives(members[:2], members[2:], "digits", seed=s, subsets=2).to_json(),
        lambda s: zoo.compact(members, splits=2, samples=2, seed=s).to_json(),
    )
    for call in calls:
        wanted = call(3)
        assert all(call(seed) == wanted for seed in (np.int64(3), torch.tensor(3), np.uint8(3)))


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, 2**64, np.float32(1)], ids=repr)
def test_seeds_that_are_none(seed: Any) -> None:
    """Case 25."""
    members = zoo.load("convnet-digits", members="0-3")
    for call in (zoo.mmd, zoo.corollary, zoo.evaluate, zoo.pairwise, zoo.compact):
        with pytest.raises(UsageError, match="seed: expected a whole number of at most 64 bits; found "):
            call(members, seed=seed)  # type: ignore[operator]


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def _import_error(content: object, folder: Path, **options: Any) -> str:
    """Save one file with torch.save and import it; return the text of the error."""
    (folder / "in").mkdir()
    torch.save(content, folder / "in" / "0.pt", **options.pop("saved", {}))
    with pytest.raises(ZooError) as error:
        zoo.from_checkpoints(folder / "in", _net, out=folder / "out", name="mine", **options)
    return str(error.value)


def test_an_entry_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    """Case 25: five tensors were listed, and not the one entry that made the file no state dict."""
    text = _import_error({**{f"w{i}": torch.zeros(1) for i in range(7)}, "epoch": 3}, tmp_path)
    assert "found 'epoch': int, 'w0': Tensor, 'w1': Tensor, 'w2': Tensor, 'w3': Tensor and 3 more" in text


@pytest.mark.parametrize("protocol", [4, 5])
def test_protocols_of_pickle_that_torch_does_not_read(tmp_path: Path, protocol: int) -> None:
    """Case 25: "Unsupported operand 149"."""
    text = _import_error(_net().state_dict(), tmp_path, saved={"pickle_protocol": protocol})
    assert "expected a pickle of protocol 2, " in text
    assert f"; found protocol {protocol}, of torch.save(…, pickle_protocol={protocol})." in text
    assert text.endswith("If you made it yourself, save it again without pickle_protocol.")


def test_two_forms_of_unicode_are_told_apart(tmp_path: Path) -> None:
    """Case 25: "expected 'café'; found 'café'"."""
    one, other = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    text = _import_error({other: _net().state_dict(), "x": _net().state_dict()}, tmp_path, key=one)
    assert text.endswith(r" They look the same and are not: 'cafe\u0301' and 'caf\xe9', two forms of Unicode.")
    assert "Unicode" not in str(UsageError("café", expected="café", found="résumé"))


def test_a_manifest_that_pandas_wrote_comes_with_advice(tmp_path: Path) -> None:
    """Case 25: the advice works."""
    shutil.copytree(Path(zoo.__file__).parent / "embedded", tmp_path / "source")
    path, original = tmp_path / "source" / "manifests" / "convnet-digits.parquet", tmp_path / "original.parquet"
    shutil.copy(path, original)
    pd.read_parquet(path).query("test_accuracy > 0.98").to_parquet(path)
    with pytest.raises(FormatError, match=r"A program that rewrites the table, such as pandas, drops it: .* pyarrow"):
        zoo.load("convnet-digits", source=tmp_path / "source")
    table = pq.read_table(path)
    table = table.replace_schema_metadata(pq.read_schema(original).metadata)
    pq.write_table(table, path)
    members = zoo.load("convnet-digits", source=tmp_path / "source")
    assert members.ids == zoo.load("convnet-digits", where="test_accuracy > 0.98").ids


def test_a_branch_with_a_slash_comes_with_advice() -> None:
    """Case 25: the client's address takes it percent-encoded."""
    with pytest.raises(ZooError, match=r"If feature/x is a branch, write its slashes as %2F\.$"):
        zoo.load("convnet-digits", source="hf://datasets/a/b@feature/x")


def test_division_in_a_condition() -> None:
    """Case 25: by zero is null; of whole numbers is no whole number."""
    assert zoo.load("convnet-digits", where="member / 2 = 1.5").ids == [3]
    with pytest.raises(SelectionError, match=r"found none of 64\. a division by zero is null\.$"):
        zoo.load("convnet-digits", where="1 / (member - member) > 0 OR (member - member) / 0 > 0")


@pytest.mark.parametrize("name", ["HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"])
def test_settings_that_come_too_late(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Case 26: the client reads its settings when it is imported; a warning says so, once."""
    published(hub)
    late = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    monkeypatch.setattr(hub_room, "_reported_settings", set())
    monkeypatch.setenv(name, late.get(name, str(tmp_path / "other")))
    with pytest.warns(UserWarning, match=f"^{name}.* was set after huggingface_hub was imported, so it has no effect"):
        zoo.load("tiny", n=1, source=ADDRESS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.load("tiny", n=1, source=ADDRESS)


@pytest.mark.parametrize(("kind", "text"), [(tarfile.LNKTYPE, "hard link"), (tarfile.SYMTYPE, "symbolic link")])
def test_links_in_an_archive_are_left_out_with_a_word(tmp_path: Path, kind: bytes, text: str) -> None:
    """Case 7."""
    path = make_archive(tmp_path)
    with tarfile.open(path) as archive:
        files = [(x, archive.extractfile(x).read()) for x in archive.getmembers()]  # type: ignore[union-attr]
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for info, content in files:
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("x/version_2.safetensors")
        link.type, link.linkname = kind, files[0][0].name
        archive.addfile(link)
    with pytest.warns(
        UserWarning, match=rf"^1 link in the archives of .* left out: x/version_2.safetensors \(a {text}\)"
    ):
        assert zoo.load(ARCHIVE, source=tmp_path).ids == [0, 1]


def test_download_says_what_was_here(hub: Hub) -> None:
    """Issue 16, item 6."""
    published(hub)
    for members, here, fetched in (("1,12", 0, 2), ("1,2,12", 2, 1), ("1,2,12", 3, 0)):
        arguments = ["download", "tiny", "--members", members, "--source", ADDRESS, "--format", "json"]
        for dry in (["--dry-run"], []):
            result = values(run(*arguments, *dry))
            assert (result["members_here"], result["members_fetched"]) == (here, 0 if dry else fetched)


def test_audit_names_links_that_lead_out(tmp_path: Path) -> None:
    """Issue 16, item 6: a file and a folder."""
    built = build(tmp_path / "source", members=range(2))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights.pt").write_bytes(b"x" * 100)
    (built.root / "a.pt").symlink_to(tmp_path / "elsewhere" / "weights.pt")
    (built.root / "folder").symlink_to(tmp_path / "elsewhere")
    result = auditing.audit(built.root)
    assert {(x.kind, x.path) for x in result.notes} >= {("link", "a.pt"), ("link", "folder")}
    assert not result.findings


def test_patterns_that_take_long() -> None:
    """Case 23: thousands of underscores took a minute."""
    table = pa.table({"member": [0], "recipe": ["x" * 5_000]})
    for pattern in ("_" * 4_000 + "y", "%" + "_" * 3_000 + "%y"):
        with pytest.raises(SelectionError, match=r"LIKE with a pattern .* or over 200 characters"):
            rows_where(table, f"recipe LIKE '{pattern}'")
    assert rows_where(table, "recipe LIKE '" + "_" * 199 + "%'").tolist() == [0]
