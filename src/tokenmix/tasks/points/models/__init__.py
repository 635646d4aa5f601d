"""Models of point clouds: the point cloud transformer with any mixer in its attention layers."""

from tokenmix.tasks.points.models.embedding import NaiveEmbedding, NeighbourEmbedding
from tokenmix.tasks.points.models.heads import PointClassifier, PointSegmenter
from tokenmix.tasks.points.models.pct import PCT, OffsetBlock
from tokenmix.tasks.points.models.presets import POINT_MODELS, create_point_model, list_point_models

__all__ = [
    "PCT",
    "POINT_MODELS",
    "NaiveEmbedding",
    "NeighbourEmbedding",
    "OffsetBlock",
    "PointClassifier",
    "PointSegmenter",
    "create_point_model",
    "list_point_models",
]
