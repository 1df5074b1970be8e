"""Files of torch.save that are more, or other, than they look."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from checkpoints_zoo.errors import DamagedError, TooLargeError
from checkpoints_zoo.interop.ingest import NetSpec
from tests.interop.test_from_checkpoints import keep, mlps, source_of
from tests.support.originals import imported


def test_archives_that_two_readers_read_in_two_ways(tmp_path: Path) -> None:
    folder = keep(tmp_path / "in", mlps(2))
    path = folder / "seed-1.pt"
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 6] = 99  # the version that it needs: torch does not look at it
    path.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"can't be listed \(NotImplementedError: zip file version 9\.9\)"):
        source_of(folder, tmp_path / "out")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(10**5))
    raw = bytearray(packed.getvalue())
    first, end = raw.index(b"PK\x01\x02"), raw.index(b"PK\x05\x06")
    harmless = raw[first:end]
    harmless[10:12] = bytes(2)  # stored, not deflated
    harmless[24:28] = harmless[20:24]
    path.write_bytes(raw[:end] + harmless + raw[end:])  # zipfile's list, after the one whose offset the end names
    with zipfile.ZipFile(path) as file:
        assert [one.compress_type for one in file.infolist()] == [zipfile.ZIP_STORED]
    with pytest.raises(DamagedError, match=r"a zip archive with one list of its files, at its end; found another"):
        source_of(folder, tmp_path / "out")


def test_few_bytes_shown_as_many_in_a_net_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    torch.save({"w": torch.ones(1).expand(2**20)}, folder / "net1.pt")
    monkeypatch.setattr("checkpoints_zoo.networks.device.free_bytes", lambda device: 2**22 - 1)
    with pytest.raises(TooLargeError, match=r"expected at most 4,194,303 bytes of tensors, .*; found 4,194,304\."):
        imported([folder], "mine", net=NetSpec(custom_name="mine"), reshard=tmp_path / "out")
