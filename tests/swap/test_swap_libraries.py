"""The same promises in every library: weights that mean something continue, costs are true, the model trains."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tokenmix
from tokenmix.layers import ExternalAttention, Mixer


def mixers(model: nn.Module) -> list[Mixer]:
    return [m for m in model.modules() if isinstance(m, Mixer)]


@pytest.mark.parametrize("mixer", ["self", "less"])
def test_a_swap_that_keeps_all_weights_keeps_the_function(subject: Any, mixer: str) -> None:
    """Less-attention starts with the identity over the tokens, so it must start as the attention that it replaces."""
    with torch.no_grad():
        before = subject.logits()
        report = tokenmix.swap_attention(subject.model, mixer, **subject.known)
        after = subject.logits()
    assert all(row.kept == ("query", "key", "value", "out") for row in report.rows)
    assert before.std() > 0.01
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", ["external", "gating", "self-double"])
def test_costs_are_those_of_the_model(subject: Any, mixer: str) -> None:
    before = sum(p.numel() for p in subject.model.parameters())
    report = tokenmix.swap_attention(subject.model, mixer, **subject.known)
    assert report.model is subject.model
    assert report.parameters_before == before
    assert report.parameters_after == sum(p.numel() for p in subject.model.parameters())
    assert {row.num_tokens for row in report.rows} == {subject.num_tokens}
    # Rows come from equations and attention alone, totals from running the whole model: they must agree.
    assert report.macs_before is not None
    assert report.macs_after is not None
    rows = [(row.macs_after or 0) - (row.macs_before or 0) for row in report.rows]
    assert report.macs_after - report.macs_before == sum(rows)
    assert report.macs_before > 2 * sum(row.macs_before or 0 for row in report.rows) / 3


def test_attention_is_counted_as_its_equation_says(subject: Any) -> None:
    report = tokenmix.swap_attention(subject.model, "external", **subject.known)
    dim, n = mixers(subject.model)[0].dim, subject.num_tokens
    assert {row.macs_before for row in report.rows} == {4 * n * dim**2 + 2 * n**2 * dim}


@pytest.mark.parametrize(
    "mixer", ["external", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gating-attention", "self-double"))]
)
def test_the_swapped_model_trains(subject: Any, mixer: str) -> None:
    model = subject.model
    tokenmix.swap_attention(model, mixer, **subject.known)
    model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        target = torch.randn_like(subject.logits())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(subject.logits(), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    inside = {f"{name}.{part}" for name, m in model.named_modules() if isinstance(m, Mixer) for part in names(m)}
    after = dict(model.named_parameters())
    assert not [name for name in inside if torch.equal(after[name], before[name])]


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def test_state_dict_and_copy(subject: Any) -> None:
    model, known = subject.model, subject.known
    plain = copy.deepcopy(model)
    tokenmix.swap_attention(model, "external", **known)
    tokenmix.swap_attention(plain, "external", **known)
    with torch.no_grad():
        expected = subject.logits()
        assert not torch.equal(subject._replace(model=plain).logits(), expected)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(subject._replace(model=plain).logits(), expected)
        assert torch.equal(subject._replace(model=copy.deepcopy(model)).logits(), expected)


def test_modes_devices_and_types_go_over(subject: Any) -> None:
    model = subject.model.double()
    model.train()
    frozen = next(m for m in model.modules() if isinstance(m, nn.LayerNorm)).eval()
    known: dict[str, Any] = {name: tuple(x.double() for x in value) for name, value in subject.known.items()}
    tokenmix.swap_attention(model, "external", **known)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(m.training for m in mixers(model))
    assert model.training
    assert not frozen.training


def test_a_swapped_model_can_be_swapped_again(subject: Any) -> None:
    with torch.no_grad():
        before = subject.logits()
        tokenmix.swap_attention(subject.model, "less", **subject.known)
        tokenmix.swap_attention(subject.model, ExternalAttention, **subject.known)
        assert all(type(m) is ExternalAttention for m in mixers(subject.model))
        assert not torch.allclose(subject.logits(), before, atol=1e-3)
