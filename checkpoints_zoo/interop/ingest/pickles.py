"""Files of torch.save on this disk: tensors alone are read from them, never code. Needs torch.

Nothing from the Hub comes here.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import DamagedError, LayoutError, TooLargeError, UsageError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.safetensors import what_is
from checkpoints_zoo.interop.ingest.origin import Origin
from checkpoints_zoo.interop.ingest.zipped import check_plain
from checkpoints_zoo.sources.archives import Head, Lot, Lying, Tell

if TYPE_CHECKING:
    from torch import Tensor

    State = dict[str, Tensor]

# How torch.save begins: a zip archive, or before version 1.6 a pickle of protocol 2.
ZIP, OLD = b"PK\x03\x04", b"\x80\x02"
DEPTH = 4  # of dicts in dicts that a state dict is looked for in


@dataclass(frozen=True)
class Within:
    """Where in a file the state dict lies.

    Args:
        key: under what ("ema", "model/state_dict"); "" for the file's own, or what is found.
        known: tells whether a head's tensors are the net's, so that the state dict that fits is found under any key;
            None where nobody knows the net: it is then the file's own, or lies under "state_dict" as Lightning has it.
    """

    key: str = ""
    known: Tell | None = None


def lot_of_pickles(origin: Origin, within: Within) -> Lot:
    """Look into files of torch.save; return their members. A damaged file becomes a member that has failed.

    Args:
        origin: whose files they are.
        within: where in the files the state dicts lie.

    Raises:
        UsageError: a file that asks for code, or in which two state dicts fit.
    """
    heads: dict[Head, Head] = {}
    members, broken = [], []
    for inside in origin.pickles:
        try:
            head = _chosen(origin.root / inside, within)
        except DamagedError as error:
            broken.append((inside, str(error)))
            continue
        members.append(Lying(inside, inside, 0, heads.setdefault(head, head)))
    return Lot(members, broken)


def _chosen(path: Path, within: Within) -> Head:
    """Find the state dict that is meant; return its head."""
    heads = {key: head_of(state, f" of file {path}") for key, state in _states(path, within).items()}
    if within.known is None or len(heads) == 1:
        return next(iter(heads.values()))
    fitting = {key: head for key, head in heads.items() if _fits(head, within.known)}
    if len(fitting) > 1:
        raise UsageError(
            f"file {path}",
            expected="one state dict of the net",
            found=f"{len(fitting)} that fit, under {', '.join(map(repr, fitting))}",
            do=f"Say which is meant: key={next(iter(fitting))!r}, or --key {next(iter(fitting))}",
            path=path,
        )
    # Where none fits, the largest is the one to be compared with the net.
    return next(iter(fitting.values()), None) or max(heads.values(), key=lambda head: len(head.tensors))


def _fits(head: Head, known: Tell) -> bool:
    try:
        known(head)
    except LayoutError:
        return False
    return True


def _states(path: Path, within: Within) -> dict[str, State]:
    """Read the state dicts in a file of torch.save that can be the one that is meant; return key -> state dict.

    Raises:
        UsageError: the file asks for something that is not tensors: it was not opened. Or it has no such key.
        DamagedError: it is cut, or holds something else than tensors by name.
    """
    loaded = _loaded(path)
    found = dict(_nested(loaded))
    if within.key:
        if within.key not in found:
            raise UsageError(
                f"file {path}",
                expected=f"a state dict under {within.key!r}",
                found=f"{', '.join(map(repr, found)) or 'none'}" if "" not in found else "one without any key",
                path=path,
            )
        return {within.key: found[within.key]}
    if within.known is None:
        found = {key: state for key, state in found.items() if key in ("", "state_dict")}
    if found:
        return found
    shown, others = f"a {type(loaded).__name__}", [key for key, _ in _nested(loaded) if key]
    if isinstance(loaded, Mapping):
        shown = ", ".join(f"{n!r}: {type(v).__name__}" for n, v in list(loaded.items())[:5]) or "an empty one"
    raise DamagedError(
        f"file {path}",
        expected="a state dict, tensors by name, or one under 'state_dict'",
        found=shown,
        do=f"Say which is meant: key={others[0]!r}, or --key {others[0]}" if others else "",
        path=path,
    )


def _nested(loaded: Any) -> Iterator[tuple[str, State]]:
    """Yield the state dicts in nested ones, each with its keys; one that lies in there twice only once."""
    import torch

    level, seen = [("", loaded)], set[int]()
    for _ in range(DEPTH):
        deeper = []
        for key, value in level:
            if not isinstance(value, Mapping) or id(value) in seen:
                continue
            seen.add(id(value))
            if value and all(type(n) is str and isinstance(t, torch.Tensor) for n, t in value.items()):
                yield key, dict(value)
            else:
                deeper += [(f"{key}/{n}" if key else n, v) for n, v in value.items() if type(n) is str]
        level = deeper


def _loaded(path: Path) -> Any:
    import torch

    with path.open("rb") as file:
        first = file.read(512)
    if not first.startswith((ZIP, OLD)):
        found = what_is(first) or f"something else: {first[:16]!r}"
        raise DamagedError(f"file {path}", expected="a file of torch.save", found=found, path=path)
    if first.startswith(ZIP):
        check_plain(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Mapped where it can be: to look at names and shapes reads no weights.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=first.startswith(ZIP))
    except pickle.UnpicklingError as error:
        what = _asked(path, str(error))
        raise UsageError(
            f"file {path}",
            expected="tensors alone, as torch.load(weights_only=True) reads them",
            found=f"a pickle that asks for {what}",
            do="It was not opened and nothing was imported: a pickle can run code. "
            "If you made it yourself, save its state dict with safetensors.torch.save_file",
            path=path,
        ) from error
    except (RuntimeError, EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, OSError) as error:
        raise DamagedError(
            f"file {path}",
            expected="a whole file of torch.save",
            found=str(error).partition(". ")[0] or "its end",
            path=path,
        ) from error


def _asked(path: Path, refused: str) -> str:
    """Say what a pickle asks for that is not tensors, reading its opcodes alone; return that."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    found = re.search(r"GLOBAL ([\w.]+)", refused) or re.search(r"(Unsupported \w+ \S+)", refused)
    first = [found[1]] if found else []
    try:
        rest = sorted(set(get_unsafe_globals_in_checkpoint(path)) - set(first))
    except (ValueError, RuntimeError, OSError, pickle.UnpicklingError):  # not a zip archive
        rest = []
    names = first + rest
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" or "more"


