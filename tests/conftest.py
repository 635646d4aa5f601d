"""What holds for every test."""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, so that a failure can be had again and a green run says something about the change;
# HYPOTHESIS_PROFILE=search looks for new ones (make test-all does).
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A million objects are imported and collected, which stay: to look through them for garbage takes seconds.

    So does a look after every 700 new objects, Python's default, through what the tests themselves keep.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)
    gc.enable()


# Folders of tests whose numbers depend on the CPU.
ARITHMETIC = {"inference", "inspect", "kernels", "layers", "models", "ops", "swap", "tasks", "testing", "train"}
ARITHMETIC |= {"distillation"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the folders of arithmetic. Of a test marked `one_fast`, all cases but the first are slow."""
    seen = set()
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in ARITHMETIC:
            item.add_marker(pytest.mark.arithmetic)
        if item.get_closest_marker("one_fast") is not None:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


@functools.cache
def _bf16_attention_raises() -> bool:
    """Whether PyTorch's own attention in bfloat16 lacks a kernel: in its default capability on a CPU with AVX-512."""
    import torch

    query = torch.zeros(1, 1, 256, 64, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    except RuntimeError:
        return True
    return False


@contextmanager
def _skipping_lack_of_kernel() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        causes = (error, error.__cause__, error.__context__)
        if not any("pack_vnni2" in str(cause) for cause in causes) or not _bf16_attention_raises():
            raise
        pytest.skip("PyTorch's attention in bfloat16 has no kernel in this capability on this CPU (pack_vnni2)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip where PyTorch itself fails."""
    with _skipping_lack_of_kernel():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip where PyTorch itself fails."""
    with _skipping_lack_of_kernel():
        return (yield)


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers, and the modules that it does so from, are gone when it ends."""
    from tokenmix.lab.registry import DATA_SETS, TASKS
    from tokenmix.layers import MIXERS
    from tokenmix.registry import MODELS

    for registry in (TASKS, MODELS, DATA_SETS):
        registry.names()  # Before the copy: importing what registers must not fall into it.
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    mixers, modules = dict(MIXERS), set(sys.modules)
    yield
    for name in set(MIXERS) - set(mixers):
        del MIXERS[name]
    for name in set(sys.modules) - modules:
        if "tests/plugins" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
