"""The three layers of external attention: published sizes, ties, parity, and what a stack asks of them."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fightingcv_attention.attention.ExternalAttention import ExternalAttention as PortedExternalAttention
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer
from tokenmix.layers.external import ExternalAttention, ExternalAttention2d, MultiHeadExternalAttention
from tokenmix.layers.table import create_mixer

TIES = ("none", "init", "hard")
BUILD: dict[str, Callable[..., Mixer]] = {
    "external": lambda **options: ExternalAttention(16, num_slots=8, **options),
    "external-2d": lambda **options: ExternalAttention2d(16, num_slots=8, **options),
    "multihead-external": lambda **options: MultiHeadExternalAttention(16, num_heads=4, num_slots=8, **options),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(name: str, **options: Any) -> Mixer:
    return BUILD[name](**options)


def sample(name: str, batch: int = 2) -> Tensor:
    return torch.randn(batch, 16, 3, 5) if name == "external-2d" else torch.randn(batch, 15, 16)


def tokens(name: str, out: Tensor) -> Tensor:
    return out.flatten(2).mT if name == "external-2d" else out


def two_steps(logits: Tensor) -> Tensor:
    """Softmax over tokens, then shares over slots, of (B, ..., N, S)."""
    shares = logits.softmax(-2)
    return shares / shares.sum(-1, keepdim=True)


# Equations and independent implementations


def test_external_attention_is_algorithm_1_with_an_output_projection() -> None:
    layer = ExternalAttention(6, num_slots=4, dtype=torch.float64)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    weights = dict(layer.named_parameters())
    query = x @ weights["query.weight"].mT + weights["query.bias"]
    mixed = two_steps(query @ weights["memory.key_memory"].mT) @ weights["memory.value_memory"]
    torch.testing.assert_close(layer(x), mixed @ weights["proj.weight"].mT + weights["proj.bias"])


def test_bare_external_attention_equals_a_port() -> None:
    port = PortedExternalAttention(d_model=16, S=8).double()
    for parameter in port.parameters():
        nn.init.normal_(parameter, std=0.3)
    bare = ExternalAttention(16, num_slots=8, query_projection=False, output_projection=False, dtype=torch.float64)
    bare.load_state_dict({"memory.key_memory": port.mk.weight, "memory.value_memory": port.mv.weight.mT})
    x = torch.randn(3, 20, 16, dtype=torch.float64)
    torch.testing.assert_close(bare(x), port(x))


def test_plain_softmax_of_the_layer() -> None:
    layer = ExternalAttention(6, num_slots=4, normalization="softmax", query_projection=False)
    x = torch.randn(2, 9, 6)
    torch.testing.assert_close(layer.attention_map(x)[:, 0], (x @ layer.memory.key_memory.mT).softmax(-1))


def test_the_eanet_block_equals_its_convolutions() -> None:
    block = ExternalAttention2d(6, num_slots=4, dtype=torch.float64).eval()
    assert block.norm.running_mean is not None
    assert block.norm.running_var is not None
    block.norm.running_mean.normal_()
    block.norm.running_var.uniform_(0.5, 2.0)
    assert block.memory.value_memory is not None
    x = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    # As released: both memories are 1-d convolutions over the pixels, (S, C, 1) and (C, S, 1).
    logits = F.conv1d(block.conv1(x).flatten(2), block.memory.key_memory.unsqueeze(-1))
    shares = logits.softmax(-1)
    mixed = F.conv1d(shares / shares.sum(1, keepdim=True), block.memory.value_memory.mT.unsqueeze(-1))
    expected = F.relu(block.norm(block.conv2(mixed.view_as(x))) + x)
    torch.testing.assert_close(block(x), expected)


def test_multi_head_equals_linear_layers() -> None:
    layer = MultiHeadExternalAttention(12, num_heads=3, expansion=4, num_slots=5, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = dict(layer.named_parameters())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    query = layer.query(x)
    heads = []
    for h in range(12):
        head = query[..., 4 * h : 4 * h + 4]
        shares = two_steps(head @ weights["memory.key_memory"].mT + weights["memory.key_bias"])
        heads.append(shares @ weights["memory.value_memory"] + weights["memory.value_bias"])
    torch.testing.assert_close(layer(x), layer.proj(torch.cat(heads, -1)))
    assert layer.attention_map(x).shape == (2, 12, 7, 5)


# Published sizes and costs


def count(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def test_the_eanet_block_has_the_published_size_and_cost() -> None:
    # conv1 with bias 262,656; M_k and M_v 32,768 each; conv2 262,144; BatchNorm 1,024.
    sizes = {tie: count(ExternalAttention2d(512, tie=tie, device="meta")) for tie in TIES}
    assert sizes == {"none": 591_360, "init": 591_360, "hard": 558_592}
    assert ExternalAttention2d(512, device="meta").macs(128 * 128) / 1e9 == pytest.approx(9.66, abs=0.005)


@pytest.mark.parametrize(("dim", "heads"), [(256, 4), (384, 6), (448, 7)])
def test_multi_head_has_the_published_size_and_cost(dim: int, heads: int) -> None:
    layer = MultiHeadExternalAttention(dim, num_heads=heads, device="meta")
    assert layer.memory.key_memory.shape == (64, 64)
    assert layer.attention_map(torch.empty(1, 3, dim, device="meta")).shape == (1, 4 * heads, 3, 64)
    assert layer.macs(197) == 197 * (8 * dim**2 + 512 * dim)
    if dim == 384:
        assert count(layer) / 1e6 == pytest.approx(1.19, abs=0.001)


@pytest.mark.parametrize("dim", [256, 384, 768])
def test_break_even_with_self_attention(dim: int) -> None:
    layer = MultiHeadExternalAttention(dim, num_heads=dim // 64, device="meta")

    def self_attention(num_tokens: int) -> int:
        return 4 * num_tokens * dim**2 + 2 * num_tokens**2 * dim

    even = 2 * dim + 256
    assert layer.macs(even) == self_attention(even)
    assert layer.macs(even - 1) > self_attention(even - 1)


@pytest.mark.parametrize("name", BUILD)
def test_macs_are_what_is_counted(name: str) -> None:
    layer, x = build(name), sample(name, batch=1)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * layer.macs(15)


@pytest.mark.parametrize("options", [{"query_projection": False}, {"output_projection": False}])
def test_macs_without_a_projection(options: dict[str, bool]) -> None:
    layer, x = ExternalAttention(16, num_slots=8, **options), torch.randn(1, 15, 16)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * layer.macs(15)


# Memories: start and ties


def test_the_start_is_neither_uniform_nor_saturated() -> None:
    x = torch.randn(2, 196, 256)
    for layer in (ExternalAttention(256), MultiHeadExternalAttention(256)):
        shares = layer.attention_map(x)
        entropy = -(shares * shares.log()).sum(-1).mean() / torch.log(torch.tensor(64.0))
        assert 0.8 < entropy < 0.98
        std = (2 / layer.memory.key_memory.shape[1]) ** 0.5
        assert layer.memory.key_memory.std().item() == pytest.approx(std, rel=0.05)


def test_a_printed_layer_has_what_is_not_usual() -> None:
    assert "num_steps" not in repr(ExternalAttention(16))
    assert "num_steps=3, chunk_size=5" in repr(ExternalAttention(16, num_steps=3, chunk_size=5))


def test_autocast_leaves_float64_alone() -> None:
    layer = ExternalAttention(16, num_slots=4, chunk_size=3).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out, layer(x))


def test_ties() -> None:
    none, init, hard = (ExternalAttention(16, num_slots=8, tie=tie).memory for tie in TIES)
    assert none.value_memory is not None
    assert init.value_memory is not None
    assert not torch.equal(none.key_memory, none.value_memory)
    assert torch.equal(init.key_memory, init.value_memory)
    assert init.key_memory.untyped_storage().data_ptr() != init.value_memory.untyped_storage().data_ptr()
    assert hard.value_memory is None
    assert [name for name, _ in hard.named_parameters()] == ["key_memory"]
    x = torch.randn(2, 1, 5, 16)
    torch.testing.assert_close(hard(x), two_steps(x @ hard.key_memory.mT) @ hard.key_memory)


def step(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The state after one step of plain gradient descent."""
    layer.zero_grad()
    layer(x).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return layer.state_dict()


