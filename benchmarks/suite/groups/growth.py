"""Time over the number of tokens: exponents, and where multi-head external attention becomes the cheaper."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from suite.harness import Built, Case, Target, Variant, agreement, derived
from suite.place import Place
from suite.results import Correctness, Measured, Role, Row
from tokenmix.layers import ExternalAttention, MultiHeadExternalAttention, SelfAttention
from tokenmix.layers.base import Mixer
from tokenmix.profiling.cost import measured_crossover

__all__ = ["CASES", "derive", "exponent"]

DIM, HEADS = 256, 4
LINEAR = (4096, 8192, 16384, 32768, 65536)
QUADRATIC = (1024, 2048, 4096, 8192)
CROSSING = (256, 512, 768, 1024, 2048, 4096)
ROLES: dict[str, Role] = {"self": "baseline"}


def _layers(place: Place) -> dict[str, Mixer]:
    layers = {
        "external": ExternalAttention(DIM),
        "multi-head external": MultiHeadExternalAttention(DIM, num_heads=HEADS),
        "self": SelfAttention(DIM, num_heads=HEADS),
    }
    return {name: place.put(layer) for name, layer in layers.items()}


def _run(layer: Mixer, x: Tensor) -> Callable[[], Tensor]:
    @torch.no_grad()
    def run() -> Tensor:
        return layer(x)

    return run


def _check(place: Place, names: Sequence[str], num_tokens: int) -> Correctness:
    """What the maps say, multiplied out in float64."""
    layers, x = _layers(place), place.randn(1, num_tokens, DIM)
    with torch.no_grad():
        found = [layers[name](x) for name in names]
        expected = [_by_map(layers[name].double(), x.double()) for name in names]
    return agreement(found, expected, place, f"float64, by the maps, {num_tokens} tokens")


def _by_map(layer: Mixer, x: Tensor) -> Tensor:
    weights = layer.attention_map(x)
    if isinstance(layer, SelfAttention):
        value = layer.qkv(x).unflatten(-1, (3, HEADS, -1))[:, :, 2].transpose(1, 2)
        return layer.proj((weights @ value).transpose(1, 2).flatten(2))
    assert isinstance(layer, ExternalAttention | MultiHeadExternalAttention)
    memory = layer.memory
    assert memory.value_memory is not None
    mixed = weights @ memory.value_memory + (0.0 if memory.value_bias is None else memory.value_bias)
    return layer.proj(mixed.transpose(1, 2).flatten(2))


def _alone(name: str, sizes: Sequence[int]) -> Callable[[Place], Built]:
    """One layer at several sizes, in turns."""

    def build(place: Place) -> Built:
        layer, role = _layers(place)[name], ROLES.get(name, "ours")
        variants = {f"N {n}": Variant(role, _run(layer, place.randn(1, n, DIM))) for n in sizes}
        return Built(variants, lambda: _check(place, (name,), 512))

    return build


def _pair(num_tokens: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        layers, x = _layers(place), place.randn(1, num_tokens, DIM)
        variants = {
            "tokenmix": Variant("ours", _run(layers["multi-head external"], x)),
            "self-attention": Variant("baseline", _run(layers["self"], x)),
        }
        return Built(variants, lambda: _check(place, ("multi-head external", "self"), min(num_tokens, 512)))

    return build


def exponent(seconds: dict[int, float]) -> float:
    """Slope of log time over log N, by least squares."""
    xs, ys = [math.log(n) for n in seconds], [math.log(s) for s in seconds.values()]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys)) / sum((x - x0) ** 2 for x in xs)


def derive(rows: list[Row], device: str) -> list[Row]:
    """The exponents and the crossover of the rows that were measured on a device."""
    done = {row.name: row for row in rows if row.status == "measured"}
    out = []
    for name, sizes, targets in (
        ("external alone", LINEAR, (Target("at most", 1.1),)),
        ("self alone", QUADRATIC, ()),
    ):
        if name in done:
            slope = exponent({n: _median(v) for n, v in zip(sizes, done[name].variants, strict=True)})
            about = f"slope of log time over log N, N {sizes[0]:,} to {sizes[-1]:,}"
            values: dict[str, tuple[Role, float]] = {"tokenmix": ("ours", slope)}
            out.append(derived(done[name], f"{name}, exponent", "exponent", values, targets, about, device))
    pairs = {n: done[f"multi-head against self, N {n}"] for n in CROSSING if f"multi-head against self, N {n}" in done}
    if len(pairs) == len(CROSSING):
        out.append(_crossover(pairs, device))
    return out


def _crossover(pairs: dict[int, Row], device: str) -> Row:
    ours, other = ({n: _median(row.variants[i]) for n, row in pairs.items()} for i in (0, 1))
    place = measured_crossover(ours, other)
    values: dict[str, tuple[Role, float]] = {"2 D + 256, predicted": ("baseline", 2.0 * DIM + 256)}
    note = f"no crossing between {CROSSING[0]} and {CROSSING[-1]} tokens"
    if place is not None:
        values = {"tokenmix": ("ours", float(place)), **values}
        note = "tokens from which multi-head external attention is faster than self-attention"
    return derived(pairs[CROSSING[0]], "multi-head against self, crossover", "tokens", values, (), note, device)


def _median(variant: Measured) -> float:
    assert variant.median is not None
    return variant.median


CASES = [
    Case(name="external alone", group="growth", shapes={"B": 1, "D": DIM, "S": 64}, build=_alone("external", LINEAR)),
    Case(name="self alone", group="growth", shapes={"B": 1, "D": DIM, "H": HEADS}, build=_alone("self", QUADRATIC)),
    *(
        Case(
            name=f"multi-head against self, N {num_tokens}",
            group="growth",
            shapes={"B": 1, "N": num_tokens, "D": DIM, "H": HEADS, "S": 64},
            build=_pair(num_tokens),
            seconds=2.0,
        )
        for num_tokens in CROSSING
    ),
]
