"""Two processes train a GAN: each steps both networks by the mean of their gradients, so that they stay the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

WORKER = """
import json, sys
from pathlib import Path
import torch
from tokenmix.lab.tasks.generation.task import ImageGeneration
from tokenmix.lab.train import trainer
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.distributed import distributed_info, process_group
from tokenmix.lab.train.run import train

out, seen, calls = Path(sys.argv[1]), [], [0]
draw, step = ImageGeneration._noise, trainer.TrainingLoop.start_batch

def noted(self, classes):
    noise = draw(self, classes)
    seen.append(noise[0, 0].item())
    return noise

ImageGeneration._noise = noted
config = make_config(
    task="image-generation", model="eagan_nano", model_kwargs={"width": 8, "latent_dim": 8}, data="digits",
    img_size=32, epochs=2, batch_size=4, limit=24, limit_eval=11, threads=1, device="cpu", checkpoint_every=2,
    **{"ema": 0.9, "classes": ("1", "4")},
)

class Killed(BaseException):
    pass

def killed(self, *args):
    calls[0] += 1
    if calls[0] == 6:
        raise Killed
    step(self, *args)

def put(name, run):
    weights = {}
    end = trainer.TrainingLoop.end_epoch
    def kept(self):
        end(self)
        weights.update({k: v.clone() for k, v in self.task.model.named_parameters()})
    trainer.TrainingLoop.end_epoch = kept
    run()
    trainer.TrainingLoop.end_epoch = end
    torch.save(weights, out / f"{name}-{distributed_info().rank}.pt")

with process_group("cpu"):
    from dataclasses import replace
    put("whole", lambda: train(config.replace(out=out / "whole"), quiet=True))
    (out / f"noise-{distributed_info().rank}.json").write_text(json.dumps(seen))
    trainer.TrainingLoop.start_batch = killed
    try:
        train(config.replace(out=out / "again"), quiet=True)
    except Killed:
        pass
    trainer.TrainingLoop.start_batch = step
    put("again", lambda: train(make_config(resume=out / "again"), quiet=True))
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "worker.py").write_text(WORKER)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            str(folder / "worker.py"),
            str(folder),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_both_processes_hold_the_same_networks(out):
    one, two = (torch.load(out / f"whole-{rank}.pt") for rank in (0, 1))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_each_process_draws_its_own_noise(out):
    one, two = (json.loads((out / f"noise-{rank}.json").read_text()) for rank in (0, 1))
    assert len(one) == len(two) == 2 * 6
    assert not set(one) & set(two)


@pytest.mark.slow
def test_resume_is_bit_equal(out):
    weights = [safetensors.torch.load_file(out / run / "model.safetensors") for run in ("whole", "again")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    results = [json.loads((out / run / "result.json").read_text())["metrics"] for run in ("whole", "again")]
    assert results[0] == results[1]
