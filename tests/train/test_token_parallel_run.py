"""`--token-parallel`: two processes that share each image train as one does, under ddp and fsdp, in both tasks."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from predictions import check_predictions
from runs import last_weights, numbers
from tokenmix.errors import UserError
from tokenmix.lab.data.scenes import Scene, SceneData, Scenes
from tokenmix.lab.tasks.segmentation import task as semantic_segmentation
from tokenmix.lab.train import trainer
from tokenmix.lab.train.launch import processes_to_start
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config

SHARED: dict[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "log_every": 2,
    "checkpoint_every": 100,
    "opt": "sgd",
    "lr": 0.05,
}
IMAGES = make_config(
    data="digits",
    model="mixer_nano",
    model_kwargs={"depth": 2, "mixer": "external", "stem": "patch"},
    epochs=1,
    batch_size=20,
    limit=140,
    limit_eval=41,
    **SHARED,
)
THIN = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}
PIXELS = make_config(
    task="semantic-segmentation",
    data="stripes",
    model="eanet_seg_nano",
    batch_size=2,
    epochs=2,
    iou_loss=0.5,
    model_kwargs={"backbone": "resnet18", "backbone_kwargs": THIN, "width": 8, "head_width": 8, "drop_rate": 0.0},
    **SHARED,
)
WINDOWS = {"way": "sliding", "window": (40, 24), "stride": (20, 12), "scales": (1.0, 2.0), "mirror": "yes"}

WORKER = """
import dataclasses, json, sys
from pathlib import Path
from test_token_parallel_run import WINDOWS, stripes
from tokenmix.errors import UserError
from tokenmix.lab.tasks.segmentation import task as semantic_segmentation
from tokenmix.lab.train.distributed import distributed_info, process_group
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config

semantic_segmentation.load_scenes = stripes
out, images, pixels = Path(sys.argv[1]), *(make_config(**json.loads(value)) for value in sys.argv[2:])
outcomes = {}

def attempt(name, config, **changes):
    try:
        train(config.replace(**{"out": out / name, "token_parallel": 2, **changes}), quiet=True)
        outcomes[name] = "done"
    except (UserError, SystemExit) as error:
        outcomes[name] = f"{type(error).__name__}: {error}"

with process_group("cpu"):
    attempt("images-ddp", images)
    attempt("images-fsdp", images, strategy="fsdp")
    attempt("pixels-ddp", pixels)
    attempt("pixels-windows", pixels, **WINDOWS)
    attempt("average", images, ema=0.9, grad_checkpointing=True, accumulate=2)
    attempt("three", images, token_parallel=3)
    attempt("timm", images, model="resnet18", model_kwargs={})
    attempt("odd", pixels, crop=(38, 24))
(out / f"outcomes-{distributed_info().rank}.json").write_text(json.dumps(outcomes))
"""


class Stripes(Scenes):
    """Noise over two classes side by side, a strip without a class at the top."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"stripes {index}"

    def scene(self, index: int) -> Scene:
        draw = np.random.default_rng([self.seed, index])
        classes = torch.zeros(40 + 8 * (index % 2), 24, dtype=torch.long)
        classes[:, int(draw.integers(6, 18)) :] = 1
        image = 60 + 120 * classes + torch.from_numpy(draw.integers(-50, 50, (3, *classes.shape)))
        classes[: 3 + 9 * (index % 3)] = 255
        return Scene(image.clamp(0, 255).byte(), self.name(index), classes)


def stripes(spec: str, **_: object) -> SceneData:
    return SceneData(
        spec=spec,
        train=Stripes(8, 0),
        test=Stripes(3, 1),
        classes=["dark", "light"],
        ignore=255,
        palette=[(0, 0, 0), (255, 255, 255)],
        mean=(0.5, 0.5, 0.5),
        std=(0.3, 0.3, 0.3),
        crop=(40, 24),
        source="made here",
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of two processes."""
    out = tmp_path_factory.mktemp("two")
    (out / "worker.py").write_text(WORKER)
    configs = [json.dumps(dataclasses.asdict(config)) for config in (IMAGES, PIXELS)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [*start, str(out / "worker.py"), str(out), *configs],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs in one process."""
    out = tmp_path_factory.mktemp("one")
    train(IMAGES.replace(out=out / "images-ddp"), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(semantic_segmentation, "load_scenes", stripes)
        train(PIXELS.replace(out=out / "pixels-ddp"), quiet=True)
        train(PIXELS.replace(out=out / "pixels-windows", **WINDOWS), quiet=True)
    (out / "images-fsdp").symlink_to(out / "images-ddp")
    return out


def outcome(two: Path, name: str) -> list[str]:
    return [json.loads((two / f"outcomes-{rank}.json").read_text())[name] for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images-ddp", "images-fsdp", "pixels-ddp", "pixels-windows"])
def test_two_processes_that_share_images_equal_one(one: Path, two: Path, name: str) -> None:
    assert outcome(two, name) == ["done", "done"]
    ours, theirs = (last_weights(folder / name) for folder in (two, one))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    for row, right in zip(numbers(two / name), numbers(one / name), strict=True):
        assert row == pytest.approx(right, rel=1e-3)
    results = [json.loads((folder / name / "result.json").read_text()) for folder in (two, one)]
    for key in ("steps", "images", "parameters", "macs"):
        assert results[0][key] == results[1][key], key
    if name.startswith("images"):
        # Every test image is counted once.
        assert results[0]["metrics"]["confusion"] == results[1]["metrics"]["confusion"]
        assert sum(map(sum, results[0]["metrics"]["confusion"])) == 41
        check_predictions(two / name, {"accuracy", "balanced_accuracy", "ece", "loss"})
    else:
        check_predictions(two / name, {"miou", "accuracy", "loss"})
        assert results[0]["metrics"]["miou"] == pytest.approx(results[1]["metrics"]["miou"], rel=1e-3)


@pytest.mark.slow
def test_averages_accumulation_and_checkpointed_blocks(two: Path) -> None:
    assert outcome(two, "average") == ["done", "done"]


@pytest.mark.slow
def test_what_cannot_be_split_is_one_line_before_anything_is_written(two: Path) -> None:
    for name, message in (
        ("three", "UserError: token_parallel=3 splits each image over as many processes and 2 run; give --devices 3"),
        ("timm", "UserError: ResNet has no token-parallel form; take an image classifier of patches (mixer_nano"),
        ("odd", "UserError: images of 38 rows cannot be split over 2 processes by multiples of 4 rows"),
    ):
        assert outcome(two, name)[0].startswith(message)
        assert outcome(two, name)[1] == "PeerFailure: 2"
        assert not (two / name).exists()


def test_the_command_starts_as_many_processes_as_share_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert processes_to_start(IMAGES.replace(token_parallel=4)) == 4
    assert processes_to_start(IMAGES.replace(token_parallel=4, devices=8)) == 8


def test_one_process_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"token_parallel=2 splits each image .* and 1 run; give --devices 2"):
        train(IMAGES.replace(out=tmp_path / "run", token_parallel=2))
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(trainer.TrainingLoop, "start_batch", full)
    with pytest.raises(UserError, match=r"^out of memory; .* --token-parallel; no checkpoint was written yet"):
        train(IMAGES.replace(out=tmp_path / "run"), quiet=True)
