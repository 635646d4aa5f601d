"""Models of point clouds: the point cloud transformer with any mixer in its attention layers."""

from tokenmix.errors import needs

with needs("tokenmix.models.points"):
    from tokenmix.models.points.builder import create_point_model
    from tokenmix.models.points.embedding import NaiveEmbedding, NeighbourEmbedding
    from tokenmix.models.points.heads import PointClassifier, PointSegmenter
    from tokenmix.models.points.pct import PCT, OffsetBlock

__all__ = [
    "PCT",
    "NaiveEmbedding",
    "NeighbourEmbedding",
    "OffsetBlock",
    "PointClassifier",
    "PointSegmenter",
    "create_point_model",
]
