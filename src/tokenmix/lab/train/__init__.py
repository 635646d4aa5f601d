"""One trainer for every task. Functions are imported on first use, so that the command's help needs no torch."""

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
