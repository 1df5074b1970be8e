"""A folder of anyone's checkpoints becomes a source: real files of torch.save and safetensors, as people keep them."""

from __future__ import annotations

import csv
import doctest
import io
import re
import shlex
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, LeftOut, SourceNotFound, UsageError
from checkpoints_zoo.interop.ingest import measuring
from checkpoints_zoo.interop.ingest.origin import number_files
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.publishing.auditing import audit
from checkpoints_zoo.sources.archives.keymaps import INNER_WRAPPER_PARTS, WRAPPER_PREFIXES, unwrap_names
from tests.hub import Hub
from tests.support.commands import run, values
from tests.support.originals import ours, states
from tests.support.publications import ADDRESS, NEW, PICTURE, consistent
from tests.support.refusals import Evil
from tests.support.scenarios import Mlp, State, hash_of, opened, random_state

DOCS = Path(__file__).parents[2] / "docs"
IMAGES: dict[str, Any] = {"like": "convnet-digits"}
Save = Callable[[State, Path], object]


def plain(state: State, path: Path) -> None:
    torch.save(state, path)


def keep(folder: Path, made: list[State], pattern: str = "seed-{}.pt", save: Save = plain, prefix: str = "") -> Path:
    """Keep members in files; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, state in enumerate(made):
        path = folder / pattern.format(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        save({prefix + name: tensor for name, tensor in state.items()}, path)
    return folder


def mlps(count: int) -> list[State]:
    return [random_state("mlp", seed) for seed in range(count)]


def source_of(folder: Path, out: Path, name: str = "mine", **options: Any) -> zoo.Collection:
    return zoo.from_checkpoints(folder, Mlp, out=out, name=name, **options)


def same(members: zoo.Collection, made: list[State]) -> None:
    """Check the members' tensors, bit for bit, as the safetensors library and hashlib see them."""
    there: State = {}
    for path in (members.source.root / "shards" / members.name).iterdir():
        there |= opened(path)
    for member, row in zip(members.ids, members.rows.to_pylist(), strict=True):
        kept = {n: t for n, t in made[member].items() if not n.endswith("num_batches_tracked")}
        assert {n.partition("/")[2] for n in there if n.startswith(f"{member:06d}/")} - {"_pad"} == kept.keys()
        assert all(torch.equal(there[f"{member:06d}/{n}"], t) for n, t in kept.items())
        assert row["sha256"] == hash_of(kept)


def lightning(state: State, path: Path) -> None:
    inside = {f"model.net.{name}": tensor for name, tensor in state.items()}
    moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(7.0)}
    torch.save({"epoch": 3, "global_step": 9, "pytorch-lightning_version": "2.5.0", "state_dict": inside,
                "optimizer_states": [{"state": {0: moments}, "param_groups": [{"lr": 0.1}]}],
                "lr_schedulers": [], "hyper_parameters": {"lr": 0.1}, "callbacks": {}}, path)  # fmt: skip


def best(state: State, path: Path) -> None:
    torch.save({"epoch": 90, "arch": "mlp", "state_dict": state, "best_acc1": torch.tensor(76.0),
                "optimizer": {"state": {}, "param_groups": []}}, path)  # fmt: skip


