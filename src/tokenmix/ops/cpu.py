"""What the choice between the libraries that multiply float32 matrices on a CPU rests on."""

import platform
from pathlib import Path

import torch

__all__ = ["AVX512", "MKL_IS_FAST"]

# Where oneDNN has been measured; elsewhere nothing is known to be gained by it.
AVX512 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _vendor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("vendor_id")), "")
    except OSError:
        return platform.processor()


# MKL takes AVX-512 on Intel's CPUs alone, where it reaches nine tenths of what the CPU can do. On AMD's it reached half
# of oneDNN's speed on one EPYC (184 multiply-adds a nanosecond on two cores) and four fifths on another (105, Zen 4).
MKL_IS_FAST = torch.backends.mkl.is_available() and "GenuineIntel" in _vendor()
