"""Carrying a plan out: shards first, then in one commit all that names them, then the tag.

By `create_commit`, not the client's `upload_folder`: that pins the parent of its first commit only, and a commit of
someone else between two of ours would go unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import DamagedError, NetworkError, UsageError
from checkpoints_zoo.publishing.folder import File, Folder, Say
from checkpoints_zoo.publishing.plan import Plan, check_rows
from checkpoints_zoo.publishing.remote import Branch, Remote, sending
from checkpoints_zoo.sources.hub import patiently


@dataclass(frozen=True)
class Published:
    """What a publication did.

    Args:
        repo: its address.
        commit: that has all of it: 40 hex digits.
        url: of the repo's page, or of the pull request.
        files, bytes: that were uploaded.
        there: files that were there already.
        commits: that were made.
        tag: that names the commit, None without one.
    """

    repo: str
    commit: str
    url: str
    files: int
    bytes: int
    there: int
    commits: int
    tag: str | None


def carry_out(remote: Remote, plan: Plan, folder: Folder, tagged: bool, say: Say) -> Published:
    """Upload what a plan says; return what was done.

    Args:
        remote: the repo.
        plan: made for it.
        folder: with the rows to be checked before the last commit.
        tagged: whether the tag is on the commit already.
        say: told of each commit.

    Raises:
        NetworkError: no answer; or someone else has committed meanwhile.
        AccessError, SourceNotFound: the repo can't be written to.
        DamagedError: a file was changed meanwhile, or the repo does not have what was sent.
    """
    branch, opens = plan.branch, plan.opens
    if not branch.head:
        branch = _made(remote, plan.private)
    title = title_of(folder)
    groups = [*plan.shards, *([plan.last] if plan.last else [])]
    rows = [f for f in (*plan.there, *plan.files) if f.inside in folder.shards]
    for at, files in enumerate(groups, 1):
        last = files is plan.last
        if last:
            check_rows(folder, rows, branch.tree, remote.label)
            _check_same([f for f in plan.there if f.inside in folder.tables()])
        size = sum(file.size for file in files)
        say(f"commit {at} of {len(groups)}: {len(files)} file{'s' * (len(files) > 1)}, {size:,} bytes …")
        name = title if last or opens else f"{title}: weights"
        branch, opens = _commit(remote, branch, name, files, opens), False
    check_rows(folder, rows, branch.tree, remote.label)
    if plan.tag is not None and not tagged:
        _tag(remote, plan.tag, branch.head)
    return Published(
        plan.repo, branch.head, remote.url(branch.name), len(plan.files), plan.bytes, len(plan.there),
        len(groups), plan.tag,
    )  # fmt: skip


def title_of(folder: Folder) -> str:
    """Return the title of the last commit; a pull request is found again by it."""
    names = [held.name for held in folder.held]
    return f"Publish {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _made(remote: Remote, private: bool) -> Branch:
    """Make the repo; return its branch."""
    what = f"making {remote.label}"
    remote.ask(
        what, lambda: remote.api.create_repo(remote.id, repo_type="dataset", private=private, exist_ok=True), "write"
    )
    branch = remote.branch()
    if branch is None:
        raise NetworkError(what, expected="the repo", found="none, though it was made", do="Try again")
    if any("/" in path for path in branch.tree) or branch.private != private:
        raise _overtaken(remote)
    return branch


def _commit(remote: Remote, branch: Branch, title: str, files: Sequence[File], opens: bool) -> Branch:
    """Commit files on top of a branch, or as a pull request; return the branch as it is then."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

    additions = []
    for file in files:
        content = str(file.content) if isinstance(file.content, Path) else file.content
        additions.append(CommitOperationAdd(file.inside, content))
        additions[-1].upload_info.sha256 = bytes.fromhex(file.sha256)  # else the client reads the file once more
    where: dict[str, Any] = {"repo_type": "dataset", "revision": branch.name, "create_pr": opens}
    what = f"commit {title!r} to {remote.label}"
    with sending(remote.label, f"upload to {remote.label}"):
        patiently(lambda: remote.api.preupload_lfs_files(remote.id, additions, free_memory=False, **where), (408,))
    _check_same(files)

    def attempt() -> tuple[str, str]:
        if opens and (pull := remote.pull(title)):
            return pull.name, pull.head  # opened before, by an attempt whose answer was lost
        try:
            made = remote.api.create_commit(
                remote.id, additions, commit_message=title, parent_commit=branch.head, **where
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            if (landed := _landed(remote, branch, title)) is None:
                raise _overtaken(remote) from error
            return branch.name, landed
        return f"refs/pr/{made.pr_num}" if opens else branch.name, made.oid

    with sending(remote.label, what):
        name, head = remote.ask(what, attempt, "write")
    after = replace(branch, name=name, head=head, tree=remote.tree(head))
    if missing := [file.inside for file in files if not after.has(file)]:
        raise DamagedError(
            f"commit {head[:12]} of {remote.label}",
            expected=f"file {missing[0]} as it was sent",
            found="another" if missing[0] in after.tree else "no such file",
            do="A .gitignore in the repo may keep it out; publish again",
            path=missing[0],
        )
    return after


def _landed(remote: Remote, branch: Branch, title: str) -> str | None:
    """Return the head if it is the commit that was to be made: done by an attempt whose answer was an error."""
    commits = remote.api.list_repo_commits(remote.id, revision=branch.name, repo_type="dataset")
    ours = len(commits) > 1 and (commits[0].title, commits[1].commit_id) == (title, branch.head)
    return commits[0].commit_id if ours else None


def _overtaken(remote: Remote) -> NetworkError:
    return NetworkError(
        f"publishing to {remote.label}",
        expected="the repo as it was when the plan was made",
        found="someone else has committed",
        do="Run again: what was uploaded is kept",
    )


def _check_same(files: Sequence[File]) -> None:
    for file in files:
        file.check_unchanged()


def _tag(remote: Remote, tag: str, commit: str) -> None:
    """Set a tag that was free when the plan was made."""

    def attempt() -> None:
        remote.api.create_tag(remote.id, tag=tag, revision=commit, repo_type="dataset", exist_ok=True)

    remote.ask(f"tag {tag} of {remote.label}", attempt, "write")
    if (found := remote.tags()[0].get(tag, "none")) != commit:
        raise taken_tag(remote, tag, found, commit[:12])


def taken_tag(remote: Remote, tag: str | None, found: str, wanted: str) -> UsageError:
    return UsageError(
        f"tag {tag} of {remote.label}",
        expected=f"none yet, or one on {wanted}",
        found=f"it on commit {found[:12]}",
        do="Take another name: what was cited by a tag stays what it was",
    )
