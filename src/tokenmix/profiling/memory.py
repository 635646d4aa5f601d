"""Peak memory of a call, read from the allocator, so that memory inside fused kernels is counted."""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.autograd.profiler import profile

from tokenmix.environment import filtered_stderr
from tokenmix.errors import UserError

_NOISE = (b"SyncActivityProfilerHandler", b"gpuGetDeviceCount", b"CPUAllocator.cpp")


def peak_memory(fn: Callable[[], object], device: torch.device | str | None = None) -> int:
    """Bytes held at the peak of `fn()`, above what was held when it started.

    On the CPU the allocator's own events are summed in order (torch.profiler); memory that was allocated before and is
    freed inside is not credited. On CUDA this is the difference of `max_memory_allocated` and what was held before.

    Args:
        fn: called once. What it returns is dropped.
        device: where `fn` runs; the CPU if not given.

    Raises:
        UserError: a device whose allocator cannot be watched, such as mps.
    """
    kind = torch.device(device or "cpu")
    if kind.type == "cuda":
        torch.cuda.synchronize(kind)
        torch.cuda.reset_peak_memory_stats(kind)
        before = torch.cuda.memory_allocated(kind)
        fn()
        torch.cuda.synchronize(kind)
        return torch.cuda.max_memory_allocated(kind) - before
    if kind.type != "cpu":
        raise UserError(f"peak memory is measured on cpu and cuda, not on {kind.type!r}; move the model to one of them")
    watch = profile(profile_memory=True)
    with filtered_stderr(_without_noise), watch:
        fn()
    assert watch.kineto_results is not None
    events = [e for e in watch.kineto_results.events() if e.name() == "[memory]"]
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events)  # pyrefly: ignore[missing-attribute]
    return max(accumulate((size for _, size in sizes), initial=0))


def _without_noise(said: bytes) -> bytes:
    """Without the profiler's own lines: they come from C++ and have no switch that works once torch is loaded."""
    return b"".join(line for line in said.splitlines(keepends=True) if not any(mark in line for mark in _NOISE))
