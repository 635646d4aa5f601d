"""The backends of external attention against each other, who is chosen, and what each of them refuses."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.external import MultiHeadExternalAttention
from tokenmix.ops import external
from tokenmix.ops import external_blocks as streaming
from tokenmix.ops.external import external_attention
from tokenmix.ops.normalize import double_normalize, slot_offset


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[40, 2**20])
def _tile_entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one or two heads, and the usual ones, which hold all of a test."""
    monkeypatch.setattr(streaming, "TILE_ENTRIES", request.param)


def problem(*shape: int, dtype: torch.dtype = torch.float64, slots: int = 4, std: float = 1.0) -> list[Tensor]:
    """query, both memories and both biases; logits of about the standard deviation `std`."""
    width = shape[-1]
    shapes = (shape, (slots, width), (slots, width), (slots,), (width,))
    drawn = [torch.randn(each, dtype=torch.float64) for each in shapes]
    drawn[1] *= std / width**0.5
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def call(tensors: list[Tensor], **options: Any) -> Tensor:
    query, key_memory, value_memory, key_bias, value_bias = tensors
    return external_attention(query, key_memory, value_memory, key_bias=key_bias, value_bias=value_bias, **options)


def grads(out: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, tensors, upstream)


@pytest.mark.usefixtures("_tile_entries")
@pytest.mark.parametrize("way", [{"backend": "tiled"}, {"chunk_size": 3}, {"chunk_size": 3, "num_steps": 2}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tiles_change_nothing(interleaved: bool, masked: bool, way: dict[str, Any]) -> None:
    tensors = problem(3, 5, 7, 3)
    if interleaved:
        tensors[0] = tensors[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0] * 7, [1] * 7]).bool() if masked else None
    tiled = call(tensors, mask=mask, **way)
    eager = call(tensors, mask=mask, num_steps=way.get("num_steps", 1), backend="eager")
    torch.testing.assert_close(tiled, eager, rtol=1e-10, atol=1e-12)
    if "backend" in way:
        assert tiled.stride() == tensors[0].stride()
    for ours, reference in zip(grads(tiled, tensors), grads(eager, tensors)):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("std", [1.0, 1000.0])
