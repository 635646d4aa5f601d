"""Cells of an experiment: training runs by name, several at a time, resumed where they stopped."""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.over_seeds import read_result
from tokenmix.files import write_json
from tokenmix.lab.grid import cells as grid
from tokenmix.lab.grid.engines import in_processes, in_turn
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.sources import make_config


@dataclass(frozen=True)
class Cell:
    """One run: its folder's name, and its settings by the names of options."""

    name: str
    settings: Mapping[str, Any]


def read_cell(folder: Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    result = read_result(folder)
    names = ("final", "validation_final", "parameters", "macs", "images", "seconds", "commit")
    return {name: result[name] for name in names if name in result}


@dataclass
class Runner:
    """Carries out cells.

    Attributes:
        out: the folder of the run folders.
        jobs: cells that are trained at a time, each in a process of its own; 0 for one after the other in this process.
        deadline: by time.monotonic(); what is being trained then is saved.
        kept: a JSON file of finished cells, from which another machine continues without their run folders.
        read: what of a finished run's folder is kept.
        complete: False once the deadline has kept a cell from finishing.
        failed: why, by the names of the cells that did.
    """

    out: Path
    jobs: int = 1
    deadline: float = float("inf")
    kept: Path | None = None
    read: Callable[[Path], dict[str, Any]] = read_cell
    complete: bool = True
    failed: dict[str, str] = field(default_factory=dict)

    def results(self, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        """What `read` finds of each cell by name, trained now if need be; without those that failed or had no time.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was being trained is saved.
        """
        by_name = {cell.name: cell for cell in cells}
        found = self._kept(cells)
        waiting = [cell for name, cell in by_name.items() if name not in found and not self.is_finished(cell)]
        self.done, self.total = len(by_name) - len(waiting), len(by_name)
        engine = functools.partial(in_processes, jobs=self.jobs) if self.jobs else in_turn
        left = None if self.deadline == float("inf") else max(0.0, self.deadline - time.monotonic())
        runs = [grid.Cell(cell.name, self._config(cell)) for cell in waiting]
        try:
            with closing(engine(runs, seconds=left)) as ended:
                for run, outcome in ended:
                    self._report(by_name[run.name], outcome)
        except TimeoutError:
            self.complete = False
        for name, cell in by_name.items():
            if name not in found and self.is_finished(cell):
                # A finished run whose settings are others is refused here.
                found[name] = self.read(finish_run(self._config(cell)))
                self._keep(cell, found[name])
        return {name: found[name] for name in by_name if name in found}

    def _kept(self, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        """The results of cells that were kept with the same settings."""
        if self.kept is None or not self.kept.exists():
            return {}
        kept = json.loads(self.kept.read_text())
        wanted = {cell.name: json.loads(json.dumps(cell.settings)) for cell in cells}
        return {
            name: kept[name]["result"]
            for name, settings in wanted.items()
            if name in kept and kept[name]["settings"] == settings
        }

    def _keep(self, cell: Cell, result: Mapping[str, Any]) -> None:
        if self.kept is not None:
            kept = json.loads(self.kept.read_text()) if self.kept.exists() else {}
            write_json(self.kept, {**kept, cell.name: {"settings": cell.settings, "result": result}})

    def is_finished(self, cell: Cell) -> bool:
        """Whether the cell has its result."""
        return (self.out / cell.name / "result.json").is_file()

    def _config(self, cell: Cell) -> Any:
        return make_config(out=self.out / cell.name, **cell.settings)

    def _report(self, cell: Cell, outcome: grid.Outcome) -> None:
        """A line for a cell that ended."""
        self.done += 1
        line = f"failed: {outcome}"
        if outcome:
            self.failed[cell.name] = str(outcome)
        else:
            result = read_result(self.out / cell.name)
            self._keep(cell, self.read(self.out / cell.name))
            parts = [(part, result.get(part) or {}) for part in ("validation", "final")]
            scores = [f"{part} {name} {found[name]:.4f}" for part, found in parts for name in list(found)[:1]]
            line = ", ".join([*scores, f"{result['seconds']:.0f} s"])
        print(f"[{self.done}/{self.total}] {cell.name}: {line}", flush=True)
