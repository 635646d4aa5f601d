"""int8 inference on CPUs."""

from tokenmix.int8.layers import Int8Gate, Int8Linear
from tokenmix.int8.quantizing import load_quantized, quantize, save_quantized

__all__ = ["Int8Gate", "Int8Linear", "load_quantized", "quantize", "save_quantized"]
