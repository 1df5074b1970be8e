"""Generators of the documentation's pages: `python -m docs.make` writes them all, `--check` names the stale ones."""