def old_format(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def deep(state: State, path: Path) -> None:
    torch.save({"trainer": {"ema": {"model_state_dict": state}, "step": 3}}, path)


def tensors_file(state: State, path: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "save"),
    [("seed-{}.pt", plain), ("member-{}.pth", old_format), ("version_{}/checkpoints/last.ckpt", lightning),
     ("run{}/model_best.pth.tar", best), ("pytorch_model-{}.bin", plain), ("{}.pt", deep),
     ("net_{}.safetensors", tensors_file)],
)  # fmt: skip
def test_every_kind_of_file(pattern: str, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints_zoo.formats.shard_files.LARGEST_TENSOR_COUNT", 60)
    made = mlps(12)
    folder, out = keep(tmp_path / "in", made, pattern, save), tmp_path / "out"
    (folder / "notes.txt").write_text("no checkpoint")
    members = source_of(folder, out, columns={"seed": range(100, 112), "optimizer": "sgd"})
    shutil.rmtree(folder)
    assert len(list((out / "shards" / "mine").iterdir())) > 1
    assert (members.ids, members.description.architecture) == (list(range(12)), "Mlp")
    same(members, made)
    rows = members.rows.to_pylist()
    assert [(r["seed"], r["optimizer"], r["method"]) for r in rows] == [(100 + i, "sgd", "independent")
                                                                       for i in range(12)]  # fmt: skip
    with (out / "files" / "mine.csv").open() as file:
        assert list(csv.reader(file)) == [["member", "file"], *([str(i), pattern.format(i)] for i in range(12))]
    assert zoo.verify(members) == []
    net = Mlp()
    net.load_state_dict(made[10])
    images = torch.rand(2, 1, 8, 8)
    assert torch.allclose(members.ensemble()(images)[10], net.eval()(images), atol=1e-5)


@pytest.mark.slow  # torch.compile takes seconds to import
def test_names_of_real_wrappers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    nets = [Mlp() for _ in range(5)]
    half = Mlp()
    half.load_state_dict(nets[3].state_dict())
    half.again = nn.DataParallel(half.again)  # type: ignore[assignment]
    half.inside = torch.compile(half.inside)  # type: ignore[assignment]
    saved = [nn.DataParallel(nets[0]), torch.compile(nets[1]), torch.compile(nn.DataParallel(nets[2])), half,
             nn.ModuleDict({"model": nn.ModuleDict({"net": nets[4]})})]  # fmt: skip
    folder = keep(tmp_path / "in", [m.state_dict() for m in saved])  # type: ignore[attr-defined]
    names = [next(iter(torch.load(folder / f"seed-{i}.pt", weights_only=True))) for i in range(5)]
    assert names == ["module.scale", "_orig_mod.scale", "_orig_mod.module.scale", "scale", "model.net.scale"]
    assert "inside._orig_mod.weight" in half.state_dict()
    members = source_of(folder, tmp_path / "out")
    same(members, [dict(net.state_dict()) for net in nets])
    assert len(members.description.layouts) == 1


PART = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
OWN = st.sampled_from(["", "model.", "net.", "module.", "net.model."])
NAMES = st.lists(st.lists(PART, min_size=2, max_size=3).map(".".join), min_size=1, max_size=6, unique=True)


@pytest.mark.slow
@settings(max_examples=60)
@given(NAMES, OWN, st.lists(st.sampled_from(WRAPPER_PREFIXES), max_size=4), st.data())
def test_wrappers_in_any_nesting(bare: list[str], own: str, nest: list[str], data: st.DataObject) -> None:
    wanted = {own + name: (i,) for i, name in enumerate(bare)}
    wrapped = {"".join(nest) + name: shape for name, shape in wanted.items()}
    assert unwrap_names(wrapped, wanted) == dict(zip(wrapped, wanted, strict=True))
    part, chosen = data.draw(st.sampled_from(INNER_WRAPPER_PARTS)), data.draw(st.sets(st.sampled_from(bare)))
    inner = {name: name.replace(".", f".{part}.", 1) if name in chosen else name for name in bare}
    within = {"".join(nest) + inner[name]: (i,) for i, name in enumerate(bare)}
    assert list(unwrap_names(within, {name: (i,) for i, name in enumerate(bare)}).values()) == bare
    with pytest.raises(LayoutError, match=r"^names of tensors: expected \d+ exactly; found extra .*$"):
        unwrap_names({**wrapped, "".join(nest) + own + "zz.extra.name.of.it": ()}, wanted)
    with pytest.raises(LayoutError, match=r"found misshapen "):
        unwrap_names({name: (*shape, 1) for name, shape in wrapped.items()}, wanted)


def test_two_tensors_never_become_one() -> None:
    with pytest.raises(LayoutError, match=r"found extra a\.module\.b\.$"):
        unwrap_names({"a.b": (), "a.module.b": ()}, {"a.b": ()})


def test_several_state_dicts_in_a_file(tmp_path: Path) -> None:
    made = mlps(2)

    def both(state: State, path: Path) -> None:
        average = {f"module.{name}": tensor * 2 for name, tensor in state.items()}
        torch.save({"model": state, "ema": {"state_dict": average}, "head": {"w": torch.zeros(3)}}, path)

    folder, out = keep(tmp_path / "in", made, save=both), tmp_path / "out"
    with pytest.raises(UsageError) as caught:
        source_of(folder, out)
    assert str(caught.value) == (
        f"file {folder}/seed-0.pt: expected one state dict of the net; found 2 that fit, under 'model', "
        "'ema/state_dict'. Choose one with key='model', or --key model."
    )
    assert not (out / "manifests").exists()
    same(source_of(folder, out, key="model"), made)
    doubled = [{n: t * 2 for n, t in state.items()} for state in made]
    same(source_of(folder, out, "averaged", key="ema/state_dict"), doubled)
    with pytest.raises(UsageError, match=r"expected a state dict under 'x'; found 'model', 'head', 'ema/state_dict'\."):
        source_of(folder, out, "other", key="x")
    with pytest.raises(UsageError, match=r"expected a state dict under 'x'; found one without any key\."):
        source_of(keep(tmp_path / "flat", made), out, "other", key="x")


def test_a_file_that_holds_itself(tmp_path: Path) -> None:
    folder = keep(tmp_path / "in", mlps(1))
    loop: dict[str, Any] = {str(i): {} for i in range(50)}
    for value in loop.values():
        value |= loop
    torch.save(loop, folder / "seed-1.pt")
    with pytest.raises(DamagedError, match=r"seed-1\.pt: expected a state dict, tensors by name, or one under"):
        source_of(folder, tmp_path / "out")


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    made = mlps(4)
    del made[1]["out.bias"]
    made[1]["head.bias"] = torch.zeros(2)
    made[2]["out.weight"] = torch.zeros(3, 5)
    folder, out = keep(tmp_path / "in", made, prefix="module."), tmp_path / "out"
    with pytest.raises(LayoutError) as caught:
        source_of(folder, out)
    assert str(caught.value) == (
        f"checkpoints of {folder}: expected 4 of the architecture, by name and shape of their tensors; found 2 that "
        "are not. seed-1.pt: missing out.bias; extra head.bias. seed-2.pt: misshapen out.weight [3, 5] for [10, 5]. "
        "Nothing was written. Move these files away, or give the architecture that they were trained with."
    )
    assert not (out / "manifests").exists()
    assert not (out / "shards").exists()
    same(source_of(folder, out, files="seed-[03].pt"), made)


def test_damaged_files(tmp_path: Path) -> None:
    folder = keep(tmp_path / "in", mlps(7))
    whole = (folder / "seed-0.pt").read_bytes()
    (folder / "seed-0.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "seed-1.pt").write_bytes(b"<!DOCTYPE html><html>")
    (folder / "seed-2.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    (folder / "seed-3.pt").write_bytes(b"")
    torch.save({"epoch": 3, "model": {"w": [1.0]}}, folder / "seed-4.pt")
    torch.save({"w": torch.zeros(3).to_sparse()}, folder / "seed-5.pt")
    with pytest.raises(DamagedError) as caught:
        source_of(folder, tmp_path / "out")
    file = f"file {folder}/seed"
    assert str(caught.value) == (
        f"checkpoints of {folder}: expected 7 of the architecture, by name and shape of their tensors; found 6 that "
        f"are not. {file}-0.pt: expected a whole file of torch.save; found {len(whole) // 2:,} bytes without "
        f"the end that a zip archive has. {file}-1.pt: expected a file of torch.save; found a web page. "
        f"{file}-2.pt: expected a file of torch.save; found a Git LFS pointer, not the file it points to. "
        f"{file}-3.pt: expected a file of torch.save; found something else: b''. "
        f"{file}-4.pt: expected a state dict, tensors by name, or one under 'state_dict'; found 'epoch': int, "
        "'model': dict. And 1 more. Nothing was written. Move these files away, or give the architecture that they "
        "were "
        "trained with."
    )
    assert caught.value.path == "seed-0.pt"
    pointer = keep(tmp_path / "st", mlps(2), "{}.safetensors", tensors_file)
    (pointer / "1.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DamagedError, match=r"1\.safetensors' .*found a Git LFS pointer"):
        source_of(pointer, tmp_path / "out")


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_is_never_run(old: bool, tmp_path: Path) -> None:
    folder, mark = keep(tmp_path / "in", mlps(2)), tmp_path / "evil"
    torch.save({"state_dict": mlps(1)[0], "x": Evil(mark), "y": np.float64(1)}, folder / "seed-1.pt",
               _use_new_zipfile_serialization=not old)  # fmt: skip
    with pytest.raises(UsageError) as caught:
        source_of(folder, tmp_path / "out")
    text = str(caught.value)
    assert re.search(r"seed-1\.pt: expected tensors alone, .*; found a pickle that asks for \w+\.mkdir", text)
    assert old or "numpy" in text  # of a zip archive's pickle all is told
    assert "It was not opened and nothing was imported: a pickle can run code. If you made it yourself, save" in text
    assert not mark.exists()
    assert not (tmp_path / "out" / "manifests").exists()


def test_bombs(tmp_path: Path) -> None:
    """Few bytes that stand for many are told from their lists alone."""
    folder = keep(tmp_path / "in", mlps(1))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(10**7))
    (folder / "seed-1.pt").write_bytes(packed.getvalue())
    found = r"nothing compressed; found 10,000,000 bytes packed into 9,\d\d\d\. Nothing was written"
    with pytest.raises(DamagedError, match=found):
        source_of(folder, tmp_path / "out")
    huge = {name: torch.zeros(1).expand(2**40) for name in mlps(1)[0]}
    torch.save(huge, folder / "seed-1.pt")
    with pytest.raises(LayoutError, match=r"seed-1\.pt: misshapen scale \[1099511627776\] for \[\]"):
        source_of(folder, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), folder / "seed-1.pt")
    with pytest.raises(DamagedError, match=r"seed-1\.pt: .*found a TorchScript module, which is code\."):
        source_of(folder, tmp_path / "out")


def test_values_that_cannot_be_used(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mlps(4)
    made[2] = made[0]
    made[3] = {name: tensor.clone() for name, tensor in made[3].items()}
    made[3]["out.bias"][1] = float("nan")
    folder, out = keep(tmp_path / "in", made), tmp_path / "out"
    with pytest.warns(LeftOut) as caught:
        members = source_of(folder, out)
    (warned,) = caught
    assert warned.filename == __file__
    assert str(warned.message) == (
        "collection mine: 2 of 4 members are left out. member 2 (seed-2.pt): excluded, the weights of member 0; "
        "member 3 (seed-3.pt): failed, values that are not finite in out.bias."
    )
    assert members.ids == [0, 1]
    monkeypatch.setattr("checkpoints_zoo.publishing.card_pictures.picture", lambda *_: PICTURE)
    zoo.publish(out, NEW)
    assert zoo.load("mine", source=ADDRESS, architecture=Mlp).ids == [0, 1]


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["member-2.pt", "member-10.pt"], [2, 10]),
        (["cifar10/resnet18-seed_7.pt", "cifar10/resnet18-seed_9.pt"], [7, 9]),
        (["version_3/epoch=9-step=90.ckpt", "version_5/epoch=7-step=70.ckpt"], [3, 5]),
        (["epoch=9-step=90.ckpt", "epoch=7-step=70.ckpt"], [0, 1]),
        (["a-3.pt", "b-4.pt"], [0, 1]),
        (["acc0.91.pt", "acc0.93.pt"], [0, 1]),
        (["7.pt", "07.pt"], [0, 1]),
        (["resnet18.pt"], [0]),
        (["seed4.pt"], [4]),
        (["a.pt", "b.pt"], [0, 1]),
        ([f"{10**20}.pt", "1.pt"], [0, 1]),
        ([f"{10**10}.pt", "1.pt"], [0, 1]),
        ([], []),
    ],
)
def test_the_number_that_tells_files_apart(names: list[str], numbers: list[int]) -> None:
    assert number_files(names) == numbers


