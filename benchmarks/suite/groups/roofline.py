"""CUDA only: multi-head external attention against copying its bytes, and against fused self-attention."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from suite import references
from suite.harness import Built, Case, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness
from tokenmix.layers import MultiHeadExternalAttention, SelfAttention
from tokenmix.ops import external_attention

__all__ = ["CASES", "paths"]

SHARE = 0.7
"""Part of the memory's bandwidth to reach: reading the queries and writing the output is all that must be moved."""

HEADS, WIDTH, SLOTS, DIM = 32, 64, 64, 384


def paths() -> dict[str, dict[str, Any]]:
    """The arguments of every path that `external_attention` offers, by name."""
    if "backend" not in inspect.signature(external_attention).parameters:
        return {"tokenmix": {}}
    names = get_args(get_type_hints(external_attention)["backend"])
    return {"tokenmix": {}, **{f"tokenmix, {name}": {"backend": name} for name in names}}


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

        def check() -> Correctness:
            inputs = (query, *memories)
            expected = references.with_gradients(references.external_attention, inputs, grad)
            expected = expected if grads else expected[:1]
            found = [tensor for options in paths().values() for tensor in run(options)]
            return agreement(found, expected * len(paths()), place, "float64")

        variants = {name: Variant("ours", lambda o=options: run(o)) for name, options in paths().items()}
        return Built({**variants, "bytes moved": Variant("floor", copies)}, check)

    return build


def _against_self(num_tokens: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        external = place.put(MultiHeadExternalAttention(DIM, num_heads=DIM // 64))
        attention = place.put(SelfAttention(DIM, num_heads=DIM // 64))
        x = place.randn(1, num_tokens, DIM)

        @torch.no_grad()
        def run(layer: torch.nn.Module) -> Tensor:
            return layer(x)

        @torch.no_grad()
        def check() -> Correctness:
            wide = MultiHeadExternalAttention(DIM, num_heads=DIM // 64, device=x.device, dtype=torch.float64)
            wide.load_state_dict(external.state_dict())
            return agreement(run(external), wide(x.double()), place, "the same layer in float64")

        variants = {
            "tokenmix": Variant("ours", lambda: run(external)),
            "self-attention, fused": Variant("baseline", lambda: run(attention)),
        }
        return Built(variants, check)

    return build


CASES = [
    *(
        Case(
            name=f"32 heads, N {num_tokens}, {kind}",
            group="roofline",
            shapes={"B": 1, "H": HEADS, "N": num_tokens, "d": WIDTH, "S": SLOTS},
            build=_operation(num_tokens, kind),
            targets=tuple(Target("at most", 1 / SHARE, name, "bytes moved") for name in paths())
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
            targets=(Target("at most", 1.0, other="self-attention, fused"),),
            devices=("cuda",),
            note=f"predicted crossover 2 D + 256 = {2 * DIM + 256}",
        )
        for num_tokens in (1024, 2048, 4096, 16384)
    ),
]
