"""Nothing waits for ever, and nothing that a machine lacks is a bare error of a library."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import AccessError, DamagedError, FormatError, NetworkError, StorageError, UsageError
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.ensemble import EXECUTIONS, Ensemble
from checkpoints_zoo.networks.modules import build_architecture
from tests.hub import Hub
from tests.support.remote import ADDRESS, published, retry_at_once
from tests.support.scenarios import Built, build

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300  # a hang fails the test; nothing is timed

JOBS = """
import sys
from dataclasses import dataclass
from checkpoints_zoo.workers import Job, Processes
from tests.support.works import squared

@dataclass(frozen=True)
class Long:
    padding: bytes = bytes(200_000)  # more than a pipe holds

    def __call__(self, x, device):
        return x * x

def run(work):
    print(sorted(job.argument for job, _ in Processes(2, say=print).run(work, [Job(str(x), x) for x in range(3)])))
"""


def script(tmp_path: Path, text: str, how: str = "file", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a file, or from standard input; return the process once it has ended."""
    file = tmp_path / "script.py"
    file.write_text(text)
    path = os.pathsep.join(filter(None, (environment.pop("PYTHONPATH", ""), str(ROOT))))
    return subprocess.run(
        [sys.executable, str(file) if how == "file" else "-"], input=None if how == "file" else text,
        env={**os.environ, "PYTHONPATH": path, **environment}, cwd=tmp_path, timeout=TIMEOUT_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_work_of_a_module_needs_no_guard(tmp_path: Path, how: str) -> None:
    """Cases 17 and 27: workers do not import the main script, so that a plain one just works."""
    ended = script(tmp_path, JOBS + "print('top')\nrun(squared)", how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "top\n[0, 1, 2]\n", "")


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_work_of_a_script_without_guard_runs_in_its_process(tmp_path: Path, how: str) -> None:
    """Case 17: workers that died at their start were waited for, if the work had more than 64 KiB."""
    ended = script(tmp_path, JOBS + "print('top')\nrun(Long())", how)
    assert (ended.returncode, ended.stdout) == (0, "top\n[0, 1, 2]\n")
    assert 'UserWarning: main script: expected `if __name__ == "__main__":` around its calls; found ' in ended.stderr
    assert ended.stderr.count("Warning") == 1


def test_work_of_a_script_with_guard_runs_in_workers(tmp_path: Path) -> None:
    ended = script(tmp_path, JOBS + "print('top')\nif __name__ == '__main__':\n    run(Long())")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.replace("top\n", "") == "[0, 1, 2]\n"
    assert ended.stderr == ""


def test_arguments_of_a_script_without_guard(tmp_path: Path) -> None:
    jobs = "[Job('a', Long()), Job('b', b'12')]"
    call = f"print(sorted(length for _, length in Processes(2).run(measured, {jobs})))"
    ended = script(tmp_path, f"{JOBS}from tests.support.works import measured\n{call}")
    assert (ended.returncode, ended.stdout) == (0, "[2, 200000]\n"), ended.stderr
    assert ended.stderr.count("Warning") == 1


def test_a_call_beside_the_guard_is_an_error(tmp_path: Path) -> None:
    ended = script(tmp_path, JOBS + "if __name__ == '__main__':\n    print('main')\nrun(Long())")
    assert ended.returncode == 1
    assert "UsageError: jobs in several processes: found calls at the top of the main script." in ended.stderr


@pytest.mark.parametrize("end", ["raise SystemExit(7)", "raise ImportError('none')"])
def test_a_script_that_can_not_be_imported_is_an_error(tmp_path: Path, end: str) -> None:
    text = JOBS + f"if __name__ == '__main__':\n    run(Long())\nelse:\n    {end}"
    ended = script(tmp_path, text)
    assert ended.returncode == 1
    assert "UsageError: main script: expected a script that workers can import; found " in ended.stderr


@pytest.mark.parametrize(("end", "cause"), [("os._exit(3)", "exit code 3"), ("raise SystemExit(4)", "exit code ")])
def test_workers_that_die_at_their_start_are_an_error(tmp_path: Path, end: str, cause: str) -> None:
    """Case 17: whatever ends them, here Python's own start."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        f"import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: {end}\n"
    )
    text = JOBS + "if __name__ == '__main__':\n    run(Long())"
    ended = script(tmp_path, text, PYTHONPATH=str(tmp_path / "broken"))
    assert ended.returncode == 1
    assert f"WorkerError: a worker process: expected one that starts; found {cause}" in ended.stderr
    assert ended.stdout.count("was ended by") <= 2  # one for each of two workers: no second try


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        return y


class Pair(Normed):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Early(Normed):
    def forward(self, x: Tensor) -> Any:
        return [super().forward(x)]


class Named(Normed):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


class Casting(Normed):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.float())


class Words(nn.Module):
    """Looks its inputs up in a table, which is also its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.table(x.long()).mean(1))


