"""Train a model to imitate another, and find the layers of a model that can be replaced."""

from tokenmix.distillation.distilling import distill
from tokenmix.distillation.fidelity import Fidelity
from tokenmix.distillation.ranking import FrontierPoint, LayerRanking, RankedLayer, rank_layers
from tokenmix.distillation.report import CurvePoint, DistillReport

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
