"""Copies of models for inference on CPUs, in float32, bfloat16 or int8."""

from tokenmix.environment import keep_freed_memory
from tokenmix.inference.folded import FoldedExternalAttention, FoldedT2TStem, Int8ExternalAttention
from tokenmix.inference.linear import FusedLinear, Int8Linear
from tokenmix.inference.optimizing import TOLERANCES, load_quantized, optimize, save_quantized

__all__ = [
    "TOLERANCES",
    "FoldedExternalAttention",
    "FoldedT2TStem",
    "FusedLinear",
    "Int8ExternalAttention",
    "Int8Linear",
    "keep_freed_memory",
    "load_quantized",
    "optimize",
    "save_quantized",
]
