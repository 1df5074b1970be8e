"""Networks: architectures by name, modules that hold a member's weights, and ensembles that run many members at
once."""
