"""Approximate posteriors as draws of weights: each method's settings, its fit, and its draws as a source."""
