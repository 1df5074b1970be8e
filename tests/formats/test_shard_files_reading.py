"""Members' bytes in pieces: neighbours together, through one buffer, never more memory than the file can fill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location, group_adjacent, hash_members
from tests.support.scenarios import build, hash_of, load, raw


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1] * 7), (2 * 14_632, [2, 1, 2, 1, 1]), (3 * 14_632, [3, 3, 1]), (10**9, [3, 3, 1])]
)
def test_neighbours_of_one_file_are_read_together(tmp_path: Path, most: int, sizes: list[int]) -> None:
    built = build(tmp_path, members=range(7), per_shard=3)
    locations = load(built)._locations()
    assert [len(g) for g in group_adjacent(locations, most)] == sizes
    assert [x for g in group_adjacent(locations, most) for x in g] == locations
    assert [len(g) for g in group_adjacent(locations[::-1], most)] == [1] * 7
    seen = [bytes(piece) for _, piece in shard_files.read_members(locations, most)]
    wanted = [b"".join(raw(t) for t in built.states[m, 40].values()) for m in range(7)]
    assert b"".join(seen) == b"".join(wanted)
    assert [len(s) // 14_632 for s in seen] == sizes


def test_hashes(tmp_path: Path) -> None:
    built = build(tmp_path, "mlp", range(5), weights=torch.float16, per_shard=2)
    locations = load(built)._locations()
    wanted = [hash_of(built.states[m, 40]) for m in range(5)]
    assert hash_members(locations) == wanted
    assert hash_members(locations[::-1]) == wanted[::-1]
    assert hash_members([]) == []


def test_hashing_a_member_of_terabytes_asks_for_no_memory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(5000))
    layout = Layout.of([("a", "F32", (2**40,))])
    with pytest.raises(DamagedError) as caught:
        hash_members([Location(3, "000003/", tmp_path / "f", 4096, layout)])
    assert str(caught.value) == (
        f"file {tmp_path / 'f'}: expected 4,398,046,515,200 bytes or more; found 5,000. Get the file again."
    )
