"""The repo as it is: its head, the files there, tags, pull requests; and what this login may do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoints_zoo.errors import AccessError, FormatError, NetworkError, UsageError, ZooError
from checkpoints_zoo.publishing.folder import File
from checkpoints_zoo.sources.hub import (
    LOGIN,
    RETRIED_STATUSES,
    SCHEME,
    TRY_AGAIN,
    Repo,
    client_info,
    host,
    retry_patiently,
    translate_error,
    translated_errors,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
ASKED = 500  # paths a request
T = TypeVar("T")


@dataclass(frozen=True)
class There:
    """A file of the repo: its size, the name that git gives to it, and of a large one the sha256 of its content."""

    size: int
    oid: str
    sha256: str | None

    def holds(self, file: File) -> bool:
        """Say whether the file has this content."""
        if self.sha256 is not None:
            return (self.size, self.sha256) == (file.size, file.sha256)
        return self.size == file.size and self.oid == file.git()


Tree = Mapping[str, There]


@dataclass(frozen=True)
class Branch:
    """A branch as it was seen.

    Args:
        name: "main", or "refs/pr/3".
        head: its commit, "" where there is no repo yet.
        tree: the files at that commit.
        private: whether only few may read it.
    """

    name: str
    head: str
    tree: Tree = field(repr=False)
    private: bool = False

    def has(self, file: File) -> bool:
        """Say whether a file is there with its content."""
        return file.inside in self.tree and self.tree[file.inside].holds(file)


@dataclass(frozen=True)
class Remote:
    """A data set repo of the Hub, asked through the client.

    Args:
        id: "org/name".
    """

    id: str

    @property
    def label(self) -> str:
        return f"{SCHEME}datasets/{self.id}"

    @cached_property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(**client_info())

    def ask(self, what: str, call: Callable[[], T], to: str = "read") -> T:
        """Call the client, again where the answer is one that passes; return what it returns.

        Raises:
            SourceNotFound, AccessError, NetworkError: no answer, or one that says no.
        """
        with sending(self.label, what, to):
            return retry_patiently(call, RETRIED_STATUSES)

    def branch(self, name: str = MAIN) -> Branch | None:
        """Look at a branch; return what is there now, None where there is no such repo."""
        from huggingface_hub.errors import RepositoryNotFoundError

        def look() -> Any:
            try:
                return self.api.repo_info(self.id, revision=name, repo_type="dataset")
            except RepositoryNotFoundError:
                return None

        about = self.ask(f"revision {name!r} of {self.label}", look)
        if about is None:
            return None
        return Branch(name, about.sha, self.tree(about.sha), bool(about.private))

    def url(self, branch: str) -> str:
        """Return the address of the page of a branch."""
        number = branch.removeprefix("refs/pr/")
        return f"{self.api.endpoint}/datasets/{self.id}{'' if number == branch else f'/discussions/{number}'}"

    def tree(self, commit: str) -> dict[str, There]:
        """List the files at a commit; return them by path."""

        def look() -> list[Any]:
            return list(self.api.list_repo_tree(self.id, recursive=True, revision=commit, repo_type="dataset"))

        return _by_path(self.ask(f"files of {self.label}", look))

    def some(self, repo: Repo, paths: list[str]) -> dict[str, There]:
        """Look some files of another repo up; return those that are there, by path."""
        found: list[Any] = []
        for at in range(0, len(paths), ASKED):
            part = paths[at : at + ASKED]

            def look(part: list[str] = part) -> list[Any]:
                return list(self.api.get_paths_info(repo.id, part, revision=repo.commit, repo_type="dataset"))

            found += self.ask(f"files of {repo}", look)
        return _by_path(found)

    def tags(self) -> tuple[dict[str, str], set[str]]:
        """Return the commit of each tag, and the names of the branches."""
        refs = self.ask(f"tags of {self.label}", lambda: self.api.list_repo_refs(self.id, repo_type="dataset"))
        return {tag.name: tag.target_commit for tag in refs.tags}, {branch.name for branch in refs.branches}

    def check_may_write(self, exists: bool) -> None:
        """Check that this login may write to the repo, or make it.

        Raises:
            AccessError: it may not.
        """
        what = f"publishing to {self.label}"
        if exists:
            self.ask(what, lambda: self.api.auth_check(self.id, write=True, repo_type="dataset"), "write")
            return
        names = self.names()
        if self.id.split("/")[0] not in names:
            raise AccessError(
                what,
                expected=f"one of the places that this login may write to: {', '.join(names)}",
                found=self.id.split("/")[0],
                do="Check the repo's name, or log in as another user",
            )

    def names(self) -> list[str]:
        """Return the names of the user and of their organisations."""
        me = self.ask(f"the login at {host()}", self.api.whoami, "write")
        return [me["name"], *(org["name"] for org in me.get("orgs", []))]

    def pull(self, title: str) -> Branch | None:
        """Find an open pull request of this user with that title; return its branch as it is, None without one."""
        me = self.names()[0]
        found = self.ask(
            f"pull requests of {self.label}",
            lambda: list(self.api.get_repo_discussions(self.id, discussion_type="pull_request", repo_type="dataset")),
        )
        for one in found:
            if one.title == title and one.author == me and one.status in ("open", "draft"):
                return self.branch(f"refs/pr/{one.num}")
        return None


def _by_path(rows: Iterable[Any]) -> dict[str, There]:
    from huggingface_hub.hf_api import RepoFile

    files = (row for row in rows if isinstance(row, RepoFile))
    return {f.path: There(f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in files}


def check_login(label: str) -> None:
    """Check, without asking the Hub, that it may be asked and that there is a login.

    Raises:
        NetworkError: offline.
        AccessError: nobody is logged in.
    """
    from huggingface_hub import get_token

    check_online(label)
    if get_token() is None:
        raise AccessError(f"publishing to {label}", expected="a login that may write", found="none", do=f"L{LOGIN[1:]}")


def check_online(label: str) -> None:
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        raise NetworkError(
            f"publishing to {label}", expected=f"a way to {host()}", found="HF_HUB_OFFLINE set", do="Unset it"
        )


def parse(repo: str) -> Remote:
    """Read the name of a repo, "org/name" or its address; return the repo, which need not exist.

    Raises:
        UsageError: another form.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    id = repo.removeprefix(f"{SCHEME}datasets/")
    try:
        validate_repo_id(id)
        if id.count("/") == 1:
            return Remote(id)
        found = f"{repo!r}"
    except HFValidationError as error:
        found = f"{repo!r}: {error}"
    raise UsageError("repo", expected="ORG/NAME of a data set repo", found=found[:200])


@contextmanager
def sending(label: str, what: str, to: str = "write") -> Iterator[None]:
    """Turn the client's errors of an upload into ours.

    Args:
        label: of the repo.
        what: is sent.
        to: what permission it takes.
    """
    try:
        with translated_errors(label, what, to):
            yield
    except ZooError:
        raise
    except RuntimeError as error:  # of one file: the client wraps it, and hf_xet has no class for its own
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        known = translate_error(cause, label, what, to)
        if known is not cause:
            raise known from error
        raise NetworkError(what, expected=f"{host()} to take it", found=str(cause)[:300], do=TRY_AGAIN) from error
    except ValueError as error:
        text = str(error)
        if text.startswith("Invalid metadata"):
            problem = " ".join(text.split())
            raise FormatError(f"README.md for {label}", expected="YAML that the Hub takes", found=problem) from error
        raise NetworkError(what, expected=f"an answer from {host()}", found=text[:300], do=TRY_AGAIN) from error
