"""Text models in Hugging Face form, the public names of `tokenmix.tasks.text.models`; each is imported at first use."""

import importlib
from typing import Any

_models = importlib.import_module("tokenmix.tasks.text.models")
__all__ = list(_models.__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_models, name)
