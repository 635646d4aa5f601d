"""Knowledge distillation, and a ranking of the layers of a model by how well a mixer replaces them."""

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
