"""External attention in int8: the folding, the products against float64, the ends of the number range, masks, NaN."""

import pytest
import torch
from nano_nets import to_int8
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.inference import Int8ExternalAttention, Int8Linear
from tokenmix.inference.folded import Folding, folded
from tokenmix.layers import ExternalAttention, MultiHeadExternalAttention
from tokenmix.ops import double_normalize

LAYERS = {
    "multi-head": lambda: MultiHeadExternalAttention(24, num_heads=3, expansion=2, num_slots=10),
    "multi-head, no biases": lambda: MultiHeadExternalAttention(24, num_heads=3, num_slots=8, memory_bias=False),
    "single": lambda: ExternalAttention(24, num_slots=16),
    "single, tied, as printed": lambda: ExternalAttention(24, num_slots=16, tie="hard", output_projection=False),
    "single, no projection": lambda: ExternalAttention(24, num_slots=16, query_projection=False),
}


def _layer(name: str) -> Folding:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def _tokens(samples: int = 3, tokens: int = 19) -> Tensor:
    return torch.randn(samples, tokens, 24, generator=torch.Generator().manual_seed(1))


def _eight(layer: nn.Module, x: Tensor) -> Int8ExternalAttention:
    made = to_int8(nn.Sequential(layer), x)[0]  # type: ignore[index]
    assert isinstance(made, Int8ExternalAttention)
    return made


def _worst(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", LAYERS)
def test_memories_folded_into_projections_change_nothing(name: str) -> None:
    layer, x = _layer(name).double(), _tokens().double()
    keys, values = folded(layer)
    heads = layer.num_heads * layer.expansion if isinstance(layer, MultiHeadExternalAttention) else 1
    logits = (x @ keys.weight.mT + keys.bias).unflatten(-1, (heads, -1)).transpose(1, 2)
    mixed = double_normalize(logits).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed @ values.weight.mT + values.bias, layer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_near_the_layer_in_float64(name: str) -> None:
    layer, x = _layer(name), _tokens()
    eight = _eight(layer, x)
    layer.double()
    # A logit of up to 20 is off by 8 bits of its input and of a row of its weight.
    assert _worst(eight(x), layer(x.double())) < 0.05
    assert _worst(eight.attention_map(x), layer.attention_map(x.double())) < 0.1
    assert eight(x).dtype == torch.float32


def test_the_map_in_8_bits_is_the_map() -> None:
    eight = _eight(_layer("multi-head"), _tokens())
    inputs = eight.scores.quantize(_tokens())
    written = eight._normalize(eight.scores.multiply(inputs), None)
    (quick, fits), slow = eight._weights(inputs), eight.values.quantize(written.transpose(1, 2).flatten(2))
    assert fits.all()
    assert (quick.int() - slow.int()).abs().max() <= 1
    assert (quick == slow).float().mean() > 0.99
    assert quick.max() == 255


@pytest.mark.parametrize("scale", [60.0, -60.0])
def test_logits_beyond_the_exponentials_of_float32(scale: float) -> None:
    layer = _layer("multi-head")
    with torch.no_grad():
        layer.query.weight *= 5.0
        layer.query.bias.copy_(scale * layer.memory.key_memory.sum(0).repeat(6))
    x = _tokens()
    eight = _eight(layer, x)
    assert not eight._weights(eight.scores.quantize(x))[1].any(), "the sums fit, so this tests nothing"
    assert eight(x).isfinite().all()
    # So steep a map is 0 or 1 nearly everywhere: 8 bits of the logits move where, not by how much.
    near = (eight(x) - layer(x)).abs() < 0.05 * layer(x).abs().max()
    assert near.float().mean() > 0.7


def test_a_sample_beyond_the_exponentials_leaves_the_others_alone() -> None:
    # Of so many numbers some are between two steps, where the two ways to the map round differently.
    x = _tokens(64, 200)
    steep = torch.cat([x, 40.0 * x[:3]])
    eight = _eight(_layer("multi-head"), steep[60:])
    fits = eight._weights(eight.scores.quantize(steep))[1]
    assert fits[:64].all(), "no sample fits, so this tests nothing"
    assert not fits[64:].any(), "all samples fit, so this tests nothing"
    together = eight(steep)
    assert torch.equal(together[:64], eight(x))
    assert torch.equal(together[64:], eight(steep[64:]))


def test_masked_tokens_come_out_0_and_count_for_nothing() -> None:
    layer, x = _layer("multi-head"), _tokens()
    eight = _eight(layer, x)
    mask = torch.ones(3, 19, dtype=torch.bool)
    mask[0, 11:] = False
    mask[1] = False
    x[0, 11:] = float("nan")
    out = eight(x, mask)
    assert (out[0, 11:] == 0).all()
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[0, :11], eight(x[:1, :11])[0], rtol=0, atol=0.02)
    torch.testing.assert_close(out[2], eight(x[2:])[0], rtol=0, atol=0.02)
    assert (eight.attention_map(x, mask)[0, :, 11:] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_own_sample_as_in_float32(bad: float) -> None:
    layer, x = _layer("multi-head"), _tokens()
    eight = _eight(layer, x)
    expected = eight(x)
    x[1, 4, 2] = bad
    found = eight(x)
    assert layer(x)[1].isnan().all()
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_large_numbers_are_cut_off_and_no_nan() -> None:
    eight = _eight(_layer("multi-head"), _tokens())
    assert eight(_tokens() * 1e37).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"normalization": "softmax"}, {"num_steps": 2}, {"chunk_size": 4}, {"backend": "eager"}, {"num_slots": 17}],
)
def test_what_stays_as_it_is(options: dict) -> None:
    torch.manual_seed(0)
    layer = MultiHeadExternalAttention(24, num_heads=3, **options).eval()
    kept = to_int8(nn.Sequential(layer), _tokens())[0]  # type: ignore[index]
    assert isinstance(kept, MultiHeadExternalAttention)
    assert isinstance(kept.query, Int8Linear)
    assert isinstance(kept.proj, Int8Linear)


def test_multiply_adds_are_those_of_the_folded_products() -> None:
    eight = _eight(_layer("multi-head"), _tokens())
    assert eight.macs(19) == 19 * (eight.scores.qweight.numel() + eight.values.qweight.numel())


def test_no_samples_and_no_tokens() -> None:
    eight = _eight(_layer("multi-head"), _tokens())
    assert eight(torch.zeros(0, 19, 24)).shape == (0, 19, 24)
    with pytest.raises(UserError, match="at least 1 token"):
        eight(torch.zeros(2, 0, 24))
