"""A file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints_zoo.formats.disk import replace_file


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with replace_file(path) as file:
        file.write("one")
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(TypeError), replace_file(path) as file:
        file.writelines(["half", None])  # type: ignore[list-item]
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]


def test_errors_are_those_of_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), replace_file(tmp_path / "file" / "a.txt"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), replace_file(tmp_path / "folder"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