def test_natural_order_where_no_number_tells(tmp_path: Path) -> None:
    made = mlps(11)
    folder = tmp_path / "in"
    for i, state in enumerate(made):
        keep(folder, [state], f"epoch={i}-acc={20 - i}.pt")
    members = source_of(folder, tmp_path / "out")
    same(members, made)


def test_columns_by_file(tmp_path: Path) -> None:
    folder = keep(tmp_path / "in", mlps(3), "run_{}/last.pt")
    table = {"seed": [7, 5, 6], "lr": [0.1, np.nan, 0.3], "created": pd.to_datetime(["2024-05-01"] * 3)}
    frame = pd.DataFrame(table, index=[f"run_{i}/last.pt" for i in (2, 0, 1)])
    wanted = [(5, None), (6, 0.3), (7, 0.1)]
    out = tmp_path / "out"
    rows = source_of(folder, out, columns=frame).rows.to_pylist()
    assert [(row["seed"], row["lr"]) for row in rows] == wanted
    assert rows[0]["created"].isoformat() == "2024-05-01T00:00:00+00:00"
    path = tmp_path / "known.csv"
    frame.rename_axis("file").to_csv(path)
    rows = source_of(folder, out, "from-csv", columns=path).rows.to_pylist()
    assert [(row["seed"], row["lr"]) for row in rows] == wanted
    arrow = frame.rename_axis("file").reset_index().convert_dtypes(dtype_backend="pyarrow")
    rows = source_of(folder, out, "from-arrow", columns=arrow).rows.to_pylist()
    assert [(row["seed"], row["lr"]) for row in rows] == wanted
    again = source_of(folder, out, "from-csv", columns={"seed": np.arange(3), "weight_decay": np.float32(0.5)})
    assert [(r["seed"], r["lr"], r["weight_decay"]) for r in again.rows.to_pylist()] == [
        (0, None, 0.5), (1, 0.3, 0.5), (2, 0.1, 0.5),
    ]  # fmt: skip