def ensemble_of(build: Callable[[], nn.Module], change: Callable[[str, Tensor], Tensor], **options: Any) -> Ensemble:
    """Make an ensemble of two random members, each of whose tensors is changed first."""
    torch.manual_seed(0)
    states = [{n: change(n, t) for n, t in build().state_dict().items() if not is_counter(n)} for _ in range(2)]
    stacked = {n: torch.stack([state[n] for state in states]) for n in states[0]}
    return Ensemble(build().to("meta").eval(), stacked, range(2), **options)


def same(name: str, tensor: Tensor) -> Tensor:
    return tensor


USABLE = [None, *(execution for execution in EXECUTIONS if execution != "graph")]
IMAGES = torch.linspace(-1, 1, 128).reshape(2, 1, 8, 8)


@pytest.mark.parametrize("execution", USABLE)
@pytest.mark.parametrize(("weights", "statistics"), [("float32", "float64"), ("float64", "float32")])
def test_statistics_of_another_dtype(weights: str, statistics: str, execution: str | None) -> None:
    """Case 18: torch refuses such pairs with a text that nobody can use."""
    dtype = getattr(torch, weights)

    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(getattr(torch, statistics if "running" in name else weights))

    ensemble = ensemble_of(Normed, change, execution=execution)
    logits = ensemble(IMAGES.to(dtype))
    plain = ensemble_of(Normed, lambda _, tensor: tensor.to(dtype), execution="module")(IMAGES.to(dtype))
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ensemble[1](IMAGES.to(dtype)), plain[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("execution", ["loop", "vmap", "module", None])
@pytest.mark.parametrize(("build", "found"), [(Pair, "tuple of 2"), (Early, "list of 1"), (Named, "dict of 1")])
def test_outputs_that_are_not_logits(build: type[nn.Module], found: str, execution: str | None) -> None:
    """Cases 19 and 45: early exits and features beside the logits."""
    with pytest.raises(UsageError) as error:
        ensemble_of(build, same, execution=execution)(IMAGES)
    assert str(error.value) == (
        f"output of {build.__name__}: expected logits, one tensor (batch, class); found a {found}."
        " Wrap the network in a module that returns the logits alone."
    )


@pytest.mark.parametrize("execution", [e for e in USABLE if e != "grouped"])
def test_a_table_of_words_with_tied_output(execution: str | None) -> None:
    """Case 45: random inputs of a trial are no words."""
    words = torch.tensor([[0.0, 6.0, 3.0], [1.0, 1.0, 5.0]])
    ensemble = ensemble_of(Words, same, execution=execution)
    expected = torch.stack([t[words.long()].mean(1) @ t.T for t in ensemble.stacked["head.weight"]])
    torch.testing.assert_close(ensemble(words), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("execution", ["loop", "vmap", "module", None])
def test_a_cast_in_a_net_of_another_dtype(execution: str | None) -> None:
    """Case 45."""
    ensemble = ensemble_of(Casting, lambda _, tensor: tensor.double(), execution=execution)
    with pytest.raises(UsageError, match=r"Casting in torch\.float64: expected a network that computes in the"):
        ensemble(IMAGES.double())


class Extra(Normed):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Extra({"a": 1}), "expected a state dict of dense tensors; found dict under '_extra_state'."),
        (lambda: Extra(None), "expected a state dict of dense tensors; found NoneType under '_extra_state'."),
        (lambda: Extra(0.5), "expected a state dict of dense tensors; found float under '_extra_state'."),
        (lazy, "expected a state dict of dense tensors; found '1.weight' without a shape. Run the module once"),
        (lambda: nn.DataParallel(Normed()), "expected the network itself; found DataParallel. Give its `.module`."),
    ],
)
def test_modules_that_are_no_networks(build: Callable[[], nn.Module], text: str) -> None:
    """Cases 19 and 45, wherever a module comes in."""
    layout = modules.layout_of(Normed().state_dict(), torch.float32)
    for use in (
        lambda: modules.build_skeleton(build, layout, "mine"),
        lambda: zoo.symmetries(build(), IMAGES),
        lambda: zoo.check_equivalence(build(), build(), build(), IMAGES),
        lambda: zoo.load("convnet-digits", n=1, architecture=build).ensemble(),
    ):
        with pytest.raises(UsageError) as error:
            use()
        assert text in str(error.value)


