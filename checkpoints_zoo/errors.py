"""Errors of this package: each text names the thing, the expectation, the finding, and the remedy.

Every error has these facts as attributes, and extends the builtin exception that fits.

>>> raise MemberNotFound("member 70 of convnet-digits", expected="an id in 0-63", found="70", member=70)
Traceback (most recent call last):
    ...
checkpoints_zoo.errors.MemberNotFound: member 70 of convnet-digits: expected an id in 0-63; found 70.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

LONGEST = 1000  # characters of each part of an error's text: what somebody typed or a file holds may be far longer


class ZooError(Exception):
    """Base of all errors of this package.

    Args:
        thing: what the error is about ("shard shards/x/00000-3f9a1c2b.safetensors").
        expected: a phrase that follows "expected".
        found: a phrase that follows "found".
        do: the remedy, a sentence without its full stop.
        collection, member, tensor, path: the facts, for programs.
    """

    def __init__(
        self,
        thing: str,
        *,
        expected: str = "",
        found: str = "",
        do: str = "",
        collection: str | None = None,
        member: int | None = None,
        tensor: str | None = None,
        path: str | Path | None = None,
    ) -> None:
        super().__init__(thing)
        self.thing = thing
        self.expected = expected
        self.found = found
        self.do = do
        self.collection = collection
        self.member = member
        self.tensor = tensor
        self.path = None if path is None else str(path)

    def __str__(self) -> str:
        thing, expected, found, do = (_cut(text) for text in (self.thing, self.expected, self.found, self.do))
        clauses = [f"expected {expected}"] if expected else []
        clauses += [f"found {found.rstrip('. ')}"] if found else []  # others' texts may end in a dot
        text = f"{thing}: {'; '.join(clauses)}." if clauses else f"{thing}."
        text = f"{text} {do}{'' if do.endswith('?') else '.'}" if do else text
        return _escape_controls(f"{text}{_explain_equal_looks(text)}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _explain_equal_looks(text: str) -> str:
    """Return a sentence on words of a text that look the same but are stored in two ways; "" if there are none.

    Unicode has two forms of "é": one character, or "e" and an accent. Some systems change names from one to the other.
    """
    if text.isascii():
        return ""
    forms: dict[str, set[str]] = {}
    for word in re.findall(r"[^\s'\"`,;:()]+", text):
        forms.setdefault(unicodedata.normalize("NFC", word.rstrip(".?")), set()).add(word.rstrip(".?"))
    pairs = [" and ".join(ascii(word) for word in sorted(words)) for words in forms.values() if len(words) > 1]
    return f" They look the same and are not: {'; '.join(pairs)}, two forms of Unicode." if pairs else ""


def _escape_controls(text: str) -> str:
    """Write control characters but ends of lines as codes: strings of a source must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _cut(text: str) -> str:
    """Return a text of 1,000 characters or fewer: of a longer one, its beginning and its end."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} ... {text[-195:]}"


def _rebuild(kind: type[ZooError], facts: dict[str, str]) -> ZooError:
    """Unpickle an error (workers send theirs back) with all its facts."""
    error = kind(facts["thing"])
    error.__dict__.update(facts)
    return error


class CollectionNotFound(ZooError, KeyError):
    """No collection of that name in the catalog, or in the source."""


class MemberNotFound(ZooError, KeyError, IndexError):
    """No member of that id, or at that position."""


class SourceNotFound(ZooError, FileNotFoundError):
    """A source that does not exist, or lacks a file that its manifest names."""


class SelectionError(ZooError, ValueError):
    """A selection (`n`, `where`, `members`, `sample`) that can't be met."""


class UsageError(ZooError, ValueError):
    """An invalid argument."""


class SymmetryError(UsageError):
    """A network whose symmetries can't be derived; the error names the operation."""


class FormatError(ZooError, ValueError):
    """A manifest or description that breaks the format, or has a newer one."""


class DamagedError(ZooError, ValueError):
    """Bytes that differ from the manifest: cut, changed, overlapping, not finite."""


class LayoutError(ZooError, ValueError):
    """Tensors that are missing, extra or misshapen."""


class TooLargeError(ZooError, MemoryError):
    """More memory needed than there is; the error names a smaller step."""


class LockedError(ZooError, BlockingIOError):
    """Another process is writing to the same folder."""


class NetworkError(ZooError, ConnectionError):
    """No answer, or an unusable one; or offline, and the files are not cached."""


class AccessError(ZooError, PermissionError):
    """A repo or file that this login may not read."""


class StorageError(ZooError, OSError):
    """A disk that is full or can't be written to."""


class WorkerError(ZooError, RuntimeError):
    """A worker process that died repeatedly, or one whose error can't be sent back."""


class SmallerChunk(UserWarning):
    """Memory is short: fewer members run at once than requested. Results stay the same."""


class LeftOut(UserWarning):
    """Members with unusable weights: their rows give the reason, and selections leave them out."""
