"""Publishing a folder as a data set repo of the Hub: checked first, resumable, and consistent at every commit.

Shards go up before the manifests that name them. So a reader of the repo never sees a row without its bytes, wherever
a publication is cut off; started again it goes on, and started once more it does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from checkpoints_zoo.errors import DamagedError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats.text import first_few, whole_number
from checkpoints_zoo.predictions.prediction_sets import TABLE
from checkpoints_zoo.publishing import cards
from checkpoints_zoo.publishing.cards import README, is_generated
from checkpoints_zoo.publishing.folder import (
    SHARDS,
    File,
    Folder,
    Held,
    Say,
    check,
    check_ranges,
    hashed,
    measure,
    read_folder,
    refuse,
    to_come,
)
from checkpoints_zoo.publishing.remote import MAIN, Branch, Remote, Tree, check_login, check_online, parse, sending
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.hub import Repo, fetch_file, retry_patiently
from checkpoints_zoo.sources.source import open_source

# A commit with this much is a place to go on from; the Hub takes 128 commits an hour.
COMMIT_BYTES = 20_000_000_000
COMMIT_FILES = 100
_COMMIT = re.compile("[0-9a-f]{7,64}")
_FRONT = re.compile(r"\A---\r?\n(.*?\r?\n)?---\r?\n?(.*)", re.DOTALL)
_TAG = re.compile(r"(?!.*(?:\.\.|//|\.lock(?:/|$)|[./]$))[A-Za-z0-9][A-Za-z0-9._/+-]{0,99}")


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


def publish(
    folder: str | Path,
    repo: str,
    *,
    tag: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    dry_run: bool = False,
    sample: int = 8,
    say: Say = lambda text: None,
) -> Published | Plan:
    """Check a folder and put it on the Hub; return what was done, or for a dry run the plan.

    Every member's place and hash are checked, that its weights are finite, that no two hold the same, and the
    accuracy of some is measured again; a dry run, which needs no torch, leaves the weights' values and the
    accuracies out. Shards that a row no longer names stay in the repo.

    Args:
        folder: with manifests/ and shards/.
        repo: "org/name" of a data set repo; it is made if there is none.
        tag: for the commit, set last.
        private: make the repo a private one.
        create_pr: put everything into a pull request, in place of main.
        dry_run: only plan, and upload nothing.
        sample: members a collection whose accuracy is measured again; 0 for none.
        say: told what is being done, a line at a time.

    Raises:
        UsageError: arguments that don't go together, a tag that is taken, a README written by hand that lacks things.
        SourceNotFound, FormatError, DamagedError: a folder that can't be published.
        AccessError, NetworkError: the Hub does not let this login, or does not answer; or someone else has committed.
    """
    remote = parse(repo)
    _check_arguments(tag, create_pr, sample)
    (check_online if dry_run and not create_pr else check_login)(remote.label)
    found = read_folder(folder)
    check_ranges(found)
    main = remote.branch(MAIN)
    _check_repo(remote, main, private, create_pr)
    if not dry_run and not (create_pr and main):
        remote.check_may_write(main is not None)
    main = main or Branch(MAIN, "", {}, private)
    taken = _check_tag(remote, main, tag)
    for held in found.held:
        if held.base:
            _check_base(remote, held)
    by_hand = _readme_by_hand(found, remote, main)
    check(found, say, finite=not dry_run)
    shards = hashed({**found.shards, **{p: x for p, x in found.predictions.items() if p.endswith(SHARDS)}})
    tables = {p: x for p, x in found.predictions.items() if not p.endswith(SHARDS)}
    last = [*(by_hand or _card(found, remote, main)), *hashed({**found.tables(), **tables})]
    plan = _plan(found, remote, main, shards, last, tag, private)
    if create_pr and plan.files:
        pull = remote.pull(_title_of(found))
        plan = _plan(found, remote, pull or main, shards, last, tag, private)
        plan = replace(plan, opens=pull is None)
    if taken and plan.files:
        raise _taken_tag(remote, tag, main.head, "the commit to be made, since there is something to upload")
    if dry_run:
        return replace(plan, to_come=to_come(found, sample))
    if sample:
        refuse(found.source.display_name, measure(found, sample, say))
    say(plan.summary())
    return _carry_out(remote, plan, found, taken, say)


def _check_arguments(tag: str | None, create_pr: bool, sample: int) -> None:
    if tag is not None and create_pr:
        raise UsageError(
            "publication", expected="a tag, or a pull request", found="both", do="Tag the commit that merges it"
        )
    if tag is not None and (not _TAG.fullmatch(tag) or _COMMIT.fullmatch(tag) or tag == MAIN):
        raise UsageError("tag", expected="a name like v1.0, that git takes and is no commit", found=repr(tag)[:120])
    if whole_number(sample) is None or sample < 0:
        raise UsageError("sample", expected="a whole number from 0", found=repr(sample)[:80])


def _check_repo(remote: Remote, main: Branch | None, private: bool, create_pr: bool) -> None:
    """Check that the repo is what the arguments take it for."""
    if main is None and create_pr:
        raise SourceNotFound(
            f"pull request to {remote.label}",
            expected="a data set repo",
            found="none that this login may see",
            do="Publish without a pull request: that makes the repo",
        )
    if main is not None and private and not main.private:
        raise UsageError(
            f"repo {remote.label}",
            expected="a private one",
            found="a public one",
            do="Make it private on its settings page, or publish without --private",
        )


def _check_tag(remote: Remote, main: Branch, tag: str | None) -> bool:
    """Say whether the tag is on the head already.

    Raises:
        UsageError: it is on another commit, or a branch has that name.
    """
    if tag is None or not main.head:
        return False
    tags, branches = remote.tags()
    if tag in branches:
        raise UsageError(f"tag {tag} of {remote.label}", expected="a name of its own", found="a branch of that name")
    if tags.get(tag, main.head) != main.head:
        raise _taken_tag(remote, tag, tags[tag], f"the newest one, {main.head[:12]}")
    return tag in tags


def _taken_tag(remote: Remote, tag: str | None, found: str, wanted: str) -> UsageError:
    return UsageError(
        f"tag {tag} of {remote.label}",
        expected=f"none yet, or one on {wanted}",
        found=f"it on commit {found[:12]}",
        do="Take another name: what was cited by a tag stays what it was",
    )


def _readme_by_hand(folder: Folder, remote: Remote, branch: Branch) -> list[File]:
    """Find the folder's README if it was written by hand; return it and its pictures, [] where one is to be made.

    Raises:
        UsageError: it does not name every manifest; or the repo has one written by hand, and the folder none.
    """
    path = folder.source.root / README
    if path.is_file():
        text = folder.source.local_path(README).read_text(encoding="utf-8", errors="replace")
        if not is_generated(text):
            names = [*(held.name for held in folder.held), *_only_there(folder, branch)]
            _check_configs(text, sorted(names), path)
            pictures = [p for p in folder.pictures if p in text]
            return [File.of(p, folder.source.local_path(p)) for p in (README, *pictures)]
    if README in branch.tree:
        text = fetch_file(Repo(remote.id, branch.head), README).read_text(encoding="utf-8", errors="replace")
        match = _FRONT.match(text)
        if not is_generated(text) and (match[2] if match else text).strip():
            raise UsageError(
                f"{README} of {remote.label}",
                expected="none, or one that an earlier publication wrote",
                found="one written by hand",
                do=f"To keep it, put it into {folder.source.root} (`hf download {remote.id} {README} --repo-type "
                f"dataset --local-dir {folder.source.root}`); to have one made, delete it in the repo",
            )
    return []


def _check_configs(text: str, names: Sequence[str], path: Path) -> None:
    """Check that the YAML of a README names every manifest, for the Hub's viewer and `datasets.load_dataset`."""
    known, problem = set(), ""
    try:
        match = _FRONT.match(text)
        configs = (yaml.safe_load((match[1] if match else "") or "") or {}).get("configs") or []
        known = {(c["config_name"], file) for c in configs for file in _paths_in(c.get("data_files"))}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        problem = f": {' '.join(str(error).split())[:200]}"
    lacking = [name for name in names if (name, f"manifests/{name}.parquet") not in known]
    if lacking:
        lines = "; ".join(f"- config_name: {n}, data_files: manifests/{n}.parquet" for n in lacking)
        raise UsageError(
            f"{path}",
            expected="YAML at its top whose `configs` name every manifest, since it was written by hand",
            found=f"none for {', '.join(lacking)}{problem}",
            do=f"Add under `configs:` {lines}; or remove the file, and one is made",
            path=path,
        )


