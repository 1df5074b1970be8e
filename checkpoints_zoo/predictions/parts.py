"""Members' logits laid aside one by one until a set can be written.

OUT/predictions/COLLECTION/SET/.parts/000007@40-SHA256.safetensors    the logits of a member, by the hash of its weights
OUT/predictions/COLLECTION/SET/.parts/begun.json                      the facts that they belong to
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats import catalog, manifest, member_bytes, safetensors
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.formats.safetensors import prefix
from checkpoints_zoo.predictions import prediction_sets as sets
from checkpoints_zoo.predictions.prediction_sets import LOGITS, SCHEMA, Facts, PredictionSet

Key = tuple[int, int]


class Parts:
    """The logits of a set that is being written.

    Args:
        folder: of the set; nobody else writes to it.
        facts: of the set. What was laid aside for other ones is deleted.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder, self.aside = folder, folder / ".parts"
        self.layout: Layout = facts.layouts[LOGITS]
        begun = self.aside / "begun.json"
        values = facts.to_json() | {"version": "", "citation": ""}
        try:
            same = begun.is_file() and catalog.read_json(begun) == values
        except FormatError:
            same = False
        if not same:
            shutil.rmtree(self.aside, ignore_errors=True)
            catalog.write_json(values, begun)
        for path in (*folder.glob(".*.tmp"), *self.aside.glob(".*.tmp")):  # of a run that was killed
            path.unlink()

    def _path(self, key: Key, weights: str) -> Path:
        return self.aside / f"{key[0]:06d}@{key[1]}-{weights}.safetensors"

    def has(self, key: Key, weights: str) -> bool:
        """Say whether a member's logits are here, whole."""
        path = self._path(key, weights)
        try:
            if path.is_file():
                member_bytes.check_against_files([self._location(key, path)])
                return True
        except DamagedError:  # computed again
            path.unlink()
        return False

    def _location(self, key: Key, path: Path) -> Location:
        return Location(key[0], "", path, safetensors.first_offset(self.layout, [""]), self.layout)

    def keep(self, key: Key, weights: str, raw: safetensors.Bytes) -> None:
        """Lay a member's logits aside, by rename."""
        written = safetensors.write_shard(self.aside / ".new", 0, self.layout, [("", raw)])
        written.replace(self._path(key, weights))

    def finish(
        self,
        before: PredictionSet | None,
        new: Sequence[tuple[Key, bool]],
        weights: Mapping[Key, str],
        facts: Callable[[pa.Table], Facts],
    ) -> None:
        """Write shards of what was laid aside, and after each the manifest; what was there before stays as it is.

        Args:
            before: the set as it was, None for none.
            new: (member, epoch) and whether it is final, in order.
            weights: the hash of each member's weights.
            facts: of the set with these rows.
        """
        rows = [] if before is None else before.rows.to_pylist()
        number = 1 + max((int(Path(row["path"]).name[:5]) for row in rows), default=-1)
        for path in self.folder.glob("[0-9]*.safetensors"):  # whose rows a kill has kept from being written
            if int(path.name[:5]) >= number:
                path.unlink()
        size = safetensors.members_per_shard(self.layout)
        for at in range(0, len(new), size):
            some = new[at : at + size]
            rows += self._shard(number, some, weights)
            number += 1
            table = manifest.table(rows, SCHEMA)
            catalog.write_json(facts(table).to_json(), self.folder / sets.DESCRIPTION)
            manifest.write(table, self.folder / sets.TABLE, SCHEMA)
            for key, _ in some:
                self._path(key, weights[key]).unlink()
        if not any(self.aside.glob("*.safetensors")):
            shutil.rmtree(self.aside)

    def _shard(self, number: int, some: Sequence[tuple[Key, bool]], weights: Mapping[Key, str]) -> list[dict[str, Any]]:
        """Write a shard; return its rows."""
        hashes: list[str] = []

        def read() -> Iterator[safetensors.Bytes]:
            for key, _ in some:
                _, raw = next(iter(member_bytes.read([self._location(key, self._path(key, weights[key]))])))
                hashes.append(content_hash(self.layout, raw))
                yield raw

        prefixes = [prefix(member, None if final else epoch) for (member, epoch), final in some]
        path = safetensors.stream_shard(self.folder, number, self.layout, prefixes, read())
        inside = "/".join(path.parts[-4:])
        start, step = safetensors.first_offset(self.layout, prefixes), self.layout.nbytes
        return [
            {
                "member": key[0], "epoch": key[1], "final": final, "status": "ok", "weights_sha256": weights[key],
                "sha256": hashes[i], "path": inside, "offset": start + i * step, "nbytes": step, "layout": LOGITS,
                "dtype": self.layout.dtype,
            }
            for i, (key, final) in enumerate(some)
        ]  # fmt: skip
