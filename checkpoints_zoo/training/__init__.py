"""Train populations from named recipes: `python -m checkpoints_zoo.training`, in a clone `python -m training`."""
