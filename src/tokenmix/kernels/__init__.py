"""Fused Triton kernels for CUDA devices, with the equations of `tokenmix.ops`; a CPU uses Triton's interpreter.

No kernel is selected automatically. `backend="triton"` of an op selects one, or raises an error if it cannot run.
"""
