"""External attention against its two matrix products alone: what normalisation costs."""

from collections.abc import Callable

import torch
from torch import Tensor

from suite import references
from suite.harness import Built, Case, Target, Variant, agreement
from suite.place import Place
from tokenmix.layers import MultiHeadExternalAttention
from tokenmix.ops import external_attention

__all__ = ["CASES", "products"]

SLOTS = 64


def products(query: Tensor, key_memory: Tensor, value_memory: Tensor) -> Tensor:
    """The two products, and nothing between them."""
    return query @ key_memory.T @ value_memory


def bare_operations(query: Tensor, key_memory: Tensor, value_memory: Tensor) -> Tensor:
    """The equation's operations in turn, in place, on as many heads as the caches hold.

    For finite numbers of moderate size: the exponentials are neither shifted nor checked.
    """
    (num_tokens, width), slots = query.shape[-2:], key_memory.shape[0]
    heads = query.reshape(-1, num_tokens, width)
    out = query.new_empty(*heads.shape[:2], value_memory.shape[1])
    size = max(1, 2**19 // (num_tokens * slots))
    map_of_heads = query.new_empty(min(size, len(heads)), num_tokens, slots)
    for some, result in zip(heads.split(size), out.split(size), strict=True):
        weights = map_of_heads[: len(some)]
        torch.mm(some.reshape(-1, width), key_memory.T, out=weights.view(-1, slots))
        weights.exp_()
        weights.div_(weights.sum(-2, keepdim=True))
        weights.div_(weights.sum(-1, keepdim=True))
        torch.mm(weights.view(-1, slots), value_memory, out=result.view(-1, out.shape[-1]))
    return out.view(*query.shape[:-1], -1)


def _inputs(place: Place, shape: tuple[int, ...], grad: bool) -> list[Tensor]:
    width = shape[-1]
    query = place.randn(*shape, grad=grad)
    return [query, *(place.randn(SLOTS, width, std=width**-0.5, grad=grad) for _ in range(2))]


def _forward(*shape: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        inputs = _inputs(place, shape, grad=False)
        compiled = torch.compile(external_attention, dynamic=False)
        variants = {
            "tokenmix": Variant("ours", lambda: external_attention(*inputs)),
            "tokenmix, compiled": Variant("ours", lambda: compiled(*inputs)),
            "two products": Variant("floor", lambda: products(*inputs)),
            "bare operations": Variant("floor", lambda: bare_operations(*inputs)),
        }

        def check():
            found = [external_attention(*inputs), compiled(*inputs), bare_operations(*inputs)]
            return agreement(found, [references.external_attention(*inputs)] * 3, place, "float64")

        return Built(variants, check)

    return build


def _both_ways(*shape: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        inputs, grad = _inputs(place, shape, grad=True), place.randn(*shape)

        def step(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
            out = function(*inputs)
            return (out, *torch.autograd.grad(out, inputs, grad))

        variants = {
            "tokenmix": Variant("ours", lambda: step(external_attention)),
            "two products": Variant("floor", lambda: step(products)),
        }

        def check():
            expected = references.with_gradients(references.external_attention, inputs, grad)
            return agreement(step(external_attention), expected, place, "float64, with gradients")

        return Built(variants, check)

    return build


def _layer(place: Place) -> Built:
    layer = place.put(MultiHeadExternalAttention(512, num_heads=8))
    x = place.randn(8, 196, 512)
    memory = layer.memory
    assert memory.value_memory is not None
    values = memory.value_memory

    @torch.no_grad()
    def bare() -> Tensor:
        heads = layer.query(x).unflatten(-1, (32, 64))
        return layer.proj(products(heads, memory.key_memory, values).flatten(2))

    @torch.no_grad()
    def ours() -> Tensor:
        return layer(x)

    def check():
        expected = MultiHeadExternalAttention(512, num_heads=8, dtype=torch.float64)
        expected.load_state_dict(layer.state_dict())
        heads = expected.query(x.cpu().double()).unflatten(-1, (32, 64)).transpose(1, 2)
        wide = expected.memory
        assert wide.value_memory is not None
        assert wide.value_bias is not None
        mixed = references.external_attention(heads, wide.key_memory, wide.value_memory) + wide.value_bias
        return agreement(ours(), expected.proj(mixed.transpose(1, 2).flatten(2)), place, "float64")

    return Built({"tokenmix": Variant("ours", ours), "four products": Variant("floor", bare)}, check)


def _targets(limit: float) -> tuple[Target, ...]:
    return tuple(
        Target("at most", limit, name, "two products", floor="bare operations")
        for name in ("tokenmix", "tokenmix, compiled")
    )


SHAPES = {
    "single head": ({"B": 1, "N": 16384, "d": 512, "S": SLOTS}, (1, 16384, 512), 1.15),
    "32 heads, N 196": ({"B": 8, "H": 32, "N": 196, "d": 64, "S": SLOTS}, (8, 32, 196, 64), 1.6),
    "32 heads, N 4096": ({"B": 1, "H": 32, "N": 4096, "d": 64, "S": SLOTS}, (1, 32, 4096, 64), 1.4),
}
BACKWARD = (Target("at most", 1.8, "tokenmix", "two products"),)

CASES = [
    *(
        Case(
            name=f"{name}, forward",
            group="external",
            shapes=shapes,
            build=_forward(*size),
            targets=_targets(limit),
            note=f"at most {limit:.4g} x two products; where the bare operations alone take longer, 1.15 x these",
        )
        for name, (shapes, size, limit) in SHAPES.items()
    ),
    *(
        Case(name=f"{name}, both ways", group="external", shapes=shapes, build=_both_ways(*size), targets=BACKWARD)
        for name, (shapes, size, _) in SHAPES.items()
    ),
    Case(
        name="multi-head layer, forward",
        group="external",
        shapes={"B": 8, "N": 196, "D": 512, "H": 8, "S": SLOTS},
        build=_layer,
        note="expansion 4; the floor is both projections and both products, without normalisation and b_k, b_v",
    ),
]
