"""The arithmetic of a run, its seeds, and settings that no run can have."""

import platform
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.plan import (
    check_config,
    make_plan,
    plan_notes,
    seed_everything,
    with_epochs,
)
from tokenmix.lab.train.sources import make_config


@given(
    num_train=st.integers(1, 500),
    micro=st.integers(1, 20),
    accumulate=st.integers(1, 4),
    epochs=st.integers(1, 5),
    max_steps=st.none() | st.integers(1, 100),
)
def test_batches_of_all_epochs_make_the_steps(num_train, micro, accumulate, epochs, max_steps):
    config = make_config(batch_size=micro * accumulate, accumulate=accumulate, epochs=epochs, max_steps=max_steps)
    if num_train < accumulate:
        with pytest.raises(UserError, match=f"{num_train} training images are fewer than the {accumulate} parts"):
            make_plan(config, num_train)
        return
    plan = make_plan(config, num_train)
    step = plan.batch_size * accumulate
    assert step <= min(num_train, config.loop.batch_size)
    noted = any("do not fill a batch" in note for note in plan_notes(config, plan, num_train, "images"))
    assert noted == (step != config.loop.batch_size)
    batches = [plan.batches(epoch) for epoch in range(plan.epochs)]
    assert sum(batches) == plan.total_steps * accumulate
    assert all(0 < n <= num_train // plan.batch_size and n % accumulate == 0 for n in batches)
    assert plan.total_steps == min(epochs * (num_train // step), max_steps or 10**9)


def test_batches_of_few_samples_are_smaller_and_told():
    config = make_config(batch_size=64)
    plan = make_plan(config, 40)
    assert (plan.batch_size, plan.steps_per_epoch) == (10, 4)
    note = plan_notes(config, plan, 40, "images")[0]
    told = (
        "40 training images do not fill a batch of 64, so batches have 10; to choose it, give a --batch-size of at most"
    )
    assert note == f"{told} 40"


@pytest.mark.parametrize(("num_train", "part"), [(46, 2), (16, 2), (15, 1)])
def test_parts_of_small_sets_are_pairs_for_mixup(num_train: int, part: int):
    plan = make_plan(make_config(batch_size=64, accumulate=8), num_train)
    assert plan.batch_size == part


@pytest.mark.parametrize(
    ("num_train", "change", "epochs"),
    [
        (60_000, {}, 10),
        (3_029, {}, 22),
        (300, {}, 30),
        (300, {"epochs": 3}, 3),
        (300, {"init_from": Path("runs/other")}, 10),
        (300, {"pretrained": True, "model": "vit_small_patch16_224"}, 10),
    ],
)
def test_few_samples_are_seen_more_often(num_train: int, change: Values, epochs: int):
    config = make_config(**change)
    plan = make_plan(config, num_train)
    settled = with_epochs(config, plan)
    assert settled.loop.epochs == plan.epochs == epochs
    assert make_plan(settled, num_train) == plan
    assert any("--epochs changes that" in note for note in plan_notes(config, plan, num_train, "images")) == (
        epochs > 10
    )
    assert not any("--epochs changes that" in note for note in plan_notes(settled, plan, num_train, "images"))


def test_a_run_within_its_warm_up_is_told():
    short = make_config(batch_size=2, epochs=12, lr=0.01, warmup_steps=499)

    def notes(config: TrainConfig, num_train: int) -> list[str]:
        notes = plan_notes(config, make_plan(config, num_train), num_train, "images")
        return [note for note in notes if "warm-up" in note]

    (note,) = notes(short, 20)
    assert "120 steps end within the warm-up of 499, at a learning rate of 0.0024 of 0.01" in note
    assert not notes(short, 100)
    assert not notes(make_config(), 1000)


def drawn(*position: int) -> tuple[float, float, float]:
    seed_everything(*position)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_numbers_are_a_function_of_the_place():
    places = [(seed, epoch, batch) for seed in (0, 1) for epoch in (0, 1, 2) for batch in (0, 1)]
    first = [drawn(*place) for place in places]
    assert [drawn(*place) for place in reversed(places)] == first[::-1]
    for values in zip(*first):
        assert len(set(values)) == len(places), "two places share their numbers"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, or none; got 0"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"lr": 0.0}, "lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"lr": float("inf")}, "lr must be a finite number, got inf"),
        ({"clip_grad": 0.0}, "clip_grad must be a positive number, or none; got 0.0"),
        ({"ema": 1.0}, r"ema must be in \(0, 1\), or none; got 1.0"),
        ({"batch_size": 10, "accumulate": 3}, "batch size 10 cannot be split into accumulate=3"),
        ({"workers": -1}, r"workers must be in \[0, 256\], got -1"),
        ({"workers": 100_000}, r"workers must be in \[0, 256\], got 100000"),
        ({"threads": 100_000}, r"threads must be in \[1, 1024\], or none; got 100000"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"limit": 0}, "limit must be at least 1"),
    ],
)
def test_impossible_settings(change, message):
    check_config(make_config())
    with pytest.raises(UserError, match=message):
        check_config(make_config(**change))


@pytest.mark.parametrize(("capability", "told"), [("AVX2", True), ("AVX512", False)])
def test_bfloat16_on_a_cpu_without_it_is_told(capability: str, told: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for precision, noted in (("bf16-mixed", told), ("32", False)):
        config = make_config(precision=precision, device="cpu")
        notes = plan_notes(config, make_plan(config, 1000), 1000, "images")
        assert any("is emulated on this CPU" in note for note in notes) == noted
