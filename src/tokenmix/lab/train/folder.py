"""A run folder: each file is read and checked once, and must belong to the run.

config.json has a random run id. Weights, checkpoints and result.json repeat the id. Weights and checkpoints also have
the SHA-256 of the run's settings and of data.json. The folder's path does not matter, so the folder can be copied and
moved as a whole. This module does not import PyTorch.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, NoReturn, Self, TypeVar

from tokenmix.errors import UserError
from tokenmix.files import Values, read_json, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.registry import TASKS
from tokenmix.lab.train.config import TaskConfig, TrainConfig, default_config
from tokenmix.lab.train.schema import Range, fitted
from tokenmix.registry import MODELS, list_models
from tokenmix.trust import from_file

D = TypeVar("D", bound=TaskConfig)

ID = "run_id"
# Sub-folder with the tokenizer of a text task.
TOKENIZER = "tokenizer"

Count = Annotated[int, Range(least=0, most=2**31)]
Amount = Annotated[float, Range(least=0)]
NUMBERS = ("answer_words", "channels", "doc_stride", "ignore", "num_points", "pad_token_id", "seq_len", "vocab_size")
DESCRIPTION: Values = {
    **dict.fromkeys((*NUMBERS, "train", "validation", "test"), Count),
    **dict.fromkeys(("classes", "metrics", "part_names"), list[str]),
    "counts": dict[str, dict[str, Count]],
    "crop_pct": Annotated[float, Range(above=0, most=1)],
    "img_size": list[Annotated[int, Range(least=1, most=2**14)]],
    "mean": list[Annotated[float, Range(least=-1e6, most=1e6)]],
    "palette": list[list[Annotated[int, Range(least=0, most=255)]]],
    "parts": dict[str, list[Count]],
    "std": list[Annotated[float, Range(least=1e-6, most=1e6)]],
}
"""Types of entries of data.json, for those of our tasks that have the entry."""
RESULT: Values = {
    **dict.fromkeys(("task", "model", "data", "monitor"), str),
    **dict.fromkeys(("metrics", "validation", "environment"), Values),
    **dict.fromkeys(("best_epoch", "epochs", "parameters"), Count),
    "img_size": DESCRIPTION["img_size"],
    "seconds": Amount,
}
"""Types of entries of result.json."""


class _Part(Values):
    """Content of a JSON file, with these types; `UserError` for a missing entry."""

    def __init__(self, path: Path, types: Values) -> None:
        super().__init__(read_part(path.parent, path.name))
        self.path = path
        try:
            for name in self.keys() & types.keys():
                fitted(types[name], self[name], name)
            if {"mean", "std"} <= types.keys() & self.keys() and len(self["mean"]) != len(self["std"]):
                raise UserError("mean and std must have the same length")
            if "img_size" in types and len(self.get("img_size") or (0, 0)) != 2:
                raise UserError("img_size must be two numbers")
        except UserError as error:
            raise UserError(f"{path} is damaged: {error}; put a whole one back") from None

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(f"{self.path} is damaged: it has no {name}; put a whole one back")


class RunFolder:
    """A run folder. A file is read on first access; `UserError` says what is wrong with the file.

    Not a dataclass: text in a caller's dataclasses is trusted, text in files is not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, run: "Path | str | RunFolder") -> "RunFolder":
        """The folder at a path; an open folder is returned as it is."""
        return run if isinstance(run, RunFolder) else cls(user_path(run))

    @classmethod
    def of_weights(cls, source: Path) -> Self | None:
        """The run folder of these weights, also of a checkpoint or file in it; None for weights of another library."""
        place = Path(os.path.abspath(source))
        place = place.parent if place.is_file() else place
        place = place.parents[1] if place.parent.name == "checkpoints" else place
        return cls(place) if all((place / name).exists() for name in ("config.json", "data.json")) else None

    @cached_property
    def setup(self) -> Values:
        """Config, command, environment and metric of the best epoch, as written."""
        return _Part(self.path / "config.json", {"monitor": str, "sources": dict[str, str], "step_size": int})

    @cached_property
    def saved_config(self) -> TrainConfig:
        """The config, as written."""
        return read_document(self.setup.get("config"), str(self.path / "config.json"))

    @cached_property
    def config(self) -> TrainConfig:
        """The config, with the folder's own tokenizer if it has one."""
        own = self.path / TOKENIZER
        return self.saved_config.replace(tokenizer=own) if own.is_dir() else self.saved_config

    @cached_property
    def description(self) -> Values:
        """The description of the data in data.json; a start from its weights needs neither config nor task."""
        config = self.setup.get("config")
        task = str(config.get("task")) if isinstance(config, dict) else ""
        ours = task in TASKS and str(TASKS[task].task).startswith("tokenmix.")
        return _Part(self.path / "data.json", DESCRIPTION if ours else {})

    @cached_property
    def result(self) -> Values:
        """Content of result.json; `UserError` if another run wrote the file."""
        result = _Part(self.path / "result.json", RESULT)
        if self.identity and result.get(ID) != self.identity[ID]:
            raise UserError(f"{self.path / 'result.json'} was not written by this run; put the run's own back")
        return result

    @cached_property
    def identity(self) -> dict[str, str]:
        """Id of the run, and SHA-256 of its settings and of data.json; empty for a folder without an id."""
        try:
            setup, data = self.setup, read_part(self.path, "data.json")
        except (OSError, UserError):
            return {}
        if not isinstance(setup.get(ID), str):
            return {}
        settings = setup.get("config")
        if isinstance(settings, dict):
            # Settings that affect training. Data may have moved and is compared separately.
            free = {*TrainConfig().marked("free"), "data"}
            parts = {name: part if isinstance(part, dict) else {name: part} for name, part in settings.items()}
            settings = {name: {k: v for k, v in part.items() if k not in free} for name, part in parts.items()}
        return {ID: setup[ID], "config_sha256": sha256_of(settings), "data_sha256": sha256_of(data)}

    @property
    def is_finished(self) -> bool:
        return (self.path / "result.json").is_file()

    @property
    def to_continue(self) -> str:
        return f"continue with: tokenmix train --resume {shlex.quote(str(self.path))}"

    def edited(self, found: Mapping[str, object]) -> list[Path]:
        """config.json and data.json, where they changed after a file was written."""
        hashes = {name: f"{name}_sha256" for name in ("config", "data")}
        return [
            self.path / f"{name}.json"
            for name, key in hashes.items()
            if key in found and key in self.identity and found[key] != self.identity[key]
        ]

    def changed_sources(self, now: Mapping[str, str]) -> list[str]:
        """The user's modules that changed since the start; older folders do not know theirs."""
        try:
            before: Mapping[str, str] = self.setup.get("sources", {})
        except UserError:  # A run folder without its setup can still be evaluated.
            return []
        return [module for module, digest in before.items() if now.get(module, digest) != digest]

    def check_sources(self, now: Mapping[str, str]) -> None:
        """Raise `UserError` if a module of the user changed since the start."""
        if changed := self.changed_sources(now):
            raise UserError(
                f"the module {changed[0]} changed since {self.path}; give another --out, or undo the change"
            )

    def check_identity(self, found: Mapping[str, object], file: Path) -> None:
        """Raise `UserError` if a file was written for another run; log which files were edited since.

        `found` is the run's identity in the file, possibly the id only.
        """
        if self.identity and found.get(ID) != self.identity[ID]:
            raise UserError(
                f"{file} was not written by the run {self.path}; put the run's own file back, or start from these "
                "weights with --init-from FILE"
            )
        for edited in self.edited(found):
            log(f"{edited} was edited after {file.name} was written")


