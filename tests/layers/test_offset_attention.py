"""Offset attention against the published steps, chunks against the whole map, statistics under a mask."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.layers import OffsetAttention
from tokenmix.layers.offset_attention import MaskedBatchNorm, Offset
from tokenmix.ops.attention import double_attention

LAYER, DIM = OffsetAttention, 24


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_published(layer: OffsetAttention, x: Tensor) -> Tensor:
    """Channel by channel as in the paper: softmax over the last axis, then the sum over the other taken out."""
    x = x.mT
    query = layer.query.weight @ x
    energy = query.mT @ query
    attention = energy.softmax(-1)
    attention = attention / attention.sum(1, keepdim=True)
    seen = (layer.value.weight @ x + layer.value.bias[:, None]) @ attention
    y = layer.offset.linear.weight @ (x - seen) + layer.offset.linear.bias[:, None]
    norm = layer.offset.norm
    y = F.batch_norm(y, norm.running_mean.clone(), norm.running_var.clone(), norm.weight, norm.bias, layer.training)  # type: ignore[union-attr]
    return (x + F.relu(y)).mT


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_equals_the_published_steps(training: bool, chunk_size: int | None) -> None:
    layer = LAYER(DIM, chunk_size=chunk_size).double().train(training)
    x = tokens(3, 17, DIM)
    torch.testing.assert_close(layer(x), as_published(layer, x), rtol=1e-9, atol=1e-9)


def test_parameters_are_those_of_the_released_layer() -> None:
    layer = LAYER(128, device="meta")
    assert sum(p.numel() for p in layer.parameters()) == 128 * 32 + 2 * (128 * 128 + 128) + 2 * 128


def test_chunks_give_the_gradients_of_the_whole_map() -> None:
    whole, chunked = LAYER(DIM).double(), LAYER(DIM, chunk_size=4).double()
    chunked.load_state_dict(whole.state_dict())
    mask = torch.arange(11) < torch.tensor([[11], [6], [0]])
    grads = []
    for layer in (whole, chunked):
        x = tokens(3, 11, DIM).requires_grad_()
        layer(x, mask).square().sum().backward()
        assert x.grad is not None
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(grads[0], grads[1]):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_double_attention_writes_no_map() -> None:
    tokens = 1536
    query = torch.randn(1, 1, tokens, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        double_attention(query, query, torch.randn(1, 1, tokens, 8), chunk_size=16)
    largest = max(event.self_cpu_memory_usage for event in profile.events() or ())
    assert largest < 4 * tokens * tokens / 4


def test_statistics_under_a_mask_are_those_of_the_tokens_alone() -> None:
    x, mask = tokens(4, 9, 6), torch.rand(4, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    masked, plain = MaskedBatchNorm(6).double(), torch.nn.BatchNorm1d(6).double()
    torch.testing.assert_close(masked(x, mask)[mask], plain(x[mask]), rtol=1e-9, atol=1e-9)
    for one, other in zip(masked.buffers(), plain.buffers()):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    before = [buffer.clone() for buffer in masked.buffers()]
    assert masked(x, torch.zeros_like(mask)).isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(before, masked.buffers()))


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="reduction must divide dim 24, got 5"):
        LAYER(24, reduction=5)
    with pytest.raises(UserError, match="chunk_size must be at least 1"):
        LAYER(24, chunk_size=0)


def test_what_padding_holds_reaches_no_weight_of_the_last_step() -> None:
    """`Offset` is also used around other mixers."""
    torch.manual_seed(0)
    step, mask = Offset(8), torch.arange(6).expand(3, 6) < 4
    x = torch.randn(3, 6, 8).masked_fill(~mask.unsqueeze(-1), torch.nan)
    for training in (True, False):
        out = step.train(training)(x, torch.zeros(3, 6, 8), mask)
        assert out.isfinite().all()
        out.square().sum().backward()
        assert all(weight.grad.isfinite().all() for weight in step.parameters() if weight.grad is not None)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_synchronised_batch_norm_is_the_same(masked: bool, training: bool) -> None:
    """PyTorch puts its own class in place of ours; on one process it is an ordinary batch norm."""
    torch.manual_seed(0)
    ours = OffsetAttention(16).train(training)
    theirs = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(ours))
    assert isinstance(theirs.offset.norm, torch.nn.SyncBatchNorm)
    x, mask = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2:] = False
    given = mask if masked else None
    torch.testing.assert_close(theirs(x, given), ours(x, given))
    torch.testing.assert_close(theirs.offset.norm.running_var, ours.offset.norm.running_var)


def test_without_a_momentum_the_statistics_are_means_of_all_batches() -> None:
    ours, theirs = MaskedBatchNorm(4, momentum=None), torch.nn.BatchNorm1d(4, momentum=None)
    for i in range(3):
        x = torch.randn(2, 5, 4) + i
        ours(x, torch.ones(2, 5, dtype=torch.bool))
        theirs(x.flatten(0, 1))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
