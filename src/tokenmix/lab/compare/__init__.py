"""Comparison of mixers at equal budget: runs, results and the report."""
