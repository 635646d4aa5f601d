"""What the choice between the libraries that multiply float32 matrices on a CPU rests on."""

import platform
import re
from pathlib import Path

import torch

__all__ = ["AVX512", "MKL_IS_FAST", "MKL_IS_HALF", "maker_and_family"]

# Where oneDNN has been measured; elsewhere nothing is known to be gained by it.
AVX512 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def maker_and_family(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, int]:
    """Who made the processor, "GenuineIntel" or "AuthenticAMD", and its family; "" and 0 where it does not say."""
    try:
        with cpuinfo.open(errors="replace") as file:
            said = file.read(1000)  # One processor says all that is asked within that.
    except OSError:
        said = platform.processor()  # On Windows: "AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD".
    maker = re.search(r"GenuineIntel|AuthenticAMD", said)
    family = re.search(r"family\s*:?\s*(\d+)", said, re.IGNORECASE)
    return maker[0] if maker else "", int(family[1]) if family else 0


_MAKER, _FAMILY = maker_and_family()

# MKL takes AVX-512 on Intel's CPUs alone, where it reaches nine tenths of what the CPU can do. On AMD's it takes AVX2:
# four fifths of oneDNN's speed on Zen 4 (family 25: 105 multiply-adds a nanosecond on two cores), whose units are as
# wide as that, and half of it from Zen 5 on (184).
MKL_IS_FAST = torch.backends.mkl.is_available() and _MAKER == "GenuineIntel"
MKL_IS_HALF = _MAKER == "AuthenticAMD" and _FAMILY >= 26
