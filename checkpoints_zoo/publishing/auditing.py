"""Find damaged and suspicious files of a repo or a folder by hashes, sizes and first bytes; nothing is unpickled.

Of files on the Hub only manifests and descriptions are downloaded whole.

This is one file, because files on the Hub and files in a folder pass the same checks.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError, SourceNotFound, StorageError, ZooError
from checkpoints_zoo.formats import manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.member_parts import Part, parts_of_rows
from checkpoints_zoo.formats.shard_files import guess_kind, header_length, parse_header
from checkpoints_zoo.formats.text import count_with_noun, first_few
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import PredictionSet
from checkpoints_zoo.sources import hub, hub_addresses, hub_errors
from checkpoints_zoo.sources.archives.indexing import ARCHIVE_SUFFIXES
from checkpoints_zoo.sources.archives.tar import BLOCK_BYTES, header_at, is_header, leads_out
from checkpoints_zoo.sources.finding import open_source
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.hub_errors import translated_errors
from checkpoints_zoo.sources.hub_ranges import RemoteFile
from checkpoints_zoo.sources.source import Source

SAMPLE_COUNT, SAMPLE_BYTES = 8, 4096
SAFETENSORS_SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")
WEIGHT_SUFFIXES = (SAFETENSORS_SUFFIX, *PICKLE_SUFFIXES, ".npy", ".npz", ".h5", ".hdf5", ".gguf", ".onnx", ".msgpack")
GZIP_SUFFIXES = (".tgz", ".tar.gz")
# First bytes of formats that run no code when loaded: a file with a pickle's suffix may have one of them.
HARMLESS_FIRST_BYTES = (b"GGUF", b"\x93NUMPY", b"\x89HDF\r\n\x1a\n")
KindAndText = tuple[str, str]  # kind and text of a finding
READING_THREADS = 8
WINDOW_BYTES = 64 * 2**10  # bytes that are read at the start of a file of weights
LARGEST_WINDOW_BYTES = 16 * 2**20  # bytes that are read at most of a file whose manifest gives the length of its header
SMALL_WINDOW_BYTES = 4096
POINTER_SIZES = range(100, 513)  # possible sizes of a Git LFS pointer file, in bytes
LARGEST_SHOWN_COUNT = 5  # files or members that the text of a finding names
_MANIFEST_PATH = re.compile(r"manifests/([^/]+)\.parquet")
_PREDICTION_SET_PATH = re.compile(r"predictions/([^/]+)/([^/]+)/manifest\.(?:parquet|json)")
CollectionRows = tuple[str, Description, pa.Table]  # name, description and manifest of a collection


@dataclass(frozen=True)
class Finding:
    """One fault or unusual property of a file.

    Args:
        kind: kind of the fault: "archive", "duplicate", "empty", "header", "link", "manifest", "member", "missing",
            "overlap", "page", "pickle", "pointer", "short", "unreadable".
        path: path of the faulty file or manifest inside the source.
        text: sentence that describes the fault.
        also: paths of the other files that have the same content.
    """

    kind: str
    path: str
    text: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.text}"


@dataclass
class Audit:
    """The result of an audit: faults and unusual properties of files, and how much was checked.

    Args:
        source: address or folder that was audited.
        files, bytes: number of files in the source, and their total size in bytes.
        read: number of files whose first bytes were read.
        collections, members: number of manifests that could be read, and number of rows in these manifests.
        predictions: number of sets of stored predictions that could be read.
        findings: the faults of files and manifests.
        notes: unusual properties that are not faults.
    """

    source: str
    files: int
    bytes: int
    read: int = 0
    collections: int = 0
    members: int = 0
    predictions: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)


def audit(address_or_folder: str | Path) -> Audit:
    """Look for damaged, duplicate and suspicious files and members without downloading weights; return the result.

    Args:
        address_or_folder: address hf://datasets/ORG/NAME[@REVISION] or folder to audit; it may lack manifests.

    Raises:
        SourceNotFound, AccessError, NetworkError: the place is not there, or can't be read.
    """
    files: Files
    links_out: list[str] = []
    if str(address_or_folder).startswith(hub_addresses.ADDRESS_SCHEME):
        source = open_source(address_or_folder, "")
        files = files_on_hub(hub.resolve_address(source.display_name))
    else:
        root = Path(address_or_folder).expanduser().absolute()
        if not root.is_dir():
            found_text = "a file" if root.is_file() else "nothing there"
            raise SourceNotFound(
                f"source {address_or_folder}",
                expected="a folder, or an address on the Hub",
                found=found_text,
                path=root,
            )
        source = folder = FolderSource(root, root.as_uri())
        files = files_in_folder(root, folder.allowed_folders(), links_out)
    result = Audit(source.display_name, len(files), sum(f.size for f in files.values()))
    result.notes += [Finding("link", path, "leads out of the folder, so it was not checked") for path in links_out]
    collections = list(_read_manifests(source, files, result))
    result.collections, result.members = len(collections), sum(rows.num_rows for *_, rows in collections)
    prediction_set_list = list(_read_sets(source, files, result))
    result.predictions = len(prediction_set_list)
    first_member_offsets = _check_rows(source, files, collections, prediction_set_list, result)
    _check_weights(collections, prediction_set_list, result)
    _check_first_bytes(files, first_member_offsets, result)
    _check_duplicates(files, collections, result)
    result.findings.sort(key=lambda f: (f.kind, f.path, f.text))
    return result


def _read_manifests(source: Source, files: Files, audit: Audit) -> Iterator[CollectionRows]:
    """Yield name, description and rows of each readable manifest; add a finding for each unreadable manifest."""
    for path in sorted(files):
        if match := _MANIFEST_PATH.fullmatch(path):
            try:
                yield match[1], *source.read_collection(match[1])
            except (NetworkError, AccessError, StorageError):
                raise
            except ZooError as error:
                audit.findings.append(Finding("manifest", path, str(error)))


def _read_sets(source: Source, files: Files, audit: Audit) -> Iterator[PredictionSet]:
    """Yield each readable set of stored predictions; add a finding for each unreadable set."""
    path_of_set = {match.groups(): path for path in sorted(files) if (match := _PREDICTION_SET_PATH.fullmatch(path))}
    for collection_and_set, path in sorted(path_of_set.items()):
        try:
            yield prediction_sets.read_set(source, *collection_and_set)
        except (NetworkError, AccessError, StorageError):
            raise
        except ZooError as error:
            audit.findings.append(Finding("manifest", path, str(error)))


def _check_weights(collections: list[CollectionRows], prediction_set_list: list[PredictionSet], audit: Audit) -> None:
    """Check that stored predictions were made from the weights that the manifest of their collection names."""
    hashes_of_collection = {name: prediction_sets.weight_hashes(rows) for name, _, rows in collections}
    for prediction_set in prediction_set_list:
        folder = prediction_sets.folder_of_set(prediction_set.facts.collection, prediction_set.facts.set)
        path = f"{folder}/{prediction_sets.MANIFEST_FILE}"
        known_hashes = hashes_of_collection.get(prediction_set.facts.collection)
        if known_hashes is None:
            text = f"weights not compared: no manifest of {prediction_set.facts.collection} that can be read"
            audit.notes.append(Finding("member", path, text))
            continue
        for member, text in prediction_sets.find_changed_weights(prediction_set, known_hashes):
            audit.findings.append(Finding("member", path, f"member {member}: {text}"))


def _check_rows(
    source: Source,
    files: Files,
    collections: list[CollectionRows],
    prediction_set_list: list[PredictionSet],
    audit: Audit,
) -> dict[str, int]:
    """Check that members' byte ranges lie inside existing files and do not overlap; return path -> offset of the first
    member in the file.

    If a description names a base repo, its members' files are looked up in that repo.
    """
    files_of_base: dict[str, Files] = {}
    ranges_of_file: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    named_tables = [(name, description.layouts, description.base, rows) for name, description, rows in collections]
    named_tables += [
        (f"predictions {prediction_set.facts.name}", prediction_set.facts.layouts, "", prediction_set.rows)
        for prediction_set in prediction_set_list
    ]
    for name, layouts, base, rows in named_tables:
        own_rows = manifest.without_parts(rows)
        if elsewhere := rows.num_rows - own_rows.num_rows:
            text = f"{count_with_noun(elsewhere, 'member')} in other repos, whose files were not looked at"
            audit.notes.append(Finding("member", f"manifests/{name}.parquet", text))
        columns = (own_rows.column(c).to_pylist() for c in ("path", "offset", "layout", "member"))
        for path, offset, layout_key, member in zip(*columns, strict=True):
            if path is not None:
                layout = layouts[layout_key]
                member_range = offset - layout.header_nbytes, offset + layout.nbytes, f"member {member} of {name}"
                ranges_of_file.setdefault((base, path), []).append(member_range)
    for base in {base for base, _ in ranges_of_file if base}:
        files_of_base[base] = files_on_hub(hub.resolve_address(base))
    for (base, path), member_ranges in sorted(ranges_of_file.items()):
        file = (files_of_base[base] if base else files).get(path)
        for kind, text in _range_problems(sorted(member_ranges), file):
            audit.findings.append(Finding(kind, f"{base}/{path}" if base else path, text))
    return {
        path: min(member_ranges)[0]
        for (base, path), member_ranges in ranges_of_file.items()
        if not base and path in files
    }


def _range_problems(member_ranges: list[tuple[int, int, str]], file: File | None) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each member range that leaves its file or overlaps another, in the order of offsets."""
    if file is None:
        members_text = first_few([member for *_, member in member_ranges], LARGEST_SHOWN_COUNT)
        yield "missing", f"no such file, named by the rows of {members_text}"
        return
    cut_members = [f"{member} (to {end:,})" for _, end, member in member_ranges if end > file.size]
    if cut_members:
        yield "short", f"a file of {file.size:,} bytes, too short for {first_few(cut_members, LARGEST_SHOWN_COUNT)}"
    if member_ranges[0][0] < 0:
        yield "overlap", f"{member_ranges[0][2]} begins {-member_ranges[0][0]:,} bytes before the file"
    last_range = member_ranges[0]  # the range that ends last so far
    for current_range in member_ranges[1:]:
        if current_range[0] < last_range[1] and current_range[:2] != last_range[:2]:
            yield (
                "overlap",
                f"{current_range[2]} at {current_range[0]:,} to {current_range[1]:,} "
                f"and {last_range[2]} at {last_range[0]:,} to {last_range[1]:,}",
            )
        last_range = max(last_range, current_range, key=lambda member_range: member_range[1])


