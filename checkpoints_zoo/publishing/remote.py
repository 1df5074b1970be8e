"""Read the state of a repo on the Hub: branches, files, tags, pull requests, and the login's permission to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoints_zoo.errors import AccessError, FormatError, NetworkError, UsageError, ZooError
from checkpoints_zoo.publishing.folder import File
from checkpoints_zoo.sources.hub import RETRIED_STATUSES, client_info, retry_patiently
from checkpoints_zoo.sources.hub_addresses import ADDRESS_SCHEME, Repo, host
from checkpoints_zoo.sources.hub_errors import (
    TRY_AGAIN_ADVICE,
    malformed_answers,
    translate_error,
    translated_errors,
)
from checkpoints_zoo.sources.hub_token import LOGIN_ADVICE, has_token

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
PATHS_PER_REQUEST = 500
T = TypeVar("T")


@dataclass(frozen=True)
class FileInRepo:
    """A file of a repo on the Hub: its size in bytes, git's hash, and its sha256 if Git LFS stores it, else None."""

    size: int
    git_hash_in_repo: str
    sha256: str | None

    def holds(self, file: File) -> bool:
        """Return whether this file has the same content as a local file."""
        if self.sha256 is not None:
            return (self.size, self.sha256) == (file.size, file.sha256)
        return self.size == file.size and self.git_hash_in_repo == file.git_hash()


Tree = Mapping[str, FileInRepo]


@dataclass(frozen=True)
class Branch:
    """The state of a repo's branch at one moment.

    Args:
        name: name of the branch, as "main" or "refs/pr/3".
        head: hash of the newest commit; "" if there is no repo yet.
        tree: files at that commit, by path.
        private: whether the repo is private.
    """

    name: str
    head: str
    tree: Tree = field(repr=False)
    private: bool = False

    def has(self, file: File) -> bool:
        """Return whether the branch has a file of the same path and content."""
        return file.repo_path in self.tree and self.tree[file.repo_path].holds(file)


@dataclass(frozen=True)
class Remote:
    """A data set repo on the Hub, read and written by `huggingface_hub`.

    Args:
        id: name of the repo, "org/name".
    """

    id: str

    @property
    def label(self) -> str:
        return f"{ADDRESS_SCHEME}datasets/{self.id}"

    @cached_property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(**client_info())

    def call(self, subject: str, request: Callable[[], T], permission: str = "read") -> T:
        """Call the Hub, and repeat the call after errors that pass; return its answer.

        Raises:
            SourceNotFound, AccessError, NetworkError: the Hub does not answer or refuses.
        """
        with hub_errors(self.label, subject, permission), malformed_answers(subject):
            return retry_patiently(request, RETRIED_STATUSES)

    def branch(self, name: str = MAIN) -> Branch | None:
        """Return the current state of a branch; None if there is no such repo."""
        from huggingface_hub.errors import RepositoryNotFoundError

        def ask_hub() -> Any:
            try:
                return self.api.repo_info(self.id, revision=name, repo_type="dataset")
            except RepositoryNotFoundError:
                return None

        repo_info = self.call(f"revision {name!r} of {self.label}", ask_hub)
        if repo_info is None:
            return None
        return Branch(name, repo_info.sha, self.tree(repo_info.sha), bool(repo_info.private))

    def url(self, branch_name: str) -> str:
        """Return the address of a branch's web page."""
        is_pull_request = branch_name.startswith("refs/pr/")
        discussion = f"/discussions/{branch_name.removeprefix('refs/pr/')}" if is_pull_request else ""
        return f"{self.api.endpoint}/datasets/{self.id}{discussion}"

    def tree(self, commit: str) -> dict[str, FileInRepo]:
        """Return the files at a commit, by path."""

        def ask_hub() -> list[Any]:
            return list(self.api.list_repo_tree(self.id, recursive=True, revision=commit, repo_type="dataset"))

        return _by_path(self.call(f"files of {self.label}", ask_hub))

    def files_of(self, repo: Repo, paths: list[str]) -> dict[str, FileInRepo]:
        """Look up paths in another repo; return the files that exist, by path."""
        path_infos: list[Any] = []
        for batch_start in range(0, len(paths), PATHS_PER_REQUEST):
            path_batch = paths[batch_start : batch_start + PATHS_PER_REQUEST]

            def ask_hub(part: list[str] = path_batch) -> list[Any]:
                return list(self.api.get_paths_info(repo.id, part, revision=repo.commit, repo_type="dataset"))

            path_infos += self.call(f"files of {repo}", ask_hub)
        return _by_path(path_infos)

    def tags(self) -> tuple[dict[str, str], set[str]]:
        """Return tag -> commit, and the names of the branches."""
        repo_refs = self.call(f"tags of {self.label}", lambda: self.api.list_repo_refs(self.id, repo_type="dataset"))
        return {tag.name: tag.target_commit for tag in repo_refs.tags}, {branch.name for branch in repo_refs.branches}

    def check_may_write(self, repo_exists: bool) -> None:
        """Check that this login may write to the repo, or make it if it does not exist.

        Raises:
            AccessError: the login may not write to the repo, or make it.
        """
        subject = f"publishing to {self.label}"
        if repo_exists:
            self.call(subject, lambda: self.api.auth_check(self.id, write=True, repo_type="dataset"), "write")
            return
        writable_namespaces = self.namespaces()
        if self.id.split("/")[0] not in writable_namespaces:
            raise AccessError(
                subject,
                expected=f"one of the places that this login may write to: {', '.join(writable_namespaces)}",
                found=self.id.split("/")[0],
                do="Check the repo's name, or log in as another user",
            )

    def namespaces(self) -> list[str]:
        """Return the name of the user who is logged in, and the names of the user's organisations."""
        user = self.call(f"the login at {host()}", self.api.whoami, "write")
        return [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]

    def find_pull_request(self, title: str) -> Branch | None:
        """Find an open pull request of this user by its title; return its branch, or None if there is none."""
        user_name = self.namespaces()[0]
        pull_requests = self.call(
            f"pull requests of {self.label}",
            lambda: list(self.api.get_repo_discussions(self.id, discussion_type="pull_request", repo_type="dataset")),
        )
        for pull_request in pull_requests:
            if (
                pull_request.title == title
                and pull_request.author == user_name
                and pull_request.status in ("open", "draft")
            ):
                return self.branch(f"refs/pr/{pull_request.num}")
        return None


