"""Which member a file of a folder becomes: the number in its name, where one number tells them apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from checkpoints_zoo.interop.ingest.origin import PICKLES, SAFETENSORS

LARGEST = 2**30
_WORDS = r"member|seed|run|model|net|version|id|fold|replica|trial|draw|sample"
_SAYS_SO = re.compile(rf"(?:^|[^a-z])(?:{_WORDS})[-_=. ]*$", re.IGNORECASE)


def numbers_of(paths: Sequence[str]) -> list[int]:
    """Number the files of a folder; return a number for each, all different.

    Where the paths are the same but for one number, it is that; where several numbers differ, the one after a word that
    says so (member, seed, run, …). Where that is another number for every file; else a file's position.

    Args:
        paths: in the folder, in order.

    >>> numbers_of(["seed-3.pt", "seed-12.pt"]), numbers_of(["v_0/epoch=9.ckpt", "v_1/epoch=7.ckpt"])
    ([3, 12], [0, 1])
    >>> numbers_of(["run_7/epoch=9.ckpt", "run_8/epoch=7.ckpt"]), numbers_of(["acc=0.91.pt", "acc=0.92.pt"])
    ([7, 8], [0, 1])
    """
    parts = [re.split("([0-9]+)", _stem(path)) for path in paths]
    positions = list(range(len(paths)))
    if len({tuple(part[::2]) for part in parts}) != 1 or any(len(digits) > 18 for p in parts for digits in p[1::2]):
        return positions
    columns = list(zip(*([int(digits) for digits in part[1::2]] for part in parts), strict=True))
    before = parts[0][::2]
    varying = [at for at, column in enumerate(columns) if len(set(column)) > 1 or len(paths) == 1]
    if len(varying) > 1 or len(paths) == 1:
        varying = [at for at in varying if _SAYS_SO.search(before[at])]
    chosen = columns[varying[0]] if len(varying) == 1 and not (varying[0] and before[varying[0]] == ".") else ()
    return list(chosen) if chosen and len(set(chosen)) == len(paths) and max(chosen) < LARGEST else positions


def _stem(path: str) -> str:
    """Take off what says of which kind a file is; return the rest of its path."""
    return next((path[: -len(s)] for s in (SAFETENSORS, *PICKLES) if path.lower().endswith(s)), path)
