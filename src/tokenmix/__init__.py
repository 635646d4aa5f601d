"""tokenmix: token mixing beyond self-attention.

Nothing heavy is imported here: each public name is fetched when it is first used. `import tokenmix.models` registers
our image classifiers with timm, `import tokenmix.text` our text models with transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tokenmix.errors import UserError, needs

if TYPE_CHECKING:
    from tokenmix.cpu import optimize
    from tokenmix.layers.table import create_mixer, list_mixers, register_mixer
    from tokenmix.models.registry import create_model
    from tokenmix.registry import list_models, list_tasks
    from tokenmix.swap import swap_attention
    from tokenmix.testing.probe import probe

__version__ = "0.2.0"

_LAZY = {
    "create_mixer": "tokenmix.layers.table",
    "list_mixers": "tokenmix.layers.table",
    "create_model": "tokenmix.models.registry",
    "list_models": "tokenmix.registry",
    "list_tasks": "tokenmix.registry",
    "optimize": "tokenmix.cpu",
    "probe": "tokenmix.testing.probe",
    "register_mixer": "tokenmix.layers.table",
    "swap_attention": "tokenmix.swap",
}
_MODULES = (
    "checkpoints",
    "compare",
    "cost",
    "cpu",
    "data",
    "inspect",
    "layers",
    "losses",
    "models",
    "ops",
    "parallel",
    "swap",
    "tasks",
    "testing",
    "text",
    "train",
)

__all__ = [
    "UserError",
    "__version__",
    "create_mixer",
    "create_model",
    "list_mixers",
    "list_models",
    "list_tasks",
    "optimize",
    "probe",
    "register_mixer",
    "swap_attention",
]


def __getattr__(name: str) -> Any:
    with needs(f"tokenmix.{name}"):
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"tokenmix.{name}")
    raise AttributeError(f"module 'tokenmix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
