"""Populations in model repos: indexed by listings and headers, read by ranges, built from config.json."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.interop.ingest.model_repos import IndexPlan, index_model_repos, number_members
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.sources import cache, fetching, rate_limits, revisions
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.member_requests import FileRange, MemberRequest
from checkpoints_zoo.sources.revisions import epoch_of_name
from tests.hub.hub import Hub
from tests.support.commands import run, values
from tests.support.model_repos import EMBEDDING, STEPS, checkpoint, nbytes, neox, publish, shards
from tests.support.web_host import WebHost

FEW = [0, 1, 2, 4, 1000, 2000]
FILES, TREES, RESOLVED = r"/_cdn/.*safetensors", r"/api/models/.*/tree/", "/resolve/"


@pytest.fixture(autouse=True)
def forget_files() -> None:
    fetching._remote_files.clear()


def index(out: Path, *addresses: str, **options: Any) -> Any:
    options = {"revision_patterns": ["step*"]} | options
    return index_model_repos(addresses or ["hf://org/net-seed{1..2}"], "net", out, **options)


def test_an_index_is_one_listing_and_one_header_range_a_snapshot(hub: Hub, tmp_path: Path) -> None:
    for seed in (1, 2):
        publish(hub, f"org/net-seed{seed}", FEW, seed=seed)
    hub.branch("org/net-seed1", "other", kind="models")
    hub.log.clear()
    lines: list[str] = []
    done = index(tmp_path, say=lines.append)
    assert (done.rows, done.ok) == (12, 12)
    assert lines[0].startswith("12 snapshots of 2 repos: 12 listings and 12 headers, about 0.")
    assert hub.log.requests(TREES) == 12
    assert hub.log.requests(FILES, ranged=True) == 12
    assert hub.log.requests("/refs") == 2
    assert hub.log.requests(RESOLVED, method="HEAD") == 13  # of config.json once
    assert hub.log.bytes(FILES) < 2**16 + 11 * 5000
    assert hub.log.leaks("hf_writer") == []
    before = len(hub.log)
    index(tmp_path)
    assert hub.log.requests() - before == 2  # the branches alone: nothing else can change

    table = pq.read_table(tmp_path / "manifests" / "net.parquet")
    assert table.schema.metadata[b"schema_version"] == b"2"
    rows = table.to_pylist()
    assert [(r["member"], r["epoch"], r["seed"]) for r in rows] == [(m, e, m) for m in (1, 2) for e in FEW]
    assert [r["epoch"] for r in rows if r["final"]] == [2000, 2000]
    commit = hub.repo("org/net-seed2", "models").refs["refs/heads/step4"]
    file = hub.files("org/net-seed2", "step4", "models")["model.safetensors"]
    row = next(r for r in rows if (r["member"], r["epoch"]) == (2, 4))
    assert row["path"] == f"hf://org/net-seed2@{commit}/model.safetensors"
    (part,) = row["parts"]
    assert part == {
        "path": row["path"],
        "offset": file.size - nbytes(neox()),
        "nbytes": nbytes(neox()),
        "etag": file.sha,
    }


def test_snapshots_move_their_bytes_alone(hub: Hub, tmp_path: Path) -> None:
    tensors = neox(hidden=64, extras=True)
    publish(hub, "org/net", FEW, tensors)
    index(tmp_path, "hf://org/net")
    hub.log.clear()
    members = zoo.load("net", source=tmp_path, snapshots=True, where="epoch >= 2")
    stacked = members.stack()
    wanted = {
        n: v
        for n, v in tensors.items()
        if "masked_bias" not in n and "inv_freq" not in n and ".attention.bias" not in n
    }
    assert set(stacked) == set(wanted)
    assert hub.log.bytes(FILES) <= 1.02 * 4 * nbytes(wanted)
    whole = checkpoint(tensors, 2)
    start, raw = whole.size - nbytes(tensors), {}
    for name, (dtype, shape) in tensors.items():
        size = {"F16": 2, "U8": 1}[dtype] * int(np.prod(shape))
        raw[name], start = whole.read(start, size), start + size
    for name in wanted:
        assert stacked[name][0].numpy().tobytes() == raw[name], name
    before = len(hub.log)
    zoo.load(members.citation).stack()
    assert len(hub.log) == before
    assert [(c.repo, c.members) for c in cache.cached_repos()] == [("models/org/net", 4)]
    assert cache.delete_members("models/org/net") > 0
    assert cache.cached_repos() == []


def test_files_are_locked_a_few_at_a_time(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lock is an open file, of which a process may have 1,024."""
    publish(hub, "org/net", FEW)
    index(tmp_path, "hf://org/net")
    held, most, hold = set[str](), list[int](), cache.hold_key_lock

    @contextmanager
    def counted(folder: Path, key: str) -> Iterator[None]:
        with hold(folder, key):
            held.add(key)
            most.append(len(held))
            yield
            held.remove(key)

    monkeypatch.setattr(cache, "hold_key_lock", counted)
    monkeypatch.setattr(fetching, "LARGEST_LOCK_COUNT", 4)
    members = zoo.load("net", source=tmp_path, snapshots=True)
    embedding = members.stack(names=[EMBEDDING])[EMBEDDING]
    assert embedding.equal(members.stack()[EMBEDDING])
    assert most[:6] == [1, 2, 3, 4, 1, 2]


