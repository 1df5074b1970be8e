"""`zoo-cli symmetries`: the library's own figures, and what it refuses."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.populations.mass import along_training, last_snapshot_positions, select_masses
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass
from checkpoints_zoo.training.recipes import RECIPES
from tests.hub import Hub
from tests.support.commands import run, values
from tests.support.remote import ADDRESS, SHARDS, published
from tests.support.scenarios import build
from tests.support.snapshots import make


def test_json_has_the_parts_that_transformers_have() -> None:
    table = zoo.symmetries("vit-digits")
    got = values(run("symmetries", "vit-digits", "--no-mass", "--format", "json"))
    assert got["dimension"] == table.dimension
    for key, held in (("signs", table.signs), ("matrices", table.matrices), ("shifts", table.shifts)):
        assert [row["name"] for row in got[key]] == list(held)
    matrices, shifts = ([row["dimension"] for row in got[key]] for key in ("matrices", "shifts"))
    assert table.dimension == got["scaling_freedom"] + sum(matrices) + sum(shifts)
    assert got["unconfirmed"] is None


@pytest.fixture(scope="module")
def found() -> MinimalMass:
    return zoo.minimal_mass(zoo.load("convnet-digits", n=8))


def test_the_table_and_the_masses_are_the_librarys(found: MinimalMass) -> None:
    result = run("symmetries", "convnet-digits", "-n", "8", "--tensors")
    assert result.exit_code == 0
    table = zoo.symmetries("convnet-digits")
    # A collection's table is derived from its members' module, named by its class.
    assert result.stdout == str(replace(table, network="ConvNet")) + f"\n\n{found}\n"
    assert result.stderr.startswith("convnet-digits: 8 members, 117.")
    short = run("symmetries", "convnet-digits", "--no-mass")
    assert short.stdout == str(replace(table, network="ConvNet")).partition("\n\ntensor")[0] + "\n"
    assert short.stderr == ""


def test_json_has_everything(found: MinimalMass, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "mass.png"
    arguments = ("-n", "8", "--corollary", "--seed", "3", "--plot", picture, "--format", "json")
    got = values(run("symmetries", "convnet-digits", *arguments))
    table = zoo.load("convnet-digits", n=1).symmetry_table
    assert got["name"] == "convnet-digits"
    assert zoo.load(got["citation"]).ids == list(found.ids)
    assert got["log10_permutations"] == table.log10_permutations()
    assert got["log10_permutations_without_streams"] == table.log10_permutations(streams=False)
    assert (got["scaling_freedom"], got["approximate_scaling_freedom"]) == (56, 0)
    for key, held in (("groups", table.groups), ("scales", table.scales)):
        assert [tuple(row) for row in got[key]] == [tuple(asdict(x)) for x in held.values()]
        assert [row["size"] for row in got[key]] == [x.size for x in held.values()]
        assert [row["writers"] for row in got[key]] == [[list(w) for w in x.writers] for x in held.values()]
    assert list(got["tensors"]) == list(table.tensors)
    assert got["tensors"]["fc1.weight"]["moves"][1] == {
        "axis": 1, "group": "conv2", "offset": 0, "span": 4, "within": 0
    }  # fmt: skip
    mass = got["mass"]
    assert {k: v for k, v in mass.items() if k != "members"} == {
        "biases": False, "approximate": False, "degenerate": {}, "held": []
    }  # fmt: skip
    columns = {
        "member": list(found.ids), "mass": found.before, "minimum": found.after, "excess_percent": found.excess,
        "residual": found.residual, "unbounded": found.unbounded, "converged": found.converged, "sweeps": found.sweeps,
        "epoch": [40] * 8, "dead": [{}] * 8,
    }  # fmt: skip
    for name, column in columns.items():
        assert [row[name] for row in mass["members"]] == (column.tolist() if torch.is_tensor(column) else column)
    assert all(set(row) == set(columns) for row in mass["members"])
    tested = zoo.corollary(zoo.load("convnet-digits", n=8), seed=3)
    assert got["corollary"]["p"] == tested.p
    assert [layer["p"] for layer in got["corollary"]["layers"]] == [layer.p for layer in tested.layers]
    assert [layer["units"] for layer in got["corollary"]["layers"]] == [x.units.tolist() for x in tested.layers]
    assert got["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_corollary_as_text() -> None:
    result = run("symmetries", "resnet8-digits", "-n", "5", "--no-mass", "--corollary")
    assert result.exit_code == 0
    text = str(zoo.corollary(zoo.load("resnet8-digits", n=5)))
    assert result.stdout.endswith(f"\n\n{text}\n")
    assert result.stderr == "resnet8-digits: testing whether channels have one distribution …\n"


def test_options_reach_the_mass() -> None:
    plain, more = (
        values(run("symmetries", "resnet8-digits", "-n", "2", *options, "--format", "json"))["mass"]
        for options in ([], ["--biases", "--approximate"])
    )
    assert (more["biases"], more["approximate"]) == (True, True)
    assert plain["degenerate"]["conv1"] == list(range(8))
    assert all(a["mass"] < b["mass"] for a, b in zip(plain["members"], more["members"], strict=True))


def test_an_architecture_alone() -> None:
    result = run("symmetries", "resnet20-frn-silu")
    assert result.exit_code == 0
    assert "\n10^551.4 permutations in 12 groups; 10^413.5 without those of streams\n" in result.stdout
    assert "\n0 exact scale factors, 784 approximate ones\n" in result.stdout
    assert values(run("symmetries", "optunet", "--format", "json"))["groups"][0]["size"] == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members of the true recipe, but for its length, with their snapshots."""
    root = tmp_path_factory.mktemp("snapshots")
    make(root, replace(RECIPES["convnet-digits"](), epochs=2), [4, 5, 6], [0, 1])
    return root


