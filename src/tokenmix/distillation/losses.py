"""What a student loses against its teacher: on outputs, and layer by layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.swap.probe import watch_calls

LossName = Literal["cosine", "mse", "kl"]
OutputLoss = Callable[[Tensor, Tensor], Tensor]


def output_loss(loss: LossName | OutputLoss, temperature: float) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The loss of student's and teacher's outputs under a mask, by name or function.

    Ours compare rows (n, D); a user's function is given the outputs themselves.
    """
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
    """1 - cos(s, t), the mean over rows (n, D)."""
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1).mean()


def relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    """|s - t|^2 / |t|^2, the mean squared error in units of the teacher's mean square; a student that gives 0 has 1."""
    wanted = teacher.float()
    return (student.float() - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, count: Tensor | None = None) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), logits (rows, classes), summed and divided by `count`.

    Paper:
        Hinton et al., Distilling the Knowledge in a Neural Network (arXiv 1503.02531). T^2 keeps the gradients of
        different temperatures alike.
    """
    log_p, log_q = ((logits.float() / temperature).log_softmax(-1) for logits in (teacher, student))
    divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    return temperature**2 * divergence / (max(1, len(student)) if count is None else count)


class LayerCall(NamedTuple):
    """One call of a teacher's layer: its name, how it was called, and what came out, without maps."""

    name: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor


@contextmanager
def watched_layers(teacher: nn.Module, names: Sequence[str]) -> Iterator[list[LayerCall]]:
    """The calls of these layers of a model that runs in the block, without gradients."""
    calls: list[LayerCall] = []
    with torch.no_grad(), ExitStack() as stack:
        for name in names:
            note = partial(lambda name, how, args, kwargs, out: LayerCall(name, how, args, kwargs, _first(out)), name)
            stack.enter_context(watch_calls(teacher.get_submodule(name), calls, note))
        yield calls


def layer_loss(student: nn.Module, calls: Sequence[LayerCall], mask: Tensor | None = None) -> Tensor:
    """How far the student's layers are from the teacher's of the same name, each given the teacher's input.

        1/L sum_l |S_l(x_l) - A_l(x_l)|^2 / |A_l(x_l)|^2

    Each layer learns by itself, so that an early one that is still far off does not disturb those after it. A layer
    that gives 0 has 1.

    Args:
        student: whose layers learn.
        calls: of the teacher's layers, from `watched_layers`.
        mask: (B, N), True = the token counts; of outputs (B, N, D) only.
    """
    losses, carry = [], None
    for name, method, args, kwargs, wanted in calls:
        if method == "mix":
            # Layers that pass scores on take those of the student.
            args, kwargs = (args[0], carry, *args[2:]), {key: kwargs[key] for key in kwargs if key != "carry"}
        result = getattr(student.get_submodule(name), method)(*args, **kwargs)
        carry = result[1] if method == "mix" else None
        losses.append(relative_error(rows_of(_first(result), mask), rows_of(wanted, mask)))
    return torch.stack(losses).mean()


def rows_of(output: Tensor, mask: Tensor | None = None) -> Tensor:
    """An output as rows (n, D): vectors (B, D), tokens (B, N, D) that the mask has, or pixels of (B, C, H, W)."""
    if output.dim() == 3 and mask is not None and mask.shape == output.shape[:2]:
        return output[mask]
    if output.dim() == 4:
        output = output.movedim(1, -1)
    return output.flatten(0, -2) if output.dim() > 1 else output.unsqueeze(-1)


def _first(result: Any) -> Tensor:
    """What attention returns, without the maps or scores that some return with it."""
    return result if isinstance(result, Tensor) else result[0]
