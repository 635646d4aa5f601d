"""Models of point clouds: the point cloud transformer with any mixer in its attention layers."""

from tokenmix.errors import needs

with needs("tokenmix.tasks.points.models"):
    from tokenmix.tasks.points.models.builder import create_point_model
    from tokenmix.tasks.points.models.embedding import NaiveEmbedding, NeighbourEmbedding
    from tokenmix.tasks.points.models.heads import PointClassifier, PointSegmenter
    from tokenmix.tasks.points.models.pct import PCT, OffsetBlock

__all__ = [
    "PCT",
    "NaiveEmbedding",
    "NeighbourEmbedding",
    "OffsetBlock",
    "PointClassifier",
    "PointSegmenter",
    "create_point_model",
]
