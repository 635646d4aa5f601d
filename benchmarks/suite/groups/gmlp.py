"""gMLP-S at 224 px and its gating unit, against timm's with the same weights."""

import copy
from collections.abc import Callable, Mapping

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenmix
from suite import references
from suite.harness import Built, Case, Target, Variant, agreement
from suite.place import Place
from suite.results import Correctness, within
from tokenmix.checkpoints import convert
from tokenmix.layers import SpatialGatingUnit

__all__ = ["CASES"]

BATCHES = (1, 4, 8)
BATCH = BATCHES[-1]
TOKENS, WIDTH, DEPTH = 196, 256, 30

FACTOR = 4.0
"""Times timm's own error in a half type that a gradient of ours may err: the factor of the kernels' tests."""


def _twins(place: Place) -> tuple[nn.Module, nn.Module]:
    """Our network and timm's with the same weights; gates and head, which start at about 0, are drawn to be seen."""
    theirs = timm.create_model("gmlp_s16_224", pretrained=False)
    for name, value in theirs.named_parameters():
        if name.endswith(("gate.proj.weight", "head.weight")):
            nn.init.normal_(value, std=0.02)
    ours = tokenmix.create_model("gmlp_small")
    ours.load_state_dict(convert(theirs.state_dict(), source="timm-gmlp", to=ours))
    return place.put(ours), place.put(theirs)


def _products(place: Place, batch: int) -> Callable[[], None]:
    """The products of the blocks, without which there is no gmlp_small: U, the gate's, V."""
    rows, hidden = batch * TOKENS, 6 * WIDTH
    gate = place.randn(TOKENS, TOKENS).expand(batch, -1, -1)
    pairs = [
        (place.randn(1, rows, WIDTH), place.randn(1, hidden, WIDTH).mT),
        (gate, place.randn(batch, TOKENS, hidden // 2)),
        (place.randn(1, rows, hidden // 2), place.randn(1, WIDTH, hidden // 2).mT),
    ]
    return references.bare_products(pairs, times=DEPTH)


def _forward(mode: str, batch: int) -> Callable[[Place], Built]:
    def build(place: Place) -> Built:
        ours, theirs = _twins(place)
        images = place.randn(batch, 3, 224, 224)
        plain = theirs
        if mode == "compiled":
            ours, theirs = (torch.compile(model, dynamic=False) for model in (ours, theirs))

        @torch.no_grad()
        def run(model: Callable[[Tensor], Tensor]) -> Tensor:
            return model(images)

        def check() -> Correctness:
            expected = run(plain)
            return agreement((run(ours), run(theirs)), (expected, expected), place, "timm, same weights")

        variants = {
            "tokenmix": Variant("ours", lambda: run(ours)),
            "timm": Variant("peer", lambda: run(theirs)),
            "its products": Variant("floor", _products(place, batch)),
        }
        return Built(variants, check)

    return build


class _Step:
    """Forward, cross-entropy, backward and a step of AdamW."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model, self.images, self.labels = model.train(), images, labels
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name."""
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(self.images), self.labels).backward()
        return {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}

    def __call__(self) -> None:
        self.gradients()
        self.optimizer.step()


def _train(place: Place) -> Built:
    images = place.randn(BATCH, 3, 224, 224)
    labels = torch.arange(BATCH, device=place.device)
    ours, theirs = (_Step(model, images, labels) for model in _twins(place))

    def as_ours(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return convert(gradients, source="timm-gmlp", to=ours.model)

    def check() -> Correctness:
        found, expected = ours.gradients(), as_ours(theirs.gradients())
        if place.dtype != torch.float32:
            exact = _Step(copy.deepcopy(theirs.model).float(), images.float(), labels)
            return _as_good_as(found, expected, as_ours(exact.gradients()), place)
        return agreement([found[name] for name in expected], expected.values(), place, "timm's gradients, same weights")

    return Built({"tokenmix": Variant("ours", ours), "timm": Variant("peer", theirs)}, check)


def _as_good_as(
    found: Mapping[str, Tensor], theirs: Mapping[str, Tensor], exact: Mapping[str, Tensor], place: Place
) -> Correctness:
    """Largest error of a gradient, in times of timm's own for the same one: in 30 blocks a half type loses much."""
    against = f"timm's gradients in float32, same weights, in times of its own error in {place.dtype_name}"
    times, rounding = [], torch.finfo(place.dtype).eps
    for name, value in exact.items():
        ours, its = (agreement(side[name], value, place, against).error for side in (found, theirs))
        if ours is None or its is None:
            return Correctness(against, None, FACTOR, False)
        times.append(ours / (its + rounding))
    return Correctness(against, max(times), FACTOR, within(max(times), FACTOR))


def _unit(place: Place) -> Built:
    from timm.models.mlp_mixer import SpatialGatingUnit as TheirUnit

    ours, theirs = place.put(SpatialGatingUnit(1536, 196, init_std=0.02)), place.put(TheirUnit(1536, 196))
    theirs.load_state_dict(
        {f"norm.{k}": v for k, v in ours.norm.state_dict().items()}
        | {"proj.weight": ours.weight.detach(), "proj.bias": ours.bias.detach()}
    )
    z = place.randn(BATCH, 196, 1536)
    half = z[..., 768:].contiguous()
    weight = ours.weight.detach().expand(BATCH, -1, -1)

    @torch.no_grad()
    def run(unit: nn.Module) -> Tensor:
        return unit(z)

    def check() -> Correctness:
        expected = references.gated(z, ours.weight.detach(), ours.bias.detach())
        return agreement((run(ours), run(theirs)), (expected, expected), place, "float64")

    variants = {
        "tokenmix": Variant("ours", lambda: run(ours)),
        "timm": Variant("peer", lambda: run(theirs)),
        "product": Variant("floor", lambda: torch.bmm(weight, half)),
    }
    return Built(variants, check)


IMAGES = {"B": BATCH, "pixels": 224}
CASES = [
    Case(
        name=f"gmlp_small, forward, eager, batch {batch}",
        group="gmlp",
        shapes={"B": batch, "pixels": 224},
        build=_forward("eager", batch),
        targets=(Target("at least", 1.0, other="timm"),),
        seconds=12.0 if batch == BATCH else 4.0,
    )
    for batch in BATCHES
]
CASES += [
    Case(
        name="gmlp_small, forward, compiled",
        group="gmlp",
        shapes=IMAGES,
        build=_forward("compiled", BATCH),
        targets=(Target("at least", 1.15, other="timm"),),
        seconds=12.0,
        note="both by torch.compile; its products are those of the 30 blocks alone",
    ),
    Case(
        name="gmlp_small, training step, eager",
        group="gmlp",
        shapes=IMAGES,
        build=_train,
        targets=(Target("at least", 1.0, other="timm"),),
        seconds=20.0,
        note="forward, cross-entropy, backward, fused AdamW",
    ),
    Case(
        name="gating unit, forward",
        group="gmlp",
        shapes={"B": BATCH, "N": 196, "C": 1536},
        build=_unit,
        note="the floor is the product over tokens alone",
    ),
]
