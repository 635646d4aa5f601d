"""Images and scenes of our recipes."""