def _by_path(tree_entries: Iterable[Any]) -> dict[str, FileInRepo]:
    from huggingface_hub.hf_api import RepoFile

    repo_files = (entry for entry in tree_entries if isinstance(entry, RepoFile))
    return {
        file.path: FileInRepo(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None) for file in repo_files
    }


def check_login(label: str) -> None:
    """Check that offline mode is off and that a user is logged in, without a request to the Hub.

    Raises:
        NetworkError: offline mode is on.
        AccessError: nobody is logged in.
    """
    check_online(label)
    if not has_token():
        raise AccessError(
            f"publishing to {label}", expected="a login that may write", found="none", do=f"L{LOGIN_ADVICE[1:]}"
        )


def check_online(label: str) -> None:
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        raise NetworkError(
            f"publishing to {label}", expected=f"a way to {host()}", found="HF_HUB_OFFLINE set", do="Unset it"
        )


def parse_repo(repo: str) -> Remote:
    """Parse the name of a repo, "org/name" or its address; return the repo, which need not exist.

    Raises:
        UsageError: the name is not ORG/NAME.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    id = repo.removeprefix(f"{ADDRESS_SCHEME}datasets/")
    try:
        validate_repo_id(id)
        if id.count("/") == 1:
            return Remote(id)
        found = f"{repo!r}"
    except HFValidationError as error:
        found = f"{repo!r}: {error}"
    raise UsageError("repo", expected="ORG/NAME of a data set repo", found=found[:200])


@contextmanager
def hub_errors(label: str, subject: str, permission: str = "write") -> Iterator[None]:
    """Turn errors of `huggingface_hub` inside a `with` block into errors of this package.

    Args:
        label: address of the repo.
        subject: name of the repo or file that is read or written, for the error text.
        permission: permission that the call needs, "read" or "write".
    """
    try:
        with translated_errors(label, subject, permission), _readme_errors(label):
            yield
    except ZooError:
        raise
    except RuntimeError as error:  # raised for one file: the client wraps it, and hf_xet has no error class of its own
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        translated_error = translate_error(cause, label, subject, permission)
        if translated_error is not cause:
            raise translated_error from error
        raise NetworkError(
            subject, expected=f"{host()} to take it", found=str(cause)[:300], do=TRY_AGAIN_ADVICE
        ) from error


@contextmanager
def _readme_errors(label: str) -> Iterator[None]:
    """Turn the Hub's refusal of a README.md inside a `with` block into a FormatError."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Invalid metadata"):
            raise
        problem = " ".join(str(error).split())
        raise FormatError(f"README.md for {label}", expected="YAML that the Hub takes", found=problem) from error
