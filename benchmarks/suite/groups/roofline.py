"""CUDA only: every backend against moving the bytes that must be moved, and against fused self-attention."""

from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from suite import references
from suite.harness import Built, Case, Target, Variant, agreement, checked
from suite.place import Place
from tokenmix.layers import MultiHeadExternalAttention, SelfAttention
from tokenmix.ops import external_attention

__all__ = ["CASES", "backends", "paths"]

SHARE = 0.7
"""Part of the memory's bandwidth that the kernel is to reach forward: it reads the queries twice, first for the sums
over the tokens, and writes the output. The other backends write or read the map as well."""

TWICE = "read, then copy"
BANDWIDTH = (Target("at most", 1 / SHARE, "tokenmix, triton", TWICE, ("cuda",)),)

FORWARD = (
    "double normalisation reads the queries twice and writes the output: so does the floor of its target, of which a "
    "ratio of 1.43 is 70 % of the bandwidth; the copy reads them once, for show"
)
BOTH_WAYS = "the floor reads the queries once, writes the output, and reads queries and gradient once, to write another"

HEADS, WIDTH, SLOTS, DIM = 32, 64, 64, 384


def backends(function: Callable[..., Tensor]) -> list[str]:
    """The names that an op's `backend` can have, none if it has no such argument."""
    hint = get_type_hints(function).get("backend")
    return [name for part in (hint, *get_args(hint)) if get_origin(part) is Literal for name in get_args(part)]


def paths(function: Callable[..., Tensor]) -> dict[str, dict[str, Any]]:
    """The arguments that pick every path of an op, by name; the first is what it chooses by itself."""
    return {"tokenmix": {}, **{f"tokenmix, {name}": {"backend": name} for name in backends(function)}}


Run = Callable[[dict[str, Any]], tuple[Tensor, ...]]


def _variants(function: Callable[..., Tensor], run: Run) -> dict[str, Variant]:
    return {name: Variant("ours", lambda o=options: run(o)) for name, options in paths(function).items()}


def _built(
    ours: dict[str, Variant], others: dict[str, Variant], expected: Tensor | tuple[Tensor, ...], place: Place
) -> Built:
    """Ours that run here and are right, and the others."""
    left, correct = checked(ours, lambda name: agreement(ours[name].run(), expected, place, "float64"))
    return Built({**left, **others}, lambda: correct)


def _operation(num_tokens: int, kind: str) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        shape, grads = (1, HEADS, num_tokens, WIDTH), kind == "both ways"
        query = place.randn(*shape, grad=grads)
        memories = [place.randn(SLOTS, WIDTH, std=WIDTH**-0.5, grad=grads) for _ in range(2)]
        grad, plain = place.randn(*shape), query.detach()
        target = torch.empty_like(plain)

        def run(options: dict[str, Any]) -> tuple[Tensor, ...]:
            out = external_attention(query, *memories, **options)
            return (out, *torch.autograd.grad(out, (query, *memories), grad)) if grads else (out,)

        def copies() -> None:
            # Forward reads the queries and writes the output; backward reads queries and gradient and writes another.
            target.copy_(plain)
            if grads:
                torch.add(plain, grad, out=target)

        def reads_twice() -> None:
            plain.sum()
            target.copy_(plain)

        floors = {"copy": Variant("floor", copies)}
        if not grads:
            floors[TWICE] = Variant("floor", reads_twice)
        expected = references.with_gradients(references.external_attention, (query, *memories), grad)
        return _built(_variants(external_attention, run), floors, expected if grads else expected[:1], place)

    return build


def _against_self(num_tokens: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        layers = {name: place.put(_external(**options)) for name, options in paths(external_attention).items()}
        attention = place.put(SelfAttention(DIM, num_heads=DIM // 64))
        x = place.randn(1, num_tokens, DIM)

        @torch.no_grad()
        def run(layer: torch.nn.Module) -> Tensor:
            return layer(x)

        wide = _external(backend="eager", device=x.device, dtype=torch.float64)
        for layer in (*layers.values(), wide):
            layer.load_state_dict(layers["tokenmix"].state_dict())
        ours = {name: Variant("ours", lambda m=layer: run(m)) for name, layer in layers.items()}
        with torch.no_grad():
            expected = wide(x.double())
        others = {"self-attention, fused": Variant("baseline", lambda: run(attention))}
        return _built(ours, others, expected, place)

    return build


def _external(**options: Any) -> MultiHeadExternalAttention:
    return MultiHeadExternalAttention(DIM, num_heads=DIM // 64, **options)


CASES = [
    *(
        Case(
            name=f"32 heads, N {num_tokens}, {kind}",
            group="roofline",
            shapes={"B": 1, "H": HEADS, "N": num_tokens, "d": WIDTH, "S": SLOTS},
            build=_operation(num_tokens, kind),
            targets=targets,
            devices=("cuda",),
            note=note,
        )
        for num_tokens in (16384, 65536)
        for kind, targets, note in (("forward", BANDWIDTH, FORWARD), ("both ways", (), BOTH_WAYS))
    ),
    *(
        Case(
            name=f"layer against self-attention, N {num_tokens}",
            group="roofline",
            shapes={"B": 1, "N": num_tokens, "D": DIM, "H": DIM // 64, "S": SLOTS},
            build=_against_self(num_tokens),
            targets=tuple(
                Target("at most", 1.0, name, "self-attention, fused", ("cuda",)) for name in paths(external_attention)
            ),
            devices=("cuda",),
            note=f"every backend; predicted crossover 2 D + 256 = {2 * DIM + 256}",
        )
        for num_tokens in (1024, 2048, 4096, 16384)
    ),
]