def reloaded(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


@pytest.mark.parametrize("block", [ExternalAttention, ExternalAttention2d])
@pytest.mark.parametrize("tie", TIES)
def test_a_copy_a_reload_and_a_conversion_train_as_before(block: Any, tie: str) -> None:
    layer = block(16, num_slots=8, tie=tie).half().float()
    x = sample("external-2d" if block is ExternalAttention2d else "external")
    twins = {
        "deepcopy": copy.deepcopy(layer),
        "reload": reloaded(layer),
        "there and back": copy.deepcopy(layer).double().float(),
        "half": copy.deepcopy(layer).half().float(),
    }
    before = layer.memory.key_memory.detach().clone()
    expected = step(layer, x)
    # Shared storage would have moved the memory by both gradients.
    torch.testing.assert_close(layer.memory.key_memory.detach(), before - 0.1 * layer.memory.key_memory.grad)
    if tie != "hard":
        assert not torch.equal(layer.memory.key_memory, layer.memory.value_memory)
    for twin in twins.values():
        state = step(twin, x)
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name])


# What a stack asks


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", BUILD)
def test_padding_changes_nothing(name: str, chunk_size: int | None) -> None:
    layer = build(name, chunk_size=chunk_size).double().eval()
    x = sample(name).double()
    keep = torch.arange(15) < 10  # two of three rows of the map
    cropped = x[:, :, :2] if name == "external-2d" else x[:, :10]
    padded = layer(x, keep.expand(2, 15))
    torch.testing.assert_close(tokens(name, padded)[:, :10], tokens(name, layer(cropped)))
    assert (tokens(name, padded)[:, 10:] == 0).all()
    shares = layer.attention_map(x, keep.expand(2, 15))
    torch.testing.assert_close(shares[:, :, :10], layer.attention_map(cropped))
    assert (shares[:, :, 10:] == 0).all()


