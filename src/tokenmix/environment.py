"""Hardware and software versions for reports, and settings of the memory allocator."""

import ctypes
import functools
import inspect
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tokenmix.errors import UserError

PACKAGES = ("tokenmix", "torch", "torchvision", "timm", "lightning", "torchmetrics", "numpy", "safetensors")
# Newest tested releases; pyproject.toml has the oldest. Newer patch releases count as tested.
TESTED = {"torch": "2.14", "torchvision": "0.29", "timm": "1.0.31", "transformers": "5.24", "lightning": "2.6"}
CPUINFO = Path("/proc/cpuinfo")
# Constants of glibc's malloc.h; 32 MiB is the largest threshold that glibc accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, MOST = 2**31 - 1, 32 * 2**20


def environment() -> dict[str, object]:
    """Hardware, versions, commit and date, as plain values for a JSON file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        # The cores available to this process; a container may restrict them.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": _matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "versions": dict(_versions()),
        **_commit(Path(__file__).parent),
    }


def cpu_name() -> str:
    """The processor's name, family and model; in virtual machines the name alone is often only the vendor."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in found:
        return platform.machine()
    if "cpu family" not in found or "model" not in found:
        return found["model name"]
    return f"{found['model name']} (family {found['cpu family']}, model {found['model']})"


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # Precision set by `fp32_precision` of torch.backends, which get_float32_matmul_precision cannot express.
        return torch.backends.cuda.matmul.fp32_precision  # pyrefly: ignore[bad-return]


# Describes the loaded code, so computed once per process.
@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def warn_untested() -> None:
    """Warn once per process about loaded packages that are newer than the newest tested releases."""
    found = {name: str(getattr(sys.modules.get(name), "__version__", "0")) for name in TESTED}
    newer = [
        f"{name} {found[name]} (tested: {tested})" for name, tested in TESTED.items() if newer_than(found[name], tested)
    ]
    if newer:
        # Attribute the warning to the user's line, at any depth in the package.
        level, frame = 1, inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(str(Path(__file__).parent)):
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"tokenmix was not tested with {', '.join(newer)}; if something fails, install the tested release",
            stacklevel=level,
        )


def newer_than(version: str, tested: str) -> bool:
    """Whether a release is newer than the tested one, to the tested precision: 2.14.9 is not newer than 2.14."""
    ours, theirs = (
        [int(number) for number in re.findall(r"\d+", text)] for text in (tested, version.partition("+")[0])
    )
    return theirs[: len(ours)] > ours


@functools.cache
def _commit(package: Path) -> dict[str, object]:
    """Commit of the checkout that contains the package, and whether tracked files changed; None if installed."""
    if not any((parent / ".git").exists() for parent in package.parents[:3]):
        return {"commit": None, "changed": None}
    head = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if changes is None else bool(changes)}


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for later calls; other allocators are not changed.

    By default glibc returns the pages of large tensors to the system and maps them again: 27,000 page faults per
    training step with wide layers. With this setting, memory stays at its peak for the life of the process.
    """
    _set_glibc({M_TRIM_THRESHOLD: NEVER, M_MMAP_THRESHOLD: MOST})


def return_large_memory() -> None:
    """Undo `keep_freed_memory` for blocks of a megabyte: for loader processes, which fill one batch after the other."""
    _set_glibc({M_MMAP_THRESHOLD: 1 << 20})


def _set_glibc(options: dict[int, int]) -> None:
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        for option, value in options.items():
            libc.mallopt(option, value)


_one_at_a_time = threading.RLock()


@contextmanager
def filtered_stderr(keep: Callable[[bytes], bytes]) -> Iterator[None]:
    """Hold back output to file descriptor 2, by any library, and write it through `keep` when the block ends."""
    with _one_at_a_time, tempfile.TemporaryFile() as held_back:
        try:
            kept = os.dup(2)
        except OSError:  # nobody reads it
            yield
            return
        sys.stderr.flush()
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            held_back.seek(0)
            os.write(kept, keep(held_back.read()))
            os.close(kept)


# Limit for the masks of all objects of an image.
MASK_BYTES = 1 << 31


def check_mask_memory(count: int, size: tuple[int, int]) -> None:
    if count * size[0] * size[1] > MASK_BYTES:
        raise UserError(
            f"{count} masks of {size[1]} x {size[0]} pixels fill more than {MASK_BYTES >> 20} MiB; cut the image into "
            "smaller ones"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
