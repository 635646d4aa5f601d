"""GLUE's own metrics, and the one that picks the best checkpoint."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tokenmix.lab.tasks.text.classification import TextClassification
from tokenmix.lab.train.sources import make_config

SETTINGS: dict[str, Any] = {
    "task": "text-classification",
    "model": "gmlp_text_nano",
    "vocab_size": 300,
    "seq_len": 16,
    "model_kwargs": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32},
}
HEADERS = {"CoLA": [], "MRPC": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]}
ROWS = {"CoLA": "gj04\t{label}\t\tthe dog saw {i}", "MRPC": "{label}\t1\t2\tthe dog saw\tit saw {i}"}
TRUE = torch.tensor([0] * 6 + [1] * 14)
GUESSED = torch.tensor([0] * 4 + [1] * 2 + [0] * 3 + [1] * 11)


def measured(name: str, folder: Path) -> tuple[TextClassification, dict[str, float]]:
    """The task on a set in GLUE's layout, and its metrics for the guesses above in two batches."""
    data = folder / name
    data.mkdir()
    for part in ("train", "dev"):
        rows = [ROWS[name].format(i=i, label=i % 2) for i in range(40)]
        (data / f"{part}.tsv").write_text("\n".join([*HEADERS[name], *rows]) + "\n")
    config = make_config(data=f"glue:{data}", **SETTINGS)
    told = TextClassification.load_data(config).describe()
    task = TextClassification(TextClassification.build_model(config, told), config, told)
    rows = task.judged(F.one_hot(GUESSED, 2).float(), TRUE, torch.arange(20))
    return task, {name: task.metrics[name](rows) for name in task.numbers()}


def test_cola_is_measured_by_matthews_correlation(tmp_path: Path):
    task, metrics = measured("CoLA", tmp_path)
    assert task.monitor == "matthews"
    assert metrics["matthews"] == pytest.approx((11 * 4 - 2 * 3) / math.sqrt(13 * 14 * 6 * 7), abs=1e-5)


def test_mrpc_is_measured_by_the_f1_of_paraphrases(tmp_path: Path):
    task, metrics = measured("MRPC", tmp_path)
    assert task.monitor == "accuracy"
    assert metrics["accuracy"] == pytest.approx(15 / 20)
    assert metrics["f1"] == pytest.approx(2 * 11 / (2 * 11 + 2 + 3), abs=1e-5)
    assert "matthews" not in metrics