@pytest.mark.slow
def test_along_training(trained: Path, tmp_path: Path) -> None:
    arguments = ("symmetries", "convnet-digits", "--source", trained, "--members", "4,6", "--along")
    got = values(run(*arguments, "--corollary", "--format", "json"))
    every = zoo.load("convnet-digits", source=trained, snapshots=True)
    assert every._snapshot_keys == [(m, e) for m in (4, 5, 6) for e in (0, 1, 2)]
    masses = {key: sum(float(t.double().square().sum()) for n, t in m.state_dict().items() if n.endswith("weight"))
              for key, m in zip(every._snapshot_keys, every, strict=True)}  # fmt: skip
    rows = got["mass"]["members"]
    assert [(r["member"], r["epoch"]) for r in rows] == [(m, e) for m in (4, 6) for e in (0, 1, 2)]
    for row in rows:
        assert row["mass"] == pytest.approx(masses[row["member"], row["epoch"]], rel=1e-6)
    assert [step["epoch"] for step in got["along"]] == [0, 1, 2]
    for step in got["along"]:
        own = [r for r in rows if r["epoch"] == step["epoch"]]
        assert step["members"] == 2
        for name, column in (("mass", "mass"), ("minimum", "minimum"), ("excess", "excess_percent")):
            assert step[name] == pytest.approx(sum(r[column] for r in own) / 2, rel=1e-12)
        excess = [r["excess_percent"] for r in own]
        assert (step["lowest"], step["highest"]) == (min(excess), max(excess))
        assert step["residual"] == max(r["residual"] for r in own)
    assert got["corollary"]["members"] == [4, 6]

    result = run(*arguments, "--plot", tmp_path / "along.png")
    lines = result.stdout.splitlines()
    assert "Mass of 2 members: " in result.stdout  # of the last epoch
    assert lines[-5] == "Along training:"
    header = ["epoch", "members", "mass", "minimum", "excess (%)", "lowest (%)", "highest (%)", "residual"]
    assert re.split(r"  +", lines[-4]) == header
    assert [line.split()[:2] for line in lines[-3:]] == [["0", "2"], ["1", "2"], ["2", "2"]]
    assert (tmp_path / "along.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_epochs_that_are_named(trained: Path) -> None:
    arguments = ("symmetries", "convnet-digits", "--source", trained, "--members", "4@0,4@1,5@1", "--along")
    got = values(run(*arguments, "--format", "json"))
    assert [(r["member"], r["epoch"]) for r in got["mass"]["members"]] == [(4, 0), (4, 1), (5, 1)]
    assert [step["members"] for step in got["along"]] == [1, 2]


@pytest.mark.slow
def test_snapshots_by_the_library(trained: Path) -> None:
    members = zoo.load("convnet-digits", source=trained, snapshots=True)
    masses = zoo.minimal_mass(members)
    epochs = [epoch for _, epoch in members._snapshot_keys]
    last = select_masses(masses, last_snapshot_positions(masses, epochs))
    alone = zoo.minimal_mass(zoo.load("convnet-digits", source=trained))
    assert last.ids == alone.ids == (4, 5, 6)
    assert torch.equal(last.before, alone.before)
    torch.testing.assert_close(last.after, alone.after, rtol=1e-9, atol=0)
    assert {n: s.shape for n, s in last.scales.items()} == {n: s.shape for n, s in alone.scales.items()}
    assert last.history.shape[1] == 3
    assert [step.epoch for step in along_training(masses, epochs)] == [0, 1, 2]
    for function in (along_training, last_snapshot_positions):
        with pytest.raises(UsageError, match=r"^epochs: expected 9, one of each snapshot; found 2\.$"):
            function(masses, [1, 2])


BAD: list[tuple[list[str], int, str]] = [
    (["resnet18", "-n", "3", "--plot", "a.png"], 2, "architecture resnet18: expected a collection, which has members; "
     "found -n, --plot. Leave these options out, or name a collection."),
    (["resnet18", "--mass"], 2, "architecture resnet18: expected a collection, which has members; found --mass. Leave "
     "these options out, or name a collection."),
    (["convnet-digits", "--no-mass", "--biases", "--plot", "a.png"], 2, "--no-mass can't be combined with --biases,"
     " --plot. See `zoo-cli symmetries --help`."),
    (["convnet-digits", "--along"], 2, "snapshots of convnet-digits: expected two epochs or more; found only epoch 40"),
    (["convnet-digits", "--plot", "a.jpg"], 2, "Invalid value for '--plot': 'a.jpg' "
     "does not end in .png or .pdf or .svg. "
     "See `zoo-cli symmetries --help`."),
    (["convnet-digits", "-n", "1", "--no-mass", "--corollary"], 2,
     "draws of convnet-digits: expected two runs or more; found 1 of 1 run."),
    (["convnet-digit"], 3, "collection 'convnet-digit': expected a name in the catalog"),
    (["resnet9"], 3, "collection 'resnet9': expected a name in the catalog (convnet-digits, convnet-digits-varied, "),
    (["convnet-digits", "--device", "moon"], 2, "device 'moon': expected a device of this machine; found "),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "text"), BAD, ids=[" ".join(b[0]) for b in BAD])
