"""Copies of members: a source of its own in a folder, whatever source and layout the members come from.

Shards are written first, each under its name only once it is whole, then the description, the manifest last. So what
was in the folder stays readable, and a copy that was killed goes on with the shards that are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpoints_zoo.formats import catalog, manifest, member_bytes, safetensors
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.formats.selection import keys_of
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.finding import Found
from checkpoints_zoo.sources.planning import Plan, plan
from checkpoints_zoo.sources.shards import Shard, finished, like, place, written
from checkpoints_zoo.sources.source import Source

__all__ = ["Plan", "copy", "plan"]

_SHARD = re.compile(r"[0-9]{5,}-[0-9a-f]{8}\.safetensors")


def copy(found: Found, dest: Path, say: Callable[[str], object] = lambda text: None) -> Found:
    """Write members into a folder as a source of its own, or add them to the one there; return them as they lie there.

    Args:
        found: the members; rows without weights are taken over as they are.
        dest: the folder; other collections in it stay.
        say: told of each shard.

    Raises:
        UsageError, FormatError: see `plan`.
        DamagedError: a member whose bytes are not what its row says.
        StorageError: no room, or a folder that can't be written to.
        NetworkError, AccessError, SourceNotFound: the members can't be had.
    """
    name, root = found.description.name, dest.expanduser().absolute()
    locks = cache.writable("local/copies")  # the folder itself is to hold nothing but the source
    with safetensors.writing_into(root), cache.locked(locks, str(root.resolve() / name)):
        making = plan(found, dest)
        folder = root / "shards" / name
        for left in (*folder.glob(".*.tmp"), *(root / "manifests").glob(f".{name}.*.tmp")):  # by a kill
            left.unlink()
        safetensors.check_room(root, sum(s.nbytes for s in making.shards if not like(folder, s)))
        for shard in making.shards:
            path = finished(folder, shard)
            if path is None:
                locations, now = _located(shard, found, making.target)
                if now is not found:
                    break
                path = written(folder, shard, locations, name)
            place(shard, path.relative_to(root).as_posix())
            say(f"{path}: {len(shard.pieces):,} members")
        else:
            return _closed(making, found)
    return copy(now, dest, say)  # an archive was found irregular: its members lie elsewhere than was thought


def _closed(making: Plan, found: Found) -> Found:
    """Write description and manifest, remove shards that were replaced, by a killed copy too; return the members."""
    target, name = making.target, making.description.name
    table = manifest.table(making.rows)
    manifest.validate(table, making.description, target.manifest_path(name))
    catalog.write_json(making.description.to_json(), target.description_path(name))
    manifest.write(table, target.manifest_path(name))
    named = {row["path"] for row in making.rows}
    for path in (target.root / "shards" / name).glob("*") if making.adds else ():
        if _SHARD.fullmatch(path.name) and path.relative_to(target.root).as_posix() not in named:
            path.unlink()
    description, rows = target.read(name)
    at = {key: i for i, key in enumerate(keys_of(rows))}
    chosen = manifest.take(rows, [at[key] for key in keys_of(found.rows)])
    return Found(target, target.commit(name), description, chosen, len(set(rows.column("member").to_pylist())))


def _located(shard: Shard, found: Found, target: Source) -> tuple[list[Location], Found]:
    """Find the bytes of a shard's members, bringing them here; return where they lie, and the members as they are now.

    Reading an archive can show that its members lie elsewhere than was thought. Then these are others than `found`.
    """
    new = [p.at for p in shard.pieces if p.at is not None]
    there = iter(found.source.locate(found.description, manifest.take(found.rows, new)))
    rows = found.source.renewed(found.description.name, found.rows)
    if rows is not found.rows:
        name = found.description.name
        return [], replace(found, description=found.source.read(name)[0], commit=found.source.commit(name), rows=rows)
    old = manifest.table([p.row for p in shard.pieces if p.at is None])
    here = iter(target.locate(target.read(found.description.name)[0], old) if old.num_rows else [])
    locations = [next(here if p.at is None else there) for p in shard.pieces]
    member_bytes.check_against_files(locations)
    return locations, found
