"""What a run said of each test sample: predictions.safetensors in its folder, and a metric of some of the samples.

The file has columns of equal length: `index`, the number of the sample in the test set, and what the task keeps of it.
A task whose samples have several rows, such as boxes, has further tables; the name of a column in one is TABLE.NAME.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import replace_file
from tokenmix.lab.data.store import read_sealed, sealed
from tokenmix.lab.train.distributed import all_gather
from tokenmix.lab.train.folder import RunFolder

FILE, INDEX = "predictions.safetensors", "index"
Rows = Mapping[str, Tensor]


@dataclass(frozen=True)
class SampledMetric:
    """A metric as a function of how often each test sample counts.

    Attributes:
        index: int64 (n,), the samples.
        resampled: weights float64 (R, n) to the metric (R,).
        values: float64 (n,), where the metric is their mean; else None.
    """

    index: Tensor
    resampled: Callable[[Tensor], Tensor]
    values: Tensor | None = None

    @classmethod
    def mean(cls, index: Tensor, values: Tensor) -> "SampledMetric":
        """The mean of one value of each sample."""
        values = values.double()
        return cls(index, lambda weights: weights @ values / weights.sum(1), values)

    @classmethod
    def of_sums(cls, index: Tensor, values: Tensor, metric: Callable[[Tensor], Tensor]) -> "SampledMetric":
        """A function of sums over the samples: of `values` (n, K) a metric that maps (R, K) to (R,)."""
        values = values.double()
        return cls(index, lambda weights: metric(weights @ values))


def quotient(sums: Tensor) -> Tensor:
    """The first of two sums over the second; (R, 2) to (R,)."""
    return sums[:, 0] / sums[:, 1]


def collected(parts: Sequence[Rows]) -> dict[str, Tensor]:
    """The rows of all batches and processes as columns, in the order of the samples; all processes must call it.

    Of a sample that several processes or batches saw a part of the rows are added up.
    """
    rows = [row for part in all_gather(list(parts)) for row in part]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: torch.cat([row[name] for row in rows if name in row]) for name in names}
    for table in {name.rpartition(".")[0] for name in names}:
        prefix = f"{table}." if table else ""
        index = columns[f"{prefix}{INDEX}"]
        order = index.argsort(stable=True)
        for name in (name for name in names if name.rpartition(".")[0] == table):
            columns[name] = columns[name][order]
    index = columns.get(INDEX, torch.empty(0, dtype=torch.int64))
    samples, place = index.unique(return_inverse=True)
    if len(samples) < len(index):
        for name in (name for name in names if "." not in name and name != INDEX):
            values = columns[name]
            columns[name] = values.new_zeros(len(samples), *values.shape[1:]).index_add(0, place, values)
        columns[INDEX] = samples
    return columns


def save_predictions(run: Path, columns: Rows, identity: Mapping[str, str]) -> None:
    """Write the file of a run folder; nothing for a task that keeps nothing."""
    if columns:
        tensors = {name: value.contiguous() for name, value in columns.items()}
        replace_file(run / FILE, safetensors.torch.save(tensors, sealed(tensors, identity)))


def read_predictions(run: Path) -> dict[str, Tensor] | None:
    """The columns of a run folder; None if it has no such file.

    Raises:
        UserError: a damaged file, or one that was written for another run.
    """
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