def test_a_part_without_bytes_is_not_read(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", FEW[:1])
    index(tmp_path, "hf://org/net")
    path = tmp_path / "manifests" / "net.parquet"
    table = pq.read_table(path)
    (row,) = table.to_pylist()
    config = row["path"].replace("model.safetensors", "config.json")
    row["parts"].append({"path": config, "offset": 0, "nbytes": 0, "etag": None})
    pq.write_table(table.from_pylist([row], schema=table.schema), path)
    assert zoo.load("net", source=tmp_path).stack()[EMBEDDING].shape == (1, 256, 32)


def test_a_file_without_buffers_is_shared_with_the_clients_cache(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", FEW, neox(hidden=64))
    index(tmp_path, "hf://org/net")
    hub.log.clear()
    zoo.load("net", source=tmp_path).stack()
    assert hub.log.bytes(FILES) <= 1.02 * nbytes(neox(hidden=64))
    assert cache.cached_repos() == []


@pytest.mark.slow
def test_a_tensor_of_all_snapshots_is_one_range_each(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", STEPS)
    index(tmp_path, "hf://org/net")
    hub.log.clear()
    members = zoo.load("net", source=tmp_path, snapshots=True)
    embedding = members.stack(names=[EMBEDDING])
    assert list(embedding) == [EMBEDDING]
    assert embedding[EMBEDDING].shape == (154, 256, 32)
    assert hub.log.requests(FILES, ranged=True) == 154
    assert hub.log.bytes(FILES) <= 1.05 * embedding[EMBEDDING].nbytes
    assert hub.log.requests() == 2 * 154
    before = len(hub.log)
    for ids, batch in members.batches(100, names=[EMBEDDING]):
        assert batch[EMBEDDING].shape[0] == len(ids)
    vector, label = members.dataset(labels="epoch", names=[EMBEDDING])[3]
    assert vector.equal(embedding[EMBEDDING][3].flatten().float())
    assert int(label) == 4
    assert len(hub.log) == before
    again = members.take([3, 5]).stack(names=["gpt_neox.final_layer_norm.bias", EMBEDDING])
    assert list(again) == ["gpt_neox.final_layer_norm.bias", EMBEDDING]
    assert hub.log.requests(FILES) == 156
    whole = members.take([3, 5]).stack()
    assert all(whole[name].equal(again[name]) for name in again)
    hub.log.clear()
    assert (
        members.take([3]).stack(names=["embed_out.weight"])["embed_out.weight"][0].equal(whole["embed_out.weight"][0])
    )
    assert len(hub.log) == 0


def test_names_that_are_not_there(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", [1, 2])
    index(tmp_path, "hf://org/net")
    hub.log.clear()
    members = zoo.load("net", source=tmp_path)
    with pytest.raises(
        UsageError, match=r"tensor 'embed_in': expected a name among embed_out.weight, gpt_neox.*Did you mean"
    ):
        members.stack(names=["embed_in"])
    with pytest.raises(UsageError, match="names of tensors: expected one or more, or None for all; found none"):
        members.stack(names=[])
    assert len(hub.log) == 0


def test_a_sharded_checkpoint_is_one_snapshot(hub: Hub, tmp_path: Path) -> None:
    tensors = neox(hidden=64, vocabulary=512)
    publish(hub, "org/net", [1, 1000], tensors, sharded=True)
    index(tmp_path, "hf://org/net")
    row = pq.read_table(tmp_path / "manifests" / "net.parquet").to_pylist()[0]
    assert [part["path"].rpartition("/")[2] for part in row["parts"]] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    hub.log.clear()
    members = zoo.load("net", source=tmp_path, snapshots=True)
    stacked = members.stack()
    assert hub.log.bytes(FILES) <= 1.02 * 2 * nbytes(tensors)
    for step, position in ((1, 0), (1000, 1)):
        for path, file in shards(tensors, step).items():
            if path.endswith(".safetensors"):
                kept = [n for n in tensors if (n in list(tensors)[: len(tensors) // 2]) == ("00001-of" in path)]
                raw = b"".join(stacked[name][position].numpy().tobytes() for name in kept)
                assert file.read(file.size - len(raw), len(raw)) == raw  # type: ignore[union-attr]
    hub.log.clear()
    cache.delete_members()
    one = members.take([1]).stack(names=["gpt_neox.final_layer_norm.bias"])
    assert hub.log.bytes(FILES) == one["gpt_neox.final_layer_norm.bias"].nbytes
    copied = members.download(tmp_path / "copy")
    assert all(copied.stack()[n].equal(t) for n, t in stacked.items())
    assert pq.read_schema(tmp_path / "copy/manifests/net.parquet").metadata[b"schema_version"] == b"1"
    assert copied.description.epoch_unit == "step"


def test_what_cannot_be_indexed_is_listed_with_a_reason(hub: Hub, tmp_path: Path) -> None:
    narrow = neox(hidden=16)
    publish(hub, "org/net", FEW, files={
        0: {"pytorch_model.bin": b"PK\x03\x04"},
        1: {"model.safetensors": b"<!DOCTYPE html><html>" + bytes(100)},
        2: {"model.safetensors": checkpoint(narrow, 7)},
        4: {k: v for k, v in shards(neox(), 4, 3).items() if "00002-of" not in k},
    })  # fmt: skip
    lines: list[str] = []
    done = index(tmp_path, "hf://org/net", say=lines.append)
    assert (done.rows, done.ok, done.excluded, done.failed) == (6, 2, 2, 2)
    rows = {r["epoch"]: r for r in pq.read_table(tmp_path / "manifests" / "net.parquet").to_pylist()}
    assert rows[0]["reason"].startswith("pytorch_model.bin: a pickle can't be read by ranges: ask for safetensors at")
    assert rows[1]["reason"].startswith("model.safetensors: expected ")
    assert rows[1]["reason"].endswith("; found a web page")
    assert rows[2]["reason"].startswith(
        "tensors of another network: misshapen embed_out.weight [256, 16] for [256, 32]"
    )
    assert rows[4]["reason"] == "2 of 3 shards"
    assert all(rows[e]["path"] is None for e in (0, 1, 2, 4))
    assert any("1 snapshot excluded: pytorch_model.bin" in line for line in lines)
    assert len(zoo.load("net", source=tmp_path, snapshots=True)) == 2


def test_an_index_on_the_web_leads_to_the_hub(web: WebHost, hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", [1, 2])
    index(tmp_path, "hf://org/net")
    web.add_folder(tmp_path)
    members = zoo.load("net", source=web.url, snapshots=True)
    embedding = members.stack(names=[EMBEDDING])[EMBEDDING]
    assert embedding.equal(members.stack()[EMBEDDING])
    assert members.source.count_local(members.description, members.rows) == 2
    assert all("authorization" not in headers for *_, headers in web.log)


@pytest.mark.slow
def test_a_network_is_built_from_its_config(hub: Hub, tmp_path: Path, oracle: Callable[[str], ModuleType]) -> None:
    transformers = oracle("transformers")
    publish(hub, "org/net-seed1", [1000, 2000], neox(dtype="F32"))
    index(tmp_path, "hf://org/net-seed1")
    members = zoo.load("net", source=tmp_path, snapshots=True)
    assert members.description.architecture == "transformers/GPTNeoXForCausalLM"
    assert "transformers_version" not in members.description.arguments
    token_ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    own = transformers.GPTNeoXForCausalLM(transformers.AutoConfig.for_model(**dict(members.description.arguments)))
    with torch.no_grad():
        logits = members.ensemble()(token_ids)
        assert logits.shape == (2, 3, 9, 256)
        for i, member in enumerate(members):
            renamed = {n.replace("embed_out.", "lm_head."): t for n, t in member.state_dict().items()}
            own.load_state_dict(renamed)
            expected = own.eval()(token_ids).logits
            assert (logits[i] - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert member.model()(token_ids).logits.equal(expected)


def test_code_of_a_repo_is_never_run(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", [1], files={1: {
        "model.safetensors": checkpoint(neox(), 1), "modeling.py": "raise SystemExit",
        "config.json": '{"architectures": ["OwnForCausalLM"], "model_type": "own",'
        ' "auto_map": {"AutoModelForCausalLM": "modeling.OwnForCausalLM"}}',
    }})  # fmt: skip
    index(tmp_path, "hf://org/net")
    members = zoo.load("net", source=tmp_path)
    assert "auto_map" not in members.description.arguments
    with pytest.raises(UsageError, match=r"a model class of transformers .*; found none of that name"):
        members[0].model()
    assert members.stack(names=[EMBEDDING])[EMBEDDING].shape == (1, 256, 32)


@pytest.mark.slow
def test_a_config_makes_nothing_else_load(oracle: Callable[[str], ModuleType]) -> None:
    """Neither kernels from the Hub, nor other weights, nor more memory or layers than a network has."""
    transformers = oracle("transformers")
    values = transformers.GPTNeoXConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    ).to_dict()
    kernels = {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel", "_x": 1}
    module: Any = build_architecture("transformers/GPTNeoXForCausalLM", **values | kernels)
    assert "evil" not in str(module.config)
    assert module.config._attn_implementation in ("sdpa", "eager")
    for wrong, text in (
        ({"hidden_size": 2**40}, "sizes in its config.json"), ({"num_hidden_layers": 10**6}, "at most 10,000 layers"),
        ({"vocab_size": "many"}, "a config.json that it can be built from"), ({"model_type": "gpt2"}, "not of GPTNeoX"),
        ({"model_type": "nope"}, "a model_type of transformers"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=text):
            build_architecture("transformers/GPTNeoXForCausalLM", **values | wrong)
    detr = {"model_type": "detr", "num_queries": 3, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    backbone: Any = build_architecture("transformers/DetrModel", **detr)
    assert not getattr(backbone.config, "use_pretrained_backbone", False)


@pytest.mark.slow
def test_tied_tensors_are_stored_and_moved_once(hub: Hub, tmp_path: Path, oracle: Callable[[str], ModuleType]) -> None:
    oracle("transformers")
    tensors = {"transformer.wte.weight": ("F32", (64, 8)), "transformer.wpe.weight": ("F32", (16, 8))}
    for name, shape in (
        ("ln_1.weight", (8,)), ("ln_1.bias", (8,)), ("attn.c_attn.weight", (8, 24)), ("attn.c_attn.bias", (24,)),
        ("attn.c_proj.weight", (8, 8)), ("attn.c_proj.bias", (8,)), ("ln_2.weight", (8,)), ("ln_2.bias", (8,)),
        ("mlp.c_fc.weight", (8, 32)), ("mlp.c_fc.bias", (32,)), ("mlp.c_proj.weight", (32, 8)),
        ("mlp.c_proj.bias", (8,)),
    ):  # fmt: skip
        tensors[f"transformer.h.0.{name}"] = "F32", shape
    tensors |= {"transformer.ln_f.weight": ("F32", (8,)), "transformer.ln_f.bias": ("F32", (8,))}
    config = (
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2,'
        ' "n_positions": 16, "vocab_size": 64, "tie_word_embeddings": true}'
    )
    for step, stored in ((1, tensors), (2, tensors | {"lm_head.weight": ("F32", (64, 8))})):
        files = {"model.safetensors": checkpoint(stored, step), "config.json": config}
        hub.commit("org/net", files, branch=f"step{step}", kind="models")
    index(tmp_path, "hf://org/net")
    members = zoo.load("net", source=tmp_path, snapshots=True)
    assert len(members) == 2
    assert members.nbytes == 2 * nbytes(tensors)
    with torch.no_grad():
        token_ids = torch.arange(5)[None]
        logits = members.ensemble()(token_ids)
        model = members[0].model()
        assert model.lm_head.weight is model.transformer.wte.weight
        assert (model(token_ids).logits - logits[0]).abs().max() <= 1e-5 * logits.abs().max()


def test_another_file_than_the_indexed_one_is_refused(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", [1, 2])
    index(tmp_path, "hf://org/net")
    other = "0" * 64
    hub.faults.add("/resolve/.*model.safetensors", method="HEAD", times=99, headers={"X-Linked-ETag": f'"{other}"'})
    with pytest.raises(
        DamagedError, match=r"expected ETag .*, as the manifest says; found 0{16}\. Manifest and file do"
    ):
        zoo.load("net", source=tmp_path).stack(names=[EMBEDDING])


def test_offline_the_missing_snapshots_are_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    publish(hub, "org/net", [1, 2])
    index(tmp_path, "hf://org/net")
    members = zoo.load("net", source=tmp_path, snapshots=True)
    members.take([0]).stack(names=[EMBEDDING])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert members.take([0]).stack(names=[EMBEDDING])[EMBEDDING].shape[0] == 1
    with pytest.raises(NetworkError, match=rf"1 of 2 members of net: .*found no members 0 of {tmp_path}"):
        members.stack(names=[EMBEDDING])


# ---- names, numbers, plans ----
@pytest.mark.parametrize(
    ("revision", "rule", "epoch"),
    [
        ("step0", None, 0), ("step143000", None, 143_000), ("step_20k", None, 20_000),
        ("step1000-tokens4B", None, 1000),
        ("epoch-7", None, 7), ("checkpoint-512", None, 512), ("iter2M", None, 2_000_000), ("v40", None, 40),
        ("seed3-s40", r"-s(\d+)", 40), ("main", None, None), ("a1b2", None, None), ("step1", r"x(\d+)", None),
        ("step1", r"step\d+", None), ("step1", "(", None), ("1-2", None, None),
    ],
)  # fmt: skip
def test_the_epoch_in_a_branchs_name(revision: str, rule: str | None, epoch: int | None) -> None:
    if epoch is None:
        with pytest.raises(UsageError, match="epoch-rule"):
            epoch_of_name(revision, rule)
    else:
        assert epoch_of_name(revision, rule) == epoch


def test_numbers_of_members() -> None:
    assert number_members(["o/n-seed3", "o/n-seed1"]) == [3, 1]
    assert number_members(["google/multiberts-seed_24", "google/multiberts-seed_0"]) == [24, 0]
    assert number_members(["o/n", "o/n-seed1"]) == [0, 1]
    assert number_members(["o/a-seed1", "o/b-seed1"]) == [0, 1]


@pytest.mark.slow
def test_braces() -> None:
    assert revisions.expand_braces("a{1..3}") == ["a1", "a2", "a3"]
    assert revisions.expand_braces("{a,b}-{0..1}") == ["a-0", "a-1", "b-0", "b-1"]
    assert revisions.expand_braces("plain") == ["plain"]
    for wrong in ("a{1..999999}", "a{3..1}", "{1..999}{1..999}"):
        with pytest.raises(UsageError, match="1 to 1,000 repos"):
            revisions.expand_braces(wrong)


def test_addresses_and_revisions_that_are_wrong(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", [1])
    for address, options, error, text in (
        ("hf://org/none", {}, SourceNotFound, "expected a model repo; found none that this login may see"),
        ("hf://org/net", {"revision_patterns": ["x*"]}, SourceNotFound, r"matches x\*; found 2 others \(main, step1\)"),
        ("hf://org/net@step1", {}, UsageError, "a revision, or --revisions; found both"),
        ("hf://datasets/org/net", {}, UsageError, "expected model repos alone"),
        ("hf://org/net", {"revision_patterns": ["*"]}, UsageError, "revision 'main': expected one number in its name"),
        ("hf://org/net", {"epoch_unit": "minute"}, UsageError, "epoch unit: expected epoch or step"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            index(tmp_path, address, **options)
    assert not (tmp_path / "manifests").exists()


def test_other_members_in_the_folder_are_not_overwritten(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", [1, 2])
    index(tmp_path, "hf://org/net")
    with pytest.raises(UsageError, match=r"expected snapshots that are indexed again.*; found 1 others"):
        index(tmp_path, "hf://org/net", revision_patterns=["step1"])


def test_a_dry_run_lists_branches_alone(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", STEPS)
    hub.log.clear()
    plan = index(tmp_path, "hf://org/net", dry_run=True)
    assert isinstance(plan, IndexPlan)
    assert (plan.repos, plan.snapshots, plan.listings, plan.headers) == (1, 154, 154, 154)
    assert len(hub.log) == 1
    assert not (tmp_path / "manifests").exists()
    index(tmp_path, "hf://org/net", revision_patterns=["step1", "step1???"])
    assert (again := index(tmp_path, "hf://org/net", dry_run=True)).listings == again.headers == 154 - 2


def test_a_tensor_over_several_ranges() -> None:
    """The bytes of each tensor are cut out of the ranges of its member."""
    layout = Layout.of_stored(
        [(n, "U8", (size,), n, (size,)) for n, size in (("a", 3), ("b", 0), ("c", 6), ("d", 3))], (), 0
    )
    file, other = (Repo("o/n", "0" * 40, "model"), "x"), (Repo("o/n", "0" * 40, "model"), "y")
    ranges = (FileRange(file, 10, 14), FileRange(other, 0, 6), FileRange(file, 90, 92))
    member = MemberRequest((1, None), "", ranges, layout, None)
    numbers = [(x.file[1], x.start + i) for x in ranges for i in range(x.nbytes)]
    for name, start, size in (("a", 0, 3), ("b", 3, 0), ("c", 3, 6), ("d", 9, 3)):
        tensor = member.of_tensor(name)
        assert [(x.file[1], x.start + i) for x in tensor.ranges for i in range(x.nbytes)] == numbers[
            start : start + size
        ]
        assert tensor.layout.nbytes == size
        assert tensor.ranges


# ---- faults ----
@pytest.mark.parametrize("path", [r"/refs$", r"/tree/", r"/resolve/.*safetensors", r"/_cdn/.*safetensors"])
def test_a_fault_that_passes(hub: Hub, tmp_path: Path, waits: list[float], path: str) -> None:
    publish(hub, "org/net", FEW)
    hub.faults.add(path, status=503, times=1)
    assert index(tmp_path, "hf://org/net").ok == len(FEW)


@pytest.mark.parametrize(
    ("path", "fault", "error", "text"),
    [
        (r"/refs$", {"body": "<html>Sign in</html>"}, NetworkError, "branches of hf://org/net: expected JSON from"),
        (r"/refs$", {"body": '{"branches": [{"name": "step1"}]}'}, NetworkError, "with the fields that Hubs send"),
        (r"/refs$", {"body": '{"branches": [{"name": "step1", "ref": "x", "targetCommit": "../../x"}], "tags": [], '
                             '"converts": []}'}, DamagedError, "a commit of 40 hex digits"),
        (r"/tree/", {"body": "<html>Sign in</html>"}, NetworkError, "expected JSON from"),
        (r"/tree/", {"body": '[{"type": "file", "path": "../x", "size": 3, "oid": "a"}]'}, DamagedError, "the repo"),
        (r"/tree/", {"body": '[{"type": "file", "path": "x", "size": 3, "oid": "../x"}]'}, DamagedError, "and a hash"),
        (r"/tree/", {"status": 403}, AccessError, "expected permission to read"),
        (r"/_cdn/", {"body": "<html>Sign in</html>" * 9000}, DamagedError, "a web page"),
    ],
)  # fmt: skip
def test_a_fault_that_stays(
    hub: Hub, tmp_path: Path, waits: list[float], path: str, fault: dict[str, Any], error: type[Exception], text: str
) -> None:
    publish(hub, "org/net", [1])
    hub.faults.add(path, times=99, **{k: v.encode() if isinstance(v, str) else v for k, v in fault.items()})
    with pytest.raises(error, match=text):
        index(tmp_path, "hf://org/net")
    assert not (tmp_path / "manifests").exists()


# ---- pace ----
@pytest.mark.slow
def test_requests_stay_inside_the_window(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "org/net", STEPS[:40])
    monkeypatch.setattr(rate_limits, "REQUESTS_IN_WINDOW", {"api": (15, 15), "resolvers": (30, 30)})
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(revisions, "API", rate_limits.Pace("api", lambda: now[0], sleep))
    monkeypatch.setattr(revisions, "RESOLVERS", rate_limits.Pace("resolvers", lambda: now[0], sleep))
    times: dict[str, list[float]] = {"api": [], "resolvers": []}
    hub.on_request = lambda x: (
        times["api" if "/api/" in x.path else "resolvers"].append(now[0]) if "/_cdn/" not in x.path else None
    )
    hub.log.clear()
    plan = index(tmp_path, "hf://org/net", dry_run=True)
    index(tmp_path, "hf://org/net")
    assert len(times["api"]) == 42
    for kind, limit in (("api", 15), ("resolvers", 30)):
        window: deque[float] = deque()
        for moment in sorted(times[kind]):
            window.append(moment)
            while window[0] <= moment - 300:
                window.popleft()
            assert len(window) <= limit
    assert now[0] - 1000 <= 60 * plan.minutes + 600


def test_another_process_counts_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "REQUESTS_IN_WINDOW", {"api": (50, 100)})
    waits: list[float] = []
    clock = iter(range(10_000)).__next__
    for _ in range(3):  # as if started again
        pace = rate_limits.Pace("api", lambda: 0.1 * clock(), waits.append)
        for _ in range(40):
            pace.wait()
    limit = rate_limits.requests_in_window("api")
    assert limit == 90
    assert len(waits) == 120 - limit
    assert all(0 < wait <= 300 for wait in waits)


INDEX = """
import sys
from checkpoints_zoo.interop.ingest.model_repos import index_model_repos
index_model_repos(["hf://org/net"], "net", sys.argv[1], revision_patterns=["step*"])
"""


@pytest.mark.slow
def test_an_index_goes_on_after_a_kill(hub: Hub, tmp_path: Path) -> None:
    publish(hub, "org/net", STEPS)
    hub.log.clear()
    hub.latency = 0.02
    process = subprocess.Popen([sys.executable, "-c", INDEX, str(tmp_path)], env=os.environ)
    while hub.log.requests(FILES) < 20 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    hub.latency = 0
    assert not (tmp_path / "manifests").exists()
    subprocess.run([sys.executable, "-c", INDEX, str(tmp_path)], env=os.environ, check=True)
    threads = revisions.THREADS
    assert hub.log.requests(TREES) <= 154 + threads
    assert hub.log.requests(FILES) <= 154 + 2 * threads
    assert len(zoo.load("net", source=tmp_path, snapshots=True)) == 154


# ---- the command ----
def test_the_command(hub: Hub, tmp_path: Path) -> None:
    for seed in (1, 2):
        publish(hub, f"org/net-seed{seed}", FEW, seed=seed)
    place = ["hf://org/net-seed{1..2}", "--revisions", "step*", "--collection", "net", "--out", tmp_path]
    assert values(run("import", *place, "--dry-run", "--format", "json"))["snapshots"] == 12
    done = run("import", *place)
    assert done.exit_code == 0
    assert "12 snapshots of 2 repos" in done.stderr
    assert "rows        12" in done.stdout
    wrong = run("import", *place, "--hash")
    assert wrong.exit_code == 2
    assert "import of model repos: expected --out, --revisions, --facts; found --hash." in wrong.stderr