@pytest.mark.parametrize("name", BUILD)
def test_a_sample_without_tokens_is_zero(name: str) -> None:
    layer, x = build(name), sample(name).requires_grad_()
    out = layer(x, torch.tensor([[True] * 15, [False] * 15]))
    assert (out[1] == 0).all()
    out.square().sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("normalization", ["double", "softmax"])
@pytest.mark.parametrize("name", BUILD)
def test_chunks_change_nothing_in_a_layer(name: str, normalization: str) -> None:
    whole = build(name, normalization=normalization).double()
    chunked = build(name, normalization=normalization, chunk_size=4).double()
    chunked.load_state_dict(whole.state_dict())
    x = sample(name).double()
    out, reference = chunked(x), whole(x)
    torch.testing.assert_close(out, reference)
    out.square().sum().backward()
    reference.square().sum().backward()
    for ours, theirs in zip(chunked.parameters(), whole.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", BUILD)
def test_sinkhorn_steps_act(name: str) -> None:
    once, twice = build(name), build(name, num_steps=2)
    twice.load_state_dict(once.state_dict())
    x = sample(name)
    assert not torch.allclose(once(x), twice(x))
    far = (twice.attention_map(x).sum(2) - 15 / 8).abs().max()
    assert far < (once.attention_map(x).sum(2) - 15 / 8).abs().max()


@pytest.mark.one_fast
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", BUILD)
def test_exports_for_any_number_of_tokens(name: str, chunk_size: int | None) -> None:
    layer, x = build(name, chunk_size=chunk_size).eval(), sample(name)
    if name == "external-2d":
        axes, other = {2: torch.export.Dim("height"), 3: torch.export.Dim("width")}, torch.randn(2, 16, 7, 4)
    else:
        axes, other = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}, torch.randn(3, 31, 16)
    exported = torch.export.export(layer, (x,), dynamic_shapes={"x": axes})
    torch.testing.assert_close(exported.module()(other), layer(other))


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", BUILD)
def test_runs_under_autocast_and_in_half_types(name: str, chunk_size: int | None) -> None:
    layer, x = build(name, chunk_size=chunk_size).eval(), sample(name)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert (mixed - exact).abs().max() < 0.05 * exact.abs().max()
    mixed.float().sum().backward()
    for dtype in (torch.bfloat16, torch.float16):
        low = layer.to(dtype)(x.to(dtype))
        assert low.dtype == dtype
        assert (low - exact).abs().max() < 0.05 * exact.abs().max()


