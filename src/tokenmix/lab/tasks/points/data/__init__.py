"""Readers of point clouds: files of common formats, data sets with classes and parts, and batches."""

from tokenmix.lab.tasks.points.data.clouds import load_points
from tokenmix.lab.tasks.points.data.files import read_points
from tokenmix.lab.tasks.points.data.ply import write_ply

__all__ = ["load_points", "read_points", "write_ply"]
