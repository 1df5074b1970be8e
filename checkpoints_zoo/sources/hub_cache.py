"""Files of the Hub on this machine: the cache of the Hub's client, and our own cache beside it."""

from __future__ import annotations

import atexit
import hashlib
import re
import shutil
import tempfile
import warnings
from pathlib import Path

from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file
from checkpoints_zoo.sources.hub_addresses import Repo

LIBRARY_NAME = "checkpoints_zoo"


_fallback_folders: list[Path] = []


def cache_root() -> Path:
    """Return the folder of our cache, which HF_HOME and HF_ASSETS_CACHE determine."""
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE).expanduser() / LIBRARY_NAME


def folder_name(repo_name: str) -> str:
    """Return the name of a repo's folder in our cache: "datasets--org--name" for "org/name"."""
    kind = "" if repo_name.count("/") > 1 else "datasets/"
    return f"{kind}{repo_name}".replace("/", "--")


def snapshot_folder(repo: Repo) -> Path:
    """Return the folder of a commit's files in the client's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repo.id, repo_type=repo.kind)
    return Path(constants.HF_HUB_CACHE, folder, "snapshots", repo.commit)


def cached_file(repo: Repo, repo_path: str) -> Path | None:
    """Look for a whole file in the client's cache; return its path, None if the file is missing."""
    from huggingface_hub import try_to_load_from_cache

    for cache_folder in (None, *fallback_folders()):
        path = try_to_load_from_cache(
            repo.id, repo_path, cache_dir=cache_folder, revision=repo.commit, repo_type=repo.kind
        )
        if isinstance(path, str):
            return Path(path)
    return None


def whole_file_record(repo: Repo, cached_path: Path) -> Path:
    """Return the path of the record with the hashes of a file in the client's cache."""
    record_name = hashlib.sha256(str(cached_path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_root() / folder_name(repo.cache_name) / "records" / f"{record_name}.json"


def blob_name(cached_path: Path) -> str:
    """Return the name of a cached file's blob, which is its ETag."""
    # The client's cache holds links to a file named by the ETag; with Xet this file is itself a link to another file.
    return cached_path.readlink().name if cached_path.is_symlink() else cached_path.name


def has_announced_hash(cached_path: Path) -> bool:
    """Say whether the name of a cached file's blob is the hash that the file should have. Without links (on some file
    systems) there is no such name."""
    return re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob_name(cached_path)) is not None


def is_offline() -> bool:
    """Say whether offline mode is on (HF_HUB_OFFLINE is set)."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def check_whole_file(repo: Repo, cached_path: Path, ignore_recorded: bool = False) -> str:
    """Compare the hash of a file in the client's cache with the announced hash; delete the file if the two differ.

    The file is read again only after it has changed. In offline mode it is not deleted, because it can't be fetched
    again.

    Args:
        repo, cached_path: the repo that has the file, and the path of the cached file.
        ignore_recorded: whether the file is hashed again even if a hash is recorded.

    Returns:
        The hash and kind of a file whose hash is wrong; "" if the hash is right, or if no hash was announced.
    """
    announced_hash, blob_path = blob_name(cached_path), cached_path.resolve()
    hash_record = HashRecord(blob_path, whole_file_record(repo, cached_path), ignore_recorded)
    if hash_record.hashes.get("") == announced_hash:
        return ""
    actual_hash = _hash_as_announced(announced_hash, blob_path)
    if actual_hash in ("", announced_hash):
        if actual_hash:
            hash_record.add("", actual_hash)
            hash_record.save()
        return ""
    with blob_path.open("rb") as file:
        guessed_kind = guess_kind(file.read(512))
    if not is_offline():
        drop_whole_file(repo, cached_path)
    return f"{actual_hash[:16]}…{f': {guessed_kind}' if guessed_kind else ''}"


def drop_whole_file(repo: Repo, cached_path: Path) -> None:
    """Delete a file and the links to it from the client's cache, so that the file is fetched again."""
    record_path, blob_path = whole_file_record(repo, cached_path), cached_path.resolve()
    etag_link = cached_path.parent / cached_path.readlink() if cached_path.is_symlink() else cached_path
    for path in {cached_path, etag_link, blob_path}:
        delete_file(path, record_path)


def _hash_as_announced(announced_hash: str, cached_path: Path) -> str:
    """Hash a file as the Hub does: sha256 for large files, git's sha1 for others; return the hash, "" if the ETag is no
    hash."""
    if re.fullmatch("[0-9a-f]{64}", announced_hash):
        digest = hashlib.sha256()
    elif re.fullmatch("[0-9a-f]{40}", announced_hash):
        digest = hashlib.sha1(b"blob %d\0" % cached_path.stat().st_size, usedforsecurity=False)
    else:
        return ""
    with cached_path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def fallback_folder(unwritable_folder: Path, error: OSError) -> Path:
    """Return a temporary folder that replaces a cache folder which can't be written to; warn at the first call.

    Args:
        unwritable_folder: the cache folder that can't be written to.
        error: the error that writing to the cache raised.
    """
    if not _fallback_folders:
        _fallback_folders.append(Path(tempfile.mkdtemp(prefix="checkpoints-zoo-")))
        atexit.register(shutil.rmtree, _fallback_folders[0], ignore_errors=True)
        warnings.warn(
            f"the cache {unwritable_folder} can't be written to ({error.strerror}): fetched files are deleted "
            "when this process ends. Set HF_HOME to a folder that can be written to.",
            stacklevel=2,
        )
    return _fallback_folders[0]


def fallback_folders() -> list[Path]:
    """Return a list with the temporary folder that `fallback_folder` has made; the list is empty if there is none."""
    return _fallback_folders[:]
