"""The unit next to the implementations of timm and g-mlp-pytorch, where they are right and where one is not."""

import copy
import warnings

import pytest
import torch
from g_mlp_pytorch import g_mlp_pytorch as lucidrains
from timm.models import mlp_mixer as timm_mixer
from torch import Tensor
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.gating import SpatialGatingUnit, fft_macs
from tokenmix.ops.gating import toeplitz_matrix

VARIANTS = ("split", "multiplicative", "additive", "linear")
GATES = ("dense", "toeplitz", "toeplitz-fft")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _shaken(unit: SpatialGatingUnit, std: float = 0.5) -> SpatialGatingUnit:
    """The unit away from its start, where every part of it matters."""
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return unit


def test_parity_with_timm():
    theirs = timm_mixer.SpatialGatingUnit(12, seq_len=9)
    ours = SpatialGatingUnit(12, 9)
    torch.nn.init.normal_(theirs.norm.weight)
    with torch.no_grad():
        ours.norm.weight.copy_(theirs.norm.weight)
        ours.weight.copy_(theirs.proj.weight)
        ours.bias.copy_(theirs.proj.bias)
    x = torch.randn(3, 9, 12)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("causal", "n"), [(False, 9), (True, 9), (True, 6)])
def test_parity_with_g_mlp_pytorch(causal, n):
    theirs = lucidrains.SpatialGatingUnit(12, 9, causal=causal)
    ours = _shaken(SpatialGatingUnit(12, 9, causal=causal))
    with torch.no_grad():
        theirs.norm.load_state_dict(ours.norm.state_dict())
        theirs.weight.copy_(ours.weight[None])
        theirs.bias.copy_(ours.bias[None])
    x, addend = torch.randn(3, n, 12), torch.randn(3, n, 6)
    torch.testing.assert_close(ours(x, addend=addend), theirs(x, gate_res=addend), rtol=1e-5, atol=1e-5)


def _reach(unit: torch.nn.Module, n: int) -> Tensor:
    """How far each token's output moves when the last token does."""
    x = torch.randn(1, n, 8)
    moved = x.clone()
    moved[:, -1] = torch.randn(8)
    with torch.no_grad():
        return (unit(moved) - unit(x))[0].abs().amax(-1)


def test_their_circulant_gate_is_causal_though_not_asked_and_our_toeplitz_gate_is_not():
    theirs = lucidrains.SpatialGatingUnit(8, 6, causal=False, circulant_matrix=True)
    torch.nn.init.normal_(theirs.weight)
    assert torch.equal(_reach(theirs, 6)[:-1], torch.zeros(5))
    for gate in ("toeplitz", "toeplitz-fft"):
        ours = _shaken(SpatialGatingUnit(8, 6, gate=gate))
        assert _reach(ours, 6).min() > 1e-3


