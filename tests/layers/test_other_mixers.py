"""Identity, pooling, depthwise convolution, token MLP, linear and EM attention: loops from the equations, and peers."""

from typing import Any

import pytest
import torch
from timm.models.metaformer import Pooling as TimmPooling
from timm.models.mlp_mixer import MixerBlock as TimmMixerBlock
from torch import Tensor

from tokenmix import UserError
from tokenmix.layers import (
    Capabilities,
    DepthwiseConvolution,
    DepthwiseConvolution2d,
    EMAttention,
    IdentityMixer,
    LinearAttention,
    Mixer,
    Pooling2d,
    TokenMLP,
)
from tokenmix.layers.base import GridMixer
from tokenmix.testing.harness import noise

X = noise(2, 6, 8).double()
MAP = noise(2, 4, 5, 3, seed=2).double()
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1] * 6]).bool()
MAP_MASK = torch.rand(2, 15, generator=torch.Generator().manual_seed(3)) < 0.7


def test_identity_keeps_every_token() -> None:
    assert torch.equal(IdentityMixer(8)(X), X)
    assert IdentityMixer(8).macs(100) == 0


@pytest.mark.parametrize("mask", [None, MAP_MASK])
def test_pooling_is_the_mean_of_the_window_minus_the_position(mask: Tensor | None) -> None:
    expected = torch.zeros_like(MAP)
    part = torch.ones(2, 5, 3).bool() if mask is None else mask.unflatten(1, (5, 3))
    for b in range(2):
        for i in range(5):
            for j in range(3):
                if not part[b, i, j]:
                    continue
                near = [
                    MAP[b, :, k, m]
                    for k in range(max(0, i - 1), min(5, i + 2))
                    for m in range(max(0, j - 1), min(3, j + 2))
                    if part[b, k, m]
                ]
                expected[b, :, i, j] = torch.stack(near).mean(0) - MAP[b, :, i, j]
    torch.testing.assert_close(Pooling2d(4).double()(MAP, mask), expected)


def test_pooling_is_timms() -> None:
    torch.testing.assert_close(Pooling2d(4)(MAP), TimmPooling()(MAP))


def test_depthwise_convolution_is_a_sum_over_neighbours() -> None:
    layer = DepthwiseConvolution(8, kernel_size=3).double()
    weight, bias = layer.conv.weight[:, 0], layer.conv.bias
    expected = torch.zeros_like(X)
    for i in range(6):
        for r in (-1, 0, 1):
            if 0 <= i + r < 6:
                expected[:, i] += weight[:, r + 1] * X[:, i + r]
        expected[:, i] += bias
    torch.testing.assert_close(layer(X), expected)


def test_depthwise_convolution_of_one_row_is_that_of_a_sequence() -> None:
    flat, line = DepthwiseConvolution2d(8, kernel_size=3).double(), DepthwiseConvolution(8, kernel_size=3).double()
    line.conv.weight.data.copy_(flat.conv.weight[:, :, 1])
    line.conv.bias.data.copy_(flat.conv.bias)
    torch.testing.assert_close(flat(X.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2), line(X))


