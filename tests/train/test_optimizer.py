"""The schedule's shape, what weight decay leaves alone, and the average of the weights."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tokenmix.errors import UserError
from tokenmix.lab.train.config import OptimConfig
from tokenmix.lab.train.plan import Warmup, WeightEMA, check_optimizer, make_optimizer, make_schedule
from tokenmix.lab.train.sources import make_config
from tokenmix.models import create_model


@given(warmup=st.integers(0, 50), rest=st.integers(1, 200), floor=st.floats(0, 0.5))
def test_rises_to_the_peak_once_then_falls_to_the_floor(warmup, rest, floor):
    schedule = Warmup("cosine", warmup, warmup + rest, floor)
    factors = [schedule(step) for step in range(warmup + rest + 5)]
    assert factors[warmup] == pytest.approx(1)
    assert factors[: warmup + 1] == sorted(set(factors[: warmup + 1]))
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[warmup + rest] == pytest.approx(floor)
    assert min(factors) > 0 or floor == 0


def test_the_rates_that_a_run_uses():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = make_schedule(optimizer, OptimConfig(lr=2e-3, min_lr=1e-5), total_steps=100, epochs=10)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(rates) == rates[5] == pytest.approx(2e-3), "5 % of the run is warm-up"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)


@pytest.mark.parametrize("warmup", [0, 500])
def test_steps_are_where_they_are_said_to_be_whatever_the_warm_up(warmup):
    """COCO's 1x, 16 images a step: a tenth after 8 of 12 epochs, a hundredth after 11."""
    epoch, config = 7330, make_config(lr=0.02, min_lr=0.0, warmup_steps=warmup, epochs=12, schedule="step")
    factor = make_schedule(
        torch.optim.SGD([torch.zeros(1)], lr=config.optim.lr), config.optim, 12 * epoch, 12
    ).lr_lambdas[0]
    steps = [warmup, 8 * epoch - 1, 8 * epoch, 11 * epoch - 1, 11 * epoch, 12 * epoch - 1]
    assert [factor(step) for step in steps] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_floor_does_not_raise_the_steps():
    assert [Warmup("step", 5, 120, floor)(100) for floor in (0.0, 0.05, 0.3)] == pytest.approx([0.1, 0.1, 0.3])


def test_no_decay_on_norms_biases_and_what_the_model_names():
    model = create_model("vit_nano", img_size=8)
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.05))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 0.0 if parameter.ndim == 1 or name == "pos_embed" else 0.05
        assert decay[id(parameter)] == expected, name


def test_unknown_optimiser():
    check_optimizer("lion")
    with pytest.raises(UserError, match="unknown optimiser 'adamm'; did you mean adam"):
        check_optimizer("adamm")


def averaged(steps: range, dtype: torch.dtype, state: dict[str, Any] | None = None) -> WeightEMA:
    """The average over these steps, in which the weights are a function of the step."""
    torch.manual_seed(0)
    model = nn.Linear(33, 5).to(dtype)
    ema = WeightEMA(model, 0.9)
    if state is not None:
        ema.load_state_dict(state)
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        ema.update(step)
    return ema


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_average_that_continues_from_its_state_is_bit_equal(dtype: torch.dtype):
    whole = averaged(range(1, 9), dtype)
    cut = averaged(range(4, 9), dtype, averaged(range(1, 4), dtype).state_dict())
    for name, value in whole.state_dict().items():
        assert value.dtype == torch.float32
        assert value.equal(cut.state_dict()[name]), name
    assert {value.dtype for value in whole.weights().values()} == {dtype}


def test_evaluating_an_average_changes_neither_it_nor_the_weights():
    ema = averaged(range(1, 5), torch.bfloat16)
    own = {name: value.clone() for name, value in ema.model.state_dict().items()}
    before = ema.state_dict()
    with ema.swapped_in():
        assert all(value.equal(ema.weights()[name]) for name, value in ema.model.state_dict().items())
        assert not any(value.equal(own[name]) for name, value in ema.model.state_dict().items())
    assert all(value.equal(own[name]) for name, value in ema.model.state_dict().items())
    assert all(value.equal(ema.state_dict()[name]) for name, value in before.items())


def test_a_peak_below_the_lowest_rate_stays_a_peak():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-6)
    factor = make_schedule(optimizer, OptimConfig(lr=2e-6), total_steps=20, epochs=2).lr_lambdas[0]
    assert max(factor(step) for step in range(20)) == 1


@pytest.mark.parametrize("shape", ["constant", "step"])
def test_every_shape_cools_down(shape):
    settings = make_config(schedule=shape, epochs=4, cooldown_epochs=1, warmup_steps=0, lr=1e-3, min_lr=1e-6)
    factor = make_schedule(torch.optim.SGD([torch.zeros(1)], lr=1e-3), settings.optim, 40, 4).lr_lambdas[0]
    assert [factor(step) for step in range(30, 40)] == pytest.approx([1e-3] * 10)
    assert factor(29) >= 0.01
