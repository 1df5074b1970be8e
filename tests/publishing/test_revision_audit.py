"""Audit across revisions: Pythia's faults planted in replicas of its series, and replicas without faults."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.publishing.revision_audit import RevisionAudit, audit_revisions, expected_steps
from checkpoints_zoo.sources import revisions
from tests.hub.hub import Hub
from tests.support.commands import run, values
from tests.support.model_repos import STEPS, checkpoint, neox, publish, shards

SMALL = neox(hidden=16)
HEADERS, TREES = r"/_cdn/.*safetensors", r"/api/models/.*/tree/"


def audited(*addresses: str, **options: Any) -> RevisionAudit:
    return audit_revisions(addresses, ("step*",), **options)


def kinds(result: RevisionAudit) -> dict[str, int]:
    return dict(Counter(finding.kind for finding in result.findings))


@pytest.mark.slow
def test_the_three_faults_of_pythia_are_found(hub: Hub) -> None:
    """86 of 154 branches equal in pairs, a shard of another model, three branches without some tensors."""
    pairs = [(STEPS[i], STEPS[i + 1]) for i in range(20, 106, 2)]
    files: dict[int, Any] = {later: {"model.safetensors": checkpoint(SMALL, first)} for first, later in pairs}
    for first, _ in pairs:
        files[first] = {"model.safetensors": checkpoint(SMALL, first)}
    lacking = {n: v for n, v in SMALL.items() if "layers.1.mlp" not in n}
    for step in (1, 142_000, 143_000):
        files[step] = {"model.safetensors": checkpoint(lacking, step)}
    publish(hub, "org/net", STEPS, SMALL, files=files)
    few = STEPS[-9:]
    foreign = shards(neox(hidden=24), 7)["model-00002-of-00002.safetensors"]
    sharded: dict[int, Any] = {step: shards(SMALL, step) for step in few}
    sharded[few[4]] = sharded[few[4]] | {"model-00002-of-00002.safetensors": foreign}
    publish(hub, "org/large", few, SMALL, files=sharded)
    hub.log.clear()
    result = audited("hf://org/net")
    assert kinds(result) == {"same weights": 43, "missing tensors": 3}
    equal = {name for x in result.findings if x.kind == "same weights" for name in x.revisions}
    assert equal == {f"org/net@step{step}" for pair in pairs for step in pair}
    assert len(equal) == 86
    assert {x.revisions[0] for x in result.findings if x.kind == "missing tensors"} == {
        f"org/net@step{step}" for step in (1, 142_000, 143_000)
    }
    missing = next(x for x in result.findings if x.kind == "missing tensors")
    assert missing.text.startswith("model.safetensors: missing gpt_neox.layers.1.mlp.dense_4h_to_h.bias")
    assert missing.compare.startswith("the header of hf://org/net@step1/model.safetensors with that of org/net@step")
    assert (result.revisions, result.contents, result.headers, result.faulty_revisions) == (154, 111, 111, 89)
    assert hub.log.requests(TREES) == 154
    assert hub.log.requests(HEADERS) == 111
    large = audited("hf://org/large")
    assert kinds(large) == {"foreign shard": 1}
    assert large.findings[0].revisions == (f"org/large@step{few[4]}",)
    assert "model-00002-of-00002.safetensors: misshapen" in large.findings[0].text


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_clean_replicas_have_no_findings(hub: Hub, sharded: bool) -> None:
    for seed in (1, 2):
        publish(
            hub,
            f"org/net-seed{seed}",
            STEPS if seed == 1 and not sharded else STEPS[-12:],
            SMALL,
            seed,
            sharded=sharded,
        )
    for address in ("hf://org/net-seed1", "hf://org/net-seed2"):
        assert audited(address).findings == []
    last = hub.files("org/net-seed1", "step143000", "models")
    hub.commit("org/net-seed1", {p: hub.blobs.virtual[f.sha] for p, f in last.items() if f.lfs}, kind="models")
    assert audit_revisions(["hf://org/net-seed1"]).findings == []  # main as well


def test_a_shard_of_another_repo_is_found_by_its_hash(hub: Hub) -> None:
    steps = [1000, 2000, 3000]
    files: dict[int, Any] = {step: shards(SMALL, step) for step in steps}
    files[2000] = files[2000] | {
        "model-00001-of-00002.safetensors": shards(SMALL, 77)["model-00001-of-00002.safetensors"]
    }
    publish(hub, "org/a", steps, SMALL, files=files)
    publish(hub, "org/b", steps, SMALL, files={s: shards(SMALL, 77 if s == 2000 else s + 50) for s in steps})
    assert audited("hf://org/a").findings == []
    (finding,) = audited("hf://org/{a,b}").findings
    assert finding.kind == "foreign shard"
    assert set(finding.revisions) == {"org/a@step2000", "org/b@step2000"}
    assert "model-00001-of-00002.safetensors is model-00001-of-00002.safetensors of" in finding.text


def test_a_half_written_checkpoint_is_found(hub: Hub) -> None:
    steps = [1000, 2000, 3000]
    files: dict[int, Any] = {step: shards(SMALL, step) for step in steps}
    files[3000] = files[3000] | {"model-00001-of-00002.safetensors": files[2000]["model-00001-of-00002.safetensors"]}
    publish(hub, "org/a", steps, SMALL, files=files)
    assert kinds(audited("hf://org/a")) == {"same shard": 1}


def test_what_else_is_found(hub: Hub) -> None:
    steps = [0, *range(1000, 9000, 1000)]
    wide = {n: ("F32", shape) for n, (_, shape) in SMALL.items()}
    publish(hub, "org/net-seed1", [s for s in steps if s != 5000], SMALL, 1, files={
        1000: {"model.safetensors": checkpoint(wide, 1)},
        2000: {"README.md": "moved"},
        3000: {k: v for k, v in shards(SMALL, 3).items() if "00002" not in k[:11]},
        4000: {"model.safetensors": b"<!DOCTYPE html>" + bytes(20_000)},
        6000: {"pytorch_model.bin": b"PK\x03\x04" + bytes(checkpoint(SMALL, 0).size - 4)},
    })  # fmt: skip
    publish(hub, "org/net-seed2", steps[1:], SMALL, 2)
    publish(hub, "org/net-seed3", steps, SMALL, 3)
    result = audited("hf://org/net-seed{1..3}")
    found = {(x.kind, x.revisions[0]) for x in result.findings}
    assert found == {
        ("size", "org/net-seed1@step1000"), ("no weights", "org/net-seed1@step2000"),
        ("missing shard", "org/net-seed1@step3000"), ("header", "org/net-seed1@step4000"),
        ("missing steps", "org/net-seed1"), ("missing steps", "org/net-seed2"),
    }  # fmt: skip
    texts = {x.revisions[0]: x.text for x in result.findings}
    assert texts["org/net-seed1"] == "no step 5000, among 8 from 0 to 8,000"
    assert texts["org/net-seed2"] == "no step 0, among 8 from 1,000 to 8,000"
    assert all(x.compare for x in result.findings)
    assert [x.revisions[0] for x in result.notes] == ["org/net-seed1@step6000"]


def test_steps_of_a_series() -> None:
    assert expected_steps(STEPS) == STEPS
    for gone in ([4], [256], [1000], [2000], [50_000], [3000, 5000], [3000, 4000, 5000], [64, 142_000]):
        assert set(expected_steps(set(STEPS) - set(gone))) - (set(STEPS) - set(gone)) == set(gone)
    for plain in ([], [5], [1, 2], [20_000, 40_000, 60_000, 100_000], list(range(0, 100, 10)), [1, 10, 100, 1000]):
        assert expected_steps(plain) == plain


@pytest.mark.slow
def test_an_audit_goes_on_where_it_was_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "org/net", STEPS[:40], SMALL)
    hub.log.clear()
    read = revisions.WeightFile.read_header
    count = iter(range(100))

    def stop(self: Any, *arguments: Any) -> Any:
        if next(count) > 20:
            raise KeyboardInterrupt
        return read(self, *arguments)

    with monkeypatch.context() as patches:
        patches.setattr(revisions.WeightFile, "read_header", stop)
        with pytest.raises(KeyboardInterrupt):
            audited("hf://org/net")
    audited("hf://org/net")
    assert hub.log.requests(TREES) == 40
    assert hub.log.requests(HEADERS) == 40


def test_the_command(hub: Hub) -> None:
    steps = [0, 1000, 2000, 3000, 4000]
    publish(hub, "org/net", steps, SMALL, files={3000: {"model.safetensors": checkpoint(SMALL, 2000)}})
    hub.commit("org/net", {"model.safetensors": checkpoint(SMALL, 2000)}, branch="step2000", kind="models")
    result = run("audit", "hf://org/net", "--revisions", "step*")
    assert result.exit_code == 1
    assert "same weights  org/net@step2000, org/net@step3000  2 revisions with the same file, sha256" in result.stdout
    assert "same weights: compare the sha256 of hf://org/net@step2000/model.safetensors and hf://" in result.stdout
    assert "5 revisions of 1 repo: listing …" in result.stderr
    found = values(run("audit", "hf://org/net", "--revisions", "step*", "--format", "json"))
    assert found["faulty_revisions"] == 2
    assert found["findings"][0]["compare"].startswith("the sha256 of hf://org/net@step2000/model.safetensors and hf://")
    clean = run(
        "audit", "hf://org/net", "--revisions", "step?000", "--revisions", "nothing", "--epoch-rule", r"step(\d+)"
    )
    assert clean.exit_code == 1
    assert "Give one folder or address" in run("audit", "a", "b").stderr
    with pytest.raises(UsageError, match="--epoch-rule"):
        audited("hf://org/net", epoch_rule="(")