COLUMNS: list[tuple[Any, type[Exception], str]] = [
    ({"sed": 1}, UsageError, r"column 'sed': expected one of the manifest's: .*Did you mean 'seed'\?"),
    ({"sha256": "0"}, UsageError, "column 'sha256': expected a column that the import does not fill"),
    ({"seed": [1, 2]}, UsageError, "column 'seed': expected 3 values, one for each member, or a single"),
    ({"seed": [1, 2, "x"]}, UsageError, r"column 'seed' of member 2: expected a whole number in \[0, 2³²\); found 'x'"),
    ({"seed": -1}, UsageError, "column 'seed' of member 0: expected a whole number"),
    ({"seed": 1.5}, UsageError, "column 'seed' of member 0: expected a whole number"),
    ({"seed": True}, UsageError, "column 'seed' of member 0: expected a whole number"),
    ({"lr": float("inf")}, UsageError, "column 'lr' of member 0: expected a finite number; found inf"),
    ({"optimizer": 3}, UsageError, "column 'optimizer' of member 0: expected text; found 3"),
    ({"split": "all"}, UsageError, "column 'split' of member 0: expected one of train, validation, test; found 'all'"),
    ({"test_accuracy": 97.0}, UsageError, r"column 'test_accuracy' of member 0: expected a share in 0\.\.1; found 97"),
    ({"created": "soon"}, UsageError, "column 'created' of member 0: expected a time, as 2024-05-01T12:00; found"),
    (3, UsageError, "columns: expected a mapping, a DataFrame or a CSV file; found int"),
    (pd.DataFrame({"seed": [1]}, index=["seed-1.pt"]), UsageError,
     "columns by file: expected a row for each of the 3 files, once; found no row for seed-0.pt, seed-2.pt."),
    (pd.DataFrame({"seed": [1] * 4}, index=[f"seed-{i}.pt" for i in range(4)]), UsageError,
     r"found rows for seed-3\.pt\.$"),
    (pd.DataFrame({"seed": [1, 2]}, index=["a", "a"]), FormatError, "columns by file: expected each file once; found"),
    ("missing.csv", SourceNotFound, "file missing.csv: expected a table; found no such file"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "kind", "text"), COLUMNS)