def test_token_mlp_is_timms_mixing_of_tokens() -> None:
    block = TimmMixerBlock(8, 6, mlp_ratio=(0.5, 4.0)).double().eval()
    layer = TokenMLP(8, 6).double()
    layer.fc1.load_state_dict(block.mlp_tokens.fc1.state_dict())
    layer.fc2.load_state_dict(block.mlp_tokens.fc2.state_dict())
    expected = block.mlp_tokens(X.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(layer(X), expected)


def test_token_mlp_keeps_smooth_maps_when_it_is_resized() -> None:
    """Weights that are smooth over the grid give nearly the same output on a smooth picture of another size."""
    layer = TokenMLP(4, 64, hidden_tokens=3).double()
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
    smooth = torch.stack([torch.cos(rows + columns), rows * columns, rows]).flatten(1).double()
    layer.fc1.weight.data.copy_(smooth / 64)
    layer.fc2.weight.data.copy_(smooth.T)
    layer.fc2.bias.data.copy_(smooth[0])
    picture = torch.stack([rows, columns, rows * columns, torch.sin(rows)]).unsqueeze(0).double()
    larger = torch.nn.functional.interpolate(picture, size=(16, 16), mode="bicubic")
    before = layer(picture.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (8, 8))
    layer.set_grid((8, 8), (16, 16))
    after = layer(larger.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (16, 16))
    expected = torch.nn.functional.interpolate(before, size=(16, 16), mode="bicubic")
    assert (after - expected).abs().max() < 0.1 * expected.abs().max()
    with pytest.raises(UserError, match="was built for 256 tokens, got 64"):
        layer(picture.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("mask", [None, MASK])
def test_linear_attention_is_the_sum_over_pairs(mask: Tensor | None) -> None:
    layer = LinearAttention(8, num_heads=2).double()
    query, key, value = (part.unflatten(2, (2, 4)) for part in layer.qkv(X).chunk(3, dim=2))
    query, key = query.relu(), key.relu()
    mixed = torch.zeros(2, 6, 2, 4).double()
    for b in range(2):
        keys = [j for j in range(6) if mask is None or mask[b, j]]
        for h in range(2):
            for i in range(6):
                weights = torch.stack([query[b, i, h] @ key[b, j, h] for j in keys])
                values = torch.stack([value[b, j, h] for j in keys])
                mixed[b, i, h] = weights @ values / (weights.sum() + 1e-15)
    expected = layer.proj(mixed.flatten(2))
    if mask is not None:
        expected = expected.masked_fill(~mask.unsqueeze(2), 0.0)
    torch.testing.assert_close(layer(X, mask), expected)
    weights = layer.attention_map(X, mask)
    mixed = (weights @ value.transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(
        layer(X), layer.proj((layer.attention_map(X) @ value.transpose(1, 2)).transpose(1, 2).flatten(2))
    )


def test_linear_attention_is_diffusers() -> None:
    """Sana's own processor, where diffusers is installed."""
    processors = pytest.importorskip("diffusers.models.attention_processor")
    layer = LinearAttention(8, num_heads=2, qkv_bias=False)
    sana = processors.Attention(
        query_dim=8, heads=2, dim_head=4, bias=False, out_bias=True, processor=processors.SanaLinearAttnProcessor2_0()
    )
    for name, part in zip("qkv", layer.qkv.weight.chunk(3)):
        getattr(sana, f"to_{name}").weight.data.copy_(part)
    sana.to_out[0].load_state_dict(layer.proj.state_dict())
    torch.testing.assert_close(layer(X.float()), sana(X.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, MASK])
def test_em_attention_is_the_loop_of_both_steps(mask: Tensor | None) -> None:
    layer = EMAttention(8, num_heads=2, num_slots=3, temperature=0.5).double()
    features = layer.query(X).unflatten(2, (2, 4))
    mixed = torch.zeros(2, 6, 2, 4).double()
    for b in range(2):
        tokens = [i for i in range(6) if mask is None or mask[b, i]]
        for h in range(2):
            bases = layer.bases[h].clone()
            for _ in range(3):
                weights = {i: torch.softmax(bases @ features[b, i, h] / 0.5, 0) for i in tokens}
                total = sum(weights.values())
                means = sum(weights[i][:, None] * features[b, i, h] for i in tokens) / total[:, None]
                bases = means / means.norm(dim=1, keepdim=True)
            for i in tokens:
                mixed[b, i, h] = weights[i] @ bases
    expected = layer.proj(mixed.flatten(2))
    if mask is not None:
        expected = expected.masked_fill(~mask.unsqueeze(2), 0.0)
    torch.testing.assert_close(layer(X, mask), expected)


def test_em_attention_of_one_head_is_the_published_unit() -> None:
    """Three steps on maps (C, N), each column of z over its sum, as in the released unit, whose epsilons are 1e-6."""
    layer = EMAttention(8, num_heads=1, num_slots=3).double()
    features = layer.query(X).mT
    bases = layer.bases.mT.expand(2, 8, 3)
    for _ in range(3):
        shares = torch.softmax(features.mT @ bases, 2)
        bases = features @ (shares / (1e-6 + shares.sum(1, keepdim=True)))
        bases = bases / (1e-6 + bases.norm(dim=1, keepdim=True))
    torch.testing.assert_close(layer(X), layer.proj((bases @ shares.mT).mT), atol=1e-5, rtol=1e-5)


def test_second_derivatives_of_a_sample_without_tokens() -> None:
    layer, x = EMAttention(8, num_heads=2, num_slots=3).double(), X.clone().requires_grad_()
    mask = torch.ones(X.shape[:2], dtype=torch.bool)
    mask[1] = False
    (gradient,) = torch.autograd.grad(layer(x, mask).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_bases_depend_on_the_sample() -> None:
    """The difference to external attention, whose memory is the same for every sample."""
    layer = EMAttention(8, num_heads=2, num_slots=3).double()
    fitted = layer._fit(X, None)[1]
    assert (fitted[0] - fitted[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Pooling2d(4, pool_size=2), "pool_size must be odd, got 2; give 3"),
        (lambda: DepthwiseConvolution(4, kernel_size=4), "kernel_size must be odd, got 4; give 5"),
        (lambda: LinearAttention(8, num_heads=3), "num_heads must divide dim 8, got 3"),
        (lambda: EMAttention(8, num_heads=3), "num_heads must divide dim 8, got 3"),
    ],
)
def test_mistakes(build, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_sums_over_many_tokens_stay_in_range() -> None:
    """65,504 is float16's largest number."""
    torch.manual_seed(0)
    x = 32 * torch.randn(1, 4096, 16) + 32
    layer = EMAttention(16, num_heads=2, num_slots=4)
    wanted, found = layer(x), layer.half()(x.half())
    assert found.isfinite().all()
    assert (found.float() - wanted).norm() < 0.1 * wanted.norm()
    linear = LinearAttention(16, num_heads=2).half()
    rows = linear.attention_map(x[:, :64].half()).float().sum(-1)
    assert ((rows - 1).abs() < 0.02).logical_or(rows == 0).all()


def test_a_temperature_is_positive() -> None:
    with pytest.raises(UserError, match="temperature must be a finite number of at least"):
        EMAttention(16, temperature=0.0)


def test_a_token_mlp_of_a_volume_is_resized() -> None:
    layer = TokenMLP(4, 8)
    weight = layer.fc1.weight.detach().clone()
    layer.set_grid((2, 2, 2), (2, 2, 2))
    torch.testing.assert_close(layer.fc1.weight, weight)
    layer.set_grid((2, 2, 2), (4, 2, 2))
    assert layer(torch.randn(1, 16, 4)).shape == (1, 16, 4)
    for grid in [(4, 4), (4, 2, 0)]:
        with pytest.raises(UserError, match="equally many positive axes"):
            layer.set_grid((4, 2, 2), grid)


class Carrying(Mixer):
    """An own mixer of maps that passes something on."""

    capabilities = Capabilities(layout="2d", map=None)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, None, mask)[0]

    def mix(self, x: Tensor, carry: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        carry = 0 if carry is None else carry
        return x + carry, carry + x


def test_a_mixer_of_maps_passes_on_what_it_carries() -> None:
    grid = GridMixer(Carrying(4), (2, 3))
    x = torch.randn(1, 6, 4)
    _, carry = grid.mix(x)
    torch.testing.assert_close(grid.mix(x, carry)[0], 2 * x)
    torch.testing.assert_close(grid(x), x)
