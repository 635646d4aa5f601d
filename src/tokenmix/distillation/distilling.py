"""Train a student on its teacher's outputs, and rank attention layers by how well a mixer replaces them."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from tokenmix.distillation.outputs import (
    Fidelity,
    HeldOut,
    LossName,
    Output,
    OutputLoss,
    OutputReader,
    layer_loss,
    mask_of,
    output_loss,
    watched_layers,
)
from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Mixer
from tokenmix.ops.checks import check_choice, check_numbers, check_whole
from tokenmix.registry import Arguments
from tokenmix.swap.carrying import Carrying
from tokenmix.swap.inserting import InsertedBlock
from tokenmix.swap.probe import Example, evaluating
from tokenmix.swap.registry import Where, find_sites
from tokenmix.swap.report import SwapRow, TableReport
from tokenmix.swap.swap import swap_attention


@dataclass(frozen=True)
class CurvePoint:
    """Mean training loss since the previous point, and held-out fidelity if there are held-out samples."""

    step: int
    loss: float
    held_out: Fidelity | None


@dataclass(frozen=True, kw_only=True)
class DistillReport(TableReport):
    """Result of `distill`.

    Attributes:
        student: the given model, trained in place.
        curve: points during training.
        before, after: held-out fidelity; None without held-out samples.
        steps: optimiser steps.
        trained: number of trained parameters.
        seconds: training time, without evaluation.
        cpu_seconds: CPU time of this process in the same period, over all cores.
        interrupted: Ctrl-C ended the training; the student keeps the weights at that point.
    """

    student: nn.Module
    curve: tuple[CurvePoint, ...]
    before: Fidelity | None
    after: Fidelity | None
    steps: int
    trained: int
    seconds: float
    cpu_seconds: float
    interrupted: bool

    def rows(self) -> list[list[str]]:
        shown = ["cosine", "mse", "agreement"] if self.before else []
        shown += ["neighbours"] if self.before and self.before.neighbours is not None else []
        table = [["step", "loss", *shown]]
        points = [] if self.before is None else [("0", "", self.before)]
        points += [(f"{point.step}", f"{point.loss:.4f}", point.held_out) for point in self.curve]
        for step, loss, held in points:
            table.append([step, loss, *(f"{getattr(held, name):.4f}" for name in shown)])
        return table

    def _about(self) -> str:
        ended = "interrupted after" if self.interrupted else "after"
        on = "" if self.before is None else f"; columns from cosine on: {self.before.rows:,} held-out rows"
        times = f"{self.seconds:.0f} s ({self.cpu_seconds:.0f} CPU seconds)"
        worse = ""
        if self.before and self.after and self.after.loss > self.before.loss:
            worse = f"; the held-out loss rose from {self.before.loss:.4f} to {self.after.loss:.4f}: give a smaller lr"
        return f"{ended} {self.steps} steps, {times}; {self.trained:,} numbers trained{on}{worse}"


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Trained = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


def distill(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable[object],
    *,
    output: Output = None,
    loss: LossName | OutputLoss | None = "cosine",
    layers: str | Sequence[str] | None = None,
    layer_weight: float = 1.0,
    steps: int | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    warmup: float = 0.05,
    train_only: Trained | None = None,
    held_out: Iterable[object] | None = None,
    report_every: int | None = None,
    temperature: float = 1.0,
    precision: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> DistillReport:
    """Train a student, in place, to reproduce its teacher's outputs on unlabelled samples.

        loss(s(x), t(x)) + w 1/L sum_l |S_l(x_l) - T_l(x_l)|^2 / |T_l(x_l)|^2

    x_l is the teacher's input to its layer l, so each layer learns independently. The optimiser is AdamW with a linear
    warm-up, a cosine schedule to 0 and gradient clipping at norm 1. Dropout is off. The teacher does not change. After
    Ctrl-C the student keeps the current weights, and the report says so.

    Args:
        teacher: the model to imitate.
        student: the model to train, for example a copy of the teacher after `swap_attention`.
        loader: batches, repeated as needed. A batch is a tensor, a tuple that starts with the input, or a dict of
            arguments; labels are not used.
        output: the compared output. None: the output if it is a tensor, else `logits` or `last_hidden_state`. A name:
            that entry of the output. "mean": the mean over tokens in `attention_mask`, a sentence embedding; "cls": the
            first token. A function of output and batch: its result. Padding tokens do not count.
        loss: "cosine", 1 - cos over rows; "mse", the squared error over the teacher's mean square; "kl", of logits at
            `temperature`; a function of both outputs; None for layers only.
        layers: names of modules, or a glob, whose outputs are also matched; a glob takes the outermost of nested
            modules.
        layer_weight: w.
        steps: optimiser steps (default: one pass through the loader); 0 only measures.
        lr: learning rate after the warm-up.
        weight_decay: of AdamW.
        warmup: fraction of the steps.
        train_only: globs over parameter names, or a function of name and parameter; "mixers" for the token mixers'
            parameters (default: all with `requires_grad`).
        held_out: batches for fidelity; they do not affect training.
        report_every: steps between points of the curve (default: a tenth of all steps).
        temperature: T of "kl".
        precision: of the forward passes; "bf16" uses autocast.
        seed: of the loader's order, if it is random.
        progress: called with a line for each point of the curve.

    Returns:
        The report, with held-out fidelity before and after.
    """
    if isinstance(loader, Tensor):
        raise UserError("the loader is one tensor, and must give batches; give images.split(32), or a DataLoader")
    if steps is None and not isinstance(loader, Sized):
        raise UserError("the loader does not say how many batches it has; give steps=")
    total = len(loader) if steps is None else steps  # type: ignore[arg-type]
    check_whole(0, steps=total)
    check_whole(report_every=report_every or 1)
    check_numbers(0.0, lr=lr, weight_decay=weight_decay, warmup=warmup, layer_weight=layer_weight)
    check_numbers(temperature=temperature)
    if temperature <= 0:
        raise UserError(f"temperature must be positive, got {temperature:g}; 1 leaves the logits as they are")
    check_choice("precision", precision, ("fp32", "bf16"))
    names = _layer_names(teacher, student, layers)
    if loss is None and not names:
        raise UserError("loss=None trains layers alone; name them by layers=, or give a loss")
    device, other = (next((p.device for p in model.parameters()), None) for model in (student, teacher))
    if teacher is student or device is None:
        what = "the same model as the teacher" if teacher is student else "without weights"
        raise UserError(f"the student is {what}; give a copy.deepcopy of the teacher in which attention was swapped")
    if device != other:
        raise UserError(f"the student is on {device} and the teacher on {other}; move both to one device")
    reader = OutputReader(output, device, precision == "bf16")
    of_outputs = output_loss("cosine" if loss is None else loss, temperature)

    def objective(batch: object) -> Tensor:
        batch = reader.moved(batch)
        with watched_layers(teacher, names) as calls:
            wanted = reader(teacher, batch)
        value = wanted.new_zeros((), dtype=torch.float32)
        if loss is not None:
            value = value + of_outputs(reader(student, batch), wanted, mask_of(teacher, batch, wanted))
        if names:
            if unused := set(names) - {call.name for call in calls}:
                raise UserError(
                    f"the forward pass does not call {', '.join(sorted(unused))}; name layers that it calls"
                )
            with reader.autocast():
                value = value + layer_weight * layer_loss(student, calls, partial(mask_of, teacher, batch))
        return value

    def fidelity() -> Fidelity | None:
        return None if held is None else held.fidelity(student, reader, of_outputs)

    held: HeldOut | None = None
    every, curve, since, seconds, cpu_seconds = report_every or max(1, total // 10), [], [], 0.0, 0.0
    step, interrupted = 0, False
    with torch.random.fork_rng(), evaluating(teacher), _learning(student, train_only) as parameters:
        torch.manual_seed(seed)
        trained = set(map(id, parameters))
        if shared := next((name for name, p in teacher.named_parameters() if id(p) in trained), None):
            raise UserError(
                f"training would change the teacher, which shares {shared} with the student; deepcopy the teacher "
                "before the swap, or leave the parameter out by train_only="
            )
        held = None if held_out is None else HeldOut.of(teacher, held_out, reader)
        before = fidelity()
        optimizer, batches = torch.optim.AdamW(parameters, weight_decay=weight_decay), _endless(loader)
        try:
            while step < total:
                wall, cpu = time.perf_counter(), time.process_time()
                # Linear warm-up, then cosine decay.
                rate = min(1.0, (step + 1) / max(1.0, warmup * total)) * 0.5 * (1 + math.cos(math.pi * step / total))
                for group in optimizer.param_groups:
                    group["lr"] = lr * rate
                value = objective(next(batches))
                if not value.isfinite():
                    raise UserError(f"the loss is {value.item()} at step {step + 1}; give a smaller lr than {lr:g}")
                optimizer.zero_grad()
                value.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                step += 1
                seconds += time.perf_counter() - wall
                cpu_seconds += time.process_time() - cpu
                since.append(value.detach())
                if step % every == 0 or step == total:
                    curve.append(CurvePoint(step, torch.stack(since).mean().item(), fidelity()))
                    since.clear()
                    if progress is not None:
                        held_now = curve[-1].held_out
                        beside = "" if held_now is None else f", held-out cosine {held_now.cosine:.4f}"
                        if held_now is not None and held_now.neighbours is not None:
                            beside += f", neighbours {held_now.neighbours:.3f}"
                        progress(f"step {step} of {total}: loss {curve[-1].loss:.4f}{beside}, {seconds:.0f} s")
        except KeyboardInterrupt:
            interrupted = True
        reached = bool(curve) and curve[-1].step == step
        return DistillReport(
            student=student,
            curve=tuple(curve),
            before=before,
            after=curve[-1].held_out if reached else fidelity(),
            steps=step,
            trained=sum(p.numel() for p in parameters),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            interrupted=interrupted,
        )


def _layer_names(teacher: nn.Module, student: nn.Module, layers: str | Sequence[str] | None) -> list[str]:
    if layers is None:
        return []
    theirs = {name for name, _ in student.named_modules()}
    both = [name for name, _ in teacher.named_modules() if name in theirs and name]
    if not isinstance(layers, str):
        for name in layers:
            if name not in both:
                raise unknown_name("module of teacher and student", name, both)
        return list(layers)
    found: list[str] = []
    for name in both:
        if fnmatchcase(name, layers) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    if not found:
        raise UserError(f"layers={layers!r} matches no module of both models; give names of their named_modules()")
    return found


def _endless(loader: Iterable[object]) -> Iterator[object]:
    seen = 0
    while True:
        before = seen
        for batch in loader:
            seen += 1
            yield batch
        if seen == before:
            raise UserError(
                f"the loader ended after {seen} batches and cannot be read again; give a list or a DataLoader, or "
                "fewer steps"
                if seen
                else "the loader has no batch; give one with samples"
            )


@contextmanager
def _learning(student: nn.Module, train_only: Trained | None) -> Iterator[list[nn.Parameter]]:
    """The trained parameters; freezes the others, turns dropout off, and trains batch norms whose weights train."""
    named = list(student.named_parameters())
    if train_only is None:
        chosen = [p for _, p in named if p.requires_grad]
    elif callable(train_only):
        chosen = [p for name, p in named if train_only(name, p)]
    elif train_only == "mixers":
        new = (module for module in student.modules() if isinstance(module, Mixer | InsertedBlock))
        inside = {id(p) for module in new for p in module.parameters()}
        chosen = [p for _, p in named if id(p) in inside]
    else:
        globs = [train_only] if isinstance(train_only, str) else train_only
        chosen = [p for name, p in named if any(fnmatchcase(name, glob) for glob in globs)]
    if not chosen:
        what = "no parameter needs a gradient" if train_only is None else f"train_only={train_only!r} matches nothing"
        raise UserError(f"{what}, so there is nothing to train; parameters are {named[0][0]}, ..., {named[-1][0]}")
    frozen = [p for p in student.parameters() if p.requires_grad and not any(p is one for one in chosen)]
    thawed = [p for p in chosen if not p.requires_grad]
    with evaluating(student):
        for parameter in (*frozen, *thawed):
            parameter.requires_grad_(not parameter.requires_grad)
        for module in student.modules():
            if isinstance(module, BATCH_NORMS) and any(p.requires_grad for p in module.parameters()):
                module.training = True
        try:
            yield chosen
        finally:
            for parameter in (*frozen, *thawed):
                parameter.requires_grad_(not parameter.requires_grad)
            for parameter in chosen:
                parameter.grad = None


@dataclass(frozen=True)
class RankedLayer:
    """Fidelity of the model with only this attention layer replaced, and multiply-adds of the layer."""

    name: str
    fidelity: Fidelity
    macs_before: int | None
    macs_after: int | None


@dataclass(frozen=True)
class FrontierPoint:
    """The model with the `count` best layers replaced: fidelity, and multiply-adds (None if unknown)."""

    count: int
    fidelity: Fidelity
    macs: int | None


@dataclass(frozen=True, kw_only=True)
class LayerRanking(TableReport):
    """Attention layers ranked by how well a mixer replaces them after a short fit.

    Attributes:
        mixer: the mixer.
        layers: the layers, best first.
        frontier: models with the 0, 1, 2, ... best layers replaced; the fitted mixers are not trained together.
        steps: of the fit.
        seconds: of the fit.
        names: of the layers, in model order.
    """

    mixer: str
    layers: tuple[RankedLayer, ...]
    frontier: tuple[FrontierPoint, ...]
    steps: int
    seconds: float
    names: tuple[str, ...]

    def best(self, count: int) -> list[str]:
        """Names of the best layers, in model order, for `swap_attention(where=...)`."""
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
    """Rank a model's attention layers by how well a mixer replaces each of them.

    For each layer, a mixer learns the layer's outputs from the layer's own inputs. All mixers train at once and
    independently, for a few steps. Then each mixer alone replaces its layer, and the loss against the original model is
    measured. The model does not change.

    Args:
        model: a model that `swap_attention` accepts.
        mixer: a name of `tokenmix.list_mixers()`, or a mixer class.
        loader: batches for the fit, as in `distill`.
        held_out: batches for the measurement.
        where: layers to rank, as in `swap_attention`.
        output: the compared output, as in `distill`.
        loss: ranking criterion, as in `distill`.
        steps: of the fit.
        lr: learning rate of the fit.
        num_tokens, img_size, example_inputs, mixer_kwargs, drop: as in `swap_attention`; the default example is a
            sample of `held_out` if its batches are tensors.
        temperature: T of "kl".
        precision: of the forward passes.
        seed: of the loader's order, if it is random.

    Returns:
        The ranking, with the frontier of fidelity against multiply-adds for the k best layers.
    """
    of_outputs = output_loss(loss, temperature)
    reader = OutputReader(output, next(model.parameters()).device, precision == "bf16")
    held = HeldOut.of(model, held_out, reader)
    fitted = copy.deepcopy(model)
    first = held.batches[0][0] if isinstance(held.batches[0], list) else held.batches[0]
    if example_inputs is None and img_size is None and isinstance(first, Tensor):
        example_inputs = (first[:1],)
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
        student = copy.deepcopy(model)
        for name in replaced:
            for one in names[name]:
                student.set_submodule(one, fitted.get_submodule(name))
        return held.fidelity(student, reader, of_outputs)

    def macs(replaced: Sequence[SwapRow]) -> int | None:
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
