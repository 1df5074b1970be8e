"""Names of an archive's members: the orders that they come in, and the ids that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LAST_NUMBER = re.compile(r"(?P<before>.*?)(?P<number>[0-9]{1,9})(?P<after>[^0-9]*)", re.DOTALL)


def names_in_order(sampled: Mapping[int, str], count: int, archive: str) -> list[str] | None:
    """Continue sampled names to all, in the order of numbers or of text; return None if neither fits.

    Args:
        sampled: place in the archive -> name there.
        count: of all names.
        archive: its name: the numbers in it may be the first one's.

    >>> names_in_order({0: "v_0.st", 1: "v_1.st", 2: "v_10.st", 11: "v_9.st"}, 12, "")[:5]
    ['v_0.st', 'v_1.st', 'v_10.st', 'v_11.st', 'v_2.st']
    """
    found = [_LAST_NUMBER.fullmatch(name) for name in sampled.values()]
    whole = [match for match in found if match]
    if len({(m["before"], m["after"]) for m in whole}) != 1 or len(whole) < len(found):
        return None
    numbers = [int(m["number"]) for m in whole]
    padding = {len(m["number"]) for m in whole} if any(m["number"].startswith("0") for m in whole) else set()
    width = padding.pop() if len(padding) == 1 else 0
    before, after = whole[0]["before"], whole[0]["after"]
    hints = [int(digits) for digits in re.findall("[0-9]{1,9}", archive)]
    for first in dict.fromkeys([min(numbers), max(numbers) - count + 1, *hints]):
        if first < 0:
            continue
        names = [f"{before}{number:0{width}d}{after}" for number in range(first, first + count)]
        for ordered in (names, sorted(names)):
            if all(ordered[place] == name for place, name in sampled.items()):
                return ordered
    return None


def numbers_of(names: Sequence[str]) -> list[int]:
    """Number an archive's members; return a number for each, all different.

    The last number in the files' own names, or in the whole names, where every member has another one; else its place.

    >>> numbers_of(["net/version_7.safetensors", "net/version_3.safetensors"]), numbers_of(["a", "b"])
    ([7, 3], [0, 1])
    """
    for part in ([name.rpartition("/")[2] for name in names], names):
        found = [_LAST_NUMBER.fullmatch(name.removesuffix(".safetensors")) for name in part]
        numbers = [int(match["number"]) for match in found if match]
        if len(numbers) == len(names) and len(set(numbers)) == len(names) and max(numbers, default=0) < 2**30:
            return numbers
    return list(range(len(names)))
