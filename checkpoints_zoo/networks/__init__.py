"""Networks: architectures by name, modules built from a layout, and ensembles that run many members at once."""
