"""One folder per domain: its data, models, tasks, metrics and output files. Importing this registers the tasks."""

from tokenmix.lab.tasks import classification, detection, generation, points, segmentation, text

__all__ = ["classification", "detection", "generation", "points", "segmentation", "text"]
