"""The errors a user meets: each says which thing, what was expected, what was found, and what to do.

Every error carries its facts as attributes, and is also the builtin that a caller would catch.

>>> raise MemberNotFound("member 70 of convnet-digits", expected="an id in 0-63", found="70", member=70)
Traceback (most recent call last):
    ...
checkpoints_zoo.errors.MemberNotFound: member 70 of convnet-digits: expected an id in 0-63; found 70.
"""

from __future__ import annotations

from pathlib import Path

LONGEST = 1000  # characters of each part of an error's text: what somebody typed or a file holds may be far longer


class ZooError(Exception):
    """Base of all errors of this package.

    Args:
        thing: what the error is about ("shard shards/x/00000-3f9a1c2b.safetensors").
        expected: what would have been right, as a phrase that follows "expected".
        found: what was there instead.
        do: what the user can do about it, as a sentence without its full stop.
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
        return f"{text} {do}{'' if do.endswith('?') else '.'}" if do else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


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
    """The place that should hold manifests and shards is none, or lacks a file its manifest names."""


class SelectionError(ZooError, ValueError):
    """A selection (`n`, `where`, `members`, `sample`) that can't be met."""


class UsageError(ZooError, ValueError):
    """An argument that the function can't take."""


class SymmetryError(UsageError):
    """A network whose symmetries can't be derived; the error names the operation."""


class FormatError(ZooError, ValueError):
    """A manifest or description that this version can't read, or that breaks the format."""


class DamagedError(ZooError, ValueError):
    """Bytes that are not what the manifest says: cut, changed, overlapping, not finite."""


class LayoutError(ZooError, ValueError):
    """Tensors that are missing, extra or misshapen against what was expected, by name."""


class TooLargeError(ZooError, MemoryError):
    """More memory asked for than there is; the error names a smaller step."""


class LockedError(ZooError, BlockingIOError):
    """Another process is writing to the same folder."""


class NetworkError(ZooError, ConnectionError):
    """No answer, or none that can be used; or nothing local to go by while offline."""


class AccessError(ZooError, PermissionError):
    """A repo or file that this login may not read."""


class StorageError(ZooError, OSError):
    """A disk that can't take what should be kept on it."""


class WorkerError(ZooError, RuntimeError):
    """A worker that died again and again, or an error of its that can't be sent here."""


class SmallerChunk(UserWarning):
    """Memory was short: fewer members are held or run at once than asked for. Results stay the same."""


class LeftOut(UserWarning):
    """Members whose weights can't be used: their rows say why, and selections leave them out."""
