"""What a run said of each test sample: predictions.safetensors in its folder.

The file has columns of equal length: `index`, the number of the sample in the test set, and what the task keeps of it.
A task whose samples have several rows, such as boxes, has further tables; the name of a column in one is TABLE.NAME.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import replace_file
from tokenmix.lab.data.store import read_sealed, sealed
from tokenmix.lab.train.distributed import all_gather
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.metrics import INDEX, Rows

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
