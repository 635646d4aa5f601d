"""The gate against plain loops, its Toeplitz forms against each other, and what resizing keeps."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.gating import (
    gate_matrix,
    spatial_gate,
    toeplitz_by_fft,
    toeplitz_matrix,
)
from tokenmix.ops.resize import resize_gate

VARIANTS = ("split", "multiplicative", "additive", "linear")
GATES = ("dense", "toeplitz", "fft")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _random_gate(gate: str, n: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn((n, n) if gate == "dense" else (2 * n - 1,), dtype=torch.float64)
    return weight, torch.randn(n, dtype=torch.float64)


def _method(gate: str) -> str:
    return "fft" if gate == "fft" else "dense"


def _entry(weight: Tensor, i: int, j: int) -> Tensor:
    """W_ij from the definition."""
    return weight[i, j] if weight.dim() == 2 else weight[i - j + (len(weight) - 1) // 2]


def _loop_gate(z, weight, bias, variant, mask, causal, addend):
    """The equation with one loop for each index that the paper writes."""
    half = z.shape[-1] // 2
    z1, z2 = (z[..., :half], z[..., half:]) if variant == "split" else (z, z)
    out = torch.zeros_like(z1)
    for s, i in itertools.product(range(z.shape[0]), range(z.shape[1])):
        if not mask[s, i]:
            continue
        f = bias[i] + addend[s, i]
        for j in range(z.shape[1]):
            if mask[s, j] and not (causal and j > i):
                f = f + _entry(weight, i, j) * z2[s, j]
        value = {"linear": f, "additive": z1[s, i] + f}.get(variant, z1[s, i] * f)
        out[s, i] = value
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gate_equals_plain_loops(variant, gate, causal):
    weight, bias = _random_gate(gate, 7)
    z = torch.randn(3, 5, 4, dtype=torch.float64)
    addend = torch.randn(3, 5, 2 if variant == "split" else 4, dtype=torch.float64)
    everything = torch.ones(3, 5, dtype=torch.bool)
    some = everything.clone()
    some[0, 3:], some[1, 1], some[2] = False, False, False
    for mask in (None, some):
        out = spatial_gate(
            z, weight, bias, variant=variant, addend=addend, mask=mask, causal=causal, method=_method(gate)
        )
        expected = _loop_gate(z, weight, bias, variant, everything if mask is None else mask, causal, addend)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_gradients(gate, causal):
    weight, bias = _random_gate(gate, 5)
    z, addend = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True], [False] * 4])

    def run(z, weight, bias, addend):
        return spatial_gate(z, weight, bias, addend=addend, mask=mask, causal=causal, method=_method(gate))

    inputs = [t.requires_grad_() for t in (z, weight, bias, addend)]
    assert torch.autograd.gradcheck(run, inputs)


def test_norm_acts_on_the_gated_half_only():
    weight, bias = _random_gate("dense", 3)
    z = torch.randn(1, 3, 4, dtype=torch.float64)
    out = spatial_gate(z, weight, bias, norm=lambda t: 2 * t)
    torch.testing.assert_close(out, z[..., :2] * (weight @ (2 * z[..., 2:]) + bias[:, None]))


@given(n=st.integers(1, 9), extra=st.integers(0, 4))
@settings(deadline=None, max_examples=30)
def test_toeplitz_matrix_entries_and_leading_block(n, extra):
    weight = torch.randn(2 * (n + extra) - 1, dtype=torch.float64)
    matrix = toeplitz_matrix(weight, n)
    expected = torch.tensor([[_entry(weight, i, j) for j in range(n)] for i in range(n)], dtype=torch.float64)
    assert torch.equal(matrix, expected)
    assert torch.equal(matrix, toeplitz_matrix(weight, n + extra)[:n, :n])


@given(n=st.integers(1, 12), extra=st.integers(0, 3), causal=st.booleans())
@settings(deadline=None, max_examples=30)
def test_toeplitz_by_fft_equals_dense(n, extra, causal):
    weight = torch.randn(2 * (n + extra) - 1, dtype=torch.float64)
    z = torch.randn(2, n, 3, dtype=torch.float64)
    dense = gate_matrix(weight, n, causal=causal) @ z
    torch.testing.assert_close(toeplitz_by_fft(weight, z, causal=causal), dense, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fft_in_half_types_rounds_once(dtype):
    weight, z = (torch.randn(2 * 64 - 1) / 8).to(dtype), torch.randn(2, 64, 4).to(dtype)
    exact = gate_matrix(weight.double(), 64) @ z.double()
    out = toeplitz_by_fft(weight, z)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@given(data=st.data(), n=st.integers(1, 6), padding=st.integers(1, 4), gate=st.sampled_from(GATES))
@settings(deadline=None, max_examples=40)
def test_padding_changes_nothing(data, n, padding, gate):
    weight, bias = _random_gate(gate, n + padding)
    variant, causal = data.draw(st.sampled_from(VARIANTS)), data.draw(st.booleans())
    z = torch.randn(2, n, 4, dtype=torch.float64)
    padded = torch.cat((z, torch.full((2, padding, 4), float("nan"), dtype=torch.float64)), 1)
    mask = (torch.arange(n + padding) < n).expand(2, -1)
    args = {"variant": variant, "causal": causal, "method": _method(gate)}
    out = spatial_gate(padded, weight, bias, mask=mask, **args)
    torch.testing.assert_close(out[:, :n], spatial_gate(z, weight, bias, **args), rtol=1e-11, atol=1e-11)
    assert torch.equal(out[:, n:], torch.zeros_like(out[:, n:]))


@pytest.mark.parametrize("gate", GATES)
def test_causal_never_leaks_and_bidirectional_reaches_back(gate):
    weight, bias = _random_gate(gate, 6)
    z = torch.randn(1, 6, 4, dtype=torch.float64)
    changed = z.clone()
    changed[:, -1] += 1

    def difference(causal):
        a, b = (spatial_gate(t, weight, bias, causal=causal, method=_method(gate)) for t in (z, changed))
        return (a - b)[0].abs().amax(-1)

    # The FFT spreads rounding over all places.
    assert difference(True)[:-1].max() <= (1e-14 if gate == "fft" else 0)
    assert difference(False)[0] > 1e-3


@pytest.mark.parametrize("gate", GATES)
def test_longer_than_the_gate_names_the_remedy(gate):
    weight, bias = _random_gate(gate, 3)
    with pytest.raises(UserError, match=r"3 tokens and got 4.*resize_gate"):
        spatial_gate(torch.randn(1, 4, 2, dtype=torch.float64), weight, bias, method=_method(gate))


def test_other_mistakes_are_named():
    weight, bias = _random_gate("dense", 3)
    with pytest.raises(UserError, match="halves its channels, got 5"):
        spatial_gate(torch.randn(1, 3, 5, dtype=torch.float64), weight, bias)
    for options, said in (
        ({"variant": "splt"}, "did you mean split"),
        ({"method": "fast"}, "unknown method"),
        ({"mask": torch.ones(1, 4)}, "mask must be bool"),
        ({"mask": torch.ones(1, 3, dtype=torch.bool)}, r"\(B, N\) = \(1, 4\)"),
    ):
        with pytest.raises(UserError, match=said):
            spatial_gate(torch.randn(1, 4, 6), torch.randn(4, 4), torch.randn(4), **options)
    with pytest.raises(UserError, match="a number for each of 4 tokens"):
        spatial_gate(torch.randn(1, 4, 6), torch.randn(4, 4), torch.randn(3))
    with pytest.raises(UserError, match=r"\(B, N, C\)"):
        spatial_gate(torch.randn(4, 6), torch.randn(4, 4), torch.randn(4))
    with pytest.raises(UserError, match="needs a Toeplitz gate"):
        spatial_gate(torch.randn(1, 3, 8, dtype=torch.float64), weight, bias, method="fft")


# Resizing


def _smooth_kernel(grid: tuple[int, int], sigma: float, stretch: float = 1.0) -> Tensor:
    """A Gaussian of the distance between query and key as W on a grid, over the number of keys that it sums."""
    axes = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(grid))
    scaled = (places[:, None] - places[None]) / torch.tensor([stretch * sigma, sigma])
    return torch.exp(-scaled.square().sum(-1) / 2) / len(places)


def _bilinear(weight: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    n, m = old[0] * old[1], new[0] * new[1]
    for _ in range(2):
        rows = weight.shape[0]
        maps = torch.nn.functional.interpolate(weight.reshape(rows, 1, *old), new, mode="bilinear")
        weight = maps.reshape(rows, m).T
    return weight * n / m


def _relative(error: Tensor, reference: Tensor) -> float:
    return (error.norm() / reference.norm()).item()


GRIDS = [((14, 14), (16, 16)), ((14, 14), (24, 24)), ((16, 16), (14, 14)), ((10, 14), (12, 20)), ((20, 12), (14, 10))]


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_a_smooth_kernel_comes_out_as_if_sampled_on_the_new_grid(old, new):
    weight, wanted = _smooth_kernel(old, 0.2, stretch=1.5), _smooth_kernel(new, 0.2, stretch=1.5)
    resized, _ = resize_gate(weight, torch.ones(len(weight), dtype=torch.float64), old, new)
    error = _relative(resized - wanted, wanted)
    assert error < 0.02
    assert error < 0.6 * _relative(_bilinear(weight, old, new) - wanted, wanted)


def test_from_224_to_256_pixels_as_documented():
    weight, wanted = _smooth_kernel((14, 14), 0.2), _smooth_kernel((16, 16), 0.2)
    resized, bias = resize_gate(weight.float(), torch.ones(196), (14, 14), (16, 16))
    assert resized.shape == (256, 256)
    assert torch.equal(bias, torch.ones(256))
    assert _relative(resized.double() - wanted, wanted) == pytest.approx(0.006, abs=5e-4)
    assert _relative(_bilinear(weight, (14, 14), (16, 16)) - wanted, wanted) == pytest.approx(0.031, abs=5e-4)


@given(
    old=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    new=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_a_constant_gate_keeps_its_row_sums_and_a_constant_bias_its_value(old, new, seed):
    n, m = old[0] * old[1], new[0] * new[1]
    level = torch.randn((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weight, bias = resize_gate(level.expand(n, n), level.expand(n), old, new)
    torch.testing.assert_close(weight.sum(1), (level * n).expand(m), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias, level.expand(m), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", [(3, 5), (7,), (1, 1)])
def test_equal_grids_are_the_identity(grid, dtype):
    n = torch.Size(grid).numel()
    weight, bias = torch.randn(n, n).to(dtype), torch.randn(n).to(dtype)
    same, same_bias = resize_gate(weight, bias, grid, grid)
    assert torch.equal(same, weight)
    assert torch.equal(same_bias, bias)
    assert same.dtype == dtype


def test_axes_are_not_exchanged():
    """A gate that looks only along rows of the image still does after a change of the number of rows."""
    height, width = 4, 6
    down = torch.eye(height, dtype=torch.float64)
    across = torch.randn(width, width, dtype=torch.float64)
    bias = torch.arange(width, dtype=torch.float64).repeat(height)
    resized, new_bias = resize_gate(torch.kron(down, across), bias, (4, 6), (8, 6))
    between, _ = resize_gate(down, torch.zeros(4, dtype=torch.float64), (4,), (8,))
    torch.testing.assert_close(resized, torch.kron(between, across))
    torch.testing.assert_close(new_bias, torch.arange(width, dtype=torch.float64).repeat(8))


@pytest.mark.parametrize(("old", "new"), [(32, 48), (48, 32), (64, 65)])
def test_toeplitz_and_dense_resize_agree_on_a_smooth_kernel(old, new):
    lags = torch.arange(1 - old, old, dtype=torch.float64) / old
    weight = torch.exp(-(((lags - 0.05) / 0.15) ** 2) / 2) / old
    bias = torch.linspace(0, 1, old, dtype=torch.float64)
    resized, new_bias = resize_gate(weight, bias, (old,), (new,))
    dense, dense_bias = resize_gate(toeplitz_matrix(weight, old), bias, (old,), (new,))
    wanted = gate_matrix(torch.exp(-(((torch.arange(1 - new, new) / new - 0.05) / 0.15) ** 2) / 2) / new, new)
    assert resized.shape == (2 * new - 1,)
    assert torch.equal(new_bias, dense_bias)
    assert _relative(toeplitz_matrix(resized, new) - wanted, wanted) < 0.005
    assert _relative(toeplitz_matrix(resized, new) - dense, wanted) < 0.01


def test_a_delta_keeps_its_sum_when_the_grid_shrinks():
    """Read at every fourth place only, most of W would be lost; the widened kernel sees all of it."""
    weight = torch.eye(32, dtype=torch.float64)
    resized, _ = resize_gate(weight, torch.ones(32, dtype=torch.float64), (32,), (8,))
    torch.testing.assert_close(resized[2:-2].sum(1), torch.ones(4, dtype=torch.float64), rtol=0.02, atol=0)


def test_resize_keeps_no_graph_and_leaves_its_input():
    weight, bias = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.ones(4))
    before = weight.detach().clone()
    resized, new_bias = resize_gate(weight, bias, (2, 2), (3, 3))
    assert not resized.requires_grad
    assert not new_bias.requires_grad
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("shape", "tokens", "old", "new", "message"),
    [
        ((9, 9), 9, (2, 4), (3, 3), "has 8 tokens"),
        ((9, 9), 8, (3, 3), (4, 4), "bias"),
        ((9, 9), 9, (3, 3), (4,), "equally many"),
        ((9, 9), 9, (3, 3), (0, 4), "positive"),
        ((9,), 5, (5, 1), (4, 1), "in a line"),
    ],
)
def test_resize_names_what_does_not_fit(shape, tokens, old, new, message):
    with pytest.raises(UserError, match=message):
        resize_gate(torch.zeros(shape), torch.zeros(tokens), old, new)


@pytest.mark.parametrize("causal", [False, True])
def test_the_fft_takes_an_empty_batch(causal: bool) -> None:
    weight = torch.randn(9, dtype=torch.float64, requires_grad=True)
    out = toeplitz_by_fft(weight, torch.zeros(0, 4, 3, dtype=torch.float64), causal=causal)
    assert out.shape == (0, 4, 3)
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
