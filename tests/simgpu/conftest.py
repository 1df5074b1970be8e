"""These tests run in processes with simulated cards alone, which tests/package/test_simulated_cards.py starts."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "SIM_DEVICES" in os.environ else ["*.py"]