def _check_first_bytes(files: Files, first_member_offsets: dict[str, int], audit: Audit) -> None:
    """Check the first bytes of weights, of archives and of files as small as a Git LFS pointer."""
    read_nbytes_of_path: dict[str, int] = {}
    for path, file in files.items():
        if (
            is_weights(path)
            or path in first_member_offsets
            or (file.is_outside_git and "." not in path.rpartition("/")[2])
        ):
            read_nbytes_of_path[path] = max(WINDOW_BYTES, min(first_member_offsets.get(path, 0), LARGEST_WINDOW_BYTES))
        elif is_archive(path) or file.size in POINTER_SIZES:
            read_nbytes_of_path[path] = SMALL_WINDOW_BYTES
    path_of_content = {files[p].content or p: p for p in reversed(read_nbytes_of_path)}  # equal contents are read once

    def read_first_bytes(path: str) -> bytes | Exception:
        try:
            return files[path].read(0, min(read_nbytes_of_path[path], files[path].size)) if files[path].size else b""
        except (DamagedError, SourceNotFound, PermissionError) as error:
            if isinstance(error, AccessError):
                raise
            return error

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="zoo-audit") as pool:
        first_bytes_of_content = dict(
            zip(path_of_content, pool.map(read_first_bytes, path_of_content.values()), strict=True)
        )
    audit.read = sum(1 for path in path_of_content.values() if files[path].size)
    for path in read_nbytes_of_path:
        first_bytes = first_bytes_of_content[files[path].content or path]
        if isinstance(first_bytes, Exception):
            audit.findings.append(Finding("unreadable", path, str(first_bytes)))
            continue
        must_be_valid = is_weights(path) or is_archive(path) or path in first_member_offsets
        fault = find_fault(path, files[path].size, first_bytes)
        if fault and (must_be_valid or fault[0] in ("pointer", "pickle")):
            audit.findings.append(Finding(fault[0], path, fault[1]))
        elif compression_note := unusual_compression(path, first_bytes):
            audit.notes.append(Finding("archive", path, compression_note))


