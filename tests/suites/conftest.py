"""Test suites of timm and transformers over our models: slow, and from the packages' source distributions."""

import fnmatch
from pathlib import Path

import pytest

# Marks that their suites set.
MARKS = (
    "accelerate_tests",
    "backward",
    "base",
    "cfg",
    "cfg_nonstd",
    "features",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "forward",
    "fxbackward",
    "fxforward",
    "is_training_test",
    "order",
    "timeout",
    "torch_compile_test",
    "torchscript",
)


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of another package's suite")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, these are not even imported: that fetches the source distribution."""
    return True if "not slow" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is in a module's `EXPECTED` must fail, for the reason that stands there; else it has to leave the list."""
    for item in items:
        expected = getattr(getattr(item, "module", None), "EXPECTED", {})
        for pattern, reason in expected.items():
            if fnmatch.fnmatchcase(item.nodeid.partition("::")[2], pattern):
                item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
