"""Training to the end whatever is there already: for programs that make many runs, and runs that torchrun restarts."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError
from tokenmix.files import latest_complete_checkpoint, one_writer
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import (
    PeerFailure,
    broadcast_object,
    distributed_info,
    process_group,
    raise_on_all_ranks,
)
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import read_config, saved_config
from tokenmix.trust import from_caller


@from_caller
def finish_run(config: TrainConfig, *, quiet: bool = False) -> Path:
    """The run folder `config.loop.out`, trained to its end.

    A finished run is left unchanged, a stopped one continues bit for bit, one without a checkpoint starts again.

    Raises:
        UserError: no folder is given, or it holds a run with other options, or one that another process writes; else
            as `train`.
    """
    run = config.loop.out
    if run is None:
        raise UserError("a run that can be resumed needs a folder; give out")
    try:
        with process_group(config.loop.device):
            # The first process decides, since it also removes.
            with raise_on_all_ranks():
                found = distributed_info().first and (run / "config.json").exists()
                if found:
                    _check_same(config, run)
                finished = found and (run / "result.json").exists()
                if found and not finished:
                    config = resume_config(config, run)
            finished, config = broadcast_object((finished, config))
            return run if finished else train(config, quiet=quiet)
    except PeerFailure as stop:
        raise SystemExit(stop.code) from None


def resume_config(config: TrainConfig, run: Path) -> TrainConfig:
    """The config that continues with a half-done run; a folder without a checkpoint is removed and started again."""
    if latest_complete_checkpoint(run / "checkpoints" / "last").exists():
        own = {name: config.flat()[name] for name in ("device", "workers", "threads")}
        return read_config(run).replace(resume=run, **own)
    if run.exists():
        with one_writer(run):
            shutil.rmtree(run)
    return config


def _check_same(config: TrainConfig, run: Path) -> None:
    before = _plain(saved_config(run))
    for name, value in _plain(get_task(config.task).with_absolute_paths(config)).items():
        if name not in config.marked("free") and value != before.get(name):
            raise UserError(
                f"{run} holds a run with {name}={before.get(name)!r} instead of {value!r}; remove it, or give "
                "another folder"
            )


def _plain(config: TrainConfig) -> dict[str, Any]:
    """Options by name, as JSON gives them back."""
    return json.loads(json.dumps(config.flat(), default=str))