def _check_duplicates(files: Files, collections: list[CollectionRows], audit: Audit) -> None:
    """Look for files with the same content under several paths, and members with the same hash under several ids."""
    for equal_paths in find_equal_files(files):
        text = f"the same {files[equal_paths[0]].size:,} bytes as {first_few(equal_paths[1:], LARGEST_SHOWN_COUNT)}"
        is_fault = any(files[path].is_outside_git or is_weights(path) for path in equal_paths)
        (audit.findings if is_fault else audit.notes).append(
            Finding("duplicate", equal_paths[0], text, tuple(equal_paths[1:]))
        )
    named_rows_and_hashes: list[tuple[str, pa.Table, list[str | None]]] = []
    for name, description, rows in collections:
        columns = (rows.column(c).to_pylist() for c in ("status", "sha256"))
        content_names: list[str | None] = [
            (sha256 or "+".join(_content_name(part, description.base) for part in parts)) if status == "ok" else None
            for status, sha256, parts in zip(*columns, parts_of_rows(rows), strict=True)
        ]
        named_rows_and_hashes.append((name, rows, content_names))
    for duplicate in shard_files.find_duplicates(named_rows_and_hashes):
        path = f"manifests/{duplicate.collection}.parquet"
        audit.findings.append(Finding("member", path, f"member {duplicate.member}: {duplicate.text}"))


