"""Models of point clouds: the point cloud transformer with any mixer in its attention layers."""

from tokenmix.models.points.embedding import NaiveEmbedding, NeighbourEmbedding
from tokenmix.models.points.heads import PointClassifier, PointSegmenter
from tokenmix.models.points.pct import PCT, OffsetBlock
from tokenmix.models.points.presets import POINT_MODELS, create_point_model, list_point_models

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