def head_of(state: Mapping[str, Tensor], where: str = "") -> Head:
    """Write down what the tensors of a state dict are; return that.

    Args:
        state: tensors by name.
        where: they lie, for errors.

    Raises:
        DamagedError: a tensor that safetensors can't hold.
    """
    import torch

    from checkpoints_zoo.networks.tensors import NAMES

    for name, t in state.items():
        if t.layout != torch.strided or t.is_quantized or t.dtype not in NAMES or t.is_meta:
            raise DamagedError(
                f"tensor {name!r}{where}", expected=f"a plain one of {', '.join(NAMES.values())}",
                found=f"{t.dtype}, {t.layout}{' without values' if t.is_meta else ''}", tensor=name,
            )  # fmt: skip
    return Head(0, tuple((name, NAMES[t.dtype], tuple(t.shape)) for name, t in state.items()))


def raw(path: Path, within: Within, layout: Layout) -> bytearray:
    """Read a member's tensors; return their bytes one after another, as its layout says.

    Args:
        path: of the file.
        within: where in it the state dict lies.
        layout: that its head was found to have.

    Raises:
        UsageError, DamagedError: it can't be read, or has no such tensors any more.
        TooLargeError: they are more than the free memory; a few bytes may be shown as many.
    """
    import torch

    from checkpoints_zoo.networks.device import free_bytes

    free = free_bytes(torch.device("cpu"))
    if free is not None and layout.nbytes > free:
        expected = f"at most {free:,} bytes of tensors, the memory that is free"
        raise TooLargeError(f"file {path}", expected=expected, found=f"{layout.nbytes:,}", path=path)
    wanted = [
        (t.stored or t.name, t.dtype, t.shape if t.stored_shape is None else t.stored_shape) for t in layout.tensors
    ]
    for state in _states(path, within).values():
        if list(head_of(state).tensors) == wanted:
            return bytes_of(state)
    raise DamagedError(f"file {path}", expected="the tensors that it had before", found="others", path=path)


def bytes_of(state: Mapping[str, Tensor]) -> bytearray:
    """Return the bytes of a state dict's tensors, one after another."""
    import torch

    out = bytearray()
    for t in state.values():
        if t.numel():
            out += t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return out
