"""How a batch goes through a model, and which of its outputs is compared."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError

Output = str | Callable[[Any, Any], Tensor] | None
LABELS = ("label", "labels")


@dataclass(frozen=True)
class OutputReader:
    """The output of a model on a batch.

    Attributes:
        output: as of `distill`.
        device: where the models are.
        half: compute in bfloat16 where autocast does.
    """

    output: Output
    device: torch.device
    half: bool = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the model; the output that is compared."""
        args, kwargs = model_arguments(model, batch)
        with self.autocast():
            return chosen_output(model(*args, **kwargs), batch, self.output)

    def autocast(self) -> torch.autocast:
        """The precision of forward passes."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def moved(self, batch: Any) -> Any:
        """The batch on the device of the models."""
        if isinstance(batch, Tensor):
            return batch.to(self.device)
        if isinstance(batch, Mapping):
            return {key: self.moved(value) for key, value in batch.items()}
        return [self.moved(value) for value in batch] if isinstance(batch, tuple | list) else batch


def model_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's forward pass in a batch: a tensor, the first of a tuple, or a mapping by name.

    Of a mapping, labels and what the forward pass has no argument for are left out.
    """
    given = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(given, Tensor):
        return (given,), {}
    if not isinstance(given, Mapping):
        raise UserError(
            f"a batch is a tensor, a tuple whose first is the input, or a dict of arguments, got "
            f"{type(batch).__name__}; change what the loader gives"
        )
    parameters = inspect.signature(model.forward).parameters
    all_taken = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    kwargs = {key: value for key, value in given.items() if (all_taken or key in parameters) and key not in LABELS}
    if not kwargs:
        raise UserError(
            f"a batch has {', '.join(map(str, given))}, and the forward pass of {type(model).__name__} takes "
            f"{', '.join(parameters)}; rename the keys"
        )
    return (), kwargs


def mask_of(batch: Any) -> Tensor | None:
    """`attention_mask` of a batch of text, True = the token counts; None without one."""
    given = batch[0] if isinstance(batch, tuple | list) and batch else batch
    mask = given.get("attention_mask") if isinstance(given, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def chosen_output(result: Any, batch: Any, output: Output) -> Tensor:
    """The output that `output` means."""
    if callable(output):
        found = output(result, batch)
    elif output in ("mean", "cls"):
        found = _pooled(_named(result, "last_hidden_state"), mask_of(batch), output)
    else:
        found = _named(result, output)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"output={output!r} gives {kind}; name an output that is a tensor of numbers, or a function")
    return found


def _named(result: Any, name: str | None) -> Any:
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


def _pooled(tokens: Tensor, mask: Tensor | None, how: str) -> Tensor:
    if tokens.dim() != 3:
        raise UserError(f"output={how!r} pools tokens (B, N, D), got {tuple(tokens.shape)}; leave it out")
    if how == "cls":
        return tokens[:, 0]
    if mask is None:
        return tokens.mean(1)
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp_min(1)
