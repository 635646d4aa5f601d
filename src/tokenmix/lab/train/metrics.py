"""Metrics: functions of what an evaluation keeps of its samples, and of how often each counts; and the file of that."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import replace_file
from tokenmix.lab.data.store import read_sealed, sealed
from tokenmix.lab.train.distributed import all_gather
from tokenmix.lab.train.folder import RunFolder

INDEX = "index"
Rows = Mapping[str, Tensor]
"""Columns of what an evaluation keeps: a row for each sample; in a column TABLE.NAME as many as the table has."""


def num_rows(rows: Rows) -> int:
    """The number of samples."""
    return len(rows.get(INDEX, next(iter(rows.values()))))


@dataclass(frozen=True)
class Metric:
    """A number of an evaluation; a bootstrap is the same function with other weights.

    Attributes:
        measure: rows, and weights float64 (R, n) of their samples, to R numbers or tables (R, ...).
        higher_is_better: else less of it is better.
        names: of the entries of a table, empty if they have none; None for a number.
        values: rows to float64 (n,), where the metric is the mean of one value of each sample; else None.
        undefined: stands for nan in results.
    """

    measure: Callable[[Rows, Tensor], Tensor]
    higher_is_better: bool = True
    names: Sequence[str] | None = None
    values: Callable[[Rows], Tensor] | None = None
    undefined: float = math.nan

    @classmethod
    def mean(cls, values: Callable[[Rows], Tensor], *, higher_is_better: bool = True) -> "Metric":
        """The mean of one value of each sample."""

        def measure(rows: Rows, weights: Tensor) -> Tensor:
            return weights @ values(rows).double() / weights.sum(1)

        return cls(measure, higher_is_better, values=lambda rows: values(rows).double())

    @classmethod
    def of_sums(
        cls,
        metric: Callable[[Tensor], Tensor],
        values: Callable[[Rows], Tensor],
        *,
        higher_is_better: bool = True,
        names: Sequence[str] | None = None,
        undefined: float = math.nan,
    ) -> "Metric":
        """A function of the sums (R, ...) over the samples of values (n, ...)."""

        def measure(rows: Rows, weights: Tensor) -> Tensor:
            return metric(torch.tensordot(weights, values(rows).double(), 1))

        return cls(measure, higher_is_better, names, undefined=undefined)

    @classmethod
    def of_columns(cls, function: Callable[..., Tensor], *columns: str, higher_is_better: bool = True) -> "Metric":
        """A function of whole columns, in which a sample of weight 2 stands twice; one of torchmetrics' is one."""

        def measure(rows: Rows, weights: Tensor) -> Tensor:
            given = ([rows[name].repeat_interleave(times, 0) for name in columns] for times in weights.long())
            return torch.stack([function(*each) for each in given])

        return cls(measure, higher_is_better)

    def __call__(self, rows: Rows) -> Any:
        """The number where each sample counts once; a table as lists, or by the names of its entries."""
        table = self.measure(rows, torch.ones(1, num_rows(rows), dtype=torch.float64))[0]
        value = table.nan_to_num(self.undefined, math.inf, -math.inf).tolist()
        return dict(zip(self.names, value, strict=True)) if self.names else value


def quotient(sums: Tensor) -> Tensor:
    """The first of two sums over the second; (R, 2, ...) to (R, ...)."""
    return sums[:, 0] / sums[:, 1]


def class_counts(predicted: Tensor, true: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Places of each class that are right, true and predicted, int64 (B, 3, classes), for each row of (B, ...)."""
    counted = torch.ones_like(true, dtype=torch.bool) if ignore is None else true != ignore
    rows = torch.arange(len(true), device=true.device).view(-1, *[1] * (true.dim() - 1)) * classes

    def count(labels: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((labels + rows)[where], minlength=classes * len(true)).view(len(true), classes)

    right = counted & (predicted == true)
    return torch.stack([count(true, right), count(true, counted), count(predicted, counted)], 1)


# Of counts (..., 3, classes); nan for a class of which nothing can be said.


def accuracy_of(counts: Tensor) -> Tensor:
    """Share of all samples that are right."""
    right, there, _ = counts.double().sum(-1).unbind(-1)
    return right / there


def recall_of(counts: Tensor) -> Tensor:
    """Share of the samples of each class that are right."""
    right, there, _ = counts.double().unbind(-2)
    return right / there


def f1_of(counts: Tensor) -> Tensor:
    """F1 of each class: 2 right / (true + predicted)."""
    right, there, found = counts.double().unbind(-2)
    return 2 * right / (there + found)


def iou_of(counts: Tensor) -> Tensor:
    """Intersection over union of each class: right / (true + predicted - right)."""
    right, there, found = counts.double().unbind(-2)
    return right / (there + found - right)


def matthews_of(counts: Tensor) -> Tensor:
    """Matthews' correlation of the labels with the predicted classes; 0 where one of them is constant."""
    right, there, found = counts.double().unbind(-2)
    total = there.sum(-1)
    over = right.sum(-1) * total - (there * found).sum(-1)
    under = (total**2 - (there**2).sum(-1)) * (total**2 - (found**2).sum(-1))
    return torch.where(under > 0, over / under.sqrt(), 0.0)


FILE = "predictions.safetensors"


def joined(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """Rows as columns on the CPU, in the order of the samples; parts of a sample are added up.

    Rows without `index` stay in the order in which they are given.
    """
    names = parts[0] if parts else ()
    with torch.autocast("cpu", enabled=False):  # Which refuses float16 beside bfloat16.
        columns = {name: torch.cat([part[name].detach().cpu() for part in parts]) for name in names}
    for name in [name for name in columns if name.rpartition(".")[2] == INDEX]:
        table = name.removesuffix(INDEX)
        order = columns[name].argsort(stable=True)
        for other in (other for other in columns if other.rpartition(".")[0] == table.removesuffix(".")):
            columns[other] = columns[other][order]
    samples, place = columns.get(INDEX, torch.empty(0)).unique(return_inverse=True)
    if len(samples) < len(place):
        for name, values in columns.items():
            if "." not in name:
                columns[name] = values.new_zeros(len(samples), *values.shape[1:]).index_add(0, place, values)
        columns[INDEX] = samples
    return columns


def collected(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """The rows of all batches and processes; all processes must call it."""
    return joined([rows for rows in all_gather(joined(parts)) if rows])


def save_predictions(run: Path, columns: Rows, identity: Mapping[str, str]) -> None:
    """Write the file of a run folder; nothing for a task whose rows have no index."""
    if INDEX in columns:
        tensors = {name: value.contiguous() for name, value in columns.items()}
        replace_file(run / FILE, safetensors.torch.save(tensors, sealed(tensors, identity)))


def read_predictions(run: Path) -> dict[str, Tensor] | None:
    """The columns of a run folder; None without such a file; `UserError` if it is damaged, or of another run."""
    file = run / FILE
    if not file.exists():
        return None
    columns, notes, _ = read_sealed(file)
    RunFolder(run).check_identity(notes, file)
    for name, values in columns.items():
        table = name.rpartition(".")[0]
        index = columns.get(f"{table}.{INDEX}" if table else INDEX)
        if index is None or index.dim() != 1 or values.dim() < 1 or len(values) != len(index):
            raise UserError(f"{file} is damaged: {name} does not have a row for each sample; remove the run")
    return columns
