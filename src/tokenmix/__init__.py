"""tokenmix: token mixing beyond self-attention.

Public names are imported at first use. `import tokenmix.models` registers our image classifiers with timm, and `import
tokenmix.text` registers our text models with transformers.
"""

import importlib
from typing import TYPE_CHECKING

from tokenmix.errors import UserError, needs

if TYPE_CHECKING:
    from tokenmix.distillation import distill, rank_layers
    from tokenmix.inference import optimize
    from tokenmix.lab.compare.compare import compare
    from tokenmix.lab.inspect import inspect
    from tokenmix.lab.registry import list_tasks
    from tokenmix.lab.train.result import train
    from tokenmix.layers.table import create_mixer, list_mixers, register_mixer
    from tokenmix.models.registry import create_model
    from tokenmix.profiling.cost import cost
    from tokenmix.registry import list_models
    from tokenmix.swap import insert, swap_attention
    from tokenmix.testing.probe import probe

__version__ = "0.2.0"

_LAZY = {
    "compare": "tokenmix.lab.compare.compare:compare",
    "cost": "tokenmix.profiling.cost:cost",
    "create_mixer": "tokenmix.layers.table:create_mixer",
    "create_model": "tokenmix.models.registry:create_model",
    "distill": "tokenmix.distillation:distill",
    "insert": "tokenmix.swap:insert",
    "inspect": "tokenmix.lab.inspect:inspect",
    "list_mixers": "tokenmix.layers:list_mixers",
    "list_models": "tokenmix.registry:list_models",
    "list_tasks": "tokenmix.lab.registry:list_tasks",
    "optimize": "tokenmix.inference:optimize",
    "probe": "tokenmix.testing.probe:probe",
    "rank_layers": "tokenmix.distillation:rank_layers",
    "register_mixer": "tokenmix.layers.table:register_mixer",
    "swap_attention": "tokenmix.swap:swap_attention",
    "train": "tokenmix.lab.train.result:train",
}
_MODULES = (
    "checkpoints",
    "distillation",
    "inference",
    "lab",
    "layers",
    "losses",
    "models",
    "ops",
    "parallel",
    "profiling",
    "swap",
    "testing",
    "text",
)

# Spelled out, because type checkers and editors do not read a table.
__all__ = [
    "UserError",
    "__version__",
    "compare",
    "cost",
    "create_mixer",
    "create_model",
    "distill",
    "insert",
    "inspect",
    "list_mixers",
    "list_models",
    "list_tasks",
    "optimize",
    "probe",
    "rank_layers",
    "register_mixer",
    "swap_attention",
    "train",
]


def __getattr__(name: str) -> object:
    with needs(f"tokenmix.{name}"):
        if name in _LAZY:
            module, _, attribute = _LAZY[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        if name in _MODULES:
            return importlib.import_module(f"tokenmix.{name}")
    raise AttributeError(f"module 'tokenmix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
