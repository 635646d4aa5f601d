"""The comparisons of the interpreter on a CUDA device, in the types and at the sizes that are used there."""

from functools import partial
from typing import Any

import pytest
import torch
from comparison import assert_as_good_as, external_inputs, outputs, poisoned

from tokenmix.ops.external import external_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HALF = [torch.float16, torch.bfloat16]
TYPES = [*HALF, torch.float32]
SHAPES = [
    # B, H, N, d, d_v, S
    (8, 32, 196, 64, 64, 64),
    (1, 32, 16384, 64, 64, 64),
    (1, 1, 4096, 512, 512, 64),
    (2, 3, 130, 24, 5, 17),
    (1, 4, 1000, 64, 64, 256),
]
eager = partial(external_attention, backend="eager")


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_eager_op(shape: tuple[int, ...], dtype: torch.dtype, backend: Any) -> None:
    inputs = external_inputs(*shape, dtype=dtype, device="cuda")
    # Logits of about 1, as trained memories have.
    inputs["key_memory"] = (inputs["key_memory"].detach() * shape[3] ** -0.5).requires_grad_()
    with poisoned():
        assert_as_good_as(partial(external_attention, backend=backend), eager, inputs)


@pytest.mark.parametrize("dtype", HALF)
def test_masks_and_a_row_without_tokens(dtype: torch.dtype) -> None:
    inputs = external_inputs(3, 4, 300, 64, 64, 64, dtype=dtype, device="cuda")
    mask = torch.rand(3, 300, device="cuda") > 0.4
    mask[1] = False
    with poisoned():
        assert_as_good_as(partial(external_attention, backend="triton"), eager, inputs, mask=mask)


def test_the_same_bits_twice_and_under_compile() -> None:
    inputs = external_inputs(2, 8, 3000, 64, 64, 64, dtype=torch.bfloat16, device="cuda")
    fused = partial(external_attention, backend="triton")
    first = outputs(fused, inputs)
    for again in (outputs(fused, inputs), outputs(torch.compile(fused, fullgraph=True), inputs)):
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dtype", HALF)
def test_more_elements_than_32_bits_count(dtype: torch.dtype) -> None:
    query = torch.randn(1, 600_000, 64, 64, device="cuda", dtype=dtype).transpose(1, 2)
    memories = torch.randn(2, 64, 64, device="cuda", dtype=dtype) * 0.125
    with torch.no_grad():
        out = external_attention(query, *memories, backend="triton")
        for head in (0, 63):
            expected = external_attention(query[:, head : head + 1], *memories, backend="eager")
            torch.testing.assert_close(out[:, head : head + 1], expected, rtol=2e-2, atol=2e-2)
