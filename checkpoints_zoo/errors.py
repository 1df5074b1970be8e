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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Import name of a package that the core does without -> the extra of checkpoints-zoo that installs the package.
EXTRA_OF_PACKAGE = {
    **dict.fromkeys(
        ("PIL", "datasets", "matplotlib", "pandas", "scipy", "sklearn", "timm", "torch", "torchvision"), "torch"
    ),
    **dict.fromkeys(("laplace", "lightning", "posteriors", "torch_uncertainty"), "methods"),
    "ray": "ray",
    "transformers": "transformers",
}
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
        # ImportError keeps its own attribute `path` outside `__dict__`.
        return _rebuild_error, (type(self), {**self.__dict__, "path": self.path})


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
    for name, value in attributes.items():
        setattr(error, name, value)
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


class MissingPackage(UsageError, ModuleNotFoundError):
    """A package that the call needs is not installed; the error names the line that installs it."""


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


class NotCompared(UserWarning):
    """Warning: single tensors were fetched, which can't be compared with the hashes of their members."""


class LeftOut(UserWarning):
    """Warning: members with unusable weights were left out of a selection; their rows give the reason."""


@contextmanager
def explain_missing_packages(user: str, otherwise: str = "") -> Iterator[None]:
    """Raise MissingPackage, in place of ModuleNotFoundError, for a package of an extra inside the `with` block.

    Args:
        user: what needs the package ("zoo.evaluate").
        otherwise: a phrase that says how to do without the package; "" if there is no way.

    >>> with explain_missing_packages("zoo.evaluate"):
    ...     raise ModuleNotFoundError("No module named 'torch'", name="torch")
    Traceback (most recent call last):
        ...
    checkpoints_zoo.errors.MissingPackage: zoo.evaluate needs torch, which is not installed. \
Type: pip install 'checkpoints-zoo[torch]'.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF_PACKAGE:  # as is MissingPackage itself, whose name is None
            raise
        install = f"Type: pip install 'checkpoints-zoo[{EXTRA_OF_PACKAGE[error.name]}]'"
        raise MissingPackage(
            f"{user} needs {error.name}, which is not installed", do=f"{install}{f'; {otherwise}' if otherwise else ''}"
        ) from error
