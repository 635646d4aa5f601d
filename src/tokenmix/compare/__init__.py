"""Mixers compared at equal budget: runs, results and the report."""
