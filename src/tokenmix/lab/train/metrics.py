"""Metrics as functions of rows per sample and of sample weights; and the file of the rows."""

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

INDEX, LABEL = "index", "label"
Rows = Mapping[str, Tensor]
"""Columns of an evaluation, with one row per sample. A column TABLE.NAME has as many rows as the table."""


def num_rows(rows: Rows) -> int:
    return len(rows.get(INDEX, next(iter(rows.values()))))


@dataclass(frozen=True)
class Metric:
    """A number of an evaluation. A resample is the same function with other weights.

    Intervals on up to 500 samples leave one out at a time, which is wrong for medians and other quantiles.
    """

    # Maps rows and float64 sample weights (R, n) to R numbers or tables (R, ...).
    measure: Callable[[Rows, Tensor], Tensor]
    higher_is_better: bool = True  # False if less is better
    names: Sequence[str] | None = None  # names of the entries of a table, empty if they have none; None for a number
    # Maps rows to float64 (n,), if the metric is the mean of one value per sample; else None.
    values: Callable[[Rows], Tensor] | None = None
    undefined: float = math.nan  # replaces nan in results

    @classmethod
    def mean(cls, values: Callable[[Rows], Tensor], *, higher_is_better: bool = True) -> "Metric":
        """The mean of one value per sample."""

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
    ) -> "Metric":
        """A function of sums (R, ...) over samples of values (n, ...)."""

        def measure(rows: Rows, weights: Tensor) -> Tensor:
            return metric(torch.tensordot(weights, values(rows).double(), 1))

        return cls(measure, higher_is_better, names)

    @classmethod
    def of_columns(cls, function: Callable[..., Tensor], *columns: str, higher_is_better: bool = True) -> "Metric":
        """A function of whole columns, such as torchmetrics has; a sample of weight 2 is repeated."""

        def measure(rows: Rows, weights: Tensor) -> Tensor:
            given = ([rows[name].repeat_interleave(times, 0) for name in columns] for times in weights.long())
            return torch.stack([function(*each) for each in given])

        return cls(measure, higher_is_better)

    def __call__(self, rows: Rows) -> Any:
        """The metric at equal weights; a table as lists, or by the names of its entries."""
        table = self.measure(rows, torch.ones(1, num_rows(rows), dtype=torch.float64))[0]
        value = table.nan_to_num(self.undefined, math.inf, -math.inf).tolist()
        return dict(zip(self.names, value, strict=True)) if self.names else value


def quotient(sums: Tensor) -> Tensor:
    """First of two sums over the second: (R, 2, ...) to (R, ...)."""
    return sums[:, 0] / sums[:, 1]


def class_counts(predicted: Tensor, true: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Correct, true and predicted positions of each class, int64 (B, 3, classes), for each row of (B, ...)."""
    counted = torch.ones_like(true, dtype=torch.bool) if ignore is None else true != ignore
    rows = torch.arange(len(true), device=true.device).view(-1, *[1] * (true.dim() - 1)) * classes

    def count(labels: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((labels + rows)[where], minlength=classes * len(true)).view(len(true), classes)

    right = counted & (predicted == true)
    return torch.stack([count(true, right), count(true, counted), count(predicted, counted)], 1)


# Functions of counts (..., 3, classes); nan for an undefined class.


def accuracy_of(counts: Tensor) -> Tensor:
    """Accuracy over all samples."""
    right, there, _ = counts.double().sum(-1).unbind(-1)
    return right / there


def recall_of(counts: Tensor) -> Tensor:
    """Recall of each class: right / true."""
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
    """Matthews correlation of labels and predicted classes; 0 where one of them is constant."""
    right, there, found = counts.double().unbind(-2)
    total = there.sum(-1)
    over = right.sum(-1) * total - (there * found).sum(-1)
    under = (total**2 - (there**2).sum(-1)) * (total**2 - (found**2).sum(-1))
    return torch.where(under > 0, over / under.sqrt(), 0.0)


FILE = "predictions.safetensors"


def joined(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """Concatenate rows on the CPU, sorted by `index` if present; rows of one sample are added.

    Rows of index -1, of a sample that replaces an unreadable one, are left out.
    """
    names = parts[0] if parts else ()
    with torch.autocast("cpu", enabled=False):  # Autocast refuses float16 with bfloat16.
        columns = {name: torch.cat([part[name].detach().cpu() for part in parts]) for name in names}
    for name in [name for name in columns if name.rpartition(".")[2] == INDEX]:
        table = name.removesuffix(INDEX)
        order = columns[name].argsort(stable=True)
        order = order[columns[name][order] >= 0]
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
    """Rows of all batches and ranks; all ranks must call this."""
    return joined([rows for rows in all_gather(joined(parts)) if rows])


def save_predictions(run: Path, columns: Rows, identity: Mapping[str, str]) -> None:
    """Write the file of a run folder, unless the task's rows have no index."""
    if INDEX in columns:
        tensors = {name: value.contiguous() for name, value in columns.items()}
        replace_file(run / FILE, safetensors.torch.save(tensors, sealed(tensors, identity)))


def read_predictions(run: Path) -> dict[str, Tensor] | None:
    """Columns of a run folder; None without a file, `UserError` if the file is damaged or of another run."""
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
