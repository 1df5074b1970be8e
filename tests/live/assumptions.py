"""The assumptions, and how each is looked up on the Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import checkpoints_zoo as zoo
from checkpoints_zoo import images, predictions
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.images.data_sets import HUB_SETS
from checkpoints_zoo.sources import archives, fetching, hub, hub_addresses
from checkpoints_zoo.sources.archives import Index, indexing
from checkpoints_zoo.sources.hub_ranges import RemoteFile

BUDGET = 200_000_000
ADDRESS = "hf://datasets/torch-uncertainty/Checkpoints"
LFS_OF_TINY = "0f2cfab770415d56e5ae7f2c4bab50e73e5acebdf24d1495cc5007904714d40a"
# Archives, bytes of one, and whether it is a raw tar, by collection.
EXPECTED = {
    "resnet18-cifar10": (2, 22.9e9, True),
    "resnet18-cifar100": (9, 23.0e9, True),
    "resnet18-tiny-imagenet": (2, 23.1e9, True),
    "resnet20-frn-silu-cifar10": (1, 0.57e9, True),
    "optunet-mnist": (1, 6.73e6, False),
}
ACCURACIES = {  # of one member at least, where class order and preprocessing are right
    "optunet-mnist": 0.6,
    "resnet20-frn-silu-cifar10": 0.8,
    "resnet18-cifar10": 0.9,
    "resnet18-cifar100": 0.6,
    "resnet18-tiny-imagenet": 0.4,
}


class Spent(Exception):
    """The traffic that is allowed would be exceeded."""


@dataclass
class Traffic:
    """Bytes that were moved, and the limit."""

    limit: int = BUDGET
    spent: int = 0

    def spend(self, size: int) -> None:
        """Count bytes that are about to be moved, unless they would be too many."""
        if self.spent + size > self.limit:
            raise Spent(f"{size:,} bytes more than the {self.limit - self.spent:,} left")
        self.spent += size


@dataclass(frozen=True)
class Line:
    """An assumption, whether it holds (None: nobody can tell), and what was found."""

    assumption: str
    holds: bool | None
    found: str

    def __str__(self) -> str:
        verdict = {True: "true", False: "FALSE", None: "unknown"}[self.holds]
        return f"{verdict:8}{self.assumption} — {self.found}"


@dataclass
class Looked:
    """What was found out of a collection's archives on the way."""

    paths: list[str] = field(default_factory=list)
    indexes: dict[str, Index] = field(default_factory=dict)


Check = Callable[[], tuple[bool, object]]


def lines(traffic: Traffic) -> Iterator[Line]:
    """Look all assumptions up; yield a line each."""

    def line(assumption: str, check: Check) -> Line:
        try:
            holds, found = check()
        except (ZooError, Spent, LookupError) as error:
            return Line(assumption, None, str(error) or type(error).__name__)
        return Line(assumption, holds, str(found))

    repo = hub.resolve_address(ADDRESS)
    yield Line("the repo is there, without a login", True, str(repo))
    for name, (count, size, raw) in EXPECTED.items():
        looked = Looked()
        for assumption, check in _of_archives(repo, name, count, size, raw, looked, traffic):
            yield line(f"{name}: {assumption}", check)
    for name in ("mnist", "cifar10", "cifar100", "tiny-imagenet"):
        yield line(
            f"{name}: columns and class order of {HUB_SETS[name].repo} are ours", partial(_images, name, traffic)
        )
    for name, least in ACCURACIES.items():
        yield line(f"{name}: a member's accuracy is above {least}", partial(_accuracy, name, least, traffic))


