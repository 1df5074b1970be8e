"""What is wrong with the files of a repo or a folder, told from hashes, sizes and first bytes; nothing is unpickled.

No file on the Hub is fetched whole, manifests and descriptions aside.
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
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.shard_files import guess_kind, header_length, parse_header
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import PredictionSet
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.archives.tar import BLOCK, header_at, is_header, leads_out
from checkpoints_zoo.sources.hub import translated_errors
from checkpoints_zoo.sources.ranges import RemoteFile
from checkpoints_zoo.sources.source import FolderSource, Source, open_source

SAMPLES, SAMPLE_BYTES = 8, 4096
SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")
WEIGHTS = (SAFETENSORS, *PICKLED, ".npy", ".npz", ".h5", ".hdf5", ".gguf", ".onnx", ".msgpack")
GZIPPED = (".tgz", ".tar.gz")
ARCHIVES = (*GZIPPED, ".tar")
# Formats that a file with a pickle's name may have, and that run nothing.
HARMLESS = (b"GGUF", b"\x93NUMPY", b"\x89HDF\r\n\x1a\n")
Said = tuple[str, str]  # kind, text
PARALLEL = 8
WINDOW = 64 * 2**10  # bytes that are read of a file of weights
LARGEST_WINDOW = 16 * 2**20  # where a manifest says how long its header is
SMALL_WINDOW = 4096
POINTER = range(100, 513)  # bytes that an LFS pointer has
SHOWN = 5
_MANIFEST = re.compile(r"manifests/([^/]+)\.parquet")
_SET = re.compile(r"predictions/([^/]+)/([^/]+)/manifest\.(?:parquet|json)")
Held = tuple[str, Description, pa.Table]


@dataclass(frozen=True)
class Finding:
    """Something about a file that is wrong, or in a note unusual.

    Args:
        kind: "archive", "duplicate", "empty", "header", "link", "manifest", "member", "missing", "overlap", "page",
            "pickle", "pointer", "short", "unreadable".
        path: of the file, or of the manifest.
        text: what was found.
        also: other files with the same content.
    """

    kind: str
    path: str
    text: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.text}"


@dataclass
class Audit:
    """What an audit has found.

    Args:
        source: what was audited.
        files, bytes: that are there.
        read: files whose first bytes were looked at.
        collections, members: rows of the manifests that could be read.
        predictions: sets of stored predictions that could be read.
        findings: what is wrong.
        notes: what is unusual.
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


def audit(place: str | Path) -> Audit:
    """Look for files and members that are not what they should be, without fetching any; return what was found.

    Args:
        place: hf://datasets/ORG/NAME[@REVISION], or a folder; with or without manifests.

    Raises:
        SourceNotFound, AccessError, NetworkError: the place is not there, or can't be read.
    """
    files: Files
    links_out: list[str] = []
    if str(place).startswith(hub.SCHEME):
        source = open_source(place, "")
        files = on_hub(hub.resolve_address(source.display_name))
    else:
        root = Path(place).expanduser().absolute()
        if not root.is_dir():
            kind = "a file" if root.is_file() else "nothing there"
            raise SourceNotFound(
                f"source {place}", expected="a folder, or an address on the Hub", found=kind, path=root
            )
        source = folder = FolderSource(root, root.as_uri())
        files = in_folder(root, folder.allowed_folders(), links_out)
    found = Audit(source.display_name, len(files), sum(f.size for f in files.values()))
    found.notes += [Finding("link", path, "leads out of the folder, so it was not checked") for path in links_out]
    held = list(_read(source, files, found))
    found.collections, found.members = len(held), sum(rows.num_rows for *_, rows in held)
    predicted = list(_read_sets(source, files, found))
    found.predictions = len(predicted)
    ends = _check_rows(source, files, held, predicted, found)
    _check_weights(held, predicted, found)
    _check_first_bytes(files, ends, found)
    _check_duplicates(files, held, found)
    found.findings.sort(key=lambda f: (f.kind, f.path, f.text))
    return found


def _read(source: Source, files: Files, found: Audit) -> Iterator[Held]:
    """Read the manifests; yield name, description and rows of those that can be."""
    for path in sorted(files):
        if match := _MANIFEST.fullmatch(path):
            try:
                yield match[1], *source.read_collection(match[1])
            except (NetworkError, AccessError, StorageError):
                raise
            except ZooError as error:
                found.findings.append(Finding("manifest", path, str(error)))


def _read_sets(source: Source, files: Files, found: Audit) -> Iterator[PredictionSet]:
    """Read the facts and rows of stored predictions; yield the sets that can be read."""
    names = {match.groups(): path for path in sorted(files) if (match := _SET.fullmatch(path))}
    for name, path in sorted(names.items()):
        try:
            yield prediction_sets.read_set(source, *name)
        except (NetworkError, AccessError, StorageError):
            raise
        except ZooError as error:
            found.findings.append(Finding("manifest", path, str(error)))


