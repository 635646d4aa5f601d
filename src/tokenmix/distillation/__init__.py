"""Train a model to imitate another, and find the layers of a model that can be replaced."""

from tokenmix.distillation.distilling import (
    CurvePoint,
    DistillReport,
    FrontierPoint,
    LayerRanking,
    RankedLayer,
    distill,
    rank_layers,
)
from tokenmix.distillation.outputs import Fidelity

__all__ = [
    "CurvePoint",
    "DistillReport",
    "Fidelity",
    "FrontierPoint",
    "LayerRanking",
    "RankedLayer",
    "distill",
    "rank_layers",
]