def is_run(target: str) -> bool:
    """Whether the target is a readable run folder; False for a model of ours, `UserError` for neither."""
    if user_path(target).is_dir():
        RunFolder.of(target).config  # noqa: B018
        return True
    if target not in MODELS:
        raise UserError(
            f"{target!r} is neither a run folder nor a model; give a run folder or one of {', '.join(list_models())}"
        )
    return False


def read_document(values: object, where: str, default: Callable[[str], D] = default_config) -> D:
    """A config from the values of a file, by option or part, as untrusted `FromFile`; `UserError` names the file."""
    task = values.get("task", TrainConfig.task) if isinstance(values, dict) else None
    if not isinstance(task, str):
        raise UserError(f"{where} is damaged: it has no task; restore it from a copy")
    try:
        return default(task).replace(**from_file(values))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def read_part(folder: Path, name: str) -> Values:
    """A JSON file of a run folder or of a comparison; `UserError` if the file is missing or damaged."""
    if not (folder / name).exists():
        if (folder / "compare.json").is_file() or (folder / "grid.json").is_file():
            runs = (path.parent for path in folder.rglob("config.json") if path.parent.parent.name == "runs")
            first = min(runs, default=folder / "runs" / "self-seed0")
            raise UserError(f"{folder} is a comparison, not a run; give one of its runs, such as {first}")
        if (folder / "config.json").exists():
            raise UserError(f"{folder} has no {name}; restore it from a copy, or start a new run")
        run = RunFolder.of_weights(folder)
        remedy = "a folder that tokenmix train wrote" if run is None else str(run.path)
        raise UserError(f"{folder} is not a run folder: it has no {name}; give {remedy}")
    try:
        values = read_json(folder / name)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{folder / name} is damaged; put a whole one back, or start a new run")
    if name == "config.json" and isinstance(values.get("model_type"), str):
        raise UserError(
            f"{folder} is a model of transformers, not a run; swap, distill and compare text-classification take it"
        )
    if name == "config.json" and isinstance(values.get("architecture"), str):
        raise UserError(f"{folder} is a model of timm, not a run; give it by name: --model local-dir:{folder}")
    return values


def sha256_of(value: object) -> str:
    """SHA-256 of a JSON value, independent of the layout in a file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
