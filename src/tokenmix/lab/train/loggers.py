"""Experiment trackers, through Lightning's loggers: Weights & Biases and MLflow.

A run folder keeps the tracker's id of the run in logger.json, so that a run that is resumed continues there too. Where
they send to is configured as usual: by WANDB_MODE, WANDB_PROJECT and MLFLOW_TRACKING_URI.
"""

import importlib
import os
import secrets
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError, needs, one_line
from tokenmix.files import read_json, write_json
from tokenmix.lab.train.config import TrainConfig

ID = "logger.json"
PROJECT = "tokenmix"
REMEDIES = {
    "wandb": "log in by: wandb login, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server, such as http://127.0.0.1:5000 of: mlflow server",
}


def check_logger(config: TrainConfig) -> None:
    """Raise `UserError` if the tracker that the run asks for is not installed."""
    if config.loop.logger is not None:
        with needs(f"--logger {config.loop.logger}"):
            importlib.import_module(config.loop.logger)


class RunLogger:
    """One run in a tracker: its options once, then a row of numbers at a time.

    Args:
        config: the run's, with `config.loop.logger` set.
        run: its folder, after which it is named.
        quiet: nothing on the terminal.

    Raises:
        UserError: the tracker cannot be reached, or wants a login.
    """

    def __init__(self, config: TrainConfig, run: Path, *, quiet: bool) -> None:
        kind, file = str(config.loop.logger), run / ID
        try:
            known = read_json(file)["id"] if file.exists() else None
        except (LookupError, TypeError, ValueError, RecursionError):
            raise UserError(f"{file} is damaged; remove it, then the tracker gets a new run") from None
        try:
            self.logger = {"wandb": _wandb, "mlflow": _mlflow}[kind](run, known, quiet)
            if known is None:
                self.logger.log_hyperparams({name: str(value) for name, value in config.flat().items()})
            write_json(file, {"logger": kind, "id": str(self.logger.version)})
        except Exception as error:  # Each tracker has its own types for a missing login and a missing network.
            raise UserError(f"--logger {kind} cannot start ({one_line(error)}); {REMEDIES[kind]}") from error

    def log(self, values: dict[str, float], step: int) -> None:
        """A row; names as in TensorBoard."""
        self.logger.log_metrics(values, step)

    def close(self, *, finished: bool) -> None:
        """End the run there; one that did not finish is marked so, and may be resumed."""
        self.logger.finalize("success" if finished else "failed")
        end = getattr(self.logger.experiment, "finish", None)
        if end is not None:
            end(exit_code=0 if finished else 1)


def _wandb(run: Path, known: str | None, quiet: bool) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    # Its files hold links, and a run folder that holds any is not resumed.
    logger = WandbLogger(
        name=run.name,
        save_dir=os.environ.get("WANDB_DIR", run.parent),
        id=known or secrets.token_hex(4),
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        settings=wandb.Settings(silent=quiet),
    )
    _ = logger.experiment  # which starts it
    return logger


def _mlflow(run: Path, known: str | None, quiet: bool) -> Any:
    import mlflow
    from lightning.pytorch.loggers import MLFlowLogger

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    # Lightning's default is a folder, which MLflow 3 refuses; MLflow's own default depends on what of it is installed.
    where = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri()
    logger = MLFlowLogger(experiment_name=name, run_name=run.name, tracking_uri=where, run_id=known)
    _ = logger.experiment
    return logger
