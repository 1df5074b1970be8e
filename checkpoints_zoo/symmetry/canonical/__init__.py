"""Canonical forms of networks: pure functions on stacked parameters that read the symmetry table."""