def _check_weights(held: list[Held], predicted: list[PredictionSet], found: Audit) -> None:
    """Check that stored predictions were made from the weights that the manifest of their collection names."""
    weights = {name: prediction_sets.weights_of(rows) for name, _, rows in held}
    for stored in predicted:
        path = f"{prediction_sets.folder_of(stored.facts.collection, stored.facts.set)}/{prediction_sets.TABLE}"
        known = weights.get(stored.facts.collection)
        if known is None:
            text = f"weights not compared: no manifest of {stored.facts.collection} that can be read"
            found.notes.append(Finding("member", path, text))
            continue
        for member, text in prediction_sets.find_other_weights(stored, known):
            found.findings.append(Finding("member", path, f"member {member}: {text}"))


def _check_rows(
    source: Source, files: Files, held: list[Held], predicted: list[PredictionSet], found: Audit
) -> dict[str, int]:
    """Check that members' bytes lie in files that are there, each in its own; return where the first of a file begins.

    The bytes of members whose description names a base are looked for there.
    """
    bases: dict[str, Files] = {}
    ranges: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    placed = [(name, description.layouts, description.base, rows) for name, description, rows in held]
    placed += [(f"predictions {s.facts.name}", s.facts.layouts, "", s.rows) for s in predicted]
    for name, layouts, base, rows in placed:
        columns = (rows.column(c).to_pylist() for c in ("path", "offset", "layout", "member"))
        for path, offset, key, member in zip(*columns, strict=True):
            if path is not None:
                layout = layouts[key]
                one = offset - layout.lead, offset + layout.nbytes, f"member {member} of {name}"
                ranges.setdefault((base, path), []).append(one)
    for base in {base for base, _ in ranges if base}:
        bases[base] = on_hub(hub.resolve_address(base))
    for (base, path), members in sorted(ranges.items()):
        size = (bases[base] if base else files).get(path)
        for kind, text in _misplaced(sorted(members), size):
            found.findings.append(Finding(kind, f"{base}/{path}" if base else path, text))
    return {path: min(members)[0] for (base, path), members in ranges.items() if not base and path in files}


def _misplaced(members: list[tuple[int, int, str]], file: File | None) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what is wrong with the places of members in a file, in the order of their bytes."""
    if file is None:
        yield "missing", f"no such file, named by the rows of {first_few([m for *_, m in members], SHOWN)}"
        return
    short = [f"{who} (to {end:,})" for _, end, who in members if end > file.size]
    if short:
        yield "short", f"a file of {file.size:,} bytes, too short for {first_few(short, SHOWN)}"
    if members[0][0] < 0:
        yield "overlap", f"{members[0][2]} begins {-members[0][0]:,} bytes before the file"
    reached = members[0]
    for one in members[1:]:
        if one[0] < reached[1] and one[:2] != reached[:2]:
            yield (
                "overlap",
                f"{one[2]} at {one[0]:,} to {one[1]:,} and {reached[2]} at {reached[0]:,} to {reached[1]:,}",
            )
        reached = max(reached, one, key=lambda r: r[1])


def _check_first_bytes(files: Files, ends: dict[str, int], found: Audit) -> None:
    """Look at the first bytes of weights, archives, and whatever has the size of an LFS pointer."""
    wanted: dict[str, int] = {}
    for path, file in files.items():
        if is_weights(path) or path in ends or (file.large and "." not in path.rpartition("/")[2]):
            wanted[path] = max(WINDOW, min(ends.get(path, 0), LARGEST_WINDOW))
        elif is_archive(path) or file.size in POINTER:
            wanted[path] = SMALL_WINDOW
    once = {files[p].content or p: p for p in reversed(wanted)}  # one file of each content is enough

    def read(path: str) -> bytes | Exception:
        try:
            return files[path].read(0, min(wanted[path], files[path].size)) if files[path].size else b""
        except (DamagedError, SourceNotFound, PermissionError) as error:
            if isinstance(error, AccessError):
                raise
            return error

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="zoo-audit") as pool:
        firsts = dict(zip(once, pool.map(read, once.values()), strict=True))
    found.read = sum(1 for path in once.values() if files[path].size)
    for path in wanted:
        first = firsts[files[path].content or path]
        if isinstance(first, Exception):
            found.findings.append(Finding("unreadable", path, str(first)))
            continue
        expected = is_weights(path) or is_archive(path) or path in ends
        said = problem(path, files[path].size, first)
        if said and (expected or said[0] in ("pointer", "pickle")):
            found.findings.append(Finding(said[0], path, said[1]))
        elif unusual := remark(path, first):
            found.notes.append(Finding("archive", path, unusual))


def _check_duplicates(files: Files, held: list[Held], found: Audit) -> None:
    """Look for files with one content under several names, and members with one hash under several ids."""
    for paths in alike(files):
        text = f"the same {files[paths[0]].size:,} bytes as {first_few(paths[1:], SHOWN)}"
        serious = any(files[p].large or is_weights(p) for p in paths)
        (found.findings if serious else found.notes).append(Finding("duplicate", paths[0], text, tuple(paths[1:])))
    hashes: list[tuple[str, pa.Table, list[str | None]]] = []
    for name, description, rows in held:
        columns = (rows.column(c).to_pylist() for c in ("status", "sha256", "path", "offset"))
        named: list[str | None] = [
            (sha256 or f"{description.base}/{path}@{offset}") if status == "ok" else None
            for status, sha256, path, offset in zip(*columns, strict=True)
        ]
        hashes.append((name, rows, named))
    for one in shard_files.find_duplicates(hashes):
        found.findings.append(
            Finding("member", f"manifests/{one.collection}.parquet", f"member {one.member}: {one.text}")
        )


@dataclass(frozen=True)
class File:
    """A file that is looked into.

    Args:
        size: in bytes.
        content: names its content: two files with one name hold the same. "" where nobody knows.
        large: whether git itself does not keep it.
        read: (offset, length) -> bytes, fewer at the end of the file.
    """

    size: int
    content: str
    large: bool
    read: Callable[[int, int], bytes] = field(repr=False, compare=False)


Files = Mapping[str, File]


def on_hub(repo: hub.Repo) -> dict[str, File]:
    """List the files of a repo at its commit; return them by path.

    Raises:
        SourceNotFound, AccessError, NetworkError: see `hub.resolve_address`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def listed() -> list[RepoFile]:
        rows = HfApi(**hub.client_info()).list_repo_tree(
            repo.id, recursive=True, revision=repo.commit, repo_type="dataset"
        )
        return [row for row in rows if isinstance(row, RepoFile)]

    def reader(inside: str) -> Callable[[int, int], bytes]:
        return lambda offset, length: RemoteFile.of(repo, inside).bytes_at(offset, length)

    with translated_errors(repo.label, f"files of {repo.label}"):
        rows = hub.retry_patiently(listed, hub.RETRIED_STATUSES)
    return {
        row.path: File(row.size, row.lfs.sha256 if row.lfs else row.blob_id, row.lfs is not None, reader(row.path))
        for row in rows
    }


