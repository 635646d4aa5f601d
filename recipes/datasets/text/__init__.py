"""Texts of our recipes."""
