"""Files of torch.save on this disk: tensors alone are read from them, never code. Needs torch.

Nothing from the Hub comes here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.archive import Head, Lot, Lying
from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.header import what_is
from checkpoints_zoo.ingest.origin import Origin

if TYPE_CHECKING:
    from torch import Tensor

# How torch.save begins: a zip archive, or before version 1.6 a pickle of protocol 2.
ZIP, OLD = b"PK\x03\x04", b"\x80\x02"


def lot_of_pickles(origin: Origin) -> Lot:
    """Look into files of torch.save; return their members. A damaged file becomes a member that has failed.

    Raises:
        UsageError: a file that asks for code.
    """
    heads: dict[Head, Head] = {}
    members, broken = [], []
    for inside in origin.pickles:
        try:
            head = _head(read(origin.root / inside))
        except DamagedError as error:
            broken.append((inside, str(error)))
            continue
        members.append(Lying(inside, inside, 0, heads.setdefault(head, head)))
    return Lot(members, broken)


def read(path: Path) -> dict[str, Tensor]:
    """Read the state dict in a file of torch.save, or under its "state_dict" as Lightning has it; return it.

    Raises:
        UsageError: the file asks for something that is not tensors: it was not opened.
        DamagedError: it is cut, or holds something else than tensors by name.
    """
    from torch import Tensor

    loaded = _loaded(path)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else loaded
    if isinstance(state, Mapping) and state and all(type(n) is str and isinstance(t, Tensor) for n, t in state.items()):
        return dict(state)
    found = f"a {type(state).__name__}"
    if isinstance(state, Mapping):
        found = f"{', '.join(f'{n!r}: {type(v).__name__}' for n, v in list(state.items())[:5])}" or "an empty one"
    raise DamagedError(
        f"file {path}", expected="a state dict, tensors by name, or one under 'state_dict'", found=found, path=path
    )


def _loaded(path: Path) -> Any:
    import pickle

    import torch

    with path.open("rb") as file:
        first = file.read(512)
    if not first.startswith((ZIP, OLD)):
        found = what_is(first) or f"something else: {first[:16]!r}"
        raise DamagedError(f"file {path}", expected="a file of torch.save", found=found, path=path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Mapped where it can be: to look at names and shapes reads no weights.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=first.startswith(ZIP))
    except pickle.UnpicklingError as error:
        what = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"(Unsupported \w+ \S+)", str(error))
        raise UsageError(
            f"file {path}",
            expected="tensors alone, as torch.load(weights_only=True) reads them",
            found=f"a pickle that asks for {what[1]}" if what else "a pickle that asks for more",
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


def _head(state: Mapping[str, Tensor]) -> Head:
    """Write down what the tensors of a state dict are; return that.

    Raises:
        DamagedError: a tensor that safetensors can't hold.
    """
    import torch

    from checkpoints_zoo.shard import NAMES

    for name, t in state.items():
        if t.layout != torch.strided or t.is_quantized or t.dtype not in NAMES or t.is_meta:
            raise DamagedError(
                f"tensor {name!r}", expected=f"a plain one of {', '.join(NAMES.values())}",
                found=f"{t.dtype}, {t.layout}", tensor=name,
            )  # fmt: skip
    return Head(0, tuple((name, NAMES[t.dtype], tuple(t.shape)) for name, t in state.items()))


def raw(path: Path) -> bytearray:
    """Read a member's tensors; return their bytes one after another, as its head says.

    Raises:
        UsageError, DamagedError: see `read`.
    """
    import torch

    out = bytearray()
    for t in read(path).values():
        if t.numel():
            out += t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return out
