"""Failures between a user and the Hub: each fault, the message, the files that remain, and the test of it.

A test compares the page with this table, and checks that every test exists that the table names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.lasting_faults import FAULTS

NOTHING = "nothing: the request is repeated"
KEPT = "earlier files, and files that arrived complete"
NO_CHANGE = "earlier files"


@dataclass(frozen=True)
class Row:
    """A fault: its kind, the request that fails, what the user sees, the files that remain, and "file::test"."""

    kind: str
    where: str
    seen: str
    left: str
    test: str


HEALED = "test_hub_faults.py::test_a_range_that_fails_once"
ANSWERS = "test_hub_faults.py::test_an_answer_that_fails_once"

# Faults that pass, and faults that take more than one answer. Lasting faults are in `tests.support.lasting_faults`.
ROWS = (
    Row("408, 429, 500 or 503 once", "any answer", NOTHING, KEPT, ANSWERS),
    Row("429 with a wait time", "a range of bytes", "nothing: the client waits as long as the Hub says", KEPT, HEALED),
    Row("429 without one", "a range of bytes", "nothing: the client waits a second, then two, …", KEPT, HEALED),
    Row(
        "connection reset in the middle",
        "a range of bytes",
        "nothing: the rest of the range is requested",
        KEPT,
        HEALED,
    ),
    Row(
        "a body cut short",
        "a range of bytes",
        "nothing: the rest of the range is requested",
        KEPT,
        "test_hub_faults.py::test_a_cut_range_goes_on_where_it_broke_off",
    ),
    Row(
        "wrong bytes once",
        "a range of bytes",
        "nothing: the hash differs, and the member is fetched again",
        KEPT,
        HEALED,
    ),
    Row("an expired link", "a range of bytes", "nothing: a new link is requested, once", KEPT, HEALED),
    Row("a redirect to another host", "a range of bytes", "nothing; the token is not sent there", KEPT, HEALED),
    Row(
        "no bytes for a long time",
        "a range of bytes",
        NOTHING,
        KEPT,
        "test_hub_faults.py::test_a_stalled_range_is_asked_for_again",
    ),
    Row(
        "no bytes, again and again",
        "a range of bytes",
        "… expected all of them; found no bytes for too long, 6 times. Try again: what has arrived is kept.",
        KEPT,
        "test_hub_faults.py::test_a_range_that_always_stalls",
    ),
    Row(
        "a redirect to another host",
        "the HEAD of a file",
        "… expected an ETag and a size; found none. Check HF_ENDPOINT, and proxies on the way.",
        KEPT,
        "test_hub_faults.py::test_a_head_that_leads_to_another_host",
    ),
    Row(
        "an HTML page or an LFS pointer in place of a shard",
        "a file of the repo",
        "… found 132 bytes: a Git LFS pointer, not the file it points to. Manifest and "
        "file do not belong together: tell the producer.",
        KEPT,
        "test_hub_faults.py::test_what_lies_there_is_named",
    ),
    Row(
        "a manifest of the wrong bytes",
        "a whole file",
        "… expected the hash …; found …. The file was not stored; get it again.",
        NO_CHANGE,
        "test_hub_faults.py::test_a_manifest_of_the_wrong_bytes_is_not_kept",
    ),
    Row(
        "a fault after some members have arrived",
        "a range of bytes",
        "the error of the fault",
        "members that arrived; the next run fetches the others only",
        "test_hub_faults.py::test_members_that_arrived_before_a_fault_are_kept",
    ),
    Row(
        "a private repo of somebody else",
        "the repo",
        "… expected a data set repo; found none that this login may see. Check its name; if it is private, log in …",
        NO_CHANGE,
        "test_hub_faults.py::test_a_private_repo_of_somebody_else",
    ),
    Row(
        "no network",
        "everything",
        "… expected an answer from HOST; found ConnectError: …",
        KEPT,
        "test_hub_faults.py::test_without_a_network",
    ),
    Row(
        "offline, all members local",
        "everything",
        "nothing: no request is made",
        KEPT,
        "sources/test_hub.py::test_offline_with_everything",
    ),
    Row(
        "offline, some members local",
        "the others",
        "1 of 3 members of NAME: expected members in the cache, since HF_HUB_OFFLINE is set; found no members 5 of …. "
        "Get them online: `zoo-cli download …`.",
        KEPT,
        "sources/test_hub.py::test_offline_with_something_names_the_rest",
    ),
    Row(
        "offline, nothing local",
        "everything",
        "… expected a commit of it in the cache, since HF_HUB_OFFLINE is set …",
        NO_CHANGE,
        "sources/test_hub.py::test_offline_with_nothing",
    ),
    Row(
        "disk full, seen before",
        "the cache",
        "cache …: expected room for … bytes; found … bytes free. Free some space, or set "
        "HF_HOME to a folder on a larger disk …",
        KEPT,
        "test_cache.py::test_too_little_room_is_seen_before_anything_is_fetched",
    ),
    Row("disk full on the way", "the cache", "the same", KEPT, "test_cache.py::test_a_disk_that_fills_up"),
    Row(
        "a read-only cache",
        "the cache",
        "a warning: fetched members are stored for this process only",
        NO_CHANGE,
        "test_cache.py::test_a_read_only_cache_is_replaced_for_this_process",
    ),
    Row(
        "a cached member that has changed",
        "the cache",
        "nothing: a file of another identity (inode, size, times) is hashed, and fetched again if it is wrong",
        KEPT,
        "test_right_bytes.py::test_a_cached_member_that_has_changed",
    ),
    Row(
        "an empty, half or changed file in the client's cache",
        "a whole file",
        "nothing: it is compared with the announced hash, and fetched again",
        KEPT,
        "test_right_bytes.py::test_the_clients_files_are_fetched_anew",
    ),
    Row(
        "several processes loading the same members",
        "the cache",
        "nothing: each member is fetched once",
        KEPT,
        "test_cache.py::test_four_processes_fetch_a_member_once",
    ),
    Row(
        "SIGKILL at random moments",
        "a download",
        "nothing; the next run continues",
        "members that arrived; temporary files, deleted after a day",
        "test_download_kill.py::test_killed_at_random_moments",
    ),
    Row(
        "a new commit between two reads",
        "the repo",
        "nothing: loaded members stay at their commit",
        KEPT,
        "sources/test_hub.py::test_a_new_commit_between_two_reads_changes_nothing",
    ),
    Row(
        "re-publication under readers",
        "the repo",
        "nothing: each load reads one commit",
        KEPT,
        "test_republication.py::test_readers_see_one_commit_each",
    ),
    Row(
        "two archived members with exchanged names",
        "an archive",
        "nothing: all headers of the archive are read",
        KEPT,
        "test_archived_collections.py::test_members_whose_names_were_exchanged",
    ),
    Row(
        "an answer lost, a hangup or a 500 at any request",
        "publishing",
        "nothing, or the error of the fault",
        "a repo in which the bytes of every row exist; the next run continues to the same result",
        "test_publish_faults.py::test_cut_off_at_each_request",
    ),
    Row(
        "SIGKILL at random moments",
        "publishing",
        "nothing; the next run continues",
        "a repo in which the bytes of every row exist, at every commit",
        "test_publish_kill.py::test_killed_at_random_moments",
    ),
)

KINDS: dict[str, str] = {
    "status 401": "401",
    "status 403": "403",
    "status 429": "429 that stays",
    "status 500": "500 that stays",
    "status 503": "503 that stays",
    "status 416": "416",
    "whole": "200 instead of 206",
    "expire": "links that never work",
    "cut": "bodies always cut short",
    "wrong": "always the wrong bytes",
    "body": "an HTML page",
    "headers": "size 0 from a mirror",
    "code RepoNotFound": "404: no such repo",
    "code RevisionNotFound": "404: no such revision",
    "code EntryNotFound": "404: no such file",
    "code GatedRepo": "gated",
}
PLACES = {"/api/": "the commit", "resolve/.*/shards/": "the HEAD of a file", "/_cdn/.*/shards/": "a range of bytes"}


def kind_of(fault: dict[str, Any]) -> str:
    """Return the name of a fault."""
    if "code" in fault:
        return KINDS[f"code {fault['code']}"]
    return KINDS[f"status {fault['status']}"] if "status" in fault else KINDS[next(iter(fault))]


def rows() -> list[Row]:
    """Return all faults, lasting ones first."""
    test = "test_hub_faults.py::test_a_fault_that_stays"
    lasting = [
        Row(kind_of(fault), PLACES[path], text if text.endswith(".") else f"{text}…", KEPT, test)
        for path, fault, _, text in FAULTS
    ]
    return [*lasting, *ROWS]


def page() -> str:
    """Write the table; return the text of docs/faults.md."""
    lines = [
        "# Failures between this machine and the Hub",
        "",
        "Made by `python -m docs.make`; a test compares the page with its generator. Each line names the test of",
        "the fault. FILE, ADDRESS and HOST are placeholders; zoo-cli lists its [exit codes](cli.md#exit-codes).",
        "",
        "| fault | request | what the user sees | what remains on disk | test |",
        "|---|---|---|---|---|",
    ]
    for row in rows():
        cells = (row.kind, row.where, row.seen, row.left, f"`{row.test}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