def test_columns_that_are_none(columns: Any, kind: type[Exception], text: str, tmp_path: Path) -> None:
    folder = keep(tmp_path / "in", mlps(3))
    with pytest.raises(kind, match=text):
        source_of(folder, tmp_path / "out", columns=columns)
    assert not (tmp_path / "out" / "manifests").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [("name,seed\na,1\n", "expected a column 'file' and others, each once; found columns name, seed."),
     ("file,seed\nseed-0.pt\n", "found rows of other lengths"), ("file,seed\na,1\na,2\n", "found a twice"),
     ("file,file\na,1\n", "found rows of other lengths"), ('file,seed\n"a', "expected a table with commas")],
)  # fmt: skip
def test_tables_that_are_none(text: str, found: str, tmp_path: Path) -> None:
    folder, path = keep(tmp_path / "in", mlps(1)), tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match=re.escape(found)):
        source_of(folder, tmp_path / "out", columns=path)


class Stop(Exception):
    """In place of a kill."""


@pytest.mark.slow
def test_cut_off_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints_zoo.formats.shard_files.LARGEST_TENSOR_COUNT", 60)
    made = mlps(12)
    folder, whole, out = keep(tmp_path / "in", made), tmp_path / "whole", tmp_path / "out"
    told: dict[str, Any] = {"columns": {"seed": range(12)}, "title": "Twelve"}
    source_of(folder, whole, **told)
    judged: list[int] = []
    judge = measuring.check_member

    def stopping(row: dict[str, Any], *rest: Any) -> None:
        if len(judged) == 7:
            raise Stop
        judged.append(row["member"])
        judge(row, *rest)

    monkeypatch.setattr(measuring, "check_member", stopping)
    with pytest.raises(Stop):
        source_of(folder, out, **told)
    same(zoo.load("mine", source=out, architecture=Mlp), made)
    begun = len(zoo.load("mine", source=out))
    assert 0 < begun < 7
    judged[:] = [-1] * 8
    source_of(folder, out, **told)
    assert judged[8:] == list(range(begun, 12))
    for path in ("shards/mine", "manifests", "files"):
        for file in (whole / path).iterdir():
            assert (out / path / file.name).read_bytes() == file.read_bytes()
    assert not list(out.rglob("*.tmp"))


