"""Faults that were reported, one file a kind: each test fails on the version that had the fault."""
