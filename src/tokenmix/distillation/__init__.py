"""Train a model to imitate another, and find the layers of a model that can be replaced."""

from tokenmix.distillation.distilling import CurvePoint, DistillReport, distill
from tokenmix.distillation.outputs import Fidelity
from tokenmix.distillation.ranking import FrontierPoint, LayerRanking, RankedLayer, rank_layers

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
