"""Less-attention's rule against loops, its factors against the dense map, the residual against convolutions."""

import pytest
import torch
import torch.nn.functional as F

from tokenmix.errors import UserError
from tokenmix.ops import less
from tokenmix.ops.less import (
    Scores,
    attention_from_scores,
    attention_residual,
    next_scores,
    pool_mask,
    transform_factored,
    transform_scores,
)
from tokenmix.ops.resize import resize_gate, resize_score_transform
from tokenmix.profiling.machine import peak_memory

D = torch.float64


def linear(x, weight, bias):
    """x W^T + 1 b^T, entry by entry."""
    n = len(x)
    return [[sum(x[i][k] * weight[j][k] for k in range(n)) + bias[j] for j in range(n)] for i in range(n)]


def transposed(x):
    return [list(row) for row in zip(*x, strict=True)]


def loop_transform(scores, theta, theta_bias, psi, psi_bias):
    """Psi(Theta(A)^T)^T of one head."""
    scores, theta, theta_bias, psi, psi_bias = (t.tolist() for t in (scores, theta, theta_bias, psi, psi_bias))
    return torch.tensor(transposed(linear(transposed(linear(scores, theta, theta_bias)), psi, psi_bias)), dtype=D)


def transform_of(n, heads=None, seed=0):
    gen = torch.Generator().manual_seed(seed)
    lead = () if heads is None else (heads,)
    shapes = ((*lead, n, n), (*lead, n), (*lead, n, n), (*lead, n))
    return [torch.randn(shape, generator=gen, dtype=D) / n**0.5 for shape in shapes]


def factors_of(batch, heads, n, width, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, width, generator=gen, dtype=D) for _ in range(2)]


