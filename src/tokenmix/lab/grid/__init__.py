"""Grids of runs: a cell is one run, trained to its end from any state."""

import shutil
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenmix.errors import UserError
from tokenmix.files import replace_file
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.run import finish_run
from tokenmix.registry import imported_plugins, load_plugin
from tokenmix.trust import only_typed, typed_words


@dataclass(frozen=True)
class Cell:
    """One run of a grid: its name for messages and `--only`, and its config with the folder in `out`.

    The process that trains it imports `plugins`, named by `--import`, and trusts the text in `typed`. If `typed` is
    None, the process trusts all text of the config that does not come from a file.
    """

    name: str
    config: TrainConfig
    plugins: tuple[str, ...] = field(default_factory=imported_plugins)
    typed: frozenset[str] | None = field(default_factory=typed_words)

    @property
    def folder(self) -> Path:
        assert self.config.loop.out is not None
        return self.config.loop.out

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def is_finished(self) -> bool:
        return self.run.is_finished


Outcome = str | OSError
"""Error of a cell, "" for none; an `OSError`, such as a full disk, also stops the other cells."""
Outcomes = Generator[tuple[Cell, Outcome], None, None]
Engine = Callable[[Sequence[Cell]], Outcomes]
"""Trains cells to their ends and yields each when it ends. If closed early or interrupted, it stops the other cells,
which save."""


def finish_cell(cell: Cell) -> Outcome:
    """Train a cell to its end like `finish_run`, and return its error. Ctrl-C is raised after the run is saved."""
    error_file = cell.folder / "error.txt"
    try:
        for plugin in set(cell.plugins) - set(imported_plugins()):
            load_plugin(plugin)
        if cell.folder.is_dir() and not (cell.folder / "config.json").exists():
            # The run was killed before it began.
            shutil.rmtree(cell.folder)
        error_file.unlink(missing_ok=True)
        with only_typed(cell.typed):
            finish_run(cell.config, quiet=True)
    except OSError as error:
        return error
    except UserError as error:
        return str(error)
    except Exception as error:
        # A bug in one layer must not stop the other runs; its traceback is kept.
        cell.folder.mkdir(parents=True, exist_ok=True)
        replace_file(error_file, traceback.format_exc().encode())
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'see error.txt'}"
    return ""
