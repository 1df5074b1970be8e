"""Train populations from named recipes; run from a clone as `python -m training RECIPE`."""