def test_what_is_refused(arguments: list[str], code: int, text: str) -> None:
    result = run("symmetries", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert f"zoo-cli: error: {text}" in result.stderr


def test_an_unknown_name_may_be_meant_for_an_architecture() -> None:
    stderr = run("symmetries", "resnet9").stderr
    assert ", or an architecture (" in stderr
    assert "Did you mean resnet8 or " in stderr


def test_a_net_that_the_package_lacks(tmp_path: Path) -> None:
    built = build(tmp_path, "mlp", range(2))
    result = run("symmetries", built.name, "--source", built.root)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_whole_collection_is_not_fetched_for_its_mass(hub: Hub) -> None:
    published(hub)
    arguments = ("symmetries", "tiny", "--source", ADDRESS)
    result = run(*arguments)
    assert result.exit_code == 0
    assert (
        "tiny: no masses, since 20 members, 292.6 kB, would be fetched; give -n N or --mass for them\n" in result.stderr
    )
    assert "Mass of" not in result.stdout
    assert not [r for r in hub.log if SHARDS in r.path]
    assert "Mass of 2 members" in run(*arguments, "-n", "2").stdout
    assert "Mass of 20 members" in run(*arguments, "--mass").stdout


@pytest.mark.parametrize(
    "name",
    ["resnet18-cifar10", "resnet18-cifar100", "resnet18-tiny-imagenet", "optunet-mnist", "resnet20-frn-silu-cifar10"],
)
def test_the_catalog_alone_knows_the_network_of_members_in_archives(name: str) -> None:
    """The client is offline here; the bytes of a member are two for each value."""
    table, listing = zoo.symmetries(name), catalog.collections()[name]
    assert 2 * sum(math.prod(axes.shape) for axes in table.tensors.values()) == listing.bytes / listing.members


def test_symmetries_of_members_in_archives_ask_no_hub(hub: Hub) -> None:
    done = run("symmetries", "resnet18-cifar100")
    assert done.exit_code == 0, done.stderr
    assert len(hub.log) == 0
    assert done.stdout.startswith("Symmetries of resnet18-cifar100\n")
    assert done.stderr == (
        "resnet18-cifar100: no masses, since 9,216 members, 207 GB, would be fetched; give -n N or --mass for them\n"
    )


def test_members_in_archives_are_not_there_offline() -> None:
    refused = run("symmetries", "resnet18-cifar100", "-n", "1")
    assert (refused.exit_code, "Traceback" in refused.stderr) == (5, False)
