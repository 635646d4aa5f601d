"""Tell timm and transformers our model names, without importing either for those who do not use it.

Neither has an entry point for plug-ins. What is loaded already is told now; for the other a finder waits for its
import, lets it load as always, and tells it behind that.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["register_with_others"]

OURS = {"timm": "tokenmix.models", "transformers.models.auto.configuration_auto": "tokenmix.tasks.text.models.auto"}
"""Module of theirs: the module of ours whose import registers our names there."""


class _Loader(importlib.abc.Loader):
    """A module's own loader, with our registration behind it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        importlib.import_module(OURS[module.__name__])


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for one module, once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register_with_others() -> None:
    """Register our models with timm and transformers, now or when they are imported."""
    waiting = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for theirs, ours in OURS.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
        elif theirs not in waiting:
            sys.meta_path.insert(0, _Finder(theirs))
