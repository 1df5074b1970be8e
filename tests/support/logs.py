"""What is logged, collected: pytest's own plugin for it costs each test milliseconds, and is off (pyproject.toml)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Collect the records of a level and above, of each logger that shows its records or leaves them to the root."""
    root = logging.getLogger()
    others = [x for x in root.manager.loggerDict.values() if isinstance(x, logging.Logger) and not x.propagate]
    collector, before = _Collector(level), root.level
    for logger in (root, *others):
        logger.addHandler(collector)
    root.setLevel(min(before, level))
    try:
        yield collector.records
    finally:
        root.setLevel(before)
        for logger in (root, *others):
            logger.removeHandler(collector)
