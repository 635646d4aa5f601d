"""int8 inference on CPUs."""

from tokenmix.int8.external import Int8ExternalAttention
from tokenmix.int8.layers import Int8Gate, Int8Linear
from tokenmix.int8.quantizing import load_quantized, quantize, save_quantized
from tokenmix.int8.stem import Int8T2TStem

__all__ = [
    "Int8ExternalAttention",
    "Int8Gate",
    "Int8Linear",
    "Int8T2TStem",
    "load_quantized",
    "quantize",
    "save_quantized",
]
