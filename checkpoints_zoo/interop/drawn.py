"""Draws on their way into shards of a source, and their rows in its manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats import manifest, safetensors
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.formats.safetensors import prefix
from checkpoints_zoo.interop.ingest import filling, known, pickles, resharding
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.archives import Head
from checkpoints_zoo.sources.source import Source

Row = dict[str, Any]
INDEPENDENT = "independent"


@dataclass
class Drawn:
    """Draws on their way into shards: those of one shard lie aside until it is full.

    Args:
        target: the source.
        name: of the collection.
        method: of the draws.
    """

    target: Source
    name: str
    method: str
    head: Head | None = None
    rows: list[Row] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        manifest_there = self.target.manifest_path(self.name).is_file()
        self.there: list[Row] = self.target.read(self.name)[1].to_pylist() if manifest_there else []
        self.aside = resharding.aside(self.target.root, self.name)
        self.waiting = 0
        self.spool: IO[bytes] | None = None

    def begin(self, head: Head, counters: Sequence[str], architecture: str) -> None:
        """Lay out the draws as the first one is."""
        self.head = head
        tensors = ((n, dtype, shape, n, shape) for n, dtype, shape in head.tensors)
        self.stored = Layout.of_stored(tensors, counters, 0)
        self.layout = safetensors.sharded(self.stored)
        self.key = archives.layout_key(architecture, self.layout)
        self.layouts[self.key] = self.layout
        self.per_shard = safetensors.members_per_shard(self.layout)
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.with_name(f"{self.name}.json").unlink(missing_ok=True)  # of an import that never came to an end
        self.aside.mkdir(parents=True)

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Take a draw.

        Raises:
            LayoutError: other dtypes than those before.
            UsageError: another draw than the one that is there already.
        """
        at = len(self.rows)
        if (head := pickles.head_of(state)) != self.head and self.head:
            dtypes = zip(head.tensors, self.head.tensors, strict=True)
            name, found, expected = next((n, one, other) for (n, one, _), (_, other, _) in dtypes if one != other)
            raise LayoutError(f"tensor {name!r} of draw {at}", expected=f"{expected}, as in the first", found=found,
                              tensor=name)  # fmt: skip
        raw = pickles.bytes_of(state)
        row: Row = {"member": at, "epoch": 0, "final": True, "status": "ok", "method": self.method, "sha256": None}
        filling.judge(row, Location(at, prefix(at), self.aside, 0, self.stored), raw)
        if at < len(self.there) and self.there[at]["sha256"] != row["sha256"]:
            raise self._others(f"another draw {at}")
        if at < len(self.there) and self.there[at]["status"] == "failed":  # by its logits
            row |= {n: self.there[at][n] for n in ("status", "reason")}
        if self.spool is None:
            safetensors.check_room(self.target.root, self.layout.nbytes)
            self.spool = (self.aside / f"{at:06d}.draws").open("w+b")
        self.spool.write(safetensors.repack(self.stored, raw, self.layout))
        self.rows.append(self._known(at) | row)
        self.waiting += 1
        if len(self.rows) % self.per_shard == 0:
            self._shard()

    def _known(self, at: int) -> Row:
        """Return what the manifest says already of a draw, such as its figures."""
        return {n: v for n, v in self.there[at].items() if n not in known.OWN} if at < len(self.there) else {}

    def _others(self, found: str) -> UsageError:
        return UsageError(
            f"collection {self.name} in folder {self.target.root}",
            expected="none, or the first of these draws",
            found=found,
            do=f"Give another folder or name, or delete manifests/{self.name}.parquet there",
            collection=self.name,
            path=self.target.root,
        )

    def _shard(self) -> None:
        """Write the waiting draws into a shard, and its place into their rows."""
        if self.spool is None:
            return
        some = self.rows[-self.waiting :]
        prefixes = [prefix(row["member"]) for row in some]
        path = self._written(some)
        if path is None:
            self.spool.seek(0)
            members = (self.spool.read(self.layout.nbytes) for _ in some)
            number = some[0]["member"] // self.per_shard
            path = safetensors.stream_shard(
                self.target.root / "shards" / self.name, number, self.layout, prefixes, members
            )
        start = safetensors.first_offset(self.layout, prefixes)
        for at, row in enumerate(some):
            row |= {
                "path": path.relative_to(self.target.root).as_posix(),
                "offset": start + at * self.layout.nbytes,
                "nbytes": self.layout.nbytes,
                "layout": self.key,
                "dtype": self.layout.dtype,
            }
        self.spool.close()
        Path(self.spool.name).unlink()
        self.spool, self.waiting = None, 0

    def _written(self, some: Sequence[Row]) -> Path | None:
        """Return the shard that holds these draws and no others already, None if there is none."""
        first, last = some[0]["member"], some[-1]["member"]
        there = self.there[first : last + 2]
        inside = {(row["path"], row["layout"]) for row in there[: len(some)]}
        if len(there) < len(some) or inside != {(there[0]["path"], self.key)}:
            return None
        if len(there) > len(some) and there[-1]["path"] == there[0]["path"]:
            return None
        path = self.target.root / str(there[0]["path"])
        return path if path.is_file() else None

    def end(self, told: Mapping[int, Row]) -> None:
        """Write the last shard, and what is told into the rows.

        Raises:
            UsageError: there are more draws already.
        """
        if len(self.there) > len(self.rows):
            raise self._others(f"{len(self.there):,} draws, not {len(self.rows):,}")
        self._shard()
        drawn: dict[int | None, int] = {}
        for row in self.rows:
            row |= told[row["member"]]
            if self.method != INDEPENDENT:
                run = row.get("run")
                row["draw"] = drawn[run] = drawn.get(run, -1) + 1
        filling.mark_duplicates(self.rows)

    def tidy(self) -> None:
        """Delete what lies aside, and shards that no row of the manifest names."""
        if self.spool is not None:
            self.spool.close()
        shutil.rmtree(self.aside, ignore_errors=True)
        path = self.target.manifest_path(self.name)
        named = set(manifest.read(path).column("path").to_pylist()) if path.is_file() else set()
        for shard in (self.target.root / "shards" / self.name).glob("*.safetensors"):
            if shard.relative_to(self.target.root).as_posix() not in named:
                shard.unlink()