def _paths_in(value: Any) -> list[str]:
    """Return the paths in a config's data_files: a path, several, or several with their splits."""
    if isinstance(value, dict):
        value = value.get("path")
    if isinstance(value, list):
        return [file for one in value for file in _paths_in(one)]
    return [value] if isinstance(value, str) else []


def _card(found: Folder, remote: Remote, branch: Branch) -> list[File]:
    """Make the card, of the folder's collections and of those that only the repo has; return its files."""
    collections = {held.name: (held.description, held.rows) for held in found.held}
    if names := _only_there(found, branch):
        source = open_source(f"{remote.label}@{branch.head}", names[0])
        collections |= {name: source.read_collection(name) for name in names}
    files = cards.files(collections, remote.id, predictions=_predictions(found, branch))
    return [File.of(path, content) for path, content in files.items()]


def _only_there(folder: Folder, branch: Branch) -> list[str]:
    """List the collections that the repo has and the folder lacks; return their names."""
    names = {Path(p).stem for p in branch.tree if p.startswith("manifests/") and p.endswith(".parquet")}
    return sorted(names - {held.name for held in folder.held})


def _predictions(folder: Folder, branch: Branch) -> dict[str, set[str]]:
    """List the sets of stored predictions that the repo has and will have; return collection -> their names."""
    named = [p.split("/") for p in (*branch.tree, *folder.predictions) if p.startswith("predictions/")]
    sets: dict[str, set[str]] = {}
    for parts in named:
        if len(parts) == 4 and parts[3] == TABLE:
            sets.setdefault(parts[1], set()).add(parts[2])
    return sets


