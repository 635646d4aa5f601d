"""What the mixers of a comparison can do at all: a table from the measured probe of all mixers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmix.files import read_json
from tokenmix.lab.compare.results import Results
from tokenmix.testing.probe_tasks import TASKS

# A checkout has it; an installed wheel does not.
MEASURED = Path(__file__).parents[4] / "dev" / "probe.json"


@dataclass(frozen=True)
class Probed:
    """A table of shares of right answers.

    Attributes:
        tasks: name, and what a mixer is able to do that solves it.
        guesses: what guessing reaches.
        rows: by mixer the share for each task, None where it was not probed, and its place from guessing (0) to 1.
        seeds: number of seeds.
    """

    tasks: list[tuple[str, str]]
    guesses: list[float]
    rows: dict[str, list[tuple[float | None, float]]]
    seeds: int


def probed(results: Results, file: Path = MEASURED) -> Probed | None:
    """The probe of those variants that are mixers of it; None if there are fewer than two, or no measured file."""
    if not file.is_file():
        return None
    plain: dict[str, Any] = read_json(file)
    scores = {(one["task"], one["mixer"]): one for one in plain["scores"]}
    names = [variant.name for variant in results.variants if variant.name in plain["structures"]]
    tasks = [task for task in TASKS if any((task, name) in scores for name in names)]
    guesses = [next(one["guess"] for (known, _), one in scores.items() if known == task) for task in tasks]
    rows: dict[str, list[tuple[float | None, float]]] = {}
    for name in names:
        values = [scores[task, name]["mean"] if (task, name) in scores else None for task in tasks]
        places = [0.0 if v is None else max(0.0, (v - guess) / (1 - guess)) for v, guess in zip(values, guesses)]
        rows[name] = list(zip(values, places))
    found = Probed([(task, TASKS[task].ability) for task in tasks], guesses, rows, plain["seeds"])
    return found if len(names) > 1 else None
