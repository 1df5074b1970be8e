"""Figures about populations: pairs, distances, loss barriers, compact posteriors, minimal mass."""
