"""Reading point clouds: files of the usual formats, data sets with classes and parts, and batches of them."""

from tokenmix.tasks.points.data.cloud import NO_PART, Cloud, Clouds, PackedClouds, PointData
from tokenmix.tasks.points.data.formats import read_points
from tokenmix.tasks.points.data.ply import write_ply
from tokenmix.tasks.points.data.samples import CloudSamples
from tokenmix.tasks.points.data.table import POINT_SETS, get_points, list_points, load_points

__all__ = [
    "NO_PART",
    "POINT_SETS",
    "Cloud",
    "CloudSamples",
    "Clouds",
    "PackedClouds",
    "PointData",
    "get_points",
    "list_points",
    "load_points",
    "read_points",
    "write_ply",
]
