"""What ties weights, checkpoints and results to the run folder that they were written for.

config.json has a random id of the run. Weights, checkpoints and result.json repeat the id; weights and checkpoints also
have the SHA-256 of the run's settings and of data.json. Nothing depends on where the folder is, so it can be copied and
moved as a whole.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError
from tokenmix.files import read_json
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.sources import read_part

ID = "run_id"


def identity_of(run: Path) -> dict[str, str]:
    """Id of a run folder, and SHA-256 of its settings and of data.json; empty for a folder that has no id."""
    try:
        setup, data = read_json(run / "config.json"), read_json(run / "data.json")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(setup, dict) or not isinstance(setup.get(ID), str):
        return {}
    return {ID: setup[ID], "config_sha256": sha256_of(_settings(setup.get("config"))), "data_sha256": sha256_of(data)}


def _settings(config: Any) -> Any:
    """The settings of a config in JSON that decide what is learned; data may have moved, and is compared by itself."""
    if not isinstance(config, dict):
        return config
    parts = {name: part if isinstance(part, dict) else {name: part} for name, part in config.items()}
    free = {*TrainConfig().marked("free"), "data"}
    return {name: {key: value for key, value in part.items() if key not in free} for name, part in parts.items()}


def sha256_of(value: Any) -> str:
    """SHA-256 of a value for JSON, whatever its layout in a file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def check_identity(found: Mapping[str, Any], run: Path, file: Path) -> None:
    """Raise `UserError` if a file of a run folder was written for another run; a line names what was edited since.

    Args:
        found: what the file says of its run; it may say no more than the id.
        run: the run folder.
        file: for the message.
    """
    own = identity_of(run)
    if own and found.get(ID) != own[ID]:
        raise UserError(
            f"{file} was not written by the run {run}; put the run's own file back, or start from these weights with "
            "--init-from FILE"
        )
    for edited in edited_files(found, own):
        log(f"{run / edited} was edited after {file.name} was written")


def edited_files(found: Mapping[str, Any], own: Mapping[str, str]) -> list[str]:
    """Which of config.json and data.json, whose SHA-256 `own` has, are others than those that `found` has."""
    return [
        f"{name}.json"
        for name in ("config", "data")
        if f"{name}_sha256" in found and found[f"{name}_sha256"] != own.get(f"{name}_sha256")
    ]


def read_result(run: Path) -> dict[str, Any]:
    """result.json of a run folder; `UserError` if it is damaged, or was written for another run."""
    result, own = read_part(run, "result.json"), identity_of(run)
    if own and result.get(ID) != own[ID]:
        raise UserError(f"{run / 'result.json'} was not written by this run; put the run's own back")
    return result