@pytest.mark.parametrize("entries", [500, 1000, 2000])
def test_tiles_in_single_precision(
    entries: int, std: float, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of many samples in a tile, of one, and a part of one's."""
    monkeypatch.setattr(streaming, "TILE_ENTRIES", entries)
    tensors = problem(3, 4, 50, 8, dtype=torch.float32, std=std)
    if interleaved:
        tensors[0] = tensors[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact, out = call(wide, backend="eager"), call(tensors, backend="tiled")
    written = call(tensors, backend="eager")
    references = [exact, *grads(exact, wide)]
    for ours, plain, reference in zip([out, *grads(out, tensors)], [written, *grads(written, tensors)], references):
        error = (plain.double() - reference).abs().max().item()
        assert (ours.double() - reference).abs().max() <= 3 * error + 1e-5 * reference.abs().max()


@pytest.mark.parametrize("std", [0.01, 30.0, 1000.0])
@pytest.mark.parametrize("way", [{"backend": "tiled"}, {"chunk_size": 5}])
def test_any_scale_of_logits(std: float, way: dict[str, Any]) -> None:
    """Beyond 88 the exponential of a float32 is infinite, below -103 it is 0."""
    tensors = problem(2, 3, 37, 4, dtype=torch.float32, std=std)
    exact = call([t.detach().double() for t in tensors], backend="eager")
    tiled = call(tensors, **way)
    eager = call(tensors, backend="eager")
    bound = max(2 * (eager - exact).abs().max().item(), 1e-5)
    assert (tiled - exact).abs().max() < bound
    assert all(g.isfinite().all() for g in grads(tiled, tensors))


@pytest.mark.parametrize("std", [1.0, 100.0])
def test_two_fused_softmaxes_are_the_double_normalisation(std: float) -> None:
    query, key_memory, *_ = problem(2, 3, 7, 4, std=std)
    shares = external.external_attention_map(query, key_memory)
    torch.testing.assert_close(shares, double_normalize(query @ key_memory.mT), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("std", "fits"), [(1.0, True), (1000.0, False)])
def test_one_exponential_an_entry_where_no_sum_leaves_the_range(std: float, fits: bool) -> None:
    factors = [tensor.detach() for tensor in problem(2, 3, 37, 4, dtype=torch.float32, std=std)]
    whole = streaming.Factors(*factors, mask=torch.rand(2, 3, 37) > 0.3)
    out, offset = torch.zeros(2, 3, 37, 4), torch.zeros(2, 3, 1, 4)
    assert streaming._at_once(whole, out, offset) == fits
    if fits:
        torch.testing.assert_close(out, streaming.reference(whole))
        logits = factors[0] @ factors[1].mT + factors[3]
        torch.testing.assert_close(offset.squeeze(-2), slot_offset(logits, mask=whole.mask))


def test_slots_far_below_and_far_above_the_others() -> None:
    tensors = problem(1, 2, 9, 3, dtype=torch.float32)
    with torch.no_grad():
        tensors[3] += torch.tensor([-300.0, 0.0, 300.0, -80.0])
    exact = call([t.detach().double() for t in tensors], backend="eager")
    # A bias of 300 costs the logits 300 rounding errors of 1.
    torch.testing.assert_close(call(tensors, backend="tiled").double(), exact, rtol=1e-3, atol=1e-3)


def test_the_second_derivative_of_the_tiles() -> None:
    tensors = problem(1, 2, 4, 2, slots=3)
    mask = torch.tensor([[True, True, False, True]])
    assert gradgradcheck(lambda *t: call(list(t), mask=mask, backend="tiled"), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"backend": "tiled"}, {"chunk_size": 4}])
def test_one_graph(way: dict[str, Any]) -> None:
    torch.compiler.reset()
    layer = MultiHeadExternalAttention(16, num_heads=4, num_slots=8, **way)
    x, mask = torch.randn(2, 15, 16, requires_grad=True), torch.rand(2, 15) > 0.2
    reference = copy.deepcopy(layer)
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, mask)
    torch.testing.assert_close(out, reference(x, mask))
    (ours,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(reference(x, mask).square().sum(), x)
    torch.testing.assert_close(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"backend": "tiled"}, {"chunk_size": 4}])
def test_one_graph_without_a_gradient_has_the_blocks_as_an_operator(way: dict[str, Any]) -> None:
    torch.compiler.reset()
    layer = MultiHeadExternalAttention(16, num_heads=4, num_slots=8, **way)
    x, mask = torch.randn(2, 15, 16), torch.rand(2, 15) > 0.2
    with torch.no_grad():
        expected = layer(x, mask)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, mask), expected)
    args = [tensor.detach() for tensor in problem(2, 3, 9, 4)]
    torch.library.opcheck(streaming._in_compiled_graph, (*args, None, 1, way.get("chunk_size")))


