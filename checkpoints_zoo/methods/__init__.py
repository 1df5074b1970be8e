"""Approximate posteriors: each method's settings, its fit, and its draws of weights stored as a collection."""
