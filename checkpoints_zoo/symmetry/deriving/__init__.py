"""The derivation of a symmetry table from the trace of any module."""
