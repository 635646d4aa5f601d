"""What holds for every test."""

import gc
import os
import sys
from collections.abc import Iterator

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `one_fast`, all cases but the first are slow."""
    seen = set()
    for item in items:
        if item.get_closest_marker("one_fast") is not None:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers, and the modules that it does so from, are gone when it ends."""
    from tokenmix.layers import MIXERS
    from tokenmix.registry import DATA_SETS, MODELS, TASKS

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
