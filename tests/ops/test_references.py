"""The reference of each op: short enough to read next to the paper, and what every backend equals."""

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix.ops import external_blocks as external
from tokenmix.ops.attention import attention
from tokenmix.ops.attention import reference as attention_reference
from tokenmix.ops.external import external_attention, external_attention_map
from tokenmix.ops.external_blocks import Factors
from tokenmix.ops.less import Scores, attention_from_scores, next_scores, transform_scores

D = torch.float64
MASK = torch.tensor([[True, False, True, True, True], [False] * 5])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "function",
    [external.reference, external.reference_map, attention_reference],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_a_reference_has_forty_lines_at_most(function: Any) -> None:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert node.end_lineno is not None
    assert node.end_lineno - node.lineno < 40


def _external() -> dict[str, Tensor]:
    shapes = {"query": (2, 3, 5, 4), "key_memory": (6, 4), "value_memory": (6, 4), "key_bias": (6,), "value_bias": (4,)}
    return {name: torch.randn(shape, dtype=D) for name, shape in shapes.items()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"normalization": "softmax"}, {"num_steps": 3}], ids=["double", "softmax", "three steps"]
)
@pytest.mark.parametrize("backend", ["eager", "tiled", "sdpa"])
def test_backends_of_external_attention(backend: Any, options: dict[str, Any], biased: bool, masked: bool) -> None:
    if backend != "eager" and options.get("num_steps", 1) != 1:
        pytest.skip("has one step")
    inputs = {k: v.requires_grad_() for k, v in _external().items() if biased or not k.endswith("bias")}
    mask = MASK if masked else None
    ours = external_attention(**inputs, **options, mask=mask, backend=backend)
    expected = external.reference(Factors(**inputs, mask=mask), **options)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(expected)
    grads = (torch.autograd.grad(out, list(inputs.values()), upstream) for out in (ours, expected))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_the_reference_of_external_attention_is_the_published_two_divisions() -> None:
    tensors = _external()
    query, keys, values = tensors["query"], tensors["key_memory"], tensors["value_memory"]
    over_tokens = torch.softmax(query @ keys.mT, dim=-2)
    expected = over_tokens / over_tokens.sum(-1, keepdim=True) @ values
    torch.testing.assert_close(external.reference(Factors(query, keys, values)), expected, rtol=1e-12, atol=1e-12)
    shares = external_attention_map(query, keys)
    torch.testing.assert_close(shares @ values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_factors_of_less_attention(heads: tuple[int, ...], masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=D) for _ in range(3))
    transform = [torch.randn(*heads, *shape, dtype=D) for shape in ((5, 5), (5,)) * 2]
    mask = MASK if masked else None
    ours = attention_from_scores(next_scores(Scores(query, key), *transform, mask=mask), value, mask=mask)
    dense, nothing = transform_scores(query @ key.mT, *transform, mask=mask), query[..., :0]
    expected = attention_reference(nothing, nothing, value, mask, bias=dense, scale=1.0)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [3, 4])
def test_fused_attention(width: int, masked: bool, causal: bool) -> None:
    query, key = (torch.randn(2, 3, 5, 4, dtype=D) for _ in range(2))
    value, bias = torch.randn(2, 3, 5, width, dtype=D), torch.randn(2, 1, 5, 5, dtype=D)
    options: dict[str, Any] = {"mask": MASK if masked else None, "causal": causal, "bias": bias}
    ours, expected = (f(query, key, value, **options) for f in (attention, attention_reference))
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_references_in_half_precision(dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in _external().items()}
    found = external.reference(Factors(**tensors))
    exact = external.reference(Factors(**{k: v.double() for k, v in tensors.items()}))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps)
