"""Train populations from named recipes; `checkpoints_zoo.cli.training` is its command line."""
