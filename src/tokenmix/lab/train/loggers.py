"""Experiment trackers: Weights & Biases and MLflow.

A run folder keeps the tracker's id of the run in logger.json, so that a run that is resumed continues there too. Where
they send to is configured as usual: by WANDB_MODE, WANDB_PROJECT and MLFLOW_TRACKING_URI.
"""

import os
import secrets
from pathlib import Path

from tokenmix.errors import UserError, one_line
from tokenmix.files import read_json, write_json
from tokenmix.lab.train.config import TrainConfig

ID = "logger.json"
PROJECT = "tokenmix"
REMEDIES = {
    "wandb": "log in by: wandb login, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server, such as http://127.0.0.1:5000 of: mlflow server",
}


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
        options = {name: str(value) for name, value in config.flat().items()}
        try:
            self.tracker: _Wandb | _MLflow = {"wandb": _Wandb, "mlflow": _MLflow}[kind](run, known, options, quiet)
            write_json(file, {"logger": kind, "id": self.tracker.id})
        except Exception as error:  # Each tracker has its own types for a missing login and a missing network.
            raise UserError(f"--logger {kind} cannot start ({one_line(error)}); {REMEDIES[kind]}") from error

    def log(self, values: dict[str, float], step: int) -> None:
        """A row; names as in TensorBoard."""
        self.tracker.log(values, step)

    def close(self, *, finished: bool) -> None:
        """End the run there; one that did not finish is marked so, and may be resumed."""
        self.tracker.close(finished=finished)


class _Wandb:
    def __init__(self, run: Path, known: str | None, options: dict[str, str], quiet: bool) -> None:
        import wandb

        # Its files hold links, and a run folder that holds any is not resumed.
        self.run = wandb.init(
            name=run.name,
            dir=os.environ.get("WANDB_DIR", run.parent),
            id=known or secrets.token_hex(4),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            config=options if known is None else None,
            settings=wandb.Settings(silent=quiet),
        )
        self.run.define_metric("*", step_metric="step")
        self.id = self.run.id

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log({**values, "step": step})

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class _MLflow:
    def __init__(self, run: Path, known: str | None, options: dict[str, str], quiet: bool) -> None:
        import mlflow

        # MLflow's own default depends on what of it is installed.
        where = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri()
        self.client = mlflow.tracking.MlflowClient(where)
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self.client.get_experiment_by_name(name)
            where_to = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
            known = self.client.create_run(where_to, run_name=run.name).info.run_id
            for option, value in options.items():
                self.client.log_param(known, option, value)
        self.id = known

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.id, name, value, step=step)

    def close(self, *, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "FAILED")
