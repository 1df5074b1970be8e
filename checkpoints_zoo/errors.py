"""Errors of this package: each text names a thing, the expected value, the found value, and a remedy.

Every error has these four texts as attributes, and is also the builtin exception of its kind (`ValueError`, ...).

>>> raise MemberNotFound("member 70 of convnet-digits", expected="an id in 0-63", found="70", member=70)
Traceback (most recent call last):
    ...
checkpoints_zoo.errors.MemberNotFound: member 70 of convnet-digits: expected an id in 0-63; found 70.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

MAX_PART_CHARACTERS = 1000  # Largest number of characters in each part of an error's text; longer parts are shortened.


class ZooError(Exception):
    """Base of all errors of this package.

    Args:
        thing: the object that the error is about ("shard shards/x/00000-3f9a1c2b.safetensors").
        expected: a phrase that describes the expected value; the text puts it after the word "expected".
        found: a phrase that describes the actual value; the text puts it after the word "found".
        do: a sentence without its full stop that tells the user how to fix the problem.
        collection, member, tensor, path: the objects that the error concerns, as attributes for programs.
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
        thing, expected, found, do = (_shorten(text) for text in (self.thing, self.expected, self.found, self.do))
        expected_and_found = [f"expected {expected}"] if expected else []
        # Texts of other libraries may end in a dot.
        expected_and_found += [f"found {found.rstrip('. ')}"] if found else []
        text = f"{thing}: {'; '.join(expected_and_found)}." if expected_and_found else f"{thing}."
        text = f"{text} {do}{'' if do.endswith('?') else '.'}" if do else text
        return _escape_controls(f"{text}{_explain_lookalikes(text)}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), self.__dict__.copy())


def _explain_lookalikes(text: str) -> str:
    """Return a sentence that names words of a text which look equal but consist of different characters; "" if there
    are no such words.

    Unicode has two forms of "é": one character, or "e" and an accent. Some systems change the form of "é" in file
    names.
    """
    if text.isascii():
        return ""
    words_of_form: dict[str, set[str]] = {}
    for word in re.findall(r"[^\s'\"`,;:()]+", text):
        words_of_form.setdefault(unicodedata.normalize("NFC", word.rstrip(".?")), set()).add(word.rstrip(".?"))
    pair_texts = [
        " and ".join(ascii(word) for word in sorted(words)) for words in words_of_form.values() if len(words) > 1
    ]
    return f" They look the same and are not: {'; '.join(pair_texts)}, two forms of Unicode." if pair_texts else ""


def _escape_controls(text: str) -> str:
    """Replace control characters, except line ends, by visible codes, so that a text cannot control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _shorten(text: str) -> str:
    """Shorten a text to 1,000 characters by replacing its middle; return the text."""
    return text if len(text) <= MAX_PART_CHARACTERS else f"{text[: MAX_PART_CHARACTERS - 200]} ... {text[-195:]}"


def _rebuild_error(error_class: type[ZooError], attributes: dict[str, str]) -> ZooError:
    """Rebuild a pickled error with all its attributes; worker processes send their errors back pickled."""
    error = error_class(attributes["thing"])
    error.__dict__.update(attributes)
    return error


class CollectionNotFound(ZooError, KeyError):
    """The catalog or the source has no collection of the requested name."""


class MemberNotFound(ZooError, KeyError, IndexError):
    """The collection has no member with the requested id, or at the requested position."""


class SourceNotFound(ZooError, FileNotFoundError):
    """A source does not exist, or lacks a file that its manifest names."""


class SelectionError(ZooError, ValueError):
    """No members can be selected by the given arguments (`n`, `where`, `members`, `sample`)."""


class UsageError(ZooError, ValueError):
    """An invalid argument."""


class SymmetryError(UsageError):
    """The symmetries of a network can't be derived; the error names the operation that prevents it."""


class FormatError(ZooError, ValueError):
    """A manifest or description does not follow the format, or has a newer format version."""


class DamagedError(ZooError, ValueError):
    """The bytes of members differ from their manifest: they are cut, changed, overlapping or not finite."""


class LayoutError(ZooError, ValueError):
    """A member's tensors are not those of its network: some are missing, extra or have another shape."""


class TooLargeError(ZooError, MemoryError):
    """The operation needs more memory than is free; the error names an operation that needs less memory."""


class LockedError(ZooError, BlockingIOError):
    """Another process is writing to the same folder now."""


class NetworkError(ZooError, ConnectionError):
    """A server gave no usable answer; or offline mode is on, and the files are not cached."""


class AccessError(ZooError, PermissionError):
    """The user's login has no permission to read a repo or file."""


class StorageError(ZooError, OSError):
    """A disk is full or can't be written to."""


class WorkerError(ZooError, RuntimeError):
    """A worker process died repeatedly, or raised an error that can't be sent back."""


class SmallerChunk(UserWarning):
    """Warning: memory is short, so fewer members run at once than requested. The results are the same as with the
    requested number of members."""


class LeftOut(UserWarning):
    """Warning: members with unusable weights were left out of a selection; their rows give the reason."""