@pytest.mark.parametrize("heads", [None, 3])
def test_dense_equals_the_loops(heads):
    transform = transform_of(5, heads)
    scores = torch.randn(2, 3, 5, 5, dtype=D)
    out = transform_scores(scores, *transform)
    for b in range(2):
        for h in range(3):
            one = transform if heads is None else [t[h] for t in transform]
            torch.testing.assert_close(out[b, h], loop_transform(scores[b, h], *one), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_dense", [False, True])
def test_factors_equal_the_dense_map_through_a_chain_with_gradients(heads, masked, with_dense):
    query, key = factors_of(2, 3, 6, 4)
    start = torch.randn(2, 3, 6, 6, dtype=D) if with_dense else None
    mask = torch.tensor([[True, False, True, True, True, False], [True] * 6]) if masked else None
    value = torch.randn(2, 3, 6, 4, dtype=D)
    layers = [transform_of(6, heads, seed=s) for s in range(4)]
    leaves = [query, key, value, *(t for layer in layers for t in layer), *([] if start is None else [start])]
    for leaf in leaves:
        leaf.requires_grad_()

    def dense():
        scores = Scores(query, key, start).matrix()
        for transform in layers:
            scores = transform_scores(scores, *transform, mask=mask)
        return scores, attention_from_scores(Scores(query[..., :0], key[..., :0], scores), value, mask=mask)

    def factored():
        q, k, rest = query, key, start
        for theta, theta_bias, psi, psi_bias in layers:
            q, k = transform_factored(q, k, theta, theta_bias, psi, psi_bias, mask=mask)
            rest = None if rest is None else transform_scores(rest, theta, None, psi, None, mask=mask)
        assert q.shape[-1] == 4 + 2 * len(layers)
        scores = Scores(q, k, rest)
        return scores.matrix(), attention_from_scores(scores, value, mask=mask)

    results = []
    for fn in (dense, factored):
        scores, out = fn()
        results.append((scores, out, *torch.autograd.grad((out * out.cos()).sum(), leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_dense", [False, True])
def test_scores_passed_on_equal_the_dense_map_with_gradients_and_without(heads, masked, with_dense):
    query, key = factors_of(2, 3, 6, 4)
    start = torch.randn(2, 3, 6, 6, dtype=D) if with_dense else None
    mask = torch.tensor([[True, False, True, True, True, False], [True] * 6]) if masked else None
    value = torch.randn(2, 3, 6, 4, dtype=D).requires_grad_()
    scores, dense = Scores(query, key, start), Scores(query, key, start).matrix()
    for seed in range(3):
        transform = transform_of(6, heads, seed=seed)
        scores, dense = next_scores(scores, *transform, mask=mask), transform_scores(dense, *transform, mask=mask)
        torch.testing.assert_close(scores.matrix(), dense)
        torch.testing.assert_close(scores.joined().matrix(), dense)
        expected = attention_from_scores(Scores(query[..., :0], key[..., :0], dense), value, mask=mask)
        torch.testing.assert_close(attention_from_scores(scores, value, mask=mask), expected)
        with torch.no_grad():
            torch.testing.assert_close(attention_from_scores(scores, value, mask=mask), expected)
    assert scores.query.shape[-1] == 4
    lead = (2 if masked else 1, 1 if heads is None else 3)
    assert with_dense or scores.common_query.shape == (*lead, 6, 6)


@pytest.mark.parametrize(
    ("n", "grad", "expected"), [(6, False, (4, (1, 1, 6, 6))), (6, True, (6, None)), (60, False, (6, None))]
)
def test_what_the_biases_add_is_a_map_only_where_that_is_smaller_and_has_no_gradient(monkeypatch, n, grad, expected):
    query, key = factors_of(2, 3, n, 4)
    scores, value = next_scores(Scores(query, key), *transform_of(n)), torch.randn(2, 3, n, 4, dtype=D)
    seen = []

    def watched(q, k, v, bias, **_):
        seen.append((q.shape[-1], None if bias is None else tuple(bias.shape)))

    monkeypatch.setattr(less, "attention", watched)
    with torch.set_grad_enabled(grad):
        attention_from_scores(scores, value)
    assert seen == [expected]


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_of_the_biases_gives_what_their_columns_give(masked, dtype):
    query, key, value = (t.to(dtype) for t in (*factors_of(2, 3, 12, 4), torch.randn(2, 3, 12, 4, dtype=D)))
    transform = [t.to(dtype) for t in transform_of(12, 3)]
    mask = torch.arange(12) < torch.tensor([[12], [7]]) if masked else None
    scores = next_scores(Scores(query, key), *transform, mask=mask)
    columns = attention_from_scores(scores.joined(), value, mask=mask)
    torch.testing.assert_close(attention_from_scores(scores, value, mask=mask), columns)


@pytest.mark.parametrize("heads", [None, 2])
def test_masked_tokens_at_the_end_are_as_if_cropped(heads):
    query, key = factors_of(1, 2, 7, 3)
    transform = transform_of(7, heads)
    mask = torch.arange(7)[None] < 5
    cropped = transform_scores((query @ key.mT)[..., :5, :5], *transform)
    dense = transform_scores(query @ key.mT, *transform, mask=mask)
    factored = Scores(*transform_factored(query, key, *transform, mask=mask)).matrix()
    for full in (dense, factored):
        torch.testing.assert_close(full[..., :5, :5], cropped)
        assert (full[..., 5:, :] == 0).all()
        assert (full[..., :, 5:] == 0).all()


def test_what_stands_in_padding_does_not_matter():
    query, key = factors_of(1, 2, 6, 3)
    mask = torch.tensor([[True, True, False, True, True, False]])
    transform = transform_of(6)
    before = transform_factored(query, key, *transform, mask=mask)
    for factor in (query, key):
        factor[:, :, ~mask[0]] = torch.nan
    for one, other in zip(before, transform_factored(query, key, *transform, mask=mask), strict=True):
        torch.testing.assert_close(one, other)


def test_gradcheck():
    query, key = factors_of(1, 2, 3, 2)
    inputs = [t.requires_grad_() for t in (query, key, *transform_of(4, 2))]
    mask = torch.tensor([[True, True, False]])
    assert torch.autograd.gradcheck(lambda *args: transform_factored(*args, mask=mask), inputs)


@pytest.mark.parametrize("heads", [None, 4])
def test_a_chain_makes_no_map_forward_or_backward(heads):
    batch, num_heads, n, width = 4, 4, 768, 8
    query, key = (t.float().requires_grad_() for t in factors_of(batch, num_heads, n, width))
    value = torch.randn(batch, num_heads, n, width, requires_grad=True)
    layers = [[t.float().requires_grad_() for t in transform_of(n, heads, seed=s)] for s in range(3)]
    bytes_of_map = 4 * batch * num_heads * n * n
    for transform in layers:  # The gradients of the weights are n x n by nature: held before, so not counted.
        for weight in transform:
            weight.grad = torch.zeros_like(weight)

    def chain():
        scores, out = (query, key), torch.zeros(())
        for transform in layers:
            scores = transform_factored(*scores, *transform)
            out = out + attention_from_scores(Scores(*scores), value).square().sum()
        out.backward()

    def one_dense_layer():
        with torch.no_grad():
            return transform_scores(Scores(query, key).matrix(), *layers[0])

    # All that three layers hold for their backward pass stays below a single map.
    assert peak_memory(chain) < bytes_of_map < 2 * bytes_of_map < peak_memory(one_dense_layer)


def residual_of(heads_in, heads_out, seed=3):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((heads_in, 2, 2), (heads_in, 2, 2), (heads_in,), (heads_in,), (heads_out, heads_in), (heads_out,))
    return [torch.randn(shape, generator=gen, dtype=D) for shape in shapes]


def convolved(scores, grid, query_weight, key_weight, norm_weight, norm_bias, head_weight, layer_scale):
    """The residual by PyTorch's own convolutions on the four-dimensional map."""
    batch, heads = scores.shape[:2]
    height, width = grid
    pad = (0, width % 2, 0, height % 2)

    def shrink(x, weight):  # (B, H, n, rest): along the grid of axis 2
        rest = x.shape[3]
        images = x.permute(0, 3, 1, 2).reshape(batch * rest, heads, height, width)
        small = F.conv2d(F.pad(images, pad), weight.unsqueeze(1), stride=2, groups=heads)
        return small.reshape(batch, rest, heads, -1).permute(0, 2, 3, 1)

    small = shrink(shrink(scores, query_weight).mT, key_weight).mT
    normed = F.group_norm(small, 1, norm_weight, norm_bias)
    return F.conv2d(normed, head_weight[:, :, None, None]) * layer_scale[:, None, None]


@pytest.mark.parametrize("grid", [(4, 6), (3, 4), (5, 3), (1, 1), (2, 2)])
@pytest.mark.parametrize(("heads_in", "heads_out"), [(1, 2), (2, 5), (3, 1)])
def test_residual_equals_convolutions_dense_and_factored(grid, heads_in, heads_out):
    n = grid[0] * grid[1]
    query, key = factors_of(2, heads_in, n, 3)
    dense = torch.randn(2, heads_in, n, n, dtype=D)
    weights = residual_of(heads_in, heads_out)
    scores = Scores(query, key, dense)
    expected = convolved(scores.matrix(), grid, *weights)
    pooled = -(-grid[0] // 2) * -(-grid[1] // 2)
    assert expected.shape == (2, heads_out, pooled, pooled)
    torch.testing.assert_close(attention_residual(scores, grid, *weights), expected)
    torch.testing.assert_close(attention_residual(scores.matrix(), grid, *weights), expected)
    factors = Scores(query, key)
    torch.testing.assert_close(
        attention_residual(factors, grid, *weights), attention_residual(factors.matrix(), grid, *weights)
    )


def test_residual_masked_is_as_if_cropped():
    query, key = factors_of(1, 2, 24, 3)
    dense = torch.randn(1, 2, 24, 24, dtype=D)
    weights = residual_of(2, 3)
    mask = torch.arange(24)[None] < 16  # the upper four of six rows of four
    out = attention_residual(Scores(query, key, dense), (6, 4), *weights, mask=mask)
    kept = Scores(query[:, :, :16], key[:, :, :16], dense[:, :, :16, :16])
    cropped = attention_residual(kept, (4, 4), *weights)
    torch.testing.assert_close(out[..., :4, :4], cropped)
    assert (out[..., 4:, :] == 0).all()
    assert (out[..., :, 4:] == 0).all()
    nothing = attention_residual(Scores(query, key, dense), (6, 4), *weights, mask=torch.zeros_like(mask))
    assert (nothing == 0).all()


def test_residual_of_factors_makes_no_large_map():
    n, heads = 1024, 4
    query, key = (t.float() for t in factors_of(1, heads, n, 16))
    weights = [w.float() for w in residual_of(heads, heads)]
    bytes_of_map = 4 * heads * n * n
    # Each thread of a convolution takes scratch memory of its own.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peak = peak_memory(lambda: attention_residual(Scores(query, key), (32, 32), *weights))
    finally:
        torch.set_num_threads(threads)
    assert peak < bytes_of_map / 2


def test_pooled_mask_keeps_a_place_with_any_token():
    mask = torch.zeros(1, 15, dtype=torch.bool)
    mask[0, [3, 14]] = True  # row 1 column 0 and the last corner of 5 x 3
    assert pool_mask(mask, (5, 3)).tolist() == [[True, False, False, False, False, True]]


def test_residual_refuses_another_grid():
    query, key = factors_of(1, 2, 12, 3)
    with pytest.raises(UserError, match="3 x 5 has 15 tokens, the scores have 12"):
        attention_residual(Scores(query, key), (3, 5), *residual_of(2, 2))


def test_resize_follows_the_rule_of_gates():
    theta, bias, *_ = transform_of(6)
    weight, small = resize_score_transform(theta, bias, (2, 3), (4, 3))
    expected = resize_gate(theta, bias, (2, 3), (4, 3))
    torch.testing.assert_close((weight, small), expected)
    many, many_bias = resize_score_transform(torch.stack([theta, -theta]), torch.stack([bias, -bias]), (2, 3), (4, 3))
    torch.testing.assert_close(many, torch.stack([weight, -weight]))
    torch.testing.assert_close(many_bias, torch.stack([small, -small]))
    constant, _ = resize_score_transform(torch.ones(6, 6, dtype=D) / 6, bias, (2, 3), (5, 5))
    torch.testing.assert_close(constant.sum(-1), torch.ones(25, dtype=D))


def test_more_tokens_than_built_for_names_the_remedy():
    query, key = factors_of(1, 2, 6, 3)
    with pytest.raises(UserError, match=r"built for 5 tokens and got 6.*resize_score_transform"):
        transform_factored(query, key, *transform_of(5))
    with pytest.raises(UserError, match="resize_score_transform"):
        transform_scores(query @ key.mT, *transform_of(5))
