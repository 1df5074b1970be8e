"""Train populations from named recipes; `checkpoints_zoo.cli.train` is its command line."""
