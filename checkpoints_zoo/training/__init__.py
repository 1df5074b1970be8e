"""Train populations from named recipes; `zoo-cli train` is their command."""
