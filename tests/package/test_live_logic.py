"""The script that looks up assumptions on the true Hub, run against a repo laid out like upstream's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import Hub
from tests.live.assumptions import Spent, Traffic, lines
from tests.sources.test_archived_collections import COUNT, REPO, forget, optunet, path_of, regular
from tests.support.image_sets import published_images

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def upstream(hub: Hub) -> Hub:
    forget()
    files = {path_of(first): regular(first) for first in (0, COUNT)}
    # Of another collection an archive whose second one starts again at 0, and a gzipped one.
    ten = {f"models/tiny-imagenet-resnet18/tiny-imagenet-resnet18-{a}.tgz": regular(0) for a in ("0-1023", "1024-2047")}
    hub.commit(REPO, {**files, **ten, "models/mnist-optunet/mnist-optunet-0-8191.tgz": optunet()[0]}, lfs=True)
    published_images(hub, "mnist")
    published_images(hub, "cifar100")
    return hub


@pytest.mark.slow
def test_each_assumption_gets_a_line(upstream: Hub) -> None:
    traffic = Traffic()
    found = {line.assumption: line for line in lines(traffic)}
    assert len(found) > 40
    verdicts = {a.replace("resnet18-cifar100: ", ""): (x.holds, x.found) for a, x in found.items() if "cifar100" in a}
    assert verdicts["9 archives in its folder"] == (False, f"{path_of(0)}, {path_of(COUNT)}")
    assert verdicts["each is a raw tar"] == (True, "tar, tar")
    assert verdicts["each has about 23.00 GB"][0]
    assert verdicts["signed links lead to another host than the Hub's"] == (
        True,
        f"bytes come from {upstream.cdn_url[7:]}",
    )
    assert verdicts["the ETag is the sha256 of the file"][0]
    assert verdicts["it has 1,024 members"] == (True, "1024")
    assert verdicts["they are called <archive>/version_<i>.safetensors"][0]
    assert verdicts["their numbers start at 0, none is missing"] == (True, "0 to 1023, first [0, 1, 10, 100]")
    assert verdicts["the second archive goes on at 1024"] == (True, "1024 to 2047")
    assert verdicts["everything is float16"] == (True, "F16")
    assert verdicts["counters are stored, as float16"][0]
    assert verdicts["the net is the catalog's"][0]
    assert verdicts["a member's accuracy is above 0.6"][0] is None  # noise for weights gives no finite logits
    assert found["optunet-mnist: a member's accuracy is above 0.6"].holds is False
    assert verdicts["cifar100: columns and class order of uoft-cs/cifar100 are ours"][0]
    assert found["optunet-mnist: each is a gzipped tar"].holds
    assert found["resnet18-tiny-imagenet: they are called <archive>/version_<i>.safetensors"].holds is False
    assert found["resnet18-tiny-imagenet: the second archive goes on at 1024"].holds is False
    assert found["resnet18-tiny-imagenet: the ETag is the sha256 of the file"].holds is False
    assert found["resnet18-cifar10: everything is float16"].holds is None  # it has no archives there
    assert found["cifar10: columns and class order of uoft-cs/cifar10 are ours"].holds is None
    assert sum(row.bytes for row in upstream.log.select("_cdn")) < traffic.spent * 1.05 + 10**6
    assert traffic.spent < 100_000_000


def test_the_limit_holds(upstream: Hub) -> None:
    traffic = Traffic(limit=30_000)
    assert any(line.holds is None and "more than the" in line.found for line in lines(traffic))
    assert traffic.spent <= 30_000
    with pytest.raises(Spent, match="10 bytes more than the 5 left"):
        Traffic(limit=5).spend(10)


@pytest.mark.slow
def test_it_runs_only_when_told_to() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.live"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "set ZOO_LIVE=1: this talks to the true Hub, and moves up to 200 MB\n"
