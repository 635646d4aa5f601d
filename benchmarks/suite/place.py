"""Where a benchmark runs: device, type, threads; tensors for it and the clock of that device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from suite.cuda import cuda_rounds
from tokenmix.errors import UserError, unknown_name
from tokenmix.profiling import Timing, peak_memory, time_interleaved

__all__ = ["DTYPES", "Place"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Module = TypeVar("Module", bound=nn.Module)

LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Place:
    """A device and the type in which everything on it is measured."""

    device: str
    dtype: torch.dtype
    threads: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    @classmethod
    def named(cls, device: str, dtype: str | None, threads: int) -> "Place":
        """The place that the command line names; float32 on the CPU and bfloat16 on CUDA if no type is given.

        Raises:
            UserError: a device that is not there, or an unknown type.
        """
        if device not in ("cpu", "cuda"):
            raise unknown_name("device", device, ("cpu", "cuda"))
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: this machine has no CUDA device; use --device cpu")
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        if dtype not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        if threads < 1:
            raise UserError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
        return cls(device, DTYPES[dtype], threads)

    @property
    def dtype_name(self) -> str:
        """The type's name without `torch.`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def tolerance(self) -> float:
        """Largest error that is taken for rounding, relative to the largest entry of the reference."""
        return {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}[self.dtype]

    def randn(self, *shape: int, std: float = 1.0, grad: bool = False) -> Tensor:
        """Normal numbers, the same on every device."""
        values = torch.randn(shape, generator=self.generator) * std
        return values.to(self.device, self.dtype).requires_grad_(grad)

    def put(self, module: Module) -> Module:
        """The module here, in evaluation mode."""
        return module.to(self.device, self.dtype).eval()

    def time(self, functions: Mapping[str, Callable[[], object]], repeats: int, seconds: float) -> dict[str, Timing]:
        """Times of each function in rounds: as many as take about `seconds`, five at least, `repeats` at most.

        On CUDA they are those of the device, with its level-2 cache emptied before each call.
        """
        least = min(LEAST_ROUNDS, repeats)
        if self.device == "cuda":
            return cuda_rounds(functions, least=least, repeats=repeats, seconds=seconds)
        first = time_interleaved(functions, repeats=1, warmup=1)
        rounds = int(seconds / max(1e-9, sum(timing.median for timing in first.values())))
        return time_interleaved(functions, repeats=max(least, min(repeats, rounds)), warmup=1)

    def peak(self, function: Callable[[], object]) -> int:
        """Bytes held at the peak of a call."""
        return peak_memory(function, self.device)
