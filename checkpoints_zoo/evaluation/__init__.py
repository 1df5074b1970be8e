"""Evaluation of ensembles: metrics, intervals, growth with the number of members, and the report."""
