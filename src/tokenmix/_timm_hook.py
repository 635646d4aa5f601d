"""Tell timm our model names, without importing timm for those who do not use it.

timm has no plug-in entry point. If it is loaded already, our models are registered now; else a finder waits for the
import of `timm`, lets it load as always, and registers behind it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["register_with_timm"]


class _Loader(importlib.abc.Loader):
    """timm's own loader, with our registration behind it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        _register()


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for `timm` alone, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _register() -> None:
    importlib.import_module("tokenmix.models")


def register_with_timm() -> None:
    """Register our models with timm, now or when it is imported."""
    if "timm" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