def test_tensors_with_the_negative_bit(tmp_path: Path) -> None:
    """Case 19: the imaginary part of a conjugate is such a tensor."""
    states: list[Mapping[str, Tensor]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = build_architecture("convnet").state_dict()
        states.append(state | {"fc2.bias": torch.complex(torch.zeros(10), state["fc2.bias"]).conj().imag})
    assert states[0]["fc2.bias"].is_neg()
    members = zoo.from_samples(
        states, "convnet", method="hmc", name="mine-hmc", like="convnet-digits", out=tmp_path / "out"
    )
    torch.testing.assert_close(members[1].state_dict()["fc2.bias"], states[1]["fc2.bias"].resolve_neg(), rtol=0, atol=0)


@pytest.mark.slow
def test_compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 21: one warning, and the same logits as without."""
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setattr(config, "fx_graph_cache", False)
    torch._dynamo.reset()
    members = zoo.load("convnet-digits", n=2)
    inputs = members.preprocess(zoo.images.load("digits").images[:3])
    ensemble = members.ensemble(compile=True)
    with pytest.warns(UserWarning, match="torch.compile failed, so the ensemble runs without it: ") as warned:
        logits = ensemble(inputs)
    assert len([w for w in warned if "torch.compile failed" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble(inputs)
    torch.testing.assert_close(logits, members.ensemble()(inputs), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "preprocessing",
    [
        {"size": [10**9, 10**9], "channels": 1},
        {"size": [8, 8], "channels": 10**9},
        {"size": [65_000, 65_000], "channels": 3},
        {"size": [10**30, 1], "channels": 1},
    ],
)
def test_inputs_of_a_description_are_bounded(tmp_path: Path, preprocessing: dict[str, Any]) -> None:
    """Case 23: a description may come from anyone."""
    root = build(tmp_path, members=range(2)).root
    path = root / "manifests" / "tiny.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "preprocessing": {**values["preprocessing"], **preprocessing}}))
    with pytest.raises(FormatError, match="expected inputs of at most 67,108,864 values"):
        zoo.load("tiny", source=root).ensemble()


@pytest.mark.slow
def test_layers_of_a_description_are_bounded() -> None:
    """Case 23: 300,000 of them took a minute."""
    with pytest.raises(UsageError, match="expected a list of at most 1,024 whole numbers in 1-65536; found "):
        build_architecture("mlp", widths=[1] * 300_000)
    assert len(list(build_architecture("mlp", widths=[1] * 1_024).parameters())) == 2 * 1_025


@pytest.fixture
def tiny(hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> Built:
    """Publish twenty small members; retries follow at once."""
    retry_at_once(monkeypatch, waits)
    return published(hub)


@pytest.mark.parametrize("path", ["revision", "manifests/tiny.json", "shards/"])
@pytest.mark.parametrize(
    "fault",
    [
        {"headers": {"Content-Encoding": "gzip"}},
        {"redirect": "http://[::1/x"},
        {"redirect": "http://127.0.0.1:99999999"},
        {"redirect": "http://" + "x" * 300 + ".example"},
        {"redirect": "gopher://127.0.0.1"},
        {"redirect": ""},
    ],
    ids=lambda fault: next(iter(fault)) + str(next(iter(fault.values())))[:20],
)
def test_answers_that_no_client_reads(hub: Hub, tiny: Built, path: str, fault: dict[str, Any]) -> None:
    """Case 22: a false encoding, a circle of redirects, links with a broken host or port."""
    hub.faults.add(path, times=10**6, **fault)
    with pytest.raises((NetworkError, DamagedError, AccessError)):
        zoo.load("tiny", members="1", source=ADDRESS).stack()


@pytest.mark.parametrize("token", ["hf_é", "hf_\x00", "hf_\u202e"])
def test_a_token_that_no_header_takes(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """Case 22."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(AccessError, match=r"^HF_TOKEN, or the stored login: expected a token of plain letters"):
        zoo.load("tiny", members="1", source=ADDRESS)


def test_a_refused_token_has_its_own_advice(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 16, item 6."""
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    hub.faults.add("", status=401, message="Invalid credentials in Authorization header", times=10**6)
    with pytest.raises(AccessError, match=r"the token was refused\. Replace it \(HF_TOKEN, or .*\), or unset it"):
        zoo.load("tiny", members="1", source=ADDRESS)


@pytest.mark.parametrize("offline", [False, True])
def test_a_record_of_a_revision_that_is_no_text(
    hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """Case 22: refs/main of the client's cache."""
    zoo.load("tiny", members="1", source=ADDRESS).stack()
    for path in Path(constants.HF_HUB_CACHE).glob("*/refs/main"):
        path.write_bytes(b"\xff\xfe\x80")
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(NetworkError, match="Load it once online"):
            zoo.load("tiny", members="1", source=ADDRESS)
    else:
        assert zoo.load("tiny", members="1", source=ADDRESS).ids == [1]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
@pytest.mark.parametrize("members", ["1", "0-19"])
def test_a_file_system_without_locks(
    hub: Hub, tiny: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, members: str
) -> None:
    """Case 20: our locks give way with a warning, and the client's own, which do not, are an error that helps."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    collection = zoo.load("tiny", members=members, source=ADDRESS)
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"):  # noqa: PT031
        if members == "1":
            assert collection.stack()
        else:
            with pytest.raises(StorageError, match=r"expected a file system with locks; .* Set HF_HOME"):
                collection.stack()
    with pytest.warns(UserWarning, match="has no locks"), disk.hold_lock(tmp_path / "x" / "lock"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["client", "fsync", "lock"])
def test_a_disk_that_is_full(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch, number: int, where: str) -> None:
    """Case 20: wherever it shows."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    name = {
        "client": "huggingface_hub.file_download.http_get", "fsync": "os.fsync",
        "lock": "huggingface_hub.utils.WeakFileLock",
    }[where]  # fmt: skip
    monkeypatch.setattr(name, refuse)
    with pytest.raises(StorageError, match=r"expected room for .*Free some space, or set HF_HOME"):
        zoo.load("tiny", members="1", source=ADDRESS).stack()
