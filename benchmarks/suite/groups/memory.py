"""External attention on a million tokens in chunks: working memory forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suite import references
from suite.harness import Built, Case, Target, Variant, agreement, checked
from suite.place import Place
from suite.results import Correctness
from tokenmix.ops import external_attention

__all__ = ["CASES"]

WIDTH, SLOTS, CHUNK = 256, 64, 4096


def _ways(device: str) -> dict[str, dict[str, Any]]:
    """Arguments of external attention by name: in chunks, and on CUDA also by the kernel that needs none."""
    kernel = {"tokenmix, triton": {"backend": "triton"}} if device == "cuda" else {}
    return {"tokenmix": {"chunk_size": CHUNK}, **kernel}


def _both_ways(query: Tensor, memories: list[Tensor], grad: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    out = external_attention(query, *memories, **options)
    return (out, *torch.autograd.grad(out, (query, *memories), grad))


def _build(num_tokens: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        memories = [place.randn(SLOTS, WIDTH, std=WIDTH**-0.5, grad=True) for _ in range(2)]
        query = place.randn(1, num_tokens, WIDTH, grad=True)
        grad = place.randn(1, num_tokens, WIDTH)
        ways = _ways(place.device)

        def check(name: str) -> Correctness:
            # Gradients in float64 are taken on fewer tokens, since the reference writes every map.
            few = query.detach()[:, : 3 * CHUNK + 7].requires_grad_()
            few_grad = grad[:, : few.shape[1]]
            expected = references.with_gradients(references.external_attention, (few, *memories), few_grad)
            found = _both_ways(few, memories, few_grad, ways[name])
            places = torch.linspace(0, num_tokens - 1, 500, device=query.device).long()
            with torch.no_grad():
                whole = external_attention(query, *memories, **ways[name])[:, places]
            return agreement(
                (*found, whole),
                (*expected, _rows(query, memories, places)),
                place,
                "float64: with gradients on 12,295 tokens, 500 outputs among all",
            )

        returned = sum(t.numel() * t.element_size() for t in (query, query, *memories))
        ours = {name: Variant("ours", lambda o=way: _both_ways(query, memories, grad, o)) for name, way in ways.items()}
        left, correct = checked(ours, check)
        return Built(left, lambda: correct, deducted=returned)

    return build


@torch.no_grad()
def _rows(query: Tensor, memories: list[Tensor], places: Tensor) -> Tensor:
    """Some outputs in float64, the sums over all tokens taken in pieces."""
    keys, values = (memory.double() for memory in memories)
    pieces = [torch.logsumexp(piece.double() @ keys.mT, dim=-2) for piece in query.split(1 << 16, dim=1)]
    offset = torch.logsumexp(torch.stack(pieces), dim=0)
    return torch.softmax(query[:, places].double() @ keys.mT - offset.unsqueeze(-2), dim=-1) @ values


CASES = [
    Case(
        name=f"both ways, N {num_tokens:,}",
        group="memory",
        shapes={"B": 1, "N": num_tokens, "d": WIDTH, "S": SLOTS, "chunk": CHUNK},
        build=_build(num_tokens),
        targets=(Target("at most", 20e6, devices=("cpu", "cuda")),) if num_tokens == 1_000_000 else (),
        quantity="bytes",
        note="beyond inputs, outputs and their gradients",
    )
    for num_tokens in (100_000, 1_000_000)
]