def _content_name(part: Part, base: str) -> str:
    """Return a name of a part's bytes: equal names mean equal bytes."""
    return f"{part.etag or f'{base}/{part.path}'}@{part.offset}"


@dataclass(frozen=True)
class File:
    """A file of the audited repo or folder.

    Args:
        size: size of the file in bytes.
        content: hash or inode of the file's content, equal for files with equal bytes; "" if it is unknown.
        is_outside_git: whether the file is kept by Git LFS or on disk, not in git itself.
        read: function (offset, length) -> bytes of the file; it returns fewer bytes at the end of the file.
    """

    size: int
    content: str
    is_outside_git: bool
    read: Callable[[int, int], bytes] = field(repr=False, compare=False)


Files = Mapping[str, File]


def files_on_hub(repo: hub_addresses.Repo) -> dict[str, File]:
    """List the files of a repo at its commit; return path -> file.

    Raises:
        SourceNotFound, AccessError, NetworkError: see `hub.resolve_address`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def list_files() -> list[RepoFile]:
        with hub_errors.malformed_answers(f"files of {repo}"):
            tree_entries = HfApi(**hub.client_info()).list_repo_tree(
                repo.id, recursive=True, revision=repo.commit, repo_type="dataset"
            )
            return [entry for entry in tree_entries if isinstance(entry, RepoFile)]

    def reader_of(repo_path: str) -> Callable[[int, int], bytes]:
        return lambda offset, length: RemoteFile.of(repo, repo_path).bytes_at(offset, length)

    with translated_errors(repo.label, f"files of {repo.label}"):
        tree_entries = hub.retry_patiently(list_files, hub.RETRIED_STATUSES)
    return {
        entry.path: File(
            entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, entry.lfs is not None, reader_of(entry.path)
        )
        for entry in tree_entries
    }


def files_in_folder(root: Path, allowed: Sequence[Path], links_out: list[str] | None = None) -> dict[str, File]:
    """List the files below a folder, without hidden folders; return path -> file.

    Symbolic links are followed, and each folder is listed once. A broken link is listed as an empty file. A link that
    leads out of the allowed folders is not listed.

    Args:
        root: folder whose files are listed.
        allowed: folders that links may lead into.
        links_out: list to which the paths of links that lead out of the allowed folders are added.
    """
    return dict(_walk(root, [folder.resolve() for folder in allowed], [] if links_out is None else links_out))


def _walk(root: Path, allowed: Sequence[Path], links_out: list[str]) -> Iterator[tuple[str, File]]:
    def refuse(error: OSError) -> None:
        raise error

    def leads_out(path: Path) -> bool:
        leads_outside = path.is_symlink() and not any(path.resolve().is_relative_to(folder) for folder in allowed)
        if leads_outside:
            links_out.append(path.relative_to(root).as_posix())
        return leads_outside

    visited_folders: set[Path] = set()
    folders_to_list = [root]  # linked folders are appended, so that a folder is listed by its own path if it has one
    for start_folder in folders_to_list:
        for folder_path, subfolder_names, file_names in os.walk(start_folder, onerror=refuse):
            if (resolved_folder := Path(folder_path).resolve()) in visited_folders:
                subfolder_names[:] = []
                continue
            visited_folders.add(resolved_folder)
            subfolder_names[:] = sorted(name for name in subfolder_names if not name.startswith("."))
            folders_to_list += [
                link
                for subfolder_name in subfolder_names
                if (link := Path(folder_path, subfolder_name)).is_symlink() and not leads_out(link)
            ]
            for name in sorted(file_names):
                path = Path(folder_path, name)
                if not leads_out(path) and (file := _describe_file(path)) is not None:
                    yield path.relative_to(root).as_posix(), file


def _describe_file(path: Path) -> File | None:
    """Describe a path on disk; return None if the path is not a regular file, such as a pipe, which could be read for
    ever."""
    try:
        stat_result = path.stat()
    except OSError:
        return File(0, "", True, _file_reader(path))
    if not stat.S_ISREG(stat_result.st_mode):
        return None
    content_key = (
        f"inode {stat_result.st_dev}:{stat_result.st_ino}" if path.is_symlink() or stat_result.st_nlink > 1 else ""
    )
    return File(stat_result.st_size, content_key, True, _file_reader(path))


def _file_reader(path: Path) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return read


def find_equal_files(files: Files) -> list[list[str]]:
    """Find files with the same content; return a list of paths for each content that several files have.

    Files on disk have no known hash. Files are hashed only if their sizes and some samples of their bytes are equal.
    """
    paths_of_key: dict[object, list[str]] = {}
    for path, file in files.items():
        if file.size:
            paths_of_key.setdefault(file.content or file.size, []).append(path)
    path_groups = []
    for key, paths in paths_of_key.items():
        if isinstance(key, str):
            path_groups.append(paths)
        elif len(paths) > 1:
            paths_with_equal_samples = [
                path for group in _group_by_digest(files, paths, _hash_samples) for path in group
            ]
            path_groups += _group_by_digest(files, paths_with_equal_samples, _hash_content)
    return sorted(paths for paths in path_groups if len(paths) > 1)


def _group_by_digest(files: Files, paths: list[str], digest_of_file: Callable[[File], str]) -> list[list[str]]:
    """Group paths whose files have the same digest; return the groups of two or more paths."""
    paths_of_digest: dict[str, list[str]] = {}
    for path in paths:
        paths_of_digest.setdefault(digest_of_file(files[path]), []).append(path)
    return [group for group in paths_of_digest.values() if len(group) > 1]


def _hash_samples(file: File) -> str:
    last_start = max(0, file.size - SAMPLE_BYTES)
    sample_starts = sorted({last_start * i // (SAMPLE_COUNT - 1) for i in range(SAMPLE_COUNT)})
    return hashlib.sha256(b"".join(file.read(sample_start, SAMPLE_BYTES) for sample_start in sample_starts)).hexdigest()


def _hash_content(file: File) -> str:
    digest = hashlib.sha256()
    for offset in range(0, file.size, 2**20):
        digest.update(file.read(offset, 2**20))
    return digest.hexdigest()


class _NotReadYet(Exception):
    """Raised if requested bytes lie behind the part of the archive that was read."""


def is_weights(path: str) -> bool:
    """Return whether a file has a suffix of files of weights."""
    return path.lower().endswith(WEIGHT_SUFFIXES)


def is_archive(path: str) -> bool:
    """Return whether a file has a suffix of archives."""
    return path.lower().endswith(ARCHIVE_SUFFIXES)


def find_fault(path: str, file_nbytes: int, first_bytes: bytes) -> KindAndText | None:
    """Find a fault in the first bytes of a file of weights or an archive; return (kind, text), or None without one.

    Args:
        path: path of the file inside the source.
        file_nbytes: size of the file in bytes.
        first_bytes: first bytes of the file. If a safetensors header is longer, only its length is checked.
    """
    if file_nbytes == 0:
        return "empty", "a file of 0 bytes"
    guessed_kind = guess_kind(first_bytes)
    if guessed_kind.startswith("a Git LFS pointer"):
        return "pointer", guessed_kind
    if guessed_kind == "a web page":
        return "page", guessed_kind
    lowercase_path = path.lower()
    if reason := _why_pickle(lowercase_path, first_bytes, guessed_kind):
        return "pickle", reason
    if lowercase_path.endswith(SAFETENSORS_SUFFIX):
        return _header_fault(path, file_nbytes, first_bytes)
    if is_archive(path):
        return _archive_fault(path, file_nbytes, first_bytes)
    return None


def unusual_compression(path: str, first_bytes: bytes) -> str:
    """Return a sentence if an archive's compression does not match its suffix, which is no fault; else ""."""
    lowercase_path = path.lower()
    if lowercase_path.endswith(GZIP_SUFFIXES) and is_header(first_bytes[:BLOCK_BYTES]):
        return "a plain tar, not a gzipped one: members can be read one by one"
    if lowercase_path.endswith(".tar") and first_bytes.startswith(b"\x1f\x8b"):
        return "a gzipped tar: it can only be read as a whole"
    return ""


