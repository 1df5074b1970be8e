"""`python -m checkpoints_zoo`: the same program as `zoo-cli`."""

from __future__ import annotations

from checkpoints_zoo.cli.main import main

if __name__ == "__main__":
    main()
