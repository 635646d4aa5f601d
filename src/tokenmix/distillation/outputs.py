"""Outputs of a student and its teacher: reading, losses and fidelity."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError, as_user_error, unknown_name
from tokenmix.registry import Arguments
from tokenmix.swap.probe import evaluating, watch_calls

Output = str | Callable[[Any, Any], Tensor] | None
LABELS = ("label", "labels")


@dataclass(frozen=True)
class OutputReader:
    """Runs a model on a batch on `device`, in bfloat16 autocast if `half`; `output` is as in `distill`."""

    output: Output
    device: torch.device
    half: bool = False

    def __call__(self, model: nn.Module, batch: object) -> Tensor:
        """The output to compare, for a tensor, a tuple (first entry) or a mapping (without labels and unknown keys)."""
        given = batch[0] if isinstance(batch, tuple | list) and batch else batch
        kwargs: Arguments = {}
        if isinstance(given, Mapping):
            parameters = inspect.signature(model.forward).parameters
            all_taken = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            kwargs = {k: v for k, v in given.items() if (all_taken or k in parameters) and k not in LABELS}
            if not kwargs:
                raise UserError(
                    f"a batch has {', '.join(map(str, given))}, and the forward pass of {type(model).__name__} takes "
                    f"{', '.join(parameters)}; rename the keys"
                )
        elif not isinstance(given, Tensor):
            raise UserError(
                f"a batch is a tensor, a tuple whose first is the input, or a dict of arguments, got "
                f"{type(batch).__name__}; change what the loader gives"
            )
        output = self.output
        shape = tuple(given.shape) if isinstance(given, Tensor) else ", ".join(map(str, given))
        failed = f"the forward pass of {type(model).__name__} on a batch {shape} fails with "
        with self.autocast():
            with as_user_error(failed, "; give batches, such as images (B, C, H, W), that teacher and student take"):
                result = model(**kwargs) if kwargs else model(given)
            if callable(output):
                found = output(result, batch)
            elif output in ("mean", "cls"):
                found = _named(result, "last_hidden_state")
                if found.dim() != 3:
                    raise UserError(f"output={output!r} pools tokens (B, N, D), got {tuple(found.shape)}; leave it out")
                if output == "cls":
                    found = found[:, 0]
                else:
                    mask = mask_of(model, batch, found)
                    weights = torch.ones_like(found[..., :1]) if mask is None else mask.unsqueeze(-1).to(found.dtype)
                    found = (found * weights).sum(1) / weights.sum(1).clamp_min(1)
            else:
                found = _named(result, output)
        if not isinstance(found, Tensor) or not found.is_floating_point():
            kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise UserError(
                f"output={output!r} gives {kind}; name an output that is a tensor of numbers, or a function"
            )
        return found

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def moved(self, batch: object) -> object:
        if isinstance(batch, Tensor):
            return batch.to(self.device)
        if isinstance(batch, Mapping):
            return {key: self.moved(value) for key, value in batch.items()}
        return [self.moved(value) for value in batch] if isinstance(batch, tuple | list) else batch


def mask_of(model: nn.Module, batch: object, output: Tensor) -> Tensor | None:
    """`attention_mask` of a batch, True = the token of the output (B, N, D) counts; None if all do.

    Models of sound, such as Wav2Vec2, shorten the mask as they shorten the sound. Outputs of a decoder have the mask of
    its tokens. Another mask of another length is not used, with a warning if it leaves tokens out.
    """
    given = batch[0] if isinstance(batch, tuple | list) and batch else batch
    name = "decoder_attention_mask" if isinstance(given, Mapping) and "decoder_input_ids" in given else "attention_mask"
    mask = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    count = output.shape[1] if output.dim() == 3 else mask.shape[1]
    if count == mask.shape[1]:
        return mask.bool()
    shorten: Any = getattr(model, "_get_feature_vector_attention_mask", None)
    if shorten is not None:
        return shorten(count, mask.long()).bool()
    if not mask.all():
        warnings.warn(
            f"an output has {count} tokens and {name} {mask.shape[1]}, so that padding counts; give batches without "
            "padding, or a function as output= that leaves it out",
            stacklevel=2,
        )
    return None


def _named(result: object, name: str | None) -> Any:
    if isinstance(result, Tensor):
        return result
    if isinstance(result, tuple | list):
        return result[0]
    found = dict(result) if isinstance(result, Mapping) else {}
    wanted = ("logits", "last_hidden_state") if name is None else (name,)
    key = next((key for key in wanted if key in found), None)
    if key is None:
        has = ", ".join(map(str, found)) or type(result).__name__
        raise UserError(
            f"the model returns {has}, and {' or '.join(wanted)} is not among them; name one by output=, or give a "
            "function of the result and the batch"
        )
    return found[key]


LossName = Literal["cosine", "mse", "kl"]
OutputLoss = Callable[[Tensor, Tensor], Tensor]


def output_loss(loss: LossName | OutputLoss, temperature: float) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The loss of both outputs under a mask. Built-in losses compare rows (n, D), user functions the outputs."""
    if not callable(loss) and loss not in get_args(LossName):
        raise unknown_name("loss", str(loss), get_args(LossName))
    by_rows: dict[str, OutputLoss] = {
        "cosine": cosine_loss,
        "mse": relative_error,
        "kl": partial(distillation_loss, temperature=temperature),
    }

    def compare(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        if student.shape != teacher.shape:
            raise UserError(
                f"the student's output is {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}; choose "
                "outputs of one shape by output="
            )
        if callable(loss):
            return loss(student, teacher)
        return by_rows[loss](rows_of(student, mask), rows_of(teacher, mask))

    return compare


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos(s, t), averaged over rows (n, D)."""
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1).mean()


def relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    """|s - t|^2 / |t|^2, the squared error relative to the teacher's; 1 for a student that outputs 0."""
    wanted = teacher.float()
    return (student.float() - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, count: Tensor | None = None) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of logits (rows, classes), summed and divided by `count`.

    Reference: Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531; T^2 keeps gradients
    comparable between temperatures.
    """
    log_p, log_q = ((logits.float() / temperature).log_softmax(-1) for logits in (teacher, student))
    divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    return temperature**2 * divergence / (max(1, len(student)) if count is None else count)


class LayerCall(NamedTuple):
    """One call of a teacher's layer: name, method, arguments, and output without maps."""

    name: str
    method: str
    args: tuple[object, ...]
    kwargs: Arguments
    out: Tensor


@contextmanager
def watched_layers(teacher: nn.Module, names: Sequence[str]) -> Iterator[list[LayerCall]]:
    """Record the calls of these layers of a model in the block, without gradients."""
    calls: list[LayerCall] = []
    with torch.no_grad(), ExitStack() as stack:
        for name in names:
            note = partial(lambda name, how, args, kwargs, out: LayerCall(name, how, args, kwargs, _first(out)), name)
            stack.enter_context(watch_calls(teacher.get_submodule(name), calls, note))
        yield calls


def layer_loss(
    student: nn.Module, calls: Sequence[LayerCall], mask: Callable[[Tensor], Tensor | None] = lambda output: None
) -> Tensor:
    """Relative error of the student's layers against the teacher's, each on the teacher's input.

        1/L sum_l |S_l(x_l) - A_l(x_l)|^2 / |A_l(x_l)|^2

    Layers learn independently, so errors of early layers do not disturb later layers. A layer that outputs 0 has error
    1. `mask` gives for an output (B, N, D) its mask (B, N), True = the token counts, or None.
    """
    losses, carry = [], None
    for name, method, args, kwargs, wanted in calls:
        if method == "mix":
            # Layers that pass scores use the student's scores.
            args, kwargs = (args[0], carry, *args[2:]), {key: kwargs[key] for key in kwargs if key != "carry"}
        result = getattr(student.get_submodule(name), method)(*args, **kwargs)
        carry = result[1] if method == "mix" else None
        counts = mask(wanted)
        losses.append(relative_error(rows_of(_first(result), counts), rows_of(wanted, counts)))
    return torch.stack(losses).mean()


def rows_of(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """An output as rows (n, D): vectors (B, D), unmasked tokens of (B, N, D), or pixels of (B, C, H, W)."""
    if output.dim() == 3 and mask is not None and mask.shape == output.shape[:2]:
        return output[mask]
    if output.dim() == 4:
        output = output.movedim(1, -1)
    return output.flatten(0, -2) if output.dim() > 1 else output.unsqueeze(-1)


def _first(result: Tensor | Sequence[Tensor]) -> Tensor:
    """The output of attention, without optional maps or scores."""
    return result if isinstance(result, Tensor) else result[0]


NEIGHBOURS = 10
MOST_COMPARED = 5000


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Agreement of a student's outputs with its teacher's, on held-out samples.

    Attributes:
        rows: number of compared vectors: samples, tokens or pixels.
        loss: the training loss.
        cosine: mean of cos(s, t).
        mse: |s - t|^2 / |t|^2.
        agreement: fraction of rows with the same largest entry, the prediction of a classifier.
        neighbours: for embeddings (B, D), the fraction of a sample's 10 nearest neighbours by cosine shared with the
            teacher. It depends on the number of samples; only the first 5,000 are used. None for other outputs and
            below 20 samples.
    """

    rows: int
    loss: float
    cosine: float
    mse: float
    agreement: float
    neighbours: float | None


@dataclass(frozen=True)
class HeldOut:
    batches: Sequence[object]
    wanted: Sequence[Tensor]
    masks: Sequence[Tensor | None]

    @classmethod
    @torch.no_grad()
    def of(cls, teacher: nn.Module, batches: Iterable[object], reader: OutputReader) -> "HeldOut":
        kept = [reader.moved(batch) for batch in batches]
        if not kept:
            raise UserError("held_out has no batch; give some, or leave it out")
        with evaluating(teacher):
            wanted = [reader(teacher, batch) for batch in kept]
        return cls(kept, wanted, [mask_of(teacher, batch, one) for batch, one in zip(kept, wanted)])

    @torch.no_grad()
    def fidelity(
        self, student: nn.Module, reader: OutputReader, loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    ) -> Fidelity:
        losses, ours, theirs = [], [], []
        for batch, wanted, mask in zip(self.batches, self.wanted, self.masks, strict=True):
            with evaluating(student):
                given = reader(student, batch)
            losses.append(loss(given, wanted, mask).float() * len(given))
            ours.append(rows_of(given, mask).float())
            theirs.append(rows_of(wanted, mask).float())
        given, wanted = torch.cat(ours), torch.cat(theirs)
        vectors = self.wanted[0].dim() == 2 and len(given) >= 2 * NEIGHBOURS
        return Fidelity(
            rows=len(given),
            loss=(torch.stack(losses).sum() / sum(map(len, self.wanted))).item(),
            cosine=F.cosine_similarity(given, wanted, dim=-1).mean().item(),
            mse=relative_error(given, wanted).item(),
            agreement=(given.argmax(-1) == wanted.argmax(-1)).float().mean().item(),
            neighbours=neighbour_overlap(given[:MOST_COMPARED], wanted[:MOST_COMPARED]) if vectors else None,
        )


def neighbour_overlap(student: Tensor, teacher: Tensor) -> float:
    """Fraction of shared nearest neighbours by cosine, excluding the row itself; (n, D) each."""
    similar = [unit @ unit.T for unit in (F.normalize(rows, dim=-1) for rows in (student, teacher))]
    ours, theirs = (cosines.fill_diagonal_(-2.0).topk(NEIGHBOURS).indices for cosines in similar)
    return (ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2).float().mean().item()
