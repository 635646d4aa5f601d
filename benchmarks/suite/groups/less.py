"""Less-attention: the factored form against the dense one, and against attention with queries and keys of its own."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor

from suite import references
from suite.harness import Built, Case, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness
from tokenmix.layers import LessAttention, SelfAttention
from tokenmix.ops import Scores, attention_from_scores, next_scores, transform_scores

__all__ = ["CASES"]


def _transform(place: Place, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Theta, its bias, Psi, its bias: near the identity, where training starts."""
    eye = torch.eye(num_tokens, device=place.device, dtype=place.dtype)
    theta, psi = (eye + place.randn(num_tokens, num_tokens, std=0.02) for _ in range(2))
    return theta, place.randn(num_tokens), psi, place.randn(num_tokens)


def _heads(place: Place, batch: int, num_tokens: int, heads: int, width: int) -> list[Tensor]:
    """Query, scaled, key and value (B, H, N, d), in memory as a projection leaves them: (B, N, H, d)."""
    deviations = (width**-0.5, 1.0, 1.0)
    return [place.randn(batch, num_tokens, heads, width, std=std).transpose(1, 2) for std in deviations]


def _core(batch: int, heads: int, num_tokens: int, width: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        query, key, value = _heads(place, batch, num_tokens, heads, width)
        transform, nothing = _transform(place, num_tokens), query[..., :0]
        scores = query @ key.mT
        x, weight = place.randn(batch, num_tokens, heads * width), place.randn(2 * heads * width, heads * width)
        flat = place.randn(batch, num_tokens, heads * width)
        mixing = [(matrix.expand(batch, -1, -1), flat) for matrix in (transform[0], transform[2])]
        rows = place.randn(batch * heads, num_tokens, width)
        products = references.bare_products([*mixing, (rows, rows.mT), (scores.flatten(0, 1), rows)])

        @torch.no_grad()
        def factored() -> Tensor:
            return attention_from_scores(next_scores(Scores(query, key), *transform), value)

        @torch.no_grad()
        def dense() -> Tensor:
            return attention_from_scores(Scores(nothing, nothing, transform_scores(scores, *transform)), value)

        @torch.no_grad()
        def printed() -> Tensor:
            theta, theta_bias, psi, psi_bias = transform
            mixed = F.linear(F.linear(scores, theta, theta_bias).mT, psi, psi_bias).mT
            return torch.softmax(mixed, dim=-1) @ value

        @torch.no_grad()
        def fresh() -> Tensor:
            both = F.linear(x, weight).unflatten(-1, (2, heads, width)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(both[0], both[1], value)

        def check() -> Correctness:
            expected = references.dense_less_attention(query.double() @ key.double().mT, *transform, value)
            return agreement((factored(), dense(), printed()), (expected, expected, expected), place, "float64")

        variants = {
            "tokenmix": Variant("ours", factored),
            "dense": Variant("baseline", printed),
            "our dense": Variant("baseline", dense),
            "fresh q, k": Variant("baseline", fresh),
            "its products": Variant("floor", products),
        }
        return Built(variants, check)

    return build


def _layer(place: Place) -> Built:
    less = place.put(LessAttention(320, 196, num_heads=5, scores_from="previous"))
    fresh, theirs = place.put(SelfAttention(320, num_heads=5)), place.put(Attention(320, num_heads=5, qkv_bias=True))
    assert isinstance(less, LessAttention)
    with torch.no_grad():
        for name, value in zip(("theta", "theta_bias", "psi", "psi_bias"), _transform(place, 196), strict=True):
            getattr(less, name).copy_(value)
    x = place.randn(4, 196, 320)
    carry = Scores(*_heads(place, 4, 196, 5, 64)[:2])

    @torch.no_grad()
    def ours() -> Tensor:
        return less.mix(x, carry)[0]

    @torch.no_grad()
    def run(layer: Callable[[Tensor], Tensor]) -> Tensor:
        return layer(x)

    @torch.no_grad()
    def check() -> Correctness:
        transform = (less.theta, less.theta_bias, less.psi, less.psi_bias)
        value = less.v(x).unflatten(2, (5, 64)).transpose(1, 2)
        scores = carry.query.double() @ carry.key.double().mT
        mixed = references.dense_less_attention(scores, *transform, value).transpose(1, 2).flatten(2)
        expected = F.linear(mixed, less.proj.weight.double(), less.proj.bias.double())
        return agreement(ours(), expected, place, "float64")

    variants = {
        "tokenmix": Variant("ours", ours),
        "fresh layer": Variant("baseline", lambda: run(fresh)),
        "timm Attention": Variant("peer", lambda: run(theirs)),
    }
    return Built(variants, check)


CASES = [
    Case(
        name=f"core, N {num_tokens}",
        group="less",
        shapes={"B": 4, "H": heads, "N": num_tokens, "d": 64},
        build=_core(4, heads, num_tokens, 64),
        targets=(Target("at least", limit, other="dense"),),
        note="dense is the printed rule, two linear maps and a softmax; our dense makes fewer copies; both have "
        "their scores given; fresh has q, k projections and fused attention; its products are two mixings, scores and "
        "values alone",
    )
    for heads, num_tokens, limit in ((5, 196, 1.4), (4, 784, 5.0))
]
CASES += [
    Case(
        name="layer, N 196",
        group="less",
        shapes={"B": 4, "H": 5, "N": 196, "D": 320},
        build=_layer,
        targets=(Target("at most", 1.0, other="fresh layer"),),
        note="with value and output projections",
    )
]
