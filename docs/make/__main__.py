"""Make the generated pages: `python -m docs.make`, or `--check` to name the stale ones.

`python -m docs.make --measure alignment` first measures anew what a page reports, which takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.make.pages import MEASURED, PAGES

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the pages that differ from what their generators return; return the exit code.

    Args:
        words: the command line; by default this process's own.
        root: the folder that the pages' paths start from.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.make", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PAGES)}; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument("--measure", action="append", default=[], choices=MEASURED, help="measure this anew first")
    options = parser.parse_args(words)
    if unknown := set(options.pages) - set(PAGES):
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    for name in options.measure:
        MEASURED[name]()
    stale = []
    for path in options.pages or PAGES:
        file, text = root / path, PAGES[path]()
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not options.check:
                file.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path} is stale: run `python -m docs.make {path}`" if options.check else f"wrote {path}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