def test_a_folder_that_has_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source_of(keep(tmp_path / "in", mlps(2)), out)
    other = keep(tmp_path / "other", mlps(3)[1:])
    with pytest.raises(UsageError, match=r"collection mine in folder .*expected none, or one that an import of these"):
        source_of(other, out)
    assert source_of(other, out, "theirs").ids == [0, 1]
    assert zoo.load("mine", source=out).ids == [0, 1]
    with pytest.raises(UsageError, match="found one of other files, of files that changed, or of another net"):
        zoo.from_checkpoints(tmp_path / "in", lambda: Mlp(6), out=out, name="mine")


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    folder, out = keep(tmp_path / "in", mlps(2)), tmp_path / "out"
    base: dict[str, Any] = {"architecture": Mlp, "out": out, "name": "mine"}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("architecture: expected a name .*; found a Mlp. Give the class or function", {"architecture": Mlp()}),
        ("architecture 'resnet': expected one of convnet, ", {"architecture": "resnet"}),
        ("architecture 'convnet': expected arguments among", {"architecture": "convnet", "arguments": {"depth": 3}}),
        ("arguments: expected an architecture by name; found a function", {"arguments": {"width": 5}}),
        ("architecture for the members: expected a function that returns a torch.nn.Module", {"architecture": dict}),
        ("collection name 'My Nets': expected lower-case letters", {"name": "My Nets"}),
        ("accuracies of mine: expected classes that the members were trained with", {"evaluate": "digits"}),
        ("test figures: expected columns with figures, or images to measure them on; found both, for test_nll",
         {"evaluate": "digits", "columns": {"test_nll": 0.1}}),
    ]  # fmt: skip
    for text, options in refused:
        with pytest.raises(UsageError, match=text):
            zoo.from_checkpoints(folder, **base | options)
    with pytest.raises(SourceNotFound, match="expected a folder of checkpoints; found nothing there"):
        source_of(tmp_path / "none", out)
    with pytest.raises(UsageError, match="directory: expected the path of one folder with checkpoints; found a list"):
        source_of([folder / "seed-0.pt"], out)  # type: ignore[arg-type]
    with pytest.raises(SourceNotFound, match="expected a folder of checkpoints; found a file"):
        source_of(folder / "seed-0.pt", out)
    with pytest.raises(SourceNotFound, match=r"found none among 0 files that match \*\.ckpt"):
        source_of(folder, out, files="*.ckpt")
    tensors_file(mlps(1)[0], folder / "x.safetensors")
    with pytest.raises(UsageError, match=r"found 1 \(\.safetensors\) and 2 others \(\.pt\)\. Choose with files="):
        source_of(folder, out)