def _why_pickle(path: str, first_bytes: bytes, guessed_kind: str) -> str:
    """Return text on the bytes or the suffix that show that a file is a pickle; return "" if the file is not a
    pickle."""
    if first_bytes.startswith(b"PK\x03\x04") and b"data.pkl" in first_bytes[:512]:
        return "a torch pickle in a zip archive, by its first bytes"
    if guessed_kind == "a Python pickle":
        return "a Python pickle, by its first bytes"
    if first_bytes.startswith(b"\x93NUMPY") and b"|O" in first_bytes[:512]:
        return "a NumPy file of pickled objects, by its first bytes"
    if path.endswith(PICKLE_SUFFIXES) and not (
        first_bytes.startswith(HARMLESS_FIRST_BYTES) or _is_safetensors(first_bytes)
    ):
        return f"a pickle, by its name; its first bytes are {guessed_kind or 'of no format that is known'}"
    return ""


def _is_safetensors(first_bytes: bytes) -> bool:
    return first_bytes[8:9] == b"{" and int.from_bytes(first_bytes[:8], "little") < 2**32


def _header_fault(path: str, file_nbytes: int, first_bytes: bytes) -> KindAndText | None:
    try:
        header_nbytes = header_length(first_bytes, file_nbytes, path)
        if len(first_bytes) < 8 + header_nbytes:
            return (
                None if _is_safetensors(first_bytes) else ("header", "expected a safetensors header; found other bytes")
            )
        if not parse_header(first_bytes, file_nbytes, path).tensors:
            return "empty", "a safetensors file without a tensor"
    except DamagedError as error:
        return "header", f"expected {error.expected}; found {error.found}"
    return None


def _archive_fault(path: str, file_nbytes: int, first_bytes: bytes) -> KindAndText | None:
    """Check the headers in the first bytes of an archive; return (kind, text) of a fault, or None without one."""
    if first_bytes.startswith(b"\x1f\x8b"):
        return None
    if not is_header(first_bytes[:BLOCK_BYTES]):
        return "archive", "expected a tar, gzipped or not; found other bytes"

    def read_bytes(offset: int, length: int) -> bytes:
        if offset + length > len(first_bytes):
            raise _NotReadYet
        return first_bytes[offset : offset + length]

    header_offset = 0
    try:
        while (header := header_at(read_bytes, header_offset, file_nbytes, path)) is not None:
            if leads_out(header.name):
                return "archive", f"expected names that stay in its folder; found {header.name[:200]!r}"
            if not header.kind:
                content_bytes = first_bytes[header.data_offset : header.end]
                reason = _why_pickle(header.name.lower(), content_bytes, guess_kind(content_bytes))
                return ("pickle", f"its first file, {header.name[:200]!r}, is {reason}") if reason else None
            header_offset = header.end
    except DamagedError as error:
        return "archive", f"expected {error.expected}; found {error.found}"
    except _NotReadYet:
        return None
    return None
