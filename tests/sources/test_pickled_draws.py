"""The collection hmc-cifar10 from a replica of its bucket: all draws, an index from one file, files that change."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, NetworkError, SourceNotFound
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.sources.haiku import haiku_names
from tests.support.commands import run, values
from tests.support.haiku_network import Network
from tests.support.hmc_bucket import CHAINS, FOLDER, bucket, draws_of_file, pickled
from tests.support.web_host import WebHost

NAME, COUNT = "hmc-cifar10", 4
FILES = bucket(COUNT)


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch, web: WebHost) -> None:
    """Let the catalog know the collection with few files, in a bucket on the loopback interface."""
    listings = catalog.collections()
    listing = listings[NAME]
    assert listing.draws is not None
    few = dataclasses.replace(listing, draws=dataclasses.replace(listing.draws, count=COUNT))
    monkeypatch.setattr(catalog, "collections", lambda: listings | {NAME: few})
    monkeypatch.setattr(catalog, "listing_of", (listings | {NAME: few}).get)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", web.url)
    web.files.update(FILES)


def path_of(number: int) -> str:
    return f"{FOLDER}/state-{number}.pkl"


@pytest.mark.slow
def test_all_draws_are_numpys_own(web: WebHost) -> None:
    members = zoo.load(NAME)
    assert (len(members), members.ids[:4]) == (CHAINS * COUNT, [0, 1, 2, 3])
    assert len(web.log) == 1 + 1 + COUNT - 1  # The first file, and a byte of each other one.
    columns = members.manifest[["run", "draw", "method"]]
    assert columns.iloc[4].tolist() == [1, 1, "hmc"]
    assert members.description.architecture == "resnet20-frn-swish"
    stacked = members.stack()
    assert sum(t[0].numel() for t in stacked.values()) == 274_042
    for number in range(COUNT):
        found = draws_of_file(number)
        for name, (module, parameter) in haiku_names().items():
            array = found[module][parameter]
            for chain in range(CHAINS):
                mine, theirs = stacked[name][CHAINS * number + chain].numpy(), array[chain]
                theirs = theirs.transpose(3, 2, 0, 1) if mine.ndim == 4 else theirs.T if mine.ndim == 2 else theirs
                assert mine.tobytes() == theirs.tobytes()
    assert len(web.log) == 1 + COUNT + 2 * (COUNT - 1)


@pytest.mark.slow
def test_members_are_the_networks_of_the_draws() -> None:
    members = zoo.load(NAME, members=[7])
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    own = {module: {n: x[1].astype(np.float64) for n, x in arrays.items()}
           for module, arrays in draws_of_file(2).items()}  # fmt: skip
    pixels = ((images.permute(0, 2, 3, 1).numpy() / 255 - [0.49, 0.48, 0.44]) / 0.2).astype(np.float64)
    logits = members.ensemble()(members.preprocess(images))[0].detach().numpy()
    np.testing.assert_allclose(logits, Network(own)(pixels), rtol=1e-4, atol=2e-4)


def test_a_draw_costs_its_file(web: WebHost) -> None:
    result = values(run("download", NAME, "--members", "4,5", "--dry-run", "--format", "json"))
    assert (result["files"], result["bytes"]) == (1, len(FILES[path_of(1)]))
    count = len(web.log)
    zoo.load(NAME, members=[4, 5]).stack()
    assert [(p, r) for p, r, _ in web.log[count:]][1:] == [(path_of(1), f"bytes=0-{result['bytes'] - 1}")]
    result = values(run("download", NAME, "--members", "3-6", "--dry-run", "--format", "json"))
    assert (result["members_here"], result["members"]) == (3, 4)


def test_citations_lead_back_and_the_cache_serves_offline(monkeypatch: pytest.MonkeyPatch, web: WebHost) -> None:
    from huggingface_hub import constants

    members = zoo.load(NAME, n=2)
    assert members.citation.startswith("gs://gresearch/bnn-posteriors/v1/hmc/cifar10@")
    stacked, count = members.stack(), len(web.log)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = zoo.load(members.citation).stack()
    assert all(torch.equal(t, again[n]) for n, t in stacked.items())
    with pytest.raises(NetworkError, match=r"file state-1.pkl of gs://gresearch/.*: expected it in the cache"):
        zoo.load(NAME, n=4).stack()
    assert len(web.log) == count


@pytest.mark.slow
def test_a_folder_of_downloaded_files(tmp_path: Path, web: WebHost) -> None:
    folder = tmp_path / "Wilson"
    folder.mkdir()
    for number in range(COUNT):
        (folder / f"state-{number}.pkl").write_bytes(FILES[path_of(number)])
    there, here = (zoo.load(NAME, members=[2, 8], source=source).stack() for source in (None, folder))
    assert all(torch.equal(t, there[n]) for n, t in here.items())
    (folder / "state-3.pkl").write_bytes(FILES[path_of(0)])
    members = zoo.load(NAME, members=[10], source=folder)
    with pytest.raises(
        DamagedError, match=r"state-3.pkl of .*Wilson: expected .* unchanged since the folder was indexed"
    ):
        members.stack()
    assert zoo.load(NAME, members=[10], source=folder).stack()["fc.bias"].shape == (1, 10)
    (folder / "state-1.pkl").unlink()
    text = r"file state-{} of .*: expected a file of the collection; found no such file"
    with pytest.raises(SourceNotFound, match=text.format("1.pkl")):
        zoo.load(NAME, members=[3], source=folder).stack()
    only_last = tmp_path / "incomplete"
    only_last.mkdir()
    (only_last / f"state-{COUNT - 1}.pkl").write_bytes(FILES[path_of(COUNT - 1)])
    with pytest.raises(SourceNotFound, match=text.format("0.pkl")):
        zoo.load(NAME, members=[3], source=only_last)


@pytest.mark.slow
def test_a_file_that_changed_is_refused(web: WebHost) -> None:
    members = zoo.load(NAME, members=[6])
    first = members.citation
    web.files[path_of(2)] = pickled(draws_of_file(9), 4)
    with pytest.raises(DamagedError, match=r"file state-2.pkl of gs://.*: expected ETag .*, as when it was first read"):
        members.stack()
    again = zoo.load(NAME, members=[6])  # The index is made anew.
    assert again.citation != first
    assert np.array_equal(again.stack()["fc.bias"][0], draws_of_file(9)["linear"]["b"][0])
    with pytest.raises(DamagedError, match=r"so it has changed: .* these ids now name the same places"):
        zoo.load(first)


def test_a_file_that_vanished(web: WebHost) -> None:
    members = zoo.load(NAME)
    del web.files[path_of(3)]
    members[:9].stack()
    with pytest.raises(
        SourceNotFound, match=r"file state-3.pkl of gs://.*: expected a file on .*; found 404 Not Found"
    ):
        members.stack()


def test_a_host_without_ranges_is_read_whole_and_said_so(web: WebHost) -> None:
    web.has_ranges = False
    with pytest.warns(UserWarning, match=r"serves no byte ranges .*read whole, such as file state-0.pkl of gs://"):
        members = zoo.load(NAME, n=1)
    assert np.array_equal(members.stack()["fc.bias"][0], draws_of_file(0)["linear"]["b"][0])


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda p: pickle.dumps([1, 2]), FormatError, "expected a dict with the key 'params'.*found list"),
        (lambda p: pickle.dumps({"params": abs}), FormatError, "found builtins.abs. Nothing was run"),
        (lambda p: pickled(p, 4)[:-100_000], DamagedError, "of a pickle"),
        (lambda p: pickled({**p, "extra": p["linear"]}, 4), LayoutError, "expected the 107 parameters of haiku's"),
        (lambda p: pickled({m: {n: x[:2] for n, x in own.items()} for m, own in p.items()}, 4), FormatError,
         "expected 3 draws, one of each chain; found 2"),
        (lambda p: pickled({m: {n: x.astype("f8") for n, x in own.items()} for m, own in p.items()}, 4), FormatError,
         "expected draws of F32, as in the first file; found F64"),
        (lambda p: pickled({**p, "linear": {n: x.astype("f8") for n, x in p["linear"].items()}}, 4), FormatError,
         "expected one dtype"),
        (lambda p: b"<html>login</html>", DamagedError, "of a pickle"),
    ],
)  # fmt: skip
def test_other_files_are_refused(web: WebHost, change: object, kind: type[Exception], text: str) -> None:
    assert callable(change)
    web.files[path_of(1)] = change(draws_of_file(1))
    members = zoo.load(NAME)
    with pytest.raises(kind, match=text) as error:
        members[3:].stack()
    assert "state-1.pkl" in str(error.value)
    assert members[:3].stack()["fc.bias"].shape == (3, 10)


def test_values_that_are_not_finite(web: WebHost) -> None:
    draws = draws_of_file(1)
    draws["linear"]["b"] = draws["linear"]["b"].copy()
    draws["linear"]["b"][2, 3] = np.nan
    web.files[path_of(1)] = pickled(draws, 4)
    with pytest.raises(DamagedError, match=r"tensor 'fc.bias' of member 5: expected finite weights"):
        zoo.load(NAME, members=[4, 5]).stack(dtype=torch.float16)


def test_a_damaged_cache_is_read_anew(web: WebHost, tmp_path: Path) -> None:
    members = zoo.load(NAME, n=3)
    wanted = {n: t.clone() for n, t in members.stack().items()}
    (shard,) = (tmp_path / "hf-home").rglob("*-draws.safetensors")
    content = bytearray(shard.read_bytes())
    content[-4:] = b"abcd"
    shard.unlink()
    shard.write_bytes(content)
    count = len(web.log)
    found = zoo.load(NAME, n=3).stack()
    assert all(torch.equal(t, wanted[n]) for n, t in found.items())
    assert len(web.log) == count + 2


@pytest.mark.slow
def test_a_copy_is_a_source_without_pickles(tmp_path: Path) -> None:
    result = run("download", NAME, "--members", "1,5", "--dest", tmp_path / "copy")
    assert result.exit_code == 0, result.output
    copied = zoo.load(NAME, source=tmp_path / "copy")
    assert copied.manifest[["member", "run", "draw"]].values.tolist() == [[1, 1, 0], [5, 2, 1]]
    assert all(torch.equal(t, zoo.load(NAME, members=[1, 5]).stack()[n]) for n, t in copied.stack().items())
    result = run("verify", NAME, "--source", tmp_path / "copy")
    assert result.exit_code == 0, result.output


def test_commands(web: WebHost) -> None:
    shown = values(run("show", NAME, "-n", "2", "--format", "json"))
    assert (shown["members"], shown["of"], shown["licence"]) == (2, CHAINS * COUNT, "unknown")
    assert "Izmailov" in shown["cite_as"]
    assert [row["run"] for row in shown["rows"]] == [0, 1]
    assert run("list", "--source", f"{web.url}{FOLDER}").exit_code == 3
    listed = {row["name"]: row for row in json.loads(run("list", "--format", "json").stdout)}
    assert (listed[NAME]["members"], listed[NAME]["bytes"]) == (783, 783 * 4 * 274_042)
