"""Which attention layers of a model a mixer replaces best."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from tokenmix.distillation.distilling import distill
from tokenmix.distillation.outputs import Fidelity, HeldOut, LossName, Output, OutputLoss, OutputReader, output_loss
from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer
from tokenmix.registry import Arguments
from tokenmix.swap.carrying import Carrying
from tokenmix.swap.probe import Example
from tokenmix.swap.registry import Where, find_sites
from tokenmix.swap.report import SwapRow, TableReport
from tokenmix.swap.swap import swap_attention


@dataclass(frozen=True)
class RankedLayer:
    """One attention layer: the fidelity of the model with this layer alone replaced, and what the layer costs."""

    name: str
    fidelity: Fidelity
    macs_before: int | None
    macs_after: int | None


@dataclass(frozen=True)
class FrontierPoint:
    """The model with the `count` best layers replaced: its fidelity and its multiply-adds, None if not known."""

    count: int
    fidelity: Fidelity
    macs: int | None


@dataclass(frozen=True, kw_only=True)
class LayerRanking(TableReport):
    """The attention layers of a model by how well a mixer replaces them, after a short fit.

    Attributes:
        mixer: what was put in.
        layers: the best first.
        frontier: of no layer, the best, the two best, and so on, with the mixers as they were fitted, not trained
            together.
        steps: of the fit.
        seconds: of the fit.
        names: of the layers in the model's own order.
    """

    mixer: str
    layers: tuple[RankedLayer, ...]
    frontier: tuple[FrontierPoint, ...]
    steps: int
    seconds: float
    names: tuple[str, ...]

    def best(self, count: int) -> list[str]:
        """Names of the best layers, for `swap_attention(where=...)`, in the model's own order."""
        chosen = {layer.name for layer in self.layers[:count]}
        return [name for name in self.names if name in chosen]

    def rows(self) -> list[list[str]]:
        table = [["layer", "loss", "cosine", "MACs of the layer", "up to here: cosine", "MACs of the model"]]
        for layer, point in zip(self.layers, self.frontier[1:], strict=True):
            costs = f"{_millions(layer.macs_before)} -> {_millions(layer.macs_after)}"
            alone = [f"{layer.fidelity.loss:.4f}", f"{layer.fidelity.cosine:.4f}", costs]
            table.append([layer.name, *alone, f"{point.fidelity.cosine:.4f}", _millions(point.macs)])
        return table

    def _about(self) -> str:
        return (
            f"{self.mixer}, the best layer first; each fitted alone for {self.steps} steps ({self.seconds:.0f} s) "
            f"and measured on {self.frontier[0].fidelity.rows:,} held-out rows"
        )


def rank_layers(
    model: nn.Module,
    mixer: str | type[Mixer],
    loader: Iterable[object],
    *,
    held_out: Iterable[object],
    where: Where = "*",
    output: Output = None,
    loss: LossName | OutputLoss = "cosine",
    steps: int = 100,
    lr: float = 1e-3,
    num_tokens: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    example_inputs: Example | None = None,
    mixer_kwargs: Arguments | None = None,
    drop: Literal["positions"] | None = None,
    temperature: float = 1.0,
    precision: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
) -> LayerRanking:
    """Rank a model's attention layers by how well a mixer replaces each of them alone.

    A mixer for each layer learns the layer's outputs on the model's own inputs to it, for a few steps, all layers at
    once and independent of each other. Then each is put in alone, and the model's loss against the original is
    measured. The model is not changed.

    Args:
        model: a model that `swap_attention` takes.
        mixer: a name of `tokenmix.list_mixers()`, or a class of mixers.
        loader: batches to fit on, as of `distill`.
        held_out: batches to measure on.
        where: the layers that are ranked, as of `swap_attention`.
        output: what is compared, as of `distill`.
        loss: by which layers are ranked, as of `distill`.
        steps: of the fit.
        lr: learning rate of the fit.
        num_tokens, img_size, example_inputs, mixer_kwargs, drop: as of `swap_attention`.
        temperature: T of "kl".
        precision: of the forward passes.
        seed: of the loader's order, where that is random.

    Returns:
        The ranking, with the frontier of fidelity against multiply-adds for the k best layers.
    """
    of_outputs = output_loss(loss, temperature)
    reader = OutputReader(output, next(model.parameters()).device, precision == "bf16")
    held = HeldOut.of(model, held_out, reader)
    fitted = copy.deepcopy(model)
    swap = swap_attention(
        fitted,
        mixer,
        where,
        num_tokens=num_tokens,
        img_size=img_size,
        example_inputs=example_inputs,
        mixer_kwargs=mixer_kwargs,
        drop=drop,
    )
    if any(isinstance(module, Carrying) for module in fitted.modules()):
        raise UserError(
            f"{swap.mixer} takes the scores of the layer before it, so no layer can be replaced alone; leave out "
            "residual and scores_from"
        )
    names = {site.name: site.names for site in find_sites(model)}
    rows = {row.name: row for row in swap.rows}
    fit = distill(
        model,
        fitted,
        loader,
        output=output,
        loss=None,
        layers=list(rows),
        steps=steps,
        lr=lr,
        train_only="mixers",
        precision=precision,
        seed=seed,
    )

    def fidelity(replaced: Sequence[str]) -> Fidelity:
        """Of the model with these layers replaced."""
        student = copy.deepcopy(model)
        for name in replaced:
            for one in names[name]:
                student.set_submodule(one, fitted.get_submodule(name))
        return held.fidelity(student, reader, of_outputs)

    def macs(replaced: Sequence[SwapRow]) -> int | None:
        """Of the model with these layers replaced."""
        if swap.macs_before is None or any(row.macs_before is None or row.macs_after is None for row in replaced):
            return None
        return swap.macs_before + sum((row.macs_after or 0) - (row.macs_before or 0) for row in replaced)

    alone = {name: fidelity([name]) for name in rows}
    order = sorted(rows, key=lambda name: alone[name].loss)
    counts = range(len(order) + 1)
    return LayerRanking(
        mixer=swap.mixer,
        layers=tuple(RankedLayer(name, alone[name], rows[name].macs_before, rows[name].macs_after) for name in order),
        frontier=tuple(FrontierPoint(k, fidelity(order[:k]), macs([rows[name] for name in order[:k]])) for k in counts),
        steps=fit.steps,
        seconds=fit.seconds,
        names=tuple(rows),
    )


def _millions(macs: int | None) -> str:
    return "?" if macs is None else f"{macs / 1e6:,.1f} M"
