"""Training: populations of networks from recipes, in stacks, resumable; `zoo-cli train` is its command line."""