def test_multiply_adds_of_tiles_are_counted_forward_and_backward() -> None:
    counts = []
    for backend in ("eager", "tiled"):
        tensors = problem(2, 3, 7, 4)
        with FlopCounterMode(display=False) as counter:
            call(tensors, backend=backend).sum().backward()
        counts.append(counter.get_total_flops())
    product = 2 * (2 * 3 * 7) * 4 * 4
    # The logits are made again for the gradient.
    assert counts == [6 * product, 7 * product]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that ran, in order."""
    ran: list[str] = []
    for name, function in (("eager", "_eager"), ("tiled", "external_by_blocks")):
        way = getattr(external, function)

        def run(*given: Any, name: str = name, way: Any = way, **more: Any) -> Tensor:
            ran.append(name)
            return way(*given, **more)

        monkeypatch.setattr(external, function, run)
    return ran


def test_who_is_chosen(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "LEAST_ENTRIES", 100)
    many, few, one_head = problem(2, 3, 9, 4), problem(1, 2, 4, 4), problem(1, 1, 40, 4)
    for tensors, options, expected in (
        (many, {}, "tiled"),
        (few, {}, "eager"),
        ([t.detach() for t in few], {}, "tiled"),
        (one_head, {}, "eager"),
        (many, {"num_steps": 2}, "eager"),
        (many, {"dropout": 0.5}, "eager"),
        (many, {"backend": "eager"}, "eager"),
        (few, {"backend": "tiled"}, "tiled"),
        ([t.to("meta") for t in many], {}, "eager"),
    ):
        calls.clear()
        call(tensors, **options)
        assert calls == [expected], options


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exporting_and_tracing_choose_the_written_map(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "LEAST_ENTRIES", 100)
    tensors = tuple(t.detach() for t in problem(2, 3, 9, 4))
    torch.export.export(_Op(), tensors)
    torch.jit.trace(_Op(), tensors, check_trace=False)
    assert set(calls) == {"eager"}


class _Op(torch.nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return call(list(tensors))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "tilde"}, "did you mean tiled"),
        ({"backend": "eager", "chunk_size": 4}, "backend='eager' does all tokens at once, got chunk_size=4"),
        ({"backend": "tiled", "num_steps": 2}, "backend='tiled' has one Sinkhorn step, got num_steps=2"),
        ({"backend": "tiled", "dropout": 0.5}, "backend='tiled' has no dropout of the map, got dropout=0.5"),
    ],
)
def test_a_backend_that_cannot_says_so(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        call(problem(1, 2, 3, 4), **options)


def test_a_layer_refuses_when_it_is_built() -> None:
    with pytest.raises(UserError, match="did you mean eager"):
        MultiHeadExternalAttention(16, backend="eagre")
    with pytest.raises(UserError, match="has no dropout of the map"):
        MultiHeadExternalAttention(16, backend="tiled", attention_dropout=0.1)


def test_elsewhere_than_on_a_cpu_the_tokens_are_summed_by_a_kernel_that_spreads_them():
    """A softmax over the tokens has one block of threads for a head there."""
    seen: list[str] = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    tensors = [torch.empty(shape, device="meta") for shape in ((2, 1, 9, 4), (3, 4), (3, 4))]
    with Listener():
        external_attention(*tensors, backend="eager")
    assert any("logsumexp" in name for name in seen)
    assert not any("log_softmax" in name for name in seen)


WAYS: list[dict[str, Any]] = [{"backend": "tiled"}, {"chunk_size": 3}]
DERIVED: list[dict[str, Any]] = [
    {},
    {"num_steps": 2},
    {"normalization": "softmax"},
    {"mask": torch.tensor([[1, 0, 1, 1, 1], [0] * 5]).bool()},
]


def _pair(options: dict[str, Any], way: dict[str, Any]) -> tuple[list[Tensor], Any, Any]:
    """Five tensors, and the tiles and the written map as functions of them."""
    tensors = [tensor.detach() for tensor in problem(2, 3, 5, 4)]
    tiled = lambda *t: call(list(t), **way, **options)  # noqa: E731
    return tensors, tiled, lambda *t: call(list(t), backend="eager", **options)


def _square(function: Any) -> Any:
    return lambda *tensors: function(*tensors).square().sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", DERIVED)
def test_tiles_compose_with_derivatives_of_any_mode(options: dict[str, Any], way: dict[str, Any]) -> None:
    if "backend" in way and "num_steps" in options:
        pytest.skip("a backend has one step")
    tensors, tiled, eager = _pair(options, way)
    primals, tangents = tuple(tensors), tuple(torch.randn_like(t) for t in tensors)
    every = tuple(range(5))

    def found(function: Any) -> list[Any]:
        once = torch.func.grad(_square(function), every)
        return [
            torch.func.jvp(function, primals, tangents),
            once(*primals),
            torch.func.jvp(once, primals, tangents),
            torch.func.grad(lambda *t: sum(g.square().sum() for g in once(*t)), every)(*primals),
        ]

    torch.testing.assert_close(found(tiled), found(eager))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", [0, 1, 2, 3, 4])
def test_tiles_hand_a_tangent_on_in_forward_mode(which: int, way: dict[str, Any]) -> None:
    tensors, tiled, eager = _pair({}, way)
    with forward_ad.dual_level():
        tensors[which] = forward_ad.make_dual(tensors[which], torch.randn_like(tensors[which]))
        ours, expected = (forward_ad.unpack_dual(f(*tensors)).tangent for f in (tiled, eager))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("in_dims", [(0, None, None), (2, None, None), (None, 0, None), (0, None, 0), (0, 0, 0)])
@pytest.mark.parametrize("way", WAYS)
def test_tiles_compose_with_vmap(in_dims: tuple[int | None, ...], way: dict[str, Any]) -> None:
    tensors, tiled, eager = _pair({}, way)
    some = [
        tensor if dim is None else torch.stack([tensor, 2 * tensor, -tensor], dim)
        for tensor, dim in zip(tensors, in_dims)
    ]

    def found(function: Any) -> list[Any]:
        def one(*t: Tensor) -> Tensor:
            return function(*t, *tensors[3:])

        each = torch.func.vmap(torch.func.grad(_square(one), (0, 1, 2)), in_dims)(*some)
        return [torch.func.vmap(one, in_dims)(*some), each]

    torch.testing.assert_close(found(tiled), found(eager))


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 1), (0, None)])
def test_a_mask_of_each_call_under_vmap(in_dims: tuple[int | None, int | None]) -> None:
    query, *rest = (tensor.detach() for tensor in problem(2, 3, 5, 4))
    mask = torch.rand(3, 2, 5) > 0.4
    given = (
        query if in_dims[0] is None else torch.stack([query, 2 * query, -query]),
        mask[0] if in_dims[1] is None else mask.movedim(0, in_dims[1]),
    )
    ours, expected = (
        torch.func.vmap(lambda q, m, b=backend: call([q, *rest], mask=m, backend=b), in_dims)(*given)
        for backend in ("tiled", "eager")
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("which", [0, 1, 2, 3, 4])
def test_a_tangent_of_any_tensor_reaches_the_result_of_the_default(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "LEAST_ENTRIES", 2**18)
    shapes = (1, 4, 2**15, 4), (3, 4), (3, 4), (3,), (4,)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    direction = torch.randn_like(tensors[which])

    def call(tensor: Tensor) -> Tensor:
        query, keys, values, key_bias, value_bias = (tensor if i == which else t for i, t in enumerate(tensors))
        return external_attention(
            query, keys, values, key_bias=key_bias, value_bias=value_bias, normalization="softmax"
        )

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(tensors[which], direction))).tangent
    step = 1e-6
    expected = (call(tensors[which] + step * direction) - call(tensors[which] - step * direction)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"chunk_size": 3}, {"backend": "tiled"}])
@pytest.mark.parametrize("empty", ["samples", "tokens", "slots"])
def test_tiles_of_nothing_are_what_eager_makes_of_it(options: dict[str, Any], empty: str) -> None:
    samples, tokens, slots = (
        0 if empty == axis else size for axis, size in (("samples", 2), ("tokens", 5), ("slots", 3))
    )
    tensors = torch.randn(samples, 2, tokens, 4), torch.randn(slots, 4), torch.randn(slots, 6)
    torch.testing.assert_close(
        external_attention(*tensors, **options), external_attention(*tensors, backend="eager"), rtol=0, atol=0
    )


@pytest.mark.parametrize("dropout", [-1.0, 1.5, float("nan")])
def test_a_dropout_that_is_no_probability_is_refused(dropout: float) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        external_attention(torch.randn(1, 5, 4), torch.randn(3, 4), torch.randn(3, 4), dropout=dropout)
