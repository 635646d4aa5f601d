"""CUDA only: every backend against copying the bytes that must move, and against fused self-attention."""

from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from suite import references
from suite.harness import Built, Case, Missing, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness
from tokenmix.errors import UserError
from tokenmix.layers import MultiHeadExternalAttention, SelfAttention
from tokenmix.ops import external_attention, spatial_gate

__all__ = ["CASES", "backends", "paths"]

SHARE = 0.7
"""Part of the memory's bandwidth to reach: reading the queries and writing the output is all that must be moved."""

HEADS, WIDTH, SLOTS, DIM = 32, 64, 64, 384


def backends(function: Callable[..., Tensor]) -> list[str]:
    """The names that an op's `backend` can have, none if it has no such argument."""
    hint = get_type_hints(function).get("backend")
    return [name for part in (hint, *get_args(hint)) if get_origin(part) is Literal for name in get_args(part)]


def paths(function: Callable[..., Tensor]) -> dict[str, dict[str, Any]]:
    """The arguments that pick every path of an op, by name; the first is what it chooses by itself."""
    return {"tokenmix": {}, **{f"tokenmix, {name}": {"backend": name} for name in backends(function)}}


Run = Callable[[dict[str, Any]], tuple[Tensor, ...]]


def _variants(function: Callable[..., Tensor], run: Run) -> dict[str, Variant | Missing]:
    """Every path that runs here; one that says that it cannot is left out with its reason."""
    variants: dict[str, Variant | Missing] = {}
    for name, options in paths(function).items():
        try:
            run(options)
            variants[name] = Variant("ours", lambda o=options: run(o))
        except UserError as error:
            variants[name] = Missing(str(error), "ours")
    return variants


def _check(variants: dict[str, Variant | Missing], expected: tuple[Tensor, ...], place: Place) -> Correctness:
    results = [v.run() for v in variants.values() if isinstance(v, Variant)]
    found = [tensor for result in results if isinstance(result, tuple) for tensor in result]
    return agreement(found, expected * len(results), place, "float64")


def _operation(num_tokens: int, kind: str) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        shape, grads = (1, HEADS, num_tokens, WIDTH), kind == "both ways"
        query = place.randn(*shape, grad=grads)
        memories = [place.randn(SLOTS, WIDTH, std=WIDTH**-0.5, grad=grads) for _ in range(2)]
        grad, target = place.randn(*shape), torch.empty(shape, device=place.device, dtype=place.dtype)

        def run(options: dict[str, Any]) -> tuple[Tensor, ...]:
            out = external_attention(query, *memories, **options)
            return (out, *torch.autograd.grad(out, (query, *memories), grad)) if grads else (out,)

        def copies() -> None:
            # Forward reads the queries and writes the output; backward reads queries and gradient and writes another.
            target.copy_(query.detach())
            if grads:
                torch.add(query.detach(), grad, out=target)

        ours = _variants(external_attention, run)

        def check() -> Correctness:
            expected = references.with_gradients(references.external_attention, (query, *memories), grad)
            return _check(ours, expected if grads else expected[:1], place)

        return Built({**ours, "bytes moved": Variant("floor", copies)}, check)

    return build


def _gate(batch: int, num_tokens: int, channels: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        z, bias = place.randn(batch, num_tokens, channels), place.randn(num_tokens)
        weight = place.randn(num_tokens, num_tokens, std=num_tokens**-0.5)
        half = z[..., channels // 2 :].contiguous()
        spread, target = weight.expand(batch, -1, -1), torch.empty_like(half)

        def norm(x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:])

        ours = _variants(spatial_gate, lambda options: (spatial_gate(z, weight, bias, norm=norm, **options),))
        variants = {
            **ours,
            "product": Variant("floor", lambda: torch.bmm(spread, half)),
            "bytes moved": Variant("floor", lambda: torch.add(z[..., : channels // 2], half, out=target)),
        }
        return Built(variants, lambda: _check(ours, (references.gated(z, weight, bias),), place))

    return build


def _against_self(num_tokens: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        layers = {name: place.put(_external(**options)) for name, options in paths(external_attention).items()}
        attention = place.put(SelfAttention(DIM, num_heads=DIM // 64))
        x = place.randn(1, num_tokens, DIM)

        @torch.no_grad()
        def run(layer: torch.nn.Module) -> Tensor:
            return layer(x)

        ours: dict[str, Variant | Missing] = {}
        for name, layer in layers.items():
            layer.load_state_dict(layers["tokenmix"].state_dict())
            try:
                run(layer)
                ours[name] = Variant("ours", lambda m=layer: run(m))
            except UserError as error:
                ours[name] = Missing(str(error), "ours")

        @torch.no_grad()
        def check() -> Correctness:
            wide = _external(backend="eager", device=x.device, dtype=torch.float64)
            wide.load_state_dict(layers["tokenmix"].state_dict())
            found = [v.run() for v in ours.values() if isinstance(v, Variant)]
            return agreement(found, [wide(x.double())] * len(found), place, "the eager layer in float64")

        return Built({**ours, "self-attention, fused": Variant("baseline", lambda: run(attention))}, check)

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
            targets=tuple(Target("at most", 1 / SHARE, name, "bytes moved") for name in paths(external_attention))
            if kind == "forward"
            else (),
            devices=("cuda",),
            note="the floor copies as many bytes as must be moved; a ratio of 1.43 is 70 % of the bandwidth",
        )
        for num_tokens in (16384, 65536)
        for kind in ("forward", "both ways")
    ),
    *(
        Case(
            name=f"layer against self-attention, N {num_tokens}",
            group="roofline",
            shapes={"B": 1, "N": num_tokens, "D": DIM, "H": DIM // 64, "S": SLOTS},
            build=_against_self(num_tokens),
            targets=tuple(Target("at most", 1.0, name, "self-attention, fused") for name in paths(external_attention)),
            devices=("cuda",),
            note=f"every backend; predicted crossover 2 D + 256 = {2 * DIM + 256}",
        )
        for num_tokens in (1024, 2048, 4096, 16384)
    ),
    *(
        Case(
            name=f"gating unit, N {num_tokens}",
            group="roofline",
            shapes={"B": batch, "N": num_tokens, "C": 1536},
            build=_gate(batch, num_tokens, 1536),
            devices=("cuda",),
            note="bytes moved: both halves read, one written",
        )
        for batch, num_tokens in ((64, 196), (8, 1024))
    ),
]
