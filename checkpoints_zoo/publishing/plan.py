"""What a publication will do: which files go up, in how many commits, and which are there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.publishing.folder import SHARDS, File, Folder, Held
from checkpoints_zoo.publishing.remote import Branch, Remote, Tree
from checkpoints_zoo.sources.hub import Repo, resolve

# A commit with this much is a place to go on from; the Hub takes 128 commits an hour.
COMMIT_BYTES = 20_000_000_000
COMMIT_FILES = 100


@dataclass(frozen=True)
class Plan:
    """What will be uploaded, and what not.

    Args:
        repo: its address.
        branch: that the commits go to, as it was seen; without a head where the repo is to be made.
        opens: whether a pull request is opened for them.
        private: whether the repo is made a private one.
        shards: to be uploaded, one group a commit.
        last: the card, descriptions and manifests to be uploaded, all in the last commit.
        there: files that are there already.
        unnamed: shards there that no row names any more; they stay.
        ignored: files of the folder that are not published.
        tag: for the last commit, None without one.
        to_come: checks that a dry run leaves out.
    """

    repo: str
    branch: Branch
    opens: bool
    private: bool
    shards: tuple[tuple[File, ...], ...]
    last: tuple[File, ...]
    there: tuple[File, ...]
    unnamed: tuple[str, ...]
    ignored: tuple[str, ...]
    tag: str | None
    to_come: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[File, ...]:
        """The files to be uploaded."""
        return (*(file for group in self.shards for file in group), *self.last)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def commits(self) -> int:
        return len(self.shards) + bool(self.last)

    def summary(self) -> str:
        """Write the plan in a line; return it."""
        if not self.files:
            return f"{self.repo}: nothing to upload, all {len(self.there)} files are there"
        files, commits = (
            f"{n} {what}{'s' * (n > 1)}" for n, what in ((len(self.files), "file"), (self.commits, "commit"))
        )
        return f"{self.repo}: {files} to upload, {self.bytes:,} bytes in {commits}; {len(self.there)} are there"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: counts, bytes, and the paths."""
        return {
            "repo": self.repo,
            "new": not self.branch.head,
            "private": self.private if not self.branch.head else self.branch.private,
            "branch": "a new pull request" if self.opens else self.branch.name,
            "head": self.branch.head or None,
            "files": len(self.files),
            "bytes": self.bytes,
            "commits": self.commits,
            "tag": self.tag,
            "upload": [file.inside for file in self.files],
            "there": [file.inside for file in self.there],
            "there_bytes": sum(file.size for file in self.there),
            "unnamed": list(self.unnamed),
            "ignored": list(self.ignored),
            "to_come": list(self.to_come),
        }


def parts(files: Iterable[File]) -> Iterator[tuple[File, ...]]:
    """Split files into commits; yield those of each."""
    part: list[File] = []
    for file in files:
        if part and (len(part) >= COMMIT_FILES or sum(f.size for f in part) + file.size > COMMIT_BYTES):
            yield tuple(part)
            part = []
        part.append(file)
    if part:
        yield tuple(part)


def compare(files: Sequence[File], branch: Branch, label: str) -> tuple[list[File], list[File]]:
    """Find out which files are missing from a branch; return those, and those that are there.

    Raises:
        UsageError: a shard of that name is there with other bytes: whoever reads it now would get wrong ones.
    """
    missing: list[File] = []
    there: list[File] = []
    for file in files:
        (there if branch.has(file) else missing).append(file)
    for file in missing:
        if file.inside in branch.tree and file.inside.endswith(SHARDS):
            raise UsageError(
                f"file {file.inside}",
                expected="a name of its own, since readers of the repo go by it",
                found=f"other bytes under that name in {label}",
                do="Rename it here and in the manifest; shards that this package writes have their hash in the name",
                path=file.inside,
            )
    return missing, there


def unnamed(folder: Folder, tree: Tree) -> list[str]:
    """List the shards of the folder's collections in the repo that no row names any more; return their paths."""
    places = tuple(f"shards/{held.name}/" for held in folder.held)
    return sorted(path for path in tree if path.startswith(places) and path not in folder.shards)


def check_rows(folder: Folder, files: Sequence[File], tree: Tree, label: str) -> None:
    """Check that the bytes of every row are in the repo.

    Args:
        folder: with the rows.
        files: the shards on disk.
        tree: the repo's.
        label: of the repo.

    Raises:
        DamagedError: naming a row without its bytes.
    """
    local = {file.inside: file for file in files}
    for held in folder.held:
        if not held.base:
            for path, end, member in _ends(held):
                there = tree.get(path)
                if there is None or there.size < end or not there.holds(local[path]):
                    found = "no such file" if there is None else f"another file of {there.size:,} bytes"
                    raise _without(held, member, path, end, label, found)


def check_base(remote: Remote, held: Held) -> None:
    """Check that the bytes of a collection whose weights lie in another repo are there.

    Raises:
        DamagedError: naming a row without its bytes.
        SourceNotFound, AccessError, NetworkError: the other repo can't be read.
    """
    base: Repo = resolve(held.base)
    tree = remote.some(base, sorted({path for path, _, _ in _ends(held)}))
    for path, end, member in _ends(held):
        if path not in tree or tree[path].size < end:
            found = "no such file" if path not in tree else f"a file of {tree[path].size:,} bytes"
            raise _without(held, member, path, end, str(base), found)


def _ends(held: Held) -> list[tuple[str, int, int]]:
    """Return (path, where its last member's bytes end, that member) of each file that rows name."""
    columns = (held.rows.column(c).to_pylist() for c in ("path", "offset", "nbytes", "member"))
    last: dict[str, tuple[int, int]] = {}
    for path, offset, nbytes, member in zip(*columns, strict=True):
        if path is not None:
            last[path] = max(last.get(path, (0, 0)), (offset + nbytes, member))
    return [(path, *end) for path, end in last.items()]


def _without(held: Held, member: int, path: str, end: int, label: str, found: str) -> DamagedError:
    return DamagedError(
        f"member {member} of {held.name}",
        expected=f"its bytes up to {end:,} in file {path} of {label}",
        found=found,
        do="Its manifest was not published. Publish again; a .gitignore in the repo may keep files out",
        collection=held.name,
        member=member,
        path=path,
    )
