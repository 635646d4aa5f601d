"""Copies of models for inference on CPUs, in float32, bfloat16 or int8."""

from tokenmix.cpu.external import FoldedExternalAttention, Int8ExternalAttention
from tokenmix.cpu.fused import FusedLinear
from tokenmix.cpu.layers import Int8Linear
from tokenmix.cpu.optimizing import TOLERANCES, load_quantized, optimize, save_quantized
from tokenmix.cpu.stem import FoldedT2TStem
from tokenmix.environment import keep_freed_memory

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
