"""Fused kernels in Triton for CUDA devices, the same equations as `tokenmix.ops`; they run on a CPU by its interpreter.

Nothing here is chosen for you: `backend="triton"` of an op picks it, and says in one line where it cannot run.
"""
