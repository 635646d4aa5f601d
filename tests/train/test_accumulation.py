"""The parts of a step weigh as much as they count: accumulated, they are one large batch."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenmix.lab.registry import get_task
from tokenmix.lab.tasks.segmentation import SegmentationOptions
from tokenmix.lab.tasks.segmentation.task import SemanticSegmentation
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.task import TaskModule
from tokenmix.text.heads import NO_LABEL


def masked_words(root: Path) -> TaskModule:
    text = root / "words.txt"
    text.write_text("".join(f"On day {i} the ship sailed {7 * i} miles further to the south.\n" for i in range(80)))
    return new_task("masked-lm", model="gmlp_text_nano", data=f"text:{text}", seq_len=16, vocab_size=300)


def clouds(root: Path, task: str) -> TaskModule:
    """Of 8 to 64 points, padded to 64."""
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("ball", "rod"):
            (root / part / name).mkdir(parents=True)
            for i in range(4):
                points = rng.normal(size=(64 if i % 2 else 8, 3))
                np.savez(root / part / name / f"{i}.npz", points=points, parts=(points[:, 2] > 0).astype(np.int64))
    model = "pct_part_nano" if task == "point-segmentation" else "pct_naive_cls_nano"
    return new_task(task, model=model, data=f"clouds:{root}", num_points=64)


def new_task(task: str, **options: Any) -> TaskModule:
    config = make_config(task, batch_size=4, validation=0, threads=1, device="cpu", **options)
    kind = get_task(config.task)
    data = kind.load_data(config)
    torch.manual_seed(0)
    made = kind(kind.build_model(config, data.describe()), config, data.describe())
    made.batch = next(iter(data.train_batches(batch_size=4, epoch=0, start=0)))  # type: ignore[assignment]
    # Neither dropout nor statistics of a batch, which parts do not share.
    return made.eval()


def gradients(task: TaskModule, parts: list[Any]) -> dict[str, Tensor]:
    task.zero_grad()
    for part, weight in zip(parts, task.part_weights(parts)):
        task.part_weight = weight
        (task.training_step(part, 0)["loss"] / len(parts)).backward()
    return {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}


def cut(batch: Mapping[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    parts = {name: values.split(sizes) for name, values in batch.items()}
    return [{name: values[i] for name, values in parts.items()} for i in range(len(sizes))]


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [1, 1, 1, 1]])
@pytest.mark.parametrize("task", ["masked-lm", "point-segmentation"])
def test_parts_are_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, sizes: list[int]) -> None:
    monkeypatch.setenv("TOKENMIX_DATA", str(tmp_path / "cache"))
    made = masked_words(tmp_path) if task == "masked-lm" else clouds(tmp_path / "clouds", task)
    batch: Any = made.batch
    if task == "masked-lm":
        batch["labels"][0, 3:] = NO_LABEL
    counts = [made.count(part) for part in cut(batch, sizes)]
    assert len(set(counts)) > 1
    whole, parts = gradients(made, [batch]), gradients(made, cut(batch, sizes))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


class Pixels(torch.nn.Conv2d):
    """A classifier of pixels."""

    fixed_size = False


@pytest.mark.parametrize("labelled", [[0, 1], [1, 3], [2, 2]])
def test_ignored_pixels_weigh_nothing(labelled: list[int]) -> None:
    config = make_config("semantic-segmentation", data="none", model="eanet_seg_nano")
    assert isinstance(config.options, SegmentationOptions)
    torch.manual_seed(0)
    task = SemanticSegmentation(Pixels(3, 3, 1), config, {"classes": ["a", "b", "c"], "ignore": 9, "img_size": [6, 6]})
    classes = torch.randint(0, 3, (4, 6, 6))
    classes[: labelled[0]] = classes[labelled[1] :, :4] = 9
    batch = {"image": torch.randn(4, 3, 6, 6), "classes": classes}
    whole, parts = gradients(task, [batch]), gradients(task, cut(batch, [2, 2]))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value)


def test_a_step_without_anything_that_counts_is_a_step() -> None:
    config = make_config("semantic-segmentation", data="none", model="eanet_seg_nano")
    task = SemanticSegmentation(Pixels(3, 3, 1), config, {"classes": ["a", "b", "c"], "ignore": 9, "img_size": [6, 6]})
    batch = {"image": torch.randn(2, 3, 6, 6), "classes": torch.full((2, 6, 6), 9)}
    assert not any(value.any() for value in gradients(task, cut(batch, [1, 1])).values())


def test_images_that_were_left_out_make_no_difference(tmp_path: Path) -> None:
    """A file that can no longer be read makes its part smaller."""
    made = new_task("image-classification", model="vit_nano", model_kwargs={"depth": 1}, data="digits", limit=64)
    batch: Any = made.batch
    whole, parts = gradients(made, [batch]), gradients(made, cut(batch, [1, 3]))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-6)


def test_the_loop_weighs_the_parts_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMIX_DATA", str(tmp_path / "cache"))
    text = tmp_path / "words.txt"
    text.write_text("".join(f"On day {i} the ship sailed {7 * i} miles further to the south.\n" for i in range(80)))
    one: dict[str, Any] = {
        "model": "gmlp_text_nano",
        "data": f"text:{text}",
        "seq_len": 16,
        "vocab_size": 300,
        "batch_size": 4,
        "opt": "sgd",
        "lr": 0.5,
        "min_lr": 0.0,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "clip_grad": None,
        "max_steps": 2,
        "validation": 0,
        "threads": 1,
        "device": "cpu",
    }
    whole, parts = (
        train(make_config("masked-lm", accumulate=n, out=tmp_path / str(n), **one), quiet=True) for n in (1, 4)
    )
    for (name, value), other in zip(read_weights(whole).items(), read_weights(parts).values(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert train_loss(whole) == pytest.approx(train_loss(parts), rel=1e-4)


def train_loss(run: Path) -> float:
    with (run / "metrics.csv").open(newline="") as file:
        return float(list(csv.DictReader(file))[-1]["train_loss"])


@pytest.mark.parametrize("sizes", [[4, 0], [0, 4], [2, 0, 2]])
def test_a_part_without_a_readable_image_counts_as_zero(sizes: list[int]) -> None:
    made = new_task("image-classification", model="vit_nano", model_kwargs={"depth": 1}, data="digits", limit=64)
    batch: Any = made.batch
    whole, parts = gradients(made, [batch]), gradients(made, cut(batch, sizes))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-6)


def test_a_step_without_a_readable_image_is_a_step() -> None:
    made = new_task("image-classification", model="vit_nano", model_kwargs={"depth": 1}, data="digits", limit=64)
    nothing = {name: values[:0] for name, values in made.batch.items()}  # type: ignore[union-attr, operator]
    assert not any(value.any() for value in gradients(made, [nothing]).values())
