"""int8 inference on CPUs."""

from tokenmix.cpu.external import Int8ExternalAttention
from tokenmix.cpu.layers import Int8Gate, Int8Linear
from tokenmix.cpu.quantizing import load_quantized, quantize, save_quantized
from tokenmix.cpu.stem import Int8T2TStem

__all__ = [
    "Int8ExternalAttention",
    "Int8Gate",
    "Int8Linear",
    "Int8T2TStem",
    "load_quantized",
    "quantize",
    "save_quantized",
]
