"""Training loops to compare: ours, and what a user would take instead."""
