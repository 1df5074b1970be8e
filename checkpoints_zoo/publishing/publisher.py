"""Publish a folder as a data set repo of the Hub: checked first, resumable, and consistent at every commit.

Shards are uploaded before the manifests that name them. A reader of the repo therefore never sees a row without its
bytes, even if a publication is interrupted. A second call continues an interrupted publication; after a complete
publication, a call uploads nothing.

This is one file, because a publication is one sequence of steps: plan, checks, commits, tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from checkpoints_zoo.errors import DamagedError, NetworkError, SourceNotFound, UsageError, explain_missing_packages
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.text import first_few, whole_number
from checkpoints_zoo.predictions.prediction_sets import MANIFEST_FILE
from checkpoints_zoo.publishing import card_pictures, cards
from checkpoints_zoo.publishing.cards import README, is_generated
from checkpoints_zoo.publishing.folder import (
    SHARD_SUFFIXES,
    File,
    Folder,
    LocalCollection,
    Say,
    check,
    check_ranges,
    hash_files,
    measure_accuracies,
    raise_problems,
    read_folder,
    skipped_checks,
)
from checkpoints_zoo.publishing.remote import (
    MAIN,
    Branch,
    Remote,
    Tree,
    check_login,
    check_online,
    hub_errors,
    parse_repo,
)
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.finding import open_source
from checkpoints_zoo.sources.hub import fetch_file, retry_patiently
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.hub_errors import TRY_AGAIN_ADVICE

# Size of a commit: an interrupted publication continues after its last commit; the Hub takes 128 commits an hour.
LARGEST_COMMIT_NBYTES = 20_000_000_000
LARGEST_COMMIT_FILE_COUNT = 100
_COMMIT = re.compile("[0-9a-f]{7,64}")
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?\r?\n)?---\r?\n?(.*)", re.DOTALL)
_TAG = re.compile(r"(?!.*(?:\.\.|//|\.lock(?:/|$)|[./]$))[A-Za-z0-9][A-Za-z0-9._/+-]{0,99}")


@dataclass(frozen=True)
class Plan:
    """The files that a publication will upload, and the branch to which they are uploaded.

    Args:
        repo: address of the repo.
        branch: branch that gets the commits, as it was when the plan was made; its head is "" if the repo does not
            exist.
        opens: whether the commits go to a new pull request, which the first of them opens.
        private: whether a new repo is made private.
        shards: shards to be uploaded, one group per commit.
        last: files of the last commit: card, descriptions and manifests.
        there: files that are in the repo already, with the same bytes, so that they are not uploaded.
        unnamed: paths of shards that stay in the repo although no row of the new manifests names them.
        ignored: paths of files in the folder that are not published.
        tag: name of a git tag for the last commit; None for no tag.
        to_come: checks that the publication will make but a dry run leaves out, one line of text per check.
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
        """Return the plan as one line of text."""
        if not self.files:
            return f"{self.repo}: nothing to upload, all {len(self.there)} files are there"
        files_text, commits_text = (
            f"{count} {noun}{'s' * (count > 1)}"
            for count, noun in ((len(self.files), "file"), (self.commits, "commit"))
        )
        return (
            f"{self.repo}: {files_text} to upload, {self.bytes:,} bytes in {commits_text}; {len(self.there)} are there"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: counts, sizes in bytes, and paths of files."""
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
            "upload": [file.repo_path for file in self.files],
            "there": [file.repo_path for file in self.there],
            "there_bytes": sum(file.size for file in self.there),
            "unnamed": list(self.unnamed),
            "ignored": list(self.ignored),
            "to_come": list(self.to_come),
        }


@dataclass(frozen=True)
class Published:
    """The result of a publication: the commit, and the numbers of uploaded files.

    Args:
        repo: address of the repo.
        commit: hash of the commit that has all published files, 40 hex digits.
        url: address of the web page of the repo or of the pull request.
        files, bytes: number of uploaded files, and their total size in bytes.
        there: number of files that the repo had already.
        commits: number of commits that were made.
        tag: name of the git tag on the commit; None for no tag.
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
    """Check a folder and upload it to the Hub; return the result, or for a dry run the plan.

    The checks before the upload: each member's location and hash; finite weights; no two members with the same
    weights; the accuracy of some members, measured again. A dry run needs no torch: it leaves out the check for finite
    weights and the accuracies. Shards that no row names any more stay in the repo.

    Args:
        folder: folder with the subfolders manifests/ and shards/.
        repo: "org/name" of a data set repo; it is made if it does not exist.
        tag: name of a git tag that is set on the new commit after all uploads.
        private: whether a new repo is made private.
        create_pr: whether all commits go to a pull request, not to main.
        dry_run: whether only the plan is made and nothing is uploaded.
        sample: number of members of each collection whose accuracy is measured again; 0 for none.
        say: function that is called with a line of text for each step.

    Raises:
        UsageError: two arguments exclude each other, the tag exists, or a README written by hand lacks a manifest.
        SourceNotFound, FormatError, DamagedError: the folder can't be published.
        AccessError, NetworkError: this login may not write, the Hub does not answer, or somebody else has committed.
    """
    remote = parse_repo(repo)
    _check_arguments(tag, create_pr, sample)
    if sample and not dry_run:
        with explain_missing_packages("publish", "or give sample=0 (--sample 0), which measures no accuracy again"):
            import torch  # noqa: F401 - found out before anything is uploaded
    if create_pr or not dry_run:
        check_login(remote.label)
    local_folder = read_folder(folder)
    check_ranges(local_folder)
    if dry_run:
        check(local_folder, say, check_finite=False)
        say(f"{local_folder.source.display_name}: the checks of a dry run found no problem")
        main_branch = _main_branch_for_plan(remote, say)
    else:
        main_branch = remote.branch(MAIN)
    _check_repo(remote, main_branch, private, create_pr)
    if not dry_run and not (create_pr and main_branch):
        remote.check_may_write(main_branch is not None)
    main_branch = main_branch or Branch(MAIN, "", {}, private)
    tag_exists = _check_tag(remote, main_branch, tag)
    for collection in local_folder.collections:
        if collection.base:
            _check_base(remote, collection)
    own_readme = _readme_by_hand(local_folder, remote, main_branch)
    if not dry_run:
        check(local_folder, say, check_finite=True)
    shards = hash_files(
        {
            **local_folder.shards,
            **{
                repo_path: disk_path
                for repo_path, disk_path in local_folder.predictions.items()
                if repo_path.endswith(SHARD_SUFFIXES)
            },
        }
    )
    prediction_tables = {
        repo_path: disk_path
        for repo_path, disk_path in local_folder.predictions.items()
        if not repo_path.endswith(SHARD_SUFFIXES)
    }
    files_sent_last = [
        *(own_readme or _make_card(local_folder, remote, main_branch)),
        *hash_files({**local_folder.tables(), **prediction_tables}),
    ]
    plan = _make_plan(local_folder, remote, main_branch, shards, files_sent_last, tag, private)
    if create_pr and plan.files:
        pull_request_branch = remote.find_pull_request(_title_of(local_folder))
        plan = _make_plan(
            local_folder, remote, pull_request_branch or main_branch, shards, files_sent_last, tag, private
        )
        plan = replace(plan, opens=pull_request_branch is None)
    if tag_exists and plan.files:
        raise _taken_tag(remote, tag, main_branch.head, "the commit to be made, since there is something to upload")
    if dry_run:
        return replace(plan, to_come=skipped_checks(local_folder, sample))
    if sample:
        raise_problems(local_folder.source.display_name, measure_accuracies(local_folder, sample, say))
    else:
        say("not checked: the test accuracies, since the sample is 0")
    if not card_pictures.can_draw():
        say("the card has no pictures, since matplotlib is not installed")
    say(plan.summary())
    return _carry_out(remote, plan, local_folder, tag_exists, say)


def _main_branch_for_plan(remote: Remote, say: Say) -> Branch | None:
    """Return the main branch for the plan of a dry run; None if there is no repo. Say so if the Hub can't be reached.

    Raises:
        AccessError, NetworkError: the Hub does not answer or refuses.
    """
    try:
        check_online(remote.label)
        return remote.branch(MAIN)
    except NetworkError as error:
        say(f"no plan, since the Hub can't be asked which files {remote.label} has")
        error.do = error.do.replace(TRY_AGAIN_ADVICE, "Try again")  # a dry run sends nothing that could have arrived
        raise


def _check_arguments(tag: str | None, create_pr: bool, sample: int) -> None:
    if tag is not None and create_pr:
        raise UsageError(
            "publication", expected="a tag, or a pull request", found="both", do="Tag the commit that merges it"
        )
    if tag is not None and (not _TAG.fullmatch(tag) or _COMMIT.fullmatch(tag) or tag == MAIN):
        raise UsageError("tag", expected="a name like v1.0, that git takes and is no commit", found=repr(tag)[:120])
    if whole_number(sample) is None or sample < 0:
        raise UsageError("sample", expected="a whole number from 0", found=repr(sample)[:80])


def _check_repo(remote: Remote, main_branch: Branch | None, private: bool, create_pr: bool) -> None:
    """Check that the repo exists if a pull request is wanted, and is private if `private` is set."""
    if main_branch is None and create_pr:
        raise SourceNotFound(
            f"pull request to {remote.label}",
            expected="a data set repo",
            found="none that this login may see",
            do="Publish without a pull request: that makes the repo",
        )
    if main_branch is not None and private and not main_branch.private:
        raise UsageError(
            f"repo {remote.label}",
            expected="a private one",
            found="a public one",
            do="Make it private on its settings page, or publish without --private",
        )


def _check_tag(remote: Remote, main_branch: Branch, tag: str | None) -> bool:
    """Check that a tag can be set on the head or on a new commit; return whether it is on the head already.

    Raises:
        UsageError: the tag is on another commit, or a branch has its name.
    """
    if tag is None or not main_branch.head:
        return False
    commit_of_tag, branch_names = remote.tags()
    if tag in branch_names:
        raise UsageError(f"tag {tag} of {remote.label}", expected="a name of its own", found="a branch of that name")
    if commit_of_tag.get(tag, main_branch.head) != main_branch.head:
        raise _taken_tag(remote, tag, commit_of_tag[tag], f"the newest one, {main_branch.head[:12]}")
    return tag in commit_of_tag


def _taken_tag(remote: Remote, tag: str | None, tagged_commit: str, other_commit: str) -> UsageError:
    return UsageError(
        f"tag {tag} of {remote.label}",
        expected=f"none yet, or one on {other_commit}",
        found=f"the tag on commit {tagged_commit[:12]}",
        do="Take another name: readers who cite a tag rely on its commit",
    )


def _readme_by_hand(folder: Folder, remote: Remote, branch: Branch) -> list[File]:
    """Return the folder's README and its pictures if the README was written by hand; [] if a card is to be made.

    Raises:
        UsageError: the README does not name every manifest; or only the repo has a README that was written by hand.
    """
    readme_path = folder.source.root / README
    if readme_path.is_file():
        readme_text = folder.source.local_path(README).read_text(encoding="utf-8", errors="replace")
        if not is_generated(readme_text):
            manifest_names = [
                *(collection.name for collection in folder.collections),
                *_names_only_in_repo(folder, branch),
            ]
            _check_configs(readme_text, sorted(manifest_names), readme_path)
            picture_paths = [path for path in folder.pictures if path in readme_text]
            return [File.of(path, folder.source.local_path(path)) for path in (README, *picture_paths)]
    if README in branch.tree:
        readme_text = fetch_file(Repo(remote.id, branch.head), README).read_text(encoding="utf-8", errors="replace")
        yaml_match = _FRONT_MATTER.match(readme_text)
        if not is_generated(readme_text) and (yaml_match[2] if yaml_match else readme_text).strip():
            raise UsageError(
                f"{README} of {remote.label}",
                expected="none, or one that an earlier publication wrote",
                found="one written by hand",
                do=f"To keep it, put it into {folder.source.root} (`hf download {remote.id} {README} --repo-type "
                f"dataset --local-dir {folder.source.root}`); to have one made, delete it in the repo",
            )
    return []


def _check_configs(readme: str, collections: Sequence[str], path: Path) -> None:
    """Check that a README's YAML names every manifest; the Hub's viewer and `datasets.load_dataset` need the names."""
    known_configs, problem_text = set(), ""
    try:
        yaml_match = _FRONT_MATTER.match(readme)
        configs = (yaml.safe_load((yaml_match[1] if yaml_match else "") or "") or {}).get("configs") or []
        known_configs = {(c["config_name"], file) for c in configs for file in _data_file_paths(c.get("data_files"))}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        problem_text = f": {' '.join(str(error).split())[:200]}"
    unnamed_manifests = [name for name in collections if (name, f"manifests/{name}.parquet") not in known_configs]
    if unnamed_manifests:
        lines_to_add = "; ".join(f"- config_name: {n}, data_files: manifests/{n}.parquet" for n in unnamed_manifests)
        raise UsageError(
            f"{path}",
            expected="YAML at its top whose `configs` name every manifest, since it was written by hand",
            found=f"none for {', '.join(unnamed_manifests)}{problem_text}",
            do=f"Add under `configs:` {lines_to_add}; or remove the file, and one is made",
            path=path,
        )


def _data_file_paths(data_files: Any) -> list[str]:
    """Return the paths in a config's `data_files`: a path, a list of paths, or a list of splits with paths."""
    if isinstance(data_files, dict):
        data_files = data_files.get("path")
    if isinstance(data_files, list):
        return [file for entry in data_files for file in _data_file_paths(entry)]
    return [data_files] if isinstance(data_files, str) else []


def _make_card(folder: Folder, remote: Remote, branch: Branch) -> list[File]:
    """Make the card of all collections, those of the folder and those that only the repo has; return its files."""
    collections = {collection.name: (collection.description, collection.rows) for collection in folder.collections}
    if names_in_repo := _names_only_in_repo(folder, branch):
        source = open_source(f"{remote.label}@{branch.head}", names_in_repo[0])
        collections |= {name: source.read_collection(name) for name in names_in_repo}
    content_of_path = cards.card_files(collections, remote.id, predictions=_prediction_names(folder, branch))
    return [File.of(path, content) for path, content in content_of_path.items()]


def _names_only_in_repo(folder: Folder, branch: Branch) -> list[str]:
    """Return the names of the collections that the repo has and the folder lacks."""
    repo_names = {Path(p).stem for p in branch.tree if p.startswith("manifests/") and p.endswith(".parquet")}
    return sorted(repo_names - {collection.name for collection in folder.collections})


def _prediction_names(folder: Folder, branch: Branch) -> dict[str, set[str]]:
    """Return the sets of stored predictions in the repo and in the folder, as collection -> names of its sets."""
    split_paths = [p.split("/") for p in (*branch.tree, *folder.predictions) if p.startswith("predictions/")]
    sets_of_collection: dict[str, set[str]] = {}
    for path_parts in split_paths:
        if len(path_parts) == 4 and path_parts[3] == MANIFEST_FILE:
            sets_of_collection.setdefault(path_parts[1], set()).add(path_parts[2])
    return sets_of_collection


def _make_plan(
    folder: Folder,
    remote: Remote,
    branch: Branch,
    shards: list[File],
    files_sent_last: list[File],
    tag: str | None,
    private: bool,
) -> Plan:
    missing_shards, present_shards = _split_by_presence(shards, branch, remote.label)
    missing_last_files, present_last_files = _split_by_presence(files_sent_last, branch, remote.label)
    changed_files = [f for f in missing_last_files if not (f.repo_path.endswith(".png") and f.repo_path in branch.tree)]
    if not changed_files and not missing_shards:  # only pictures differ: another version of matplotlib drew them
        missing_last_files, present_last_files = [], files_sent_last
    return Plan(
        remote.label,
        branch,
        False,
        private,
        tuple(_group_into_commits(missing_shards)),
        tuple(missing_last_files),
        (*present_shards, *present_last_files),
        tuple(_unnamed_shards(folder, branch.tree)),
        tuple(folder.ignored()),
        tag,
    )


def _split_by_presence(files: Sequence[File], branch: Branch, label: str) -> tuple[list[File], list[File]]:
    """Return the files that are missing from a branch, and the files that it has.

    Raises:
        UsageError: the branch has a shard of the same name with other bytes; overwriting it would break
            loads of the repo that are under way.
    """
    missing_files: list[File] = []
    present_files: list[File] = []
    for file in files:
        (present_files if branch.has(file) else missing_files).append(file)
    for file in missing_files:
        if file.repo_path in branch.tree and file.repo_path.endswith(SHARD_SUFFIXES):
            raise UsageError(
                f"file {file.repo_path}",
                expected="a name of its own, since readers of the repo go by it",
                found=f"other bytes under that name in {label}",
                do="Rename it here and in the manifest; shards that this package writes have their hash in the name",
                path=file.repo_path,
            )
    return missing_files, present_files


def _group_into_commits(files: Iterable[File]) -> Iterator[tuple[File, ...]]:
    """Split files into groups, one per commit; yield the groups."""
    group: list[File] = []
    for file in files:
        if group and (
            len(group) >= LARGEST_COMMIT_FILE_COUNT or sum(f.size for f in group) + file.size > LARGEST_COMMIT_NBYTES
        ):
            yield tuple(group)
            group = []
        group.append(file)
    if group:
        yield tuple(group)


def _unnamed_shards(folder: Folder, tree: Tree) -> list[str]:
    """Return the paths of shards in the repo that belong to the folder's collections and that no row names."""
    shard_folders = tuple(f"shards/{collection.name}/" for collection in folder.collections)
    return sorted(path for path in tree if path.startswith(shard_folders) and path not in folder.shards)


def _carry_out(remote: Remote, plan: Plan, folder: Folder, is_tagged: bool, say: Say) -> Published:
    """Upload the files of a plan; return the result of the publication.

    Args:
        remote: repo that the plan was made for.
        plan: plan to carry out.
        folder: folder whose rows are checked against the repo before the last commit.
        is_tagged: whether the branch's newest commit already has the tag.
        say: function that is called with a line of text for each commit.

    Raises:
        NetworkError: the Hub does not answer, or somebody else has committed meanwhile.
        AccessError, SourceNotFound: the repo can't be written to.
        DamagedError: a file was changed meanwhile, or the repo does not have a file that was sent.
    """
    branch, opens_pull_request = plan.branch, plan.opens
    if not branch.head:
        branch = _make_repo(remote, plan.private)
    title = _title_of(folder)
    file_groups = [*plan.shards, *([plan.last] if plan.last else [])]
    shard_files = [f for f in (*plan.there, *plan.files) if f.repo_path in folder.shards]
    for commit_number, files in enumerate(file_groups, 1):
        is_last = files is plan.last
        if is_last:
            _check_rows(folder, shard_files, branch.tree, remote.label)
            _check_unchanged([f for f in plan.there if f.repo_path in folder.tables()])
        group_nbytes = sum(file.size for file in files)
        files_text = f"{len(files)} file{'s' * (len(files) > 1)}, {group_nbytes:,} bytes"
        say(f"commit {commit_number} of {len(file_groups)}: {files_text} …")
        commit_title = title if is_last or opens_pull_request else f"{title}: weights"
        branch, opens_pull_request = _commit(remote, branch, commit_title, files, opens_pull_request), False
    _check_rows(folder, shard_files, branch.tree, remote.label)
    if plan.tag is not None and not is_tagged:
        _set_tag(remote, plan.tag, branch.head)
    return Published(
        plan.repo, branch.head, remote.url(branch.name), len(plan.files), plan.bytes, len(plan.there),
        len(file_groups), plan.tag,
    )  # fmt: skip


def _title_of(folder: Folder) -> str:
    """Return the title of the last commit; the pull request has the same title, by which it is found."""
    collection_names = [collection.name for collection in folder.collections]
    return f"Publish {first_few(collection_names, 3)}"


def _make_repo(remote: Remote, private: bool) -> Branch:
    """Make the repo on the Hub; return its main branch."""
    action_text = f"making {remote.label}"
    remote.call(
        action_text,
        lambda: remote.api.create_repo(remote.id, repo_type="dataset", private=private, exist_ok=True),
        "write",
    )
    branch = remote.branch()
    if branch is None:
        raise NetworkError(action_text, expected="the repo", found="none, though it was made", do="Try again")
    if any("/" in path for path in branch.tree) or branch.private != private:
        raise _somebody_committed(remote)
    return branch


def _commit(remote: Remote, branch: Branch, title: str, files: Sequence[File], opens_pull_request: bool) -> Branch:
    """Commit files to a branch or to a new pull request; return the branch after the commit."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

    additions = []
    for file in files:
        content = str(file.content) if isinstance(file.content, Path) else file.content
        additions.append(CommitOperationAdd(file.repo_path, content))
        additions[-1].upload_info.sha256 = bytes.fromhex(file.sha256)  # else the client reads the file once more
    repo_options: dict[str, Any] = {"repo_type": "dataset", "revision": branch.name, "create_pr": opens_pull_request}
    action = f"commit {title!r} to {remote.label}"
    with hub_errors(remote.label, f"upload to {remote.label}"):
        retry_patiently(
            lambda: remote.api.preupload_lfs_files(remote.id, additions, free_memory=False, **repo_options), (408,)
        )
    _check_unchanged(files)

    def create_commit() -> tuple[str, str]:
        if opens_pull_request and (pull_request_branch := remote.find_pull_request(title)):
            # An earlier attempt opened this pull request, but the answer was lost.
            return pull_request_branch.name, pull_request_branch.head
        try:
            commit_info = remote.api.create_commit(
                remote.id, additions, commit_message=title, parent_commit=branch.head, **repo_options
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            if (landed_commit := _find_landed_commit(remote, branch, title)) is None:
                raise _somebody_committed(remote) from error
            return branch.name, landed_commit
        return f"refs/pr/{commit_info.pr_num}" if opens_pull_request else branch.name, commit_info.oid

    with hub_errors(remote.label, action):
        branch_name, head_commit = remote.call(action, create_commit, "write")
    new_branch = replace(branch, name=branch_name, head=head_commit, tree=remote.tree(head_commit))
    if missing_paths := [file.repo_path for file in files if not new_branch.has(file)]:
        raise DamagedError(
            f"commit {head_commit[:12]} of {remote.label}",
            expected=f"file {missing_paths[0]} as it was sent",
            found="another" if missing_paths[0] in new_branch.tree else "no such file",
            do="A .gitignore in the repo may keep it out; publish again",
            path=missing_paths[0],
        )
    return new_branch


def _find_landed_commit(remote: Remote, branch: Branch, title: str) -> str | None:
    """Return the newest commit if it is the requested commit, made by an attempt that seemed to fail; else None."""
    commits = remote.api.list_repo_commits(remote.id, revision=branch.name, repo_type="dataset")
    is_own_commit = len(commits) > 1 and (commits[0].title, commits[1].commit_id) == (title, branch.head)
    return commits[0].commit_id if is_own_commit else None


def _somebody_committed(remote: Remote) -> NetworkError:
    return NetworkError(
        f"publishing to {remote.label}",
        expected="the repo as it was when the plan was made",
        found="a commit of somebody else",
        do="Run again: what was uploaded is kept",
    )


def _check_unchanged(files: Sequence[File]) -> None:
    for file in files:
        file.check_unchanged()


def _set_tag(remote: Remote, tag: str, commit: str) -> None:
    """Set a tag, which did not exist when the plan was made, on a commit."""

    def create_tag() -> None:
        remote.api.create_tag(remote.id, tag=tag, revision=commit, repo_type="dataset", exist_ok=True)

    remote.call(f"tag {tag} of {remote.label}", create_tag, "write")
    if (present_commit := remote.tags()[0].get(tag, "none")) != commit:
        raise _taken_tag(remote, tag, present_commit, commit[:12])


def _check_rows(folder: Folder, shard_files_of_folder: Sequence[File], tree: Tree, label: str) -> None:
    """Check that the bytes of every row are in the repo.

    Args:
        folder: folder with the rows.
        shard_files_of_folder: shards of the folder.
        tree: files of the repo, by path.
        label: address of the repo, for the error text.

    Raises:
        DamagedError: the bytes of a row are missing; the error names its member.
    """
    local_file_of_path = {file.repo_path: file for file in shard_files_of_folder}
    for collection in folder.collections:
        if not collection.base:
            for path, needed_nbytes, member in _needed_sizes(collection):
                repo_file = tree.get(path)
                if repo_file is None or repo_file.size < needed_nbytes or not repo_file.holds(local_file_of_path[path]):
                    found = "no such file" if repo_file is None else f"another file of {repo_file.size:,} bytes"
                    raise _missing_bytes(collection, member, path, needed_nbytes, label, found)


def _check_base(remote: Remote, collection: LocalCollection) -> None:
    """Check that the other repo that has a collection's weights has the bytes of every row.

    Raises:
        DamagedError: the bytes of a row are missing; the error names its member.
        SourceNotFound, AccessError, NetworkError: the other repo can't be read.
    """
    base_repo: Repo = hub.resolve_address(collection.base)
    file_of_path = remote.files_of(base_repo, sorted({path for path, _, _ in _needed_sizes(collection)}))
    for path, needed_nbytes, member in _needed_sizes(collection):
        if path not in file_of_path or file_of_path[path].size < needed_nbytes:
            found = "no such file" if path not in file_of_path else f"a file of {file_of_path[path].size:,} bytes"
            raise _missing_bytes(collection, member, path, needed_nbytes, str(base_repo), found)


def _needed_sizes(collection: LocalCollection) -> list[tuple[str, int, int]]:
    """Return for each file that rows name: its path, the size that it needs so that the last byte range lies in it, and
    the member of that range."""
    rows = manifest.without_parts(collection.rows)
    columns = (rows.column(c).to_pylist() for c in ("path", "offset", "nbytes", "member"))
    end_and_member_of_path: dict[str, tuple[int, int]] = {}
    for path, offset, nbytes, member in zip(*columns, strict=True):
        if path is not None:
            end_and_member_of_path[path] = max(end_and_member_of_path.get(path, (0, 0)), (offset + nbytes, member))
    return [(path, *end_and_member) for path, end_and_member in end_and_member_of_path.items()]


def _missing_bytes(
    collection: LocalCollection, member: int, path: str, needed_nbytes: int, label: str, found: str
) -> DamagedError:
    return DamagedError(
        f"member {member} of {collection.name}",
        expected=f"its bytes up to {needed_nbytes:,} in file {path} of {label}",
        found=found,
        do="Its manifest was not published. Publish again; a .gitignore in the repo may keep files out",
        collection=collection.name,
        member=member,
        path=path,
    )
