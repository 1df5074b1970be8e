"""Progress of long loops: a bar with a rate on stderr, if stderr is a terminal and the loop takes over two seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

SECONDS_BEFORE_BAR = 2


def progress(
    items: Iterable[Item], total: int, title: str, unit: str = "members", size: Callable[[Item], int] = lambda item: 1
) -> Iterator[Item]:
    """Yield the items of a loop, and show its progress.

    Args:
        items: items of the loop.
        total: sum of the items' sizes.
        title: what the loop does ("convnet-digits: logits").
        unit: what the sizes count.
        size: function that returns the size of an item.

    >>> sum(progress(range(4), 4, "sum", "numbers"))
    6
    """
    from tqdm import tqdm

    is_disabled = sys.stderr is None or not sys.stderr.isatty()
    with tqdm(
        total=total, desc=title, unit=f" {unit}", delay=SECONDS_BEFORE_BAR, disable=is_disabled, leave=False
    ) as bar:
        for item in items:
            yield item
            bar.update(size(item))