@pytest.mark.slow
def test_figures_are_measured(tmp_path: Path) -> None:
    """The members that ship, saved by somebody else's script, have the figures that their own manifest says."""
    shipped = zoo.load("convnet-digits", n=4)
    folder = keep(tmp_path / "in", [dict(m.state_dict()) for m in shipped], save=lightning)
    members = zoo.from_checkpoints(
        folder, "convnet", out=tmp_path / "out", name="mine", evaluate="digits", columns={"method": "independent"},
        dataset="digits", classes="digits", preprocessing=shipped.preprocess, title="Four", licence="MIT",
    )  # fmt: skip
    for row, known in zip(members.rows.to_pylist(), shipped.rows.to_pylist(), strict=True):
        assert row["sha256"] == known["sha256"]
        for figure in ("test_accuracy", "test_nll", "test_brier", "test_ece"):
            assert row[figure] == pytest.approx(known[figure], abs=1e-6)
    assert (members.description.title, members.description.licence, members.classes) == ("Four", "MIT", shipped.classes)
    assert zoo.evaluate(members, "digits")["accuracy"].value > 0.9
    # Started again without the facts: what was said and measured stays.
    again = zoo.from_checkpoints(folder, "convnet", out=tmp_path / "out", name="mine")
    assert again.description == members.description
    assert again.rows.equals(members.rows)
    # With another preprocessing the figures are others.
    shifted = zoo.images.Preprocess(shipped.preprocess.size, 1, (0.5,), (1.0,))
    facts: dict[str, Any] = {"out": tmp_path / "out", "name": "mine", "preprocessing": shifted}
    unmeasured = zoo.from_checkpoints(folder, "convnet", **facts)
    assert unmeasured.manifest[["test_accuracy", "test_nll", "eval_data"]].isna().all(axis=None)
    assert unmeasured.rows.column("sha256").equals(members.rows.column("sha256"))
    measured = zoo.from_checkpoints(folder, "convnet", evaluate="digits", **facts)
    assert zoo.verify(measured) == []
    assert measured.rows.column("test_nll").to_pylist() != members.rows.column("test_nll").to_pylist()


@pytest.mark.slow
def test_upstreams_names(tmp_path: Path) -> None:
    made = states(3)
    folder = keep(tmp_path / "in", made, prefix="model.")
    members = zoo.from_checkpoints(folder, "optunet", out=tmp_path / "out", name="nets")
    same(members, [ours(state) for state in made])
    grey = build_architecture("resnet18", channels=1, classes=3)  # upstream's have three channels
    keep(tmp_path / "grey", [dict(grey.state_dict())])
    told = {"channels": 1, "classes": 3}
    members = zoo.from_checkpoints(tmp_path / "grey", "resnet18", arguments=told, out=tmp_path / "out", name="grey")
    assert members.description.arguments == told
    assert members[0].model()(torch.zeros(1, 1, 8, 8)).shape == (1, 3)


