"""Two processes on the CPU (gloo) learn masked words as one does with batches twice as large."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config

WORKER = """
import json, sys
from pathlib import Path
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.distributed import process_group
from tokenmix.lab.train.run import train

out, values = Path(sys.argv[1]), json.loads(sys.argv[2])
values["tokenizer"] = Path(values["tokenizer"])
with process_group("cpu"):
    for strategy in ("ddp", "fsdp"):
        parts = {"ddp": 2, "fsdp": 1}[strategy]
        train(make_config(**{**values, "strategy": strategy, "accumulate": parts, "out": out / strategy}), quiet=True)
"""
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of one and of two processes."""
    out = tmp_path_factory.mktemp("runs")
    words = ["the", "old", "cat", "sees", "a", "small", "dog", "and", "loves", "that", "great", "ship", "of", "kings"]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 9)) for i in range(200)]
    (out / "some.txt").write_text("\n".join(lines) + "\n")
    config = make_config(
        task="masked-lm",
        model="amlp_text_nano",
        model_kwargs=SMALL,
        data=f"text:{out / 'some.txt'}",
        vocab_size=300,
        seq_len=16,
        batch_size=8,
        epochs=1,
        max_steps=6,
        lr=1e-3,
        opt_eps=1e-6,
        schedule="linear",
        threads=1,
        device="cpu",
        log_every=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMIX_DATA", str(out / "cache"))
        train(config.replace(batch_size=16, out=out / "one"), quiet=True)
        values = {**dataclasses.asdict(config), "tokenizer": str(out / "one" / "tokenizer")}
        (out / "worker.py").write_text(WORKER)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        done = subprocess.run(
            [*start, str(out / "worker.py"), str(out), json.dumps(values)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_equal_one(runs: Path, strategy: str):
    """Although the masked positions of a step are not evenly shared, nor those of its parts."""
    one, two = (
        safetensors.torch.load_file(runs / name / "checkpoints" / "last" / "model.safetensors")
        for name in ("one", strategy)
    )
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
    results = [json.loads((runs / name / "result.json").read_text()) for name in ("one", strategy)]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], rel=1e-3)
    assert results[0]["steps"] == results[1]["steps"] == 6
    rows = [(runs / name / "metrics.csv").read_text().splitlines() for name in ("one", strategy)]
    place = rows[0][0].split(",").index("train_loss")
    losses = [[float(row.split(",")[place]) for row in lines[1:]] for lines in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
