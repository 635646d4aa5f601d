"""What predictions.safetensors must hold, whatever the task."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.metrics import read_predictions


def check_predictions(run: Path, names: set[str]) -> None:
    """The metrics of a run follow from what it said of each test sample, and a sample of weight 2 counts twice.

    Args:
        run: a finished run.
        names: the metrics of which this must hold, among them that which is monitored.
    """
    task = load_task(run)
    columns, told = read_predictions(run), json.loads((run / "result.json").read_text())["metrics"]
    assert columns is not None
    assert task.monitor in names
    samples = columns["index"]
    assert samples.equal(samples.unique()), "one row for each, in order"
    generator = torch.Generator().manual_seed(0)
    times = torch.randint(0, 3, (len(samples),), generator=generator)
    written_out = repeated(columns, times)
    for name in names:
        metric = task.metrics[name]
        value = metric.measure(columns, torch.ones(1, len(samples), dtype=torch.float64))
        assert value.shape == (1,)
        assert value.item() == pytest.approx(told[name], rel=1e-5, abs=1e-6), name
        twice = metric.measure(columns, torch.stack([times, torch.ones_like(times)]).double())
        assert twice[0].item() == pytest.approx(metric(written_out), rel=1e-9, abs=1e-12), name
        assert twice[1].item() == pytest.approx(value.item(), rel=1e-9), name
        if metric.values is not None:
            assert metric.values(columns).mean().item() == pytest.approx(value.item())


def repeated(columns: dict[str, Tensor], times: Tensor) -> dict[str, Tensor]:
    """The same with each sample written out so often, as samples of their own."""
    parts: dict[str, list[Tensor]] = {name: [] for name in columns}
    number = 0
    for sample, count in zip(columns["index"].tolist(), times.tolist()):
        for _ in range(count):
            for name, values in columns.items():
                table = name.rpartition(".")[0]
                index = f"{table}.index" if table else "index"
                rows = values[columns[index] == sample]
                parts[name].append(torch.full_like(rows, number) if name == index else rows)
            number += 1
    return {name: torch.cat(values) for name, values in parts.items()}
