"""Fused kernels in Triton for CUDA devices, the same equations as `tokenmix.ops`; they run on a CPU by its interpreter.

Nothing here is chosen automatically: `backend="triton"` of an op selects it, or raises one line if it cannot run.
"""
