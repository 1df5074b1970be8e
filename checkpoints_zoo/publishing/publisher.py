"""Publishing a folder as a data set repo of the Hub: checked first, resumable, and consistent at every commit.

Shards go up before the manifests that name them. So a reader of the repo never sees a row without its bytes, wherever
a publication is cut off; started again it goes on, and started once more it does nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from checkpoints_zoo.errors import SourceNotFound, UsageError
from checkpoints_zoo.formats import selection
from checkpoints_zoo.publishing import cards, readme
from checkpoints_zoo.publishing.folder import SHARDS, File, Folder, Say, hashed, read
from checkpoints_zoo.publishing.members import check, check_ranges, measure, refuse, to_come
from checkpoints_zoo.publishing.plan import Plan, check_base, compare, parts, unnamed
from checkpoints_zoo.publishing.remote import MAIN, Branch, Remote, check_login, check_online, parse
from checkpoints_zoo.publishing.upload import Published, carry_out, taken_tag, title_of
from checkpoints_zoo.sources.finding import resolve

__all__ = ["Plan", "Published", "publish"]

_COMMIT = re.compile("[0-9a-f]{7,64}")
_TAG = re.compile(r"(?!.*(?:\.\.|//|\.lock(?:/|$)|[./]$))[A-Za-z0-9][A-Za-z0-9._/+-]{0,99}")


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
    found = read(folder)
    check_ranges(found)
    main = remote.branch(MAIN)
    _check_repo(remote, main, private, create_pr)
    if not dry_run and not (create_pr and main):
        remote.check_may_write(main is not None)
    main = main or Branch(MAIN, "", {}, private)
    taken = _check_tag(remote, main, tag)
    for held in found.held:
        if held.base:
            check_base(remote, held)
    by_hand = readme.by_hand(found, remote, main)
    check(found, say, finite=not dry_run)
    shards = hashed({**found.shards, **{p: x for p, x in found.predictions.items() if p.endswith(SHARDS)}})
    tables = {p: x for p, x in found.predictions.items() if not p.endswith(SHARDS)}
    last = [*(by_hand or _card(found, remote, main)), *hashed({**found.tables(), **tables})]
    plan = _plan(found, remote, main, shards, last, tag, private)
    if create_pr and plan.files:
        pull = remote.pull(title_of(found))
        plan = _plan(found, remote, pull or main, shards, last, tag, private)
        plan = replace(plan, opens=pull is None)
    if taken and plan.files:
        raise taken_tag(remote, tag, main.head, "the commit to be made, since there is something to upload")
    if dry_run:
        return replace(plan, to_come=to_come(found, sample))
    if sample:
        refuse(found.source.shown, measure(found, sample, say))
    say(plan.summary())
    return carry_out(remote, plan, found, taken, say)


def _plan(
    found: Folder, remote: Remote, branch: Branch, shards: list[File], last: list[File], tag: str | None, private: bool
) -> Plan:
    missing, there = compare(shards, branch, remote.label)
    missing_last, there_last = compare(last, branch, remote.label)
    changed = [f for f in missing_last if not (f.inside.endswith(".png") and f.inside in branch.tree)]
    if not changed and not missing:  # pictures that another matplotlib drew
        missing_last, there_last = [], last
    return Plan(
        remote.label, branch, False, private, tuple(parts(missing)), tuple(missing_last), (*there, *there_last),
        tuple(unnamed(found, branch.tree)), tuple(found.ignored()), tag,
    )  # fmt: skip


def _card(found: Folder, remote: Remote, branch: Branch) -> list[File]:
    """Make the card, of the folder's collections and of those that only the repo has; return its files."""
    collections = {held.name: (held.description, held.rows) for held in found.held}
    if names := readme.others(found, branch):
        source = resolve(f"{remote.label}@{branch.head}", names[0])
        collections |= {name: source.read(name) for name in names}
    written = cards.files(collections, remote.id, predictions=readme.predictions(found, branch))
    return [File.of(path, content) for path, content in written.items()]


def _check_arguments(tag: str | None, create_pr: bool, sample: int) -> None:
    if tag is not None and create_pr:
        raise UsageError(
            "publication", expected="a tag, or a pull request", found="both", do="Tag the commit that merges it"
        )
    if tag is not None and (not _TAG.fullmatch(tag) or _COMMIT.fullmatch(tag) or tag == MAIN):
        raise UsageError("tag", expected="a name like v1.0, that git takes and is no commit", found=repr(tag)[:120])
    if selection.whole(sample) is None or sample < 0:
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
        raise taken_tag(remote, tag, tags[tag], f"the newest one, {main.head[:12]}")
    return tag in tags
