"""Collections: members selected from a source, the views through which their weights are read, and `load`."""
