"""Commits, trees and refs of a repo, in memory."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime

from .answers import Refusal

LFS_SUFFIXES = (
    *(".safetensors", ".parquet", ".arrow", ".npz", ".npy", ".bin", ".pt", ".ckpt", ".h5", ".png", ".jpg"),
    *(".tar", ".tgz", ".gz", ".zst", ".zip"),
)
REGULAR_MAX = 10 * 1024 * 1024
serial = itertools.count()


def now() -> str:
    """Return the time as the Hub writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def git_oid(content: bytes) -> str:
    """Return the name git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def wants_lfs(path: str, size: int, sample: bytes) -> bool:
    """Say whether the Hub would keep a new file outside git."""
    return path.endswith(LFS_SUFFIXES) or size > REGULAR_MAX or b"\0" in sample


@dataclass(frozen=True)
class File:
    """A file of a tree: its git name, the sha256 and size of its content, its Xet name if it has one."""

    oid: str
    sha: str
    size: int
    lfs: bool
    xet: str | None = None

    @classmethod
    def regular(cls, content: bytes) -> File:
        """Return the file that git keeps itself."""
        return cls(git_oid(content), hashlib.sha256(content).hexdigest(), len(content), False)

    @classmethod
    def large(cls, sha: str, size: int, xet: str | None = None) -> File:
        """Return the file of which git keeps a pointer."""
        return cls(git_oid(pointer(sha, size)), sha, size, True, xet)


def pointer(sha: str, size: int) -> bytes:
    """Return the text that git keeps in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()


@dataclass(frozen=True)
class Commit:
    """A tree, and how it came to be."""

    id: str
    parent: str | None
    title: str
    message: str
    tree: dict[str, File]
    date: str = field(default_factory=now)

    def short(self) -> dict:
        """Return what a listing says of it."""
        return {"id": self.id, "title": self.title, "date": self.date}


class Repo:
    """A repo of one kind ("datasets", "models", "spaces")."""

    def __init__(self, kind: str, id: str, *, private: bool = False, gated: bool = False) -> None:
        self.kind, self.id, self.private, self.gated = kind, id, private, gated
        self.created = now()
        self.commits: dict[str, Commit] = {}
        self.pulls: list[str] = []  # titles
        self.pull_authors: list[str] = []
        self.pull_status: dict[int, str] = {}  # "closed" or "merged"; those not named are open
        self.allowed: set[str] = set()  # users who may read it though it is gated
        self.refs: dict[str, str] = {}  # full name -> commit
        self.commit("refs/heads/main", {}, "initial commit")

    @property
    def owner(self) -> str:
        """The user or organisation before the slash."""
        return self.id.split("/")[0]

    @property
    def web(self) -> str:
        """The path of its pages."""
        return f"/{self.id}" if self.kind == "models" else f"/{self.kind}/{self.id}"

    def commit(self, ref: str, tree: dict[str, File], title: str, message: str = "", parent: str | None = None) -> str:
        """Make a commit, point the ref at it, and return its id."""
        known = (self.kind, self.id, title, parent, sorted((path, file.oid) for path, file in tree.items()))
        id = hashlib.sha1(repr((known, next(serial))).encode()).hexdigest()
        self.commits[id] = Commit(id, parent, title, message, tree)
        self.refs[ref] = id
        return id

    def ref(self, revision: str) -> str | None:
        """Return the full name of a branch, tag or pull request; None if there is none of that name."""
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in self.refs:
                return name
        return None

    def at(self, revision: str) -> Commit:
        """Return the commit of a revision. Raises: Refusal: 404, there is none."""
        name = self.ref(revision)
        if name:
            return self.commits[self.refs[name]]
        if len(revision) >= 7:
            for id, commit in self.commits.items():
                if id.startswith(revision):
                    return commit
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def set_ref(self, name: str, revision: str) -> None:
        """Make a ref. Raises: Refusal: 409, it exists."""
        commit = self.at(revision).id
        if name in self.refs:
            raise Refusal(409, "", f"Reference already exists: {name}")
        self.refs[name] = commit

    def open_pull(self, title: str, author: str = "") -> int:
        """Open a pull request that starts at main, and return its number."""
        self.pulls.append(title)
        self.pull_authors.append(author or self.owner)
        self.refs[f"refs/pr/{len(self.pulls)}"] = self.refs["refs/heads/main"]
        return len(self.pulls)
