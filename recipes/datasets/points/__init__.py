"""Point clouds of our recipes."""
