"""One trainer for every task: checkpoints without pickle, run folders.

The functions are fetched when they are first used: the command line imports `config` for its help and must not wait
for torch.
"""

import importlib
from typing import TYPE_CHECKING

from tokenmix.errors import needs

with needs("tokenmix.lab.train"):
    from tokenmix.lab.train.config import CompareConfig, TrainConfig
    from tokenmix.lab.train.sources import make_config

if TYPE_CHECKING:
    from tokenmix.lab.train.load import load_run
    from tokenmix.lab.train.run import evaluate, predict, train

__all__ = ["CompareConfig", "TrainConfig", "evaluate", "load_run", "make_config", "predict", "train"]


def __getattr__(name: str) -> object:
    if name in ("evaluate", "load_run", "predict", "train"):
        home = "load" if name == "load_run" else "run"
        return getattr(importlib.import_module(f"tokenmix.lab.train.{home}"), name)
    raise AttributeError(f"module 'tokenmix.lab.train' has no attribute {name!r}")