class Small(nn.Module):
    """A net whose symmetries are known."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.conv(images)).relu().mean((2, 3)))
        return logits


@pytest.mark.slow
def test_everything_takes_what_is_made(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints_zoo.publishing.card_pictures.picture", lambda *_: PICTURE)
    torch.manual_seed(1)
    made = [dict(Small().state_dict()) for _ in range(3)]
    folder, out = keep(tmp_path / "in", made), tmp_path / "out"
    members = zoo.from_checkpoints(folder, Small, out=out, name="small", evaluate="digits", **IMAGES)
    assert audit(out).findings == []
    assert zoo.verify(members) == []
    dry = values(run("publish", out, "--repo", NEW, "--dry-run", "--format", "json"))
    assert [path for path in dry["upload"] if path.startswith("shards")] == [members.rows["path"][0].as_py()]
    assert {".import/", "files/"} <= set(dry["ignored"])
    zoo.publish(out, NEW)
    assert consistent(hub) > 1
    there = zoo.load("small", source=ADDRESS, architecture=Small)
    assert all(torch.equal(there.stack()[name], tensor) for name, tensor in members.stack().items())
    assert zoo.verify(there) == []
    canonical = there.canonicalize(scale="unit-norm", permute="first")
    images = torch.rand(5, 1, 8, 8)
    assert torch.allclose(canonical.ensemble()(images), there.ensemble()(images), atol=1e-5)
    data = zoo.images.load("digits")
    mean = there.ensemble()(there.preprocess(data.images)).softmax(-1).mean(0)
    accuracy = float((mean.argmax(-1) == data.labels).double().mean())
    assert zoo.evaluate(there, "digits")["accuracy"].value == pytest.approx(accuracy, abs=1e-6)


def test_without_preprocessing_one_is_told(tmp_path: Path) -> None:
    members = source_of(keep(tmp_path / "in", mlps(2)), tmp_path / "out")
    with pytest.raises(
        FormatError,
        match=r"preprocessing of mine: expected the preprocessing that turns pixels .*preprocessing=, like=",
    ):
        members.preprocess  # noqa: B018


def test_without_classes_one_is_told(tmp_path: Path) -> None:
    members = source_of(keep(tmp_path / "in", mlps(2)), tmp_path / "out")
    assert repr(members) == f"Collection('mine', 2 members, Mlp, from {tmp_path / 'out'})"
    with pytest.raises(UsageError) as caught:
        zoo.evaluate(members, "digits", ood="photos")
    assert str(caught.value) == (
        "classes of mine: expected names of classes in the order of the logits, to compare the logits with labels; "
        "found none in its description. Make the collection again, with like= or classes= and preprocessing= "
        "(`zoo-cli import --like NAME`)."
    )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net_of_test.py").write_text(
        "from torch import nn\n\n\nclass Own(nn.Linear):\n    pass\n\n\ndef build(width=3):\n    return Own(width, 2)\n"
    )
    made = [{"weight": torch.full((2, 4), float(i)), "bias": torch.zeros(2)} for i in range(3)]
    keep(tmp_path / "in", made, save=lambda state, path: torch.save({"model": state, "ema": dict(state)}, path))
    (tmp_path / "t.csv").write_text("file,seed\nseed-0.pt,4\nseed-1.pt,5\nseed-2.pt,6\n")
    command = ["import", "in", "--collection", "own", "--reshard", "out", "--architecture", "own_net_of_test:build",
               "--argument", "width=4", "--columns", "t.csv", "--files", "*.pt"]  # fmt: skip
    assert "found 2 that fit, under 'model', 'ema'" in run(*command).output
    done = run(*command, "--key", "ema", "--strict", "--format", "json")
    assert values(done)["ok"] == 3
    members = zoo.load("own", source="out")
    assert members.description.architecture == "Own"
    assert members.rows["seed"].to_pylist() == [4, 5, 6]
    assert torch.equal(members.stack()["weight"][2], made[2]["weight"])
    refused = run("import", "in", "--collection", "b", "--reshard", "out", "--architecture", "own_net_of_test:nothing")
    assert refused.exit_code == 2
    assert (
        "architecture own_net_of_test:nothing: expected MODULE:FUNCTION that can be imported from here"
        in refused.output
    )
    torch.save({"w": torch.zeros(2)}, "in/seed-1.pt")
    strict = run(*command[:4], "other", "--reshard", "out", *command[6:], "--key", "ema", "--strict")
    assert strict.exit_code != 0


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "your-checkpoints.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    runs = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    blocks = re.findall(r"```(python|bash)\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) > 6
    for at, (language, code) in enumerate(blocks):
        if language == "bash":
            for line in code.replace("\\\n", " ").splitlines():
                result = run(*shlex.split(line, comments=True)[1:])
                assert result.exit_code == 0, result.output
        elif ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, scope, f"block {at}", "your-checkpoints.md", 0)
            found: list[str] = []
            runs.run(test, out=found.append, clear_globs=False)
            assert not found, "".join(found)
            scope |= test.globs
        else:
            exec(compile(code, f"your-checkpoints.md, block {at}", "exec"), scope)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (DOCS / target).is_file(), target
