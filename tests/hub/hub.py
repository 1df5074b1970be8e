"""The Hub: what it holds, and what a test may set up, break and look at without the client."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from .app import serve
from .blobs import Blobs
from .faults import Faults
from .log import Exchange, Log
from .repos import File, Repo, pointer, wants_lfs
from .virtual import Virtual, described
from .xet import rebuild

WRITER, READER = "hf_writer", "hf_reader"  # tokens of alice (who may write to zoo/ as well) and of bob


class Hub:
    """A Hub of its own: an ASGI application, and the set-up of tests.

    Attributes:
        url: of the API, http://127.0.0.1:PORT.
        cdn_url: of the CDN, http://localhost:PORT: to a client another host, so a token sent there shows.
        log: one `Exchange` a request.
        faults: what goes wrong; `faults.py` says how to write one.
        latency: seconds before each answer.
        on_request: called with each `Exchange` before it is answered, from the Hub's thread.
        errors: exceptions of the Hub itself: a test that finds any here has found a bug of the Hub.
        xet: whether uploads and downloads go to Xet storage.
        cdn_ttl: seconds that a link to the CDN lives.
        page, part_size: rows of a listing's page, bytes of a part of an LFS upload.
    """

    def __init__(
        self,
        root: str | Path,
        port: int,
        *,
        xet: bool = False,
        latency: float = 0.0,
        cdn_ttl: float = 3600,
        page: int = 1000,
        part_size: int = 5 * 1024 * 1024,
    ) -> None:
        self.root, self.port, self.lock = Path(root).resolve(), port, threading.RLock()
        self.url, self.cdn_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self.tokens, self.groups = {WRITER: "alice", READER: "bob"}, {"alice": ["zoo"]}
        self.latency_default, self.defaults = latency, (xet, cdn_ttl, page, part_size)
        self.log, self.generations = Log(api=self.url), itertools.count()
        self.errors: list[Exception] = []
        self.folder: Path | None = None
        self.wipe()

    async def __call__(self, scope, receive, send) -> None:
        await serve(self, scope, receive, send)

    # ---- between tests ----
    def reset(self) -> None:
        """Empty the log, end all faults and delays; the repos stay."""
        self.latency = self.latency_default
        self.faults = Faults()
        self.on_request: Callable[[Exchange], None] | None = None
        self.log.clear()

    def wipe(self) -> None:
        """Reset, and forget every repo and all content."""
        self.reset()
        self.errors.clear()
        self.xet, self.cdn_ttl, self.page, self.part_size = self.defaults
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        # A new folder each time: hf_xet keeps the databases of the old one open.
        self.folder = self.root / str(next(self.generations))
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs = Blobs(self.folder / "blobs")
        self.links, self.dead_links = itertools.count(1), 0
        self.xet_shards: dict[Path, dict] = {}

    @property
    def faults(self) -> Faults:
        """What goes wrong; a list of dicts may be assigned."""
        return self._faults

    @faults.setter
    def faults(self, faults) -> None:
        self._faults = Faults(faults)

    def expire_links(self) -> None:
        """Kill every link to the CDN that was given out so far."""
        self.dead_links = next(self.links)

    # ---- repos without the client ----
    def create_repo(self, id: str, kind: str = "datasets", *, private=False, gated=False) -> Repo:
        """Make an empty repo, and return it."""
        repo = self.repos[kind, id] = Repo(kind, id, private=private, gated=gated)
        return repo

    def repo(self, id: str, kind: str = "datasets") -> Repo:
        """Return a repo, made if there is none of that name."""
        return self.repos.get((kind, id)) or self.create_repo(id, kind)

    def commit(
        self,
        id: str,
        files: Mapping[str, bytes | str | Path | Virtual | None],
        title: str = "set up",
        *,
        branch: str = "main",
        kind: str = "datasets",
        lfs: bool | None = None,
    ) -> str:
        """Commit files to a repo, made if there is none of that name, and return the commit.

        Args:
            id: "alice/zoo".
            files: content by path; None deletes, a `Path` is copied.
            title: of the commit.
            branch: made from main if there is none of that name.
            kind: "datasets", "models" or "spaces".
            lfs: keep the content outside git (True), in it (False), or as the Hub would.
        """
        with self.lock:
            repo = self.repo(id, kind)
            parent = repo.at(branch if repo.ref(branch) else "main")
            tree = dict(parent.tree)
            for path, content in files.items():
                if content is None:
                    del tree[path]
                    continue
                sha, size = self.blobs.put(content)
                virtual = isinstance(content, Virtual)
                large = virtual or wants_lfs(path, size, self.blobs.read(sha, 0, 512))
                if virtual or (large if lfs is None else lfs):
                    tree[path] = File.large(sha, size)
                else:
                    tree[path] = File.regular(self.blobs.read(sha))
            return repo.commit(repo.ref(branch) or f"refs/heads/{branch}", tree, title, parent=parent.id)

    def add_virtual(
        self,
        id: str,
        path: str,
        size: int,
        read: Callable[[int, int], bytes],
        *,
        branch: str = "main",
        kind: str = "datasets",
    ) -> str:
        """Commit a file whose bytes `read(offset, length)` makes on request, and return the commit."""
        version = len(self.repo(id, kind).commits)
        file = Virtual(size, read, described(f"{kind}/{id}/{path} {size} {version}"))
        return self.commit(id, {path: file}, branch=branch, kind=kind)

    def branch(self, id: str, name: str, at: str = "main", kind: str = "datasets") -> None:
        """Make or move a branch."""
        repo = self.repo(id, kind)
        repo.refs[f"refs/heads/{name}"] = repo.at(at).id

    def tag(self, id: str, name: str, at: str = "main", kind: str = "datasets") -> None:
        """Make or move a tag."""
        repo = self.repo(id, kind)
        repo.refs[f"refs/tags/{name}"] = repo.at(at).id

    def files(self, id: str, revision: str = "main", kind: str = "datasets") -> dict[str, File]:
        """Return the files of a revision by path."""
        return dict(self.repo(id, kind).at(revision).tree)

    def read(self, id: str, path: str, revision: str = "main", kind: str = "datasets") -> bytes:
        """Return a file's content."""
        return self.blobs.read(self.content(self.files(id, revision, kind)[path].sha))

    def pointer(self, id: str, path: str, revision: str = "main", kind: str = "datasets") -> bytes:
        """Return the LFS pointer of a file."""
        file = self.files(id, revision, kind)[path]
        return pointer(file.sha, file.size)

    def content(self, sha: str) -> str:
        """See to it that content which only Xet storage has can be read here, and return the sha256."""
        if not self.blobs.has(sha):
            rebuild(self, sha)
        return sha

    def namespaces(self, user: str | None) -> set[str]:
        """Return where a user may write."""
        return {user, *self.groups.get(user, [])} if user else set()