def test_dropout_acts_in_training_only() -> None:
    x = torch.randn(2, 15, 16)
    for layer in (
        ExternalAttention(16, num_slots=8, dropout=0.5),
        MultiHeadExternalAttention(16, num_slots=8, dropout=0.5),
        MultiHeadExternalAttention(16, num_slots=8, attention_dropout=0.5),
    ):
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("name", BUILD)
def test_capabilities(name: str) -> None:
    capabilities = BUILD[name]().capabilities
    assert (capabilities.linear, capabilities.mask, capabilities.causal, capabilities.map) == (
        True,
        True,
        False,
        "slots",
    )
    assert (capabilities.layout == "2d") is (name == "external-2d")
    assert capabilities.independent is (name != "external-2d")


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"normalization": "l1"}, "unknown normalization 'l1'"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 token, got 0"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(name, **options)


@pytest.mark.parametrize("name", BUILD)
def test_there_is_no_causal_form(name: str) -> None:
    with pytest.raises(UserError, match=rf"mixer '{name}' has no argument 'causal'; it takes .*num_slots"):
        create_mixer(name, 16, causal=True)


@pytest.mark.parametrize("name", BUILD)
def test_the_shared_options_are_spelled_out_and_the_same(name: str) -> None:
    shared = {"num_slots", "tie", "normalization", "num_steps", "chunk_size", "backend"}
    ours, first = (inspect.signature(cls).parameters for cls in (type(BUILD[name]()), ExternalAttention))
    assert {n: ours[n] for n in shared} == {n: first[n] for n in shared}
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in ours.values())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ExternalAttention(16, num_slots=0), "num_slots must be at least 1, got 0"),
        (lambda: ExternalAttention(16, tie="soft"), "unknown tie 'soft'"),
        (
            lambda: MultiHeadExternalAttention(16, num_heads=5),
            "num_heads must divide dim 16, got 5; the nearest that does is 4",
        ),
        (lambda: MultiHeadExternalAttention(16, num_heads=0), "num_heads must be at least 1, got 0"),
        (lambda: MultiHeadExternalAttention(16, expansion=0), "expansion must be at least 1, got 0"),
        (lambda: MultiHeadExternalAttention(16, attention_dropout=0.1, chunk_size=4), "excludes dropout"),
    ],
)
def test_sizes_that_cannot_be(make: Callable[[], Mixer], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


@pytest.mark.parametrize("method", ["forward", "attention_map"])
@pytest.mark.parametrize("name", BUILD)
def test_input_that_does_not_fit(name: str, method: str) -> None:
    call, x = getattr(build(name), method), sample(name)
    with pytest.raises(UserError, match="takes"):
        call(x[0])
    with pytest.raises(UserError, match=r"mask must be \(B, N\)"):
        call(x, torch.ones(2, 14).bool())


@pytest.mark.parametrize("options", [{"chunk_size": 5}, {"backend": "tiled"}, {"backend": "eager"}])
def test_gradients_under_checkpointing_are_the_same(options: dict[str, Any]):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer, x = ExternalAttention(32, num_slots=8, **options), torch.randn(2, 16, 32, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).square().sum(), x)[0]
    given = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)[0]
    assert torch.equal(given, wanted)
