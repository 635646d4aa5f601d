"""Pure functions of tensors: the equations of the mechanisms. They need only torch."""

from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.external import external_attention, external_attention_map, sharded_external_attention
from tokenmix.ops.gating import spatial_gate, toeplitz_matrix
from tokenmix.ops.less import (
    Scores,
    attention_from_scores,
    attention_residual,
    next_scores,
    transform_factored,
    transform_scores,
)
from tokenmix.ops.normalize import double_normalize, slot_offset
from tokenmix.ops.resize import resize_gate, resize_score_transform

__all__ = [
    "Scores",
    "attention",
    "attention_from_scores",
    "attention_probabilities",
    "attention_residual",
    "double_normalize",
    "external_attention",
    "external_attention_map",
    "next_scores",
    "resize_gate",
    "resize_score_transform",
    "sharded_external_attention",
    "slot_offset",
    "spatial_gate",
    "toeplitz_matrix",
    "transform_factored",
    "transform_scores",
]