def in_folder(root: Path, allowed: Sequence[Path], links_out: list[str] | None = None) -> dict[str, File]:
    """List the files below a folder, without hidden folders; return path -> file.

    Links are followed, each folder once. A link to nothing is an empty file. A link that leads out of the allowed
    folders is not listed.

    Args:
        root: the folder.
        allowed: folders that links may lead into.
        links_out: takes the paths of links that lead elsewhere.
    """
    return dict(_walk(root, [folder.resolve() for folder in allowed], [] if links_out is None else links_out))


def _walk(root: Path, allowed: Sequence[Path], links_out: list[str]) -> Iterator[tuple[str, File]]:
    def refuse(error: OSError) -> None:
        raise error

    def leads_out(path: Path) -> bool:
        outside = path.is_symlink() and not any(path.resolve().is_relative_to(folder) for folder in allowed)
        if outside:
            links_out.append(path.relative_to(root).as_posix())
        return outside

    visited: set[Path] = set()
    starts = [root]  # links to folders come last: a folder is listed by its own path if it has one
    for start in starts:
        for place, folders, names in os.walk(start, onerror=refuse):
            if (resolved := Path(place).resolve()) in visited:
                folders[:] = []
                continue
            visited.add(resolved)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            starts += [link for n in folders if (link := Path(place, n)).is_symlink() and not leads_out(link)]
            for name in sorted(names):
                path = Path(place, name)
                if not leads_out(path) and (file := _file(path)) is not None:
                    yield path.relative_to(root).as_posix(), file


def _file(path: Path) -> File | None:
    """Return a file of a folder; None for what is no file, such as a pipe, whose reading would never end."""
    try:
        status = path.stat()
    except OSError:
        return File(0, "", True, _reader(path))
    if not stat.S_ISREG(status.st_mode):
        return None
    content = f"inode {status.st_dev}:{status.st_ino}" if path.is_symlink() or status.st_nlink > 1 else ""
    return File(status.st_size, content, True, _reader(path))


def _reader(path: Path) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return read


