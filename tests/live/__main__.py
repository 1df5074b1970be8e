"""Print the table: `ZOO_LIVE=1 python -m tests.live`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Print a line an assumption; return how many are false."""
    if os.environ.get("ZOO_LIVE") != "1":
        print("set ZOO_LIVE=1: this talks to the true Hub, and moves up to 200 MB", file=sys.stderr)
        return 2
    from tests.live.assumptions import Traffic, lines

    traffic, wrong = Traffic(), 0
    for line in lines(traffic):
        wrong += line.holds is False
        print(line, flush=True)
    print(f"{traffic.spent / 1e6:.1f} MB moved; {wrong} assumptions are false", file=sys.stderr)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
