"""CPU only: copies of whole networks by tokenmix.optimize, in int8 and float32, against the networks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenmix
from suite.harness import Built, Case, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness
from tokenmix.inference.operators import largest_weight
from tokenmix.layers import GatedMLP

__all__ = ["CASES"]

BATCH = 8

BOUND = 0.03
"""Error of a logit relative to the largest: 8 bits in every layer, of weights that were drawn and not trained. What
it costs in accuracy is measured on trained networks (dev/LOG.md)."""


def _bare_gmlp(model: nn.Module, batch: int) -> Callable[[], None]:
    """The operations of gmlp_small's blocks in turn, products and GELU into memory that is there already."""
    blocks = [module for module in model.modules() if isinstance(module, GatedMLP)]
    x = torch.randn(batch, blocks[0].num_tokens, blocks[0].dim)
    hidden = torch.empty(*x.shape[:2], blocks[0].hidden)
    active, gate, out = torch.empty_like(hidden), torch.empty_like(hidden[..., ::2]), torch.empty_like(x)

    @torch.no_grad()
    def run() -> None:
        for block in blocks:
            inside = F.layer_norm(x, x.shape[-1:])
            _linear(block.proj_in, inside, hidden)
            torch.ops.aten.gelu.out(hidden, out=active)
            content, gated = active.chunk(2, -1)
            weight = block.gating.weight.expand(batch, -1, -1)
            torch.baddbmm(block.gating.bias[:, None], weight, F.layer_norm(gated, gate.shape[-1:]), out=gate)
            _linear(block.proj_out, gate.mul_(content), out)
            out.add_(x)

    return run


def _linear(layer: nn.Linear, x: Tensor, out: Tensor) -> None:
    torch.addmm(layer.bias, x.flatten(0, 1), layer.weight.mT, out=out.flatten(0, 1))


def _build(name: str) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        model = tokenmix.create_model(name)
        for key, value in model.named_parameters():
            # They start at about 0, where every network agrees with every other.
            if key.endswith(("gating.weight", "head.weight")):
                nn.init.normal_(value, std=0.02)
        place.put(model)
        images = place.randn(BATCH, 3, 224, 224)
        small = tokenmix.optimize(model, images, dtype="int8", measure=False)
        fast = tokenmix.optimize(model, images, measure=False)

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
        if name == "gmlp_small":
            variants["bare operations"] = Variant("floor", _bare_gmlp(model, BATCH))
        return Built(variants, check)

    return build


CASES = [
    Case(
        name=f"{name}, forward",
        group="int8",
        shapes={"B": BATCH, "pixels": 224},
        build=_build(name),
        targets=(
            *([Target("at least", 1.5, "tokenmix, int8", "tokenmix, float32")] if largest_weight() == 127 else []),
            Target("at least", 1.15, "tokenmix, optimized float32", "tokenmix, float32", floor="bare operations"),
        ),
        devices=("cpu",),
        seconds=10.0,
        note="int8 has a target where the CPU adds 8-bit products exactly (VNNI, AMX); the floor has the operations of "
        "gmlp_small's blocks and nothing else",
    )
    for name in ("gmlp_small", "eamlp_7")
]
