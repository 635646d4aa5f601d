"""CPU only: copies of whole networks by tokenmix.optimize, in int8 and float32, against the networks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tokenmix
from suite.harness import Built, Case, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness

__all__ = ["CASES"]

BATCH = 8

BOUND = 0.03
"""Error of a logit relative to the largest: 8 bits in every layer, of weights that were drawn and not trained. What
it costs in accuracy is measured on trained networks (LOG.md)."""


def _build(name: str) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        model = tokenmix.create_model(name)
        for key, value in model.named_parameters():
            # They start at about 0, where every network agrees with every other.
            if key.endswith(("gating.weight", "head.weight")):
                nn.init.normal_(value, std=0.02)
        place.put(model)
        images = place.randn(BATCH, 3, 224, 224)
        small = tokenmix.optimize(model, images, dtype="int8")
        fast = tokenmix.optimize(model, images)

        @torch.no_grad()
        def run(net: nn.Module) -> Tensor:
            return net(images)

        def check() -> Correctness:
            return agreement(run(small), run(model), place, "the same network in float32", bound=BOUND)

        variants = {
            "tokenmix, int8": Variant("ours", lambda: run(small)),
            "tokenmix, optimized float32": Variant("ours", lambda: run(fast)),
            "tokenmix, float32": Variant("baseline", lambda: run(model)),
        }
        return Built(variants, check)

    return build


CASES = [
    Case(
        name=f"{name}, forward",
        group="int8",
        shapes={"B": BATCH, "pixels": 224},
        build=_build(name),
        targets=(
            Target("at least", 1.5, "tokenmix, int8", "tokenmix, float32"),
            Target("at least", 1.15, "tokenmix, optimized float32", "tokenmix, float32"),
        ),
        devices=("cpu",),
        seconds=10.0,
    )
    for name in ("gmlp_small", "eamlp_7")
]
