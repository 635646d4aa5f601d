"""How many steps each variant is trained for, so that samples, multiply-adds or seconds are equal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from tokenmix.errors import UserError
from tokenmix.files import write_json
from tokenmix.lab.compare.results import Variant
from tokenmix.lab.compare.variant_runs import variant_of
from tokenmix.lab.grid import Cell
from tokenmix.lab.train.config import CompareConfig
from tokenmix.lab.train.folder import read_part
from tokenmix.lab.train.plan import make_plan
from tokenmix.lab.train.schema import Range, fitted

FILE = "steps.json"
"""The steps of each variant: a time that is measured again is another."""


def equal_steps(config: CompareConfig, out: Path, total: int, measured: Sequence[Variant]) -> dict[str, int]:
    """Steps of each variant, {} if all have as many. They are kept in the folder, and taken from there again.

        steps_v = total * cost_1 / cost_v

    with the cost of a sample or a step, and the first variant's in the numerator.

    Args:
        config: with the budget.
        out: folder of the comparison.
        total: steps of the first variant.
        measured: all variants, in their order.

    Raises:
        UserError: multiply-adds that are not known.
    """
    if config.budget == "images":
        return {}
    seconds = {v.name: v.step.median if v.step else None for v in measured}
    costs: Mapping[str, float | None] = {v.name: v.macs for v in measured} if config.budget == "macs" else seconds
    unknown = next((name for name, cost in costs.items() if not cost), None)
    if unknown is not None:
        raise UserError(f"the {config.budget} of {unknown} are not known; give --budget images")
    known = {name: cost for name, cost in costs.items() if cost}
    before = read_part(out, FILE) if (out / FILE).exists() else {}
    kept = {name: fitted(Annotated[int, Range(least=1)], steps, f"steps of {name}") for name, steps in before.items()}
    base, steps = next(((name, n) for name, n in kept.items() if name in known), (next(iter(known)), total))
    scaled = {name: max(1, round(steps * known[base] / cost)) for name, cost in known.items()}
    write_json(out / FILE, scaled | kept)
    return scaled | kept


def with_steps(cells: Sequence[Cell], steps: Mapping[str, int], num_train: int) -> list[Cell]:
    """The runs with so many steps, in as many epochs as these take."""
    found = []
    for cell in cells:
        number = steps.get(variant_of(cell))
        if number is None:
            found.append(cell)
            continue
        epochs = math.ceil(number / make_plan(cell.config, num_train).steps_per_epoch)
        config = cell.config.replace(max_steps=number, epochs=max(epochs, cell.config.loop.epochs))
        found.append(replace(cell, config=config))
    return found
