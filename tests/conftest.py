"""What every test needs before anything heavy is imported: no network, no window, no clock."""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.hub.fixtures import hub, hub_server, hub_xet, prepare, waits  # noqa: F401 (fixtures)
from tests.support.web_host import web  # noqa: F401 (a fixture)

HERE = Path(__file__).parent
CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
LIVE = os.environ.get("ZOO_LIVE") == "1"

# Imports make millions of objects, and none of them is garbage.
gc.disable()
if "PYTEST_XDIST_WORKER" in os.environ:
    # To take them all apart at the end takes seconds: the last thing that a process of xdist does is to leave.
    Finalize(None, os._exit, (0,), exitpriority=-1000)

# Each is read once, when its package is imported. Assigned, so that the caller's own settings can't leak in.
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = "1"  # the nets are small: on a busy machine a second thread costs more than it gives
# The tests start many processes, and each would compile again what it imports, for longer than it then runs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
if not LIVE:
    hub_home = tempfile.mkdtemp(prefix="zoo-tests-")
    atexit.register(shutil.rmtree, hub_home, ignore_errors=True)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=hub_home)
    prepare()  # binds a port on loopback, before huggingface_hub reads its address

# A slow machine is no bug: Hypothesis's deadlines are off. CI draws the same examples every time.
settings.register_profile(
    "zoo", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=CI, print_blob=True
)
settings.load_profile("zoo")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite on all cores, with a Hub for each process; files that the caller names run in this process,
    unless the caller gives `-n`."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # Its own workers would start workers, and so on.
    if is_whole and not is_worker and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses, config.option.dist = "logical", "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine can't run: `live` tests without ZOO_LIVE=1, `gpu` tests without a GPU; slow ones first."""
    items[:] = spread(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    without_gpu: bool | None = None
    for item in items:
        if NUMERIC.match(item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""):
            item.add_marker(pytest.mark.numeric)
        if item.get_closest_marker("live") and not LIVE:
            item.add_marker(pytest.mark.skip(reason="ZOO_LIVE=1 is not set"))
        if item.get_closest_marker("gpu"):
            if without_gpu is None:
                import torch

                without_gpu = not torch.cuda.is_available()
            if without_gpu:
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what is imported by now, until Python ends."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton reports as a leak what is never collected.


def spread(tests: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests so that each process, which gets a part of them in order, begins with its part of the slow ones."""
    slow = [test for test in tests if test.get_closest_marker("slow")]
    quick = [test for test in tests if not test.get_closest_marker("slow")]
    parts = []
    for at in range(processes):
        for some in (slow, quick):
            parts += some[at * len(some) // processes : (at + 1) * len(some) // processes]
    return parts


# Whose tests compare numbers that torch's kernels computed.
NUMERIC = re.compile(
    r"(evaluation|methods|networks|populations|symmetry)/|"
    r"(collection/test_equivalence|interop/test_interop|training/test_(init_permutation|loop|population|schedules|training))"
)


def seed(name: str) -> None:
    """Make what draws without a seed a function of a name: of a test or a fixture, whatever ran before it."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Seeding cards that nobody has used yet notes each time where it was asked for, which takes a millisecond.
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(number)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Draw the same in a fixture of a module or session, whichever test is the first to ask for it."""
    shared = fixturedef.scope != "function"
    if shared:
        seed(f"{fixturedef.baseid}::{fixturedef.argname}")
    made = yield
    if shared:
        seed(request.node.nodeid)
    return made


def import_oracle(name: str, *, required: bool) -> ModuleType:
    """Import the package that a test compares with, and return it.

    Args:
        name: dotted module name.
        required: fail where the package is missing; the test is skipped otherwise.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if required:
            pytest.fail(f"the oracle {name} is missing ({error}): a comparison may not be skipped when CI=true")
        pytest.skip(f"the oracle {name} is missing ({error})")


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], ModuleType]:
    """Import an oracle by name, as in `oracle("torchmetrics")`; a missing one fails if CI=true, or skips."""
    return lambda name: import_oracle(name, required=CI)
