"""Grids of runs: cells, and the engines that train them to their end."""