@pytest.mark.parametrize("gate", GATES)
def test_causal_keeps_the_last_token_to_itself(gate):
    reach = _reach(_shaken(SpatialGatingUnit(8, 6, gate=gate, causal=True)), 6)
    assert reach[:-1].max() <= (1e-5 if gate == "toeplitz-fft" else 0)
    assert reach[-1] > 1e-2


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_starts_as_the_identity(variant, gate):
    unit = SpatialGatingUnit(8, 6, variant=variant, gate=gate, norm=False)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(unit(x), x[..., :4] if variant == "split" else x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns(variant, gate):
    unit = _shaken(SpatialGatingUnit(8, 6, variant=variant, gate=gate))
    unit(torch.randn(2, 6, 8)).square().sum().backward()
    for name, parameter in unit.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    weights = 36 if gate == "dense" else 11
    assert sum(p.numel() for p in unit.parameters()) == weights + 6 + 2 * unit.out_dim


def test_toeplitz_forms_share_weights_and_results():
    dense, fast = SpatialGatingUnit(8, 6, gate="toeplitz"), SpatialGatingUnit(8, 6, gate="toeplitz-fft")
    fast.load_state_dict(_shaken(dense).state_dict())
    x, mask = torch.randn(2, 5, 8), torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    torch.testing.assert_close(fast(x, mask), dense(x, mask))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_map_is_the_matrix_that_was_used(gate, causal):
    unit = _shaken(SpatialGatingUnit(8, 6, variant="linear", gate=gate, causal=causal))
    x = torch.randn(2, 5, 8)
    used = unit.attention_map(x)
    assert used.shape == (5, 5)
    torch.testing.assert_close(used @ unit.norm(x) + unit.bias[:5, None], unit(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", GATES)
def test_padding_with_nan_changes_neither_output_nor_gradients(gate):
    unit = _shaken(SpatialGatingUnit(8, 7, gate=gate)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padded = torch.cat((x, torch.full((2, 2, 8), float("nan"), dtype=torch.float64)), 1).requires_grad_()
    mask = (torch.arange(7) < 5).expand(2, 7)

    def gradients(out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out.square().sum(), list(unit.parameters())))

    short, long = unit(x), unit(padded, mask)
    torch.testing.assert_close(long[:, :5], short)
    assert torch.equal(long[:, 5:], torch.zeros(2, 2, 4, dtype=torch.float64))
    for name, a, b in zip(dict(unit.named_parameters()), gradients(long), gradients(short)):
        torch.testing.assert_close(a, b, msg=name)


def test_no_token_at_all_gives_zero_and_finite_gradients():
    unit = _shaken(SpatialGatingUnit(8, 4))
    x = torch.randn(2, 4, 8, requires_grad=True)
    out = unit(x, torch.tensor([[False] * 4, [True] * 4]))
    assert torch.equal(out[0], torch.zeros(4, 4))
    out.sum().backward()
    assert torch.equal(x.grad[0], torch.zeros(4, 8))
    assert all(p.grad.isfinite().all() for p in unit.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gate", ["dense", "toeplitz"])
def test_macs_are_those_counted(gate, variant):
    unit = SpatialGatingUnit(16, 12, variant=variant, gate=gate)
    with FlopCounterMode(display=False) as counter:
        unit(torch.randn(1, 10, 16))
    assert counter.get_total_flops() == 2 * unit.macs(10)


def test_fft_macs_follow_from_the_algorithm_and_win_at_length():
    # N = 2: transforms of length 4, 8 MACs each; 2 channels there and back and the weights once; 3 bins of 4 a channel.
    assert fft_macs(2, 2) == 5 * 8 + 3 * 4 * 2
    long = SpatialGatingUnit(64, 4096, gate="toeplitz-fft")
    assert long.macs(4096) < 4096**2 * 32 / 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gate", GATES)
def test_half_types(gate, dtype):
    unit = _shaken(SpatialGatingUnit(16, 8, gate=gate), std=0.1)
    x = torch.randn(2, 8, 16)
    exact = unit(x)
    half = copy.deepcopy(unit).to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(half.float(), exact, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", dtype):
        mixed = unit(x)
    torch.testing.assert_close(mixed.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_compiles_without_a_graph_break(gate):
    unit = _shaken(SpatialGatingUnit(8, 6, gate=gate, causal=True))
    compiled = torch.compile(unit, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(2, 6, 8), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    for train in (True, False):
        unit.train(train)
        torch.testing.assert_close(compiled(x, mask), unit(x, mask))
    compiled(x, mask).sum().backward()


@pytest.mark.one_fast
@pytest.mark.parametrize("gate", GATES)
def test_exports_with_a_dynamic_number_of_tokens(gate):
    unit = _shaken(SpatialGatingUnit(8, 16, gate=gate)).eval()
    shapes = ({0: Dim("batch"), 1: Dim("tokens", min=2, max=16)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(unit, (torch.randn(2, 9, 8),), dynamic_shapes=shapes).module()
    for n in (2, 9, 16):
        x = torch.randn(3, n, 8)
        torch.testing.assert_close(program(x), unit(x))


def test_copies_and_files_keep_the_unit(tmp_path):
    unit = _shaken(SpatialGatingUnit(8, 6, gate="toeplitz"))
    torch.save(unit.state_dict(), tmp_path / "unit.pt")
    other = SpatialGatingUnit(8, 6, gate="toeplitz")
    other.load_state_dict(torch.load(tmp_path / "unit.pt", weights_only=True))
    x = torch.randn(2, 6, 8)
    for twin in (other, copy.deepcopy(unit)):
        assert torch.equal(twin(x), unit(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "got dim=7"),
        ({"variant": "product"}, "unknown variant 'product'"),
        ({"gate": "circulant"}, "unknown gate 'circulant'"),
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
    ],
)
def test_constructor_names_the_mistake(arguments, message):
    with pytest.raises(UserError, match=message):
        SpatialGatingUnit(**{"dim": 8, "num_tokens": 4, **arguments})


def test_forward_names_the_mistake():
    unit = SpatialGatingUnit(8, 4)
    with pytest.raises(UserError, match=r"4 tokens and got 5.*resize_gate"):
        unit(torch.randn(1, 5, 8))
    with pytest.raises(UserError, match=r"takes tokens \(B, N, 8\)"):
        unit(torch.randn(1, 4, 6))
    with pytest.raises(UserError, match=r"addend must be \(1, 4, 4\)"):
        unit(torch.randn(1, 4, 8), addend=torch.randn(1, 4, 8))
    with pytest.raises(UserError, match="boolean"):
        unit(torch.randn(1, 4, 8), torch.ones(1, 4))


@pytest.mark.parametrize("gate", ["dense", "toeplitz"])
def test_weights_of_the_future_do_not_reach_a_resized_causal_gate(gate):
    one = SpatialGatingUnit(8, 6, gate=gate, causal=True, init_std=1.0)
    other = copy.deepcopy(one)
    with torch.no_grad():
        if gate == "dense":
            other.weight.add_(torch.full((6, 6), 50.0).triu(1))
        else:
            other.weight[:5] += 50
    for layer in (one, other):
        layer.set_grid((6,), (12,))
    torch.testing.assert_close(one.matrix(12), other.matrix(12))


@pytest.mark.parametrize("gate", ["dense", "toeplitz"])
def test_a_constant_causal_gate_stays_constant(gate):
    layer = SpatialGatingUnit(8, 6, gate=gate, causal=True)
    torch.nn.init.constant_(layer.weight, 3.0)
    layer.set_grid((6,), (12,))
    torch.testing.assert_close(layer.matrix(12), torch.full((12, 12), 1.5).tril())


def test_a_toeplitz_gate_has_an_odd_number_of_weights():
    with pytest.raises(UserError, match="2n-1 weights, got 6; give an odd number"):
        toeplitz_matrix(torch.arange(6.0), 3)