def _of_archives(
    repo: hub_addresses.Repo, name: str, count: int, size: float, raw: bool, looked: Looked, traffic: Traffic
) -> Iterator[tuple[str, Check]]:
    """Yield what is assumed of a collection's archives, and how to find out; checks use what those before found."""

    def remote(at: int = 0) -> RemoteFile:
        return fetching.remote_file(repo, looked.paths[at])

    def listed() -> tuple[bool, object]:
        listing = catalog.find_listing(name)
        assert listing.archives is not None
        looked.paths = indexing.list_on_hub(repo, listing.archives)
        return len(looked.paths) == count, ", ".join(looked.paths) or f"none in {listing.archives.folder}"

    def sized() -> tuple[bool, object]:
        sizes = [remote(at).size for at in range(len(looked.paths))]
        return all(abs(s - size) < 0.01 * size for s in sizes), f"{sizes} bytes"

    def first_bytes() -> tuple[bool, object]:
        traffic.spend(512 * len(looked.paths))
        first = [remote(at).bytes_at(0, 512) for at in range(len(looked.paths))]
        kinds = ["gzip" if f[:2] == b"\x1f\x8b" else "tar" if f[257:262] == b"ustar" else repr(f[:8]) for f in first]
        return set(kinds) == {"tar" if raw else "gzip"}, ", ".join(kinds)

    def signed() -> tuple[bool, object]:
        link = remote().link
        return not hub_addresses.is_hub_link(link), f"bytes come from {urlsplit(link).netloc}"

    def tagged() -> tuple[bool, object]:
        etag = remote().etag
        right = bool(re.fullmatch("[0-9a-f]{64}", etag))
        return right and (name != "resnet18-tiny-imagenet" or etag == LFS_OF_TINY), f"ETag {etag}"

    def indexed(at: int) -> Index:
        path = looked.paths[at]
        if path not in looked.indexes:

            def read(offset: int, length: int) -> bytes:
                traffic.spend(length)
                return remote(at).bytes_at(offset, length)

            looked.indexes[path] = archives.index_archive(read, remote(at).size, path)
        return looked.indexes[path]

    def regular() -> tuple[bool, object]:
        index = indexed(0)
        read = sum(e.verified for e in index.entries)
        return read < len(
            index.entries
        ), f"{len(index.entries)} members, {read} headers read, {len(index.others)} others"

    def thousand() -> tuple[bool, object]:
        return len(indexed(0).entries) == 1024, len(indexed(0).entries)

    def named() -> tuple[bool, object]:
        names = [e.name for e in indexed(0).entries]
        stem = looked.paths[0].rpartition("/")[2].removesuffix(".tgz")
        right = all(re.fullmatch(rf"{re.escape(stem)}/version_\d+\.safetensors", n) for n in names)
        return right, ", ".join(names[:3]) + ", …"

    def ordered() -> tuple[bool, object]:
        numbers = _numbers(indexed(0))
        return sorted(numbers) == list(range(len(numbers))), f"{min(numbers)} to {max(numbers)}, first {numbers[:4]}"

    def goes_on() -> tuple[bool, object]:
        numbers = _numbers(indexed(1))
        return min(numbers) == 1024, f"{min(numbers)} to {max(numbers)}"

    def halves() -> tuple[bool, object]:
        kinds = {dtype for head in indexed(0).headers for _, dtype, _ in head.tensors}
        return kinds == {"F16"}, ", ".join(sorted(kinds))

    def counted() -> tuple[bool, object]:
        found = {dtype for head in indexed(0).headers for tensor, dtype, _ in head.tensors if is_counter(tensor)}
        return found == {"F16"}, f"num_batches_tracked: {', '.join(sorted(found)) or 'not stored'}"

    def recognised() -> tuple[bool, object]:
        _, _, net = archives.rows_of_archives({looked.paths[0]: indexed(0)})
        return net["architecture"] == catalog.find_listing(name).architecture, net

    yield f"{count} archives in its folder", listed
    yield f"each has about {size / 1e9:.2f} GB", sized
    yield f"each is a {'raw tar' if raw else 'gzipped tar'}", first_bytes
    yield "signed links lead to another host than the Hub's", signed
    yield "the ETag is the sha256 of the file", tagged
    if not raw:
        return
    yield "the first archive is regular: most members are predicted", regular
    yield "it has 1,024 members", thousand
    yield "they are called <archive>/version_<i>.safetensors", named
    yield "their numbers start at 0, none is missing", ordered
    if count > 1:
        yield "the second archive goes on at 1024", goes_on
    yield "everything is float16", halves
    if "frn" not in name:
        yield "counters are stored, as float16", counted
    yield "the net is the catalog's", recognised


def _numbers(index: Index) -> Sequence[int]:
    return [archives.numbers_in(entry.name.rpartition("/")[2])[-1] for entry in index.entries]


def _images(name: str, traffic: Traffic) -> tuple[bool, object]:
    known = HUB_SETS[name]
    repo = hub.resolve_address(f"hf://datasets/{known.repo}")
    split = known.splits["test"]
    paths = [p for p in hub.list_files(repo, known.folder) if p.rpartition("/")[2].startswith(f"{split}-")]
    traffic.spend(sum(fetching.remote_file(repo, path).size for path in paths))
    found = images.load(name)
    return True, f"{len(found)} images of {len(found.classes)} classes"


def _accuracy(name: str, least: float, traffic: Traffic) -> tuple[bool, object]:
    listing = catalog.find_listing(name)
    repo = hub.resolve_address(ADDRESS)
    assert listing.archives is not None
    if not EXPECTED[name][2]:
        traffic.spend(sum(fetching.remote_file(repo, p).size for p in indexing.list_on_hub(repo, listing.archives)))
    else:  # the other archives' indexes too
        traffic.spend(2**20 * len(indexing.list_on_hub(repo, listing.archives)))
    members = zoo.load(name, n=1, source=ADDRESS)
    traffic.spend(members.nbytes if EXPECTED[name][2] else 0)
    inside = images.load(listing.dataset)
    assert inside.labels is not None
    few = slice(0, 1000)
    small = images.ImageData(inside.name, inside.split, inside.images[few], inside.labels[few], inside.classes)
    accuracy = metrics.accuracy(predictions.logits(members, small)[0].softmax(-1), inside.labels[few]).item()
    return accuracy > least, f"member {members.ids[0]}: {accuracy:.3f} on {len(small)} images"