def alike(files: Files) -> list[list[str]]:
    """Find files with the same content; return their paths, one list a content.

    Where no hash is known, which is on this disk alone, those that agree in size and in some samples are hashed.
    """
    groups: dict[object, list[str]] = {}
    for path, file in files.items():
        if file.size:
            groups.setdefault(file.content or file.size, []).append(path)
    found = []
    for key, paths in groups.items():
        if isinstance(key, str):
            found.append(paths)
        elif len(paths) > 1:
            found += _split(files, [p for same in _split(files, paths, _sampled) for p in same], _hashed)
    return sorted(paths for paths in found if len(paths) > 1)


def _split(files: Files, paths: list[str], name: Callable[[File], str]) -> list[list[str]]:
    """Put paths that have one name of their content together; return those that are not alone."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(name(files[path]), []).append(path)
    return [group for group in groups.values() if len(group) > 1]


def _sampled(file: File) -> str:
    last = max(0, file.size - SAMPLE_BYTES)
    places = sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
    return hashlib.sha256(b"".join(file.read(at, SAMPLE_BYTES) for at in places)).hexdigest()


def _hashed(file: File) -> str:
    digest = hashlib.sha256()
    for at in range(0, file.size, 2**20):
        digest.update(file.read(at, 2**20))
    return digest.hexdigest()


class _Beyond(Exception):
    """Bytes that were not read."""


def is_weights(path: str) -> bool:
    """Say whether a file's name is one of weights."""
    return path.lower().endswith(WEIGHTS)


def is_archive(path: str) -> bool:
    """Say whether a file's name is one of archives."""
    return path.lower().endswith(ARCHIVES)


def problem(path: str, size: int, first: bytes) -> Said | None:
    """Say what is wrong with a file of weights or an archive; return (kind, text), None for nothing.

    Args:
        path: its name.
        size: in bytes.
        first: its first bytes. Of a safetensors header that is longer, only the length is checked.
    """
    if size == 0:
        return "empty", "a file without a byte"
    known = guess_kind(first)
    if known.startswith("a Git LFS pointer"):
        return "pointer", known
    if known == "a web page":
        return "page", known
    name = path.lower()
    if said := _pickle(name, first, known):
        return "pickle", said
    if name.endswith(SAFETENSORS):
        return _header(path, size, first)
    if is_archive(path):
        return _archive(path, size, first)
    return None


def remark(path: str, first: bytes) -> str:
    """Say what is unusual about an archive, and not wrong; return "" for nothing."""
    name = path.lower()
    if name.endswith(GZIPPED) and is_header(first[:BLOCK]):
        return "a plain tar, not a gzipped one: members can be read one by one"
    if name.endswith(".tar") and first.startswith(b"\x1f\x8b"):
        return "a gzipped tar: it can only be read as a whole"
    return ""


def _pickle(name: str, first: bytes, known: str) -> str:
    """Say by which bytes or name a file is a pickle; return "" if it is none."""
    if first.startswith(b"PK\x03\x04") and b"data.pkl" in first[:512]:
        return "a torch pickle in a zip archive, by its first bytes"
    if known == "a Python pickle":
        return "a Python pickle, by its first bytes"
    if first.startswith(b"\x93NUMPY") and b"|O" in first[:512]:
        return "a NumPy file of pickled objects, by its first bytes"
    if name.endswith(PICKLED) and not (first.startswith(HARMLESS) or _is_safetensors(first)):
        return f"a pickle, by its name; its first bytes are {known or 'of no format that is known'}"
    return ""


def _is_safetensors(first: bytes) -> bool:
    return first[8:9] == b"{" and int.from_bytes(first[:8], "little") < 2**32


def _header(path: str, size: int, first: bytes) -> Said | None:
    try:
        length = header_length(first, size, path)
        if len(first) < 8 + length:
            return None if _is_safetensors(first) else ("header", "expected a safetensors header; found other bytes")
        if not parse_header(first, size, path).tensors:
            return "empty", "a safetensors file without a tensor"
    except DamagedError as error:
        return "header", f"expected {error.expected}; found {error.found}"
    return None


def _archive(path: str, size: int, first: bytes) -> Said | None:
    """Look at an archive's first headers, as far as they were read."""
    if first.startswith(b"\x1f\x8b"):
        return None
    if not is_header(first[:BLOCK]):
        return "archive", "expected a tar, gzipped or not; found other bytes"

    def take(offset: int, length: int) -> bytes:
        if offset + length > len(first):
            raise _Beyond
        return first[offset : offset + length]

    at = 0
    try:
        while (header := header_at(take, at, size, path)) is not None:
            if leads_out(header.name):
                return "archive", f"expected names that stay in its folder; found {header.name[:200]!r}"
            if not header.kind:
                content = first[header.data : header.end]
                said = _pickle(header.name.lower(), content, guess_kind(content))
                return ("pickle", f"its first file, {header.name[:200]!r}, is {said}") if said else None
            at = header.end
    except DamagedError as error:
        return "archive", f"expected {error.expected}; found {error.found}"
    except _Beyond:
        return None
    return None