def _plan(
    found: Folder, remote: Remote, branch: Branch, shards: list[File], last: list[File], tag: str | None, private: bool
) -> Plan:
    missing, there = _compare(shards, branch, remote.label)
    missing_last, there_last = _compare(last, branch, remote.label)
    changed = [f for f in missing_last if not (f.inside.endswith(".png") and f.inside in branch.tree)]
    if not changed and not missing:  # pictures that another matplotlib drew
        missing_last, there_last = [], last
    return Plan(
        remote.label, branch, False, private, tuple(_commits_of(missing)), tuple(missing_last), (*there, *there_last),
        tuple(_unnamed(found, branch.tree)), tuple(found.ignored()), tag,
    )  # fmt: skip


def _compare(files: Sequence[File], branch: Branch, label: str) -> tuple[list[File], list[File]]:
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


def _commits_of(files: Iterable[File]) -> Iterator[tuple[File, ...]]:
    """Split files into commits; yield those of each."""
    part: list[File] = []
    for file in files:
        if part and (len(part) >= COMMIT_FILES or sum(f.size for f in part) + file.size > COMMIT_BYTES):
            yield tuple(part)
            part = []
        part.append(file)
    if part:
        yield tuple(part)


def _unnamed(folder: Folder, tree: Tree) -> list[str]:
    """List the shards of the folder's collections in the repo that no row names any more; return their paths."""
    places = tuple(f"shards/{held.name}/" for held in folder.held)
    return sorted(path for path in tree if path.startswith(places) and path not in folder.shards)


def _carry_out(remote: Remote, plan: Plan, folder: Folder, tagged: bool, say: Say) -> Published:
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
        branch = _made_repo(remote, plan.private)
    title = _title_of(folder)
    groups = [*plan.shards, *([plan.last] if plan.last else [])]
    rows = [f for f in (*plan.there, *plan.files) if f.inside in folder.shards]
    for at, files in enumerate(groups, 1):
        last = files is plan.last
        if last:
            _check_rows(folder, rows, branch.tree, remote.label)
            _check_same([f for f in plan.there if f.inside in folder.tables()])
        size = sum(file.size for file in files)
        say(f"commit {at} of {len(groups)}: {len(files)} file{'s' * (len(files) > 1)}, {size:,} bytes …")
        name = title if last or opens else f"{title}: weights"
        branch, opens = _commit(remote, branch, name, files, opens), False
    _check_rows(folder, rows, branch.tree, remote.label)
    if plan.tag is not None and not tagged:
        _tag(remote, plan.tag, branch.head)
    return Published(
        plan.repo, branch.head, remote.url(branch.name), len(plan.files), plan.bytes, len(plan.there),
        len(groups), plan.tag,
    )  # fmt: skip


def _title_of(folder: Folder) -> str:
    """Return the title of the last commit; a pull request is found again by it."""
    names = [held.name for held in folder.held]
    return f"Publish {first_few(names, 3)}"


def _made_repo(remote: Remote, private: bool) -> Branch:
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
        retry_patiently(
            lambda: remote.api.preupload_lfs_files(remote.id, additions, free_memory=False, **where), (408,)
        )
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
        raise _taken_tag(remote, tag, found, commit[:12])


def _check_rows(folder: Folder, files: Sequence[File], tree: Tree, label: str) -> None:
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
                    raise _lacks_bytes(held, member, path, end, label, found)


def _check_base(remote: Remote, held: Held) -> None:
    """Check that the bytes of a collection whose weights lie in another repo are there.

    Raises:
        DamagedError: naming a row without its bytes.
        SourceNotFound, AccessError, NetworkError: the other repo can't be read.
    """
    base: Repo = hub.resolve_address(held.base)
    tree = remote.some(base, sorted({path for path, _, _ in _ends(held)}))
    for path, end, member in _ends(held):
        if path not in tree or tree[path].size < end:
            found = "no such file" if path not in tree else f"a file of {tree[path].size:,} bytes"
            raise _lacks_bytes(held, member, path, end, str(base), found)


def _ends(held: Held) -> list[tuple[str, int, int]]:
    """Return (path, where its last member's bytes end, that member) of each file that rows name."""
    columns = (held.rows.column(c).to_pylist() for c in ("path", "offset", "nbytes", "member"))
    last: dict[str, tuple[int, int]] = {}
    for path, offset, nbytes, member in zip(*columns, strict=True):
        if path is not None:
            last[path] = max(last.get(path, (0, 0)), (offset + nbytes, member))
    return [(path, *end) for path, end in last.items()]


def _lacks_bytes(held: Held, member: int, path: str, end: int, label: str, found: str) -> DamagedError:
    return DamagedError(
        f"member {member} of {held.name}",
        expected=f"its bytes up to {end:,} in file {path} of {label}",
        found=found,
        do="Its manifest was not published. Publish again; a .gitignore in the repo may keep files out",
        collection=held.name,
        member=member,
        path=path,
    )
