"""Every mixer of the table, and every other path through its code, keeps every property."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import CASES, DIM, VARIANTS, builder, example
from tokenmix.environment import newer_than
from tokenmix.layers import MIXERS
from tokenmix.testing import PROPERTIES, NotApplicable, PropertyFailure
from tokenmix.testing.harness import awake, call, noise, size_like, to_tokens
from tokenmix.testing.properties.graphs import compiled

EVERY = {**CASES, **VARIANTS}
# One capture costs more than all other properties together; of a layer with several rows in the table one is fast.
CAPTURED = {*CASES} - {"self-double", "external-softmax", "external-2d", "gating-toeplitz", "gating-attention"}
SLOW = {(name, row) for name in {*EVERY} - CAPTURED for row in ("compile", "export", "onnx")}


GATES = [name for name in EVERY if name.startswith("gating")]
CAUSAL = [name for name in EVERY if name.endswith("causal")]
WITHOUT_MAP = [name for name in CASES if MIXERS[name].layer.capabilities.map is None]
NOT_OFFERED = {
    *((name, row) for name in WITHOUT_MAP for row in ("map-shape", "map-rows", "map-used")),
    ("identity", "mask-polarity"),
    *((name, "map-rows") for name in GATES),
    *((name, "equivariance") for name in CAUSAL),
    ("external-softmax", "mask-polarity"),
    ("external-2d", "batch-training"),
    ("offset", "batch-training"),
    ("offset-chunked", "batch-training"),
    ("less-stack", "device-dtype"),
}
"""What a mixer has not, by its nature; everything else is checked."""

EXCEPTIONS = [(name, row) for name, case in EVERY.items() for row in case.except_for]
KEPT = [
    pytest.param(name, row, marks=[pytest.mark.slow] if (name, row) in SLOW else [])
    for name in EVERY
    for row in PROPERTIES
    if (name, row) not in NOT_OFFERED and (name, row) not in EXCEPTIONS
]


def _check(name: str, row: str) -> None:
    # Inductor compiles for seconds: `test_compiles_to_kernels` runs it.
    check = partial(compiled, backend="aot_eager") if row == "compile" else PROPERTIES[row].check
    check(builder(EVERY[name]), example(EVERY[name]))


@pytest.mark.parametrize(("name", "row"), KEPT)
def test_keeps(name: str, row: str) -> None:
    if (name, row) == ("offset-chunked", "trace") and not newer_than(torch.__version__, "2.8"):
        pytest.skip("torch 2.8 numbers the values of a recomputed chunk differently at each trace")
    _check(name, row)


@pytest.mark.parametrize(("name", "row"), sorted(NOT_OFFERED))
def test_does_not_offer(name: str, row: str) -> None:
    with pytest.raises(NotApplicable):
        _check(name, row)


@pytest.mark.parametrize(("name", "row"), EXCEPTIONS)
def test_an_exception_is_still_needed(name: str, row: str) -> None:
    with pytest.raises(PropertyFailure):
        _check(name, row)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_compiles_to_kernels(name: str) -> None:
    compiled(builder(EVERY[name]), example(EVERY[name]), backend="inductor")


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_mask_size_and_scale(name: str, data: st.DataObject) -> None:
    """Whatever the mask, what lies under False is 0 afterwards and has no part in anything."""
    layer = awake(builder(EVERY[name])).double()
    size = data.draw(st.integers(1, 3), "samples")
    dtype = data.draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16)), "dtype")
    scale = data.draw(st.sampled_from((0.1, 1.0, 10.0, 100.0)), "scale")
    if example(EVERY[name]).dim() == 4:
        x = noise(size, DIM, data.draw(st.integers(1, 5), "height"), data.draw(st.integers(1, 5), "width")) * scale
    else:
        fewest = 16 if layer.capabilities.length == "fixed" else 1  # type: ignore[union-attr]
        x = noise(size, data.draw(st.integers(fewest, 16), "tokens"), DIM) * scale
    tokens = to_tokens(x).shape[1]
    flat = data.draw(st.lists(st.booleans(), min_size=size * tokens, max_size=size * tokens), "mask")
    mask = torch.tensor(flat).view(size, tokens)
    other = to_tokens(x).clone()
    other[~mask] = 7.0
    layer, x, other = layer.to(dtype), x.to(dtype), size_like(x, other).to(dtype)
    with torch.no_grad():
        out = to_tokens(call(layer, x, mask))
        again = to_tokens(call(layer, other, mask))
    assert out.isfinite().all()
    assert not out[~mask].any()
    torch.testing.assert_close(again, out, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EVERY)
def test_answers_and_learns_alike_on_a_gpu(name: str) -> None:
    x = example(EVERY[name]).double()
    results = []
    for device in ("cpu", "cuda"):
        layer, given = awake(builder(EVERY[name])).double().to(device), x.to(device).requires_grad_()
        out = layer(given)
        out.square().mean().backward()
        results.append([out, *(t.grad for t in (given, *layer.parameters()) if t.grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-9, atol=1e-9)
