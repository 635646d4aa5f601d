"""From a float32 model and a few inputs to an int8 one, to a file and back."""

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenmix.cpu.operators import require_operators
from tokenmix.cpu.planning import fill, install, kind_of, make_plan, observe, plan_of
from tokenmix.errors import UserError

__all__ = ["load_quantized", "quantize", "save_quantized"]

_KEY = "tokenmix_int8"


@torch.no_grad()
def quantize(model: nn.Module, inputs: Tensor | Iterable[Tensor | Sequence[Any]]) -> nn.Module:
    """An int8 copy of a model, for inference on a CPU.

        model8 = tokenmix.quantize(model, images)          # images: a hundred or so of the training images, as the
        logits = model8(batch)                             # model takes them; batches of any size afterwards

    Linear layers (with the GELU behind them), the products of spatial gates over tokens and external attention become
    int8, see `Int8Linear`, `Int8Gate` and `Int8ExternalAttention`; norms, softmax, convolutions and the head stay
    float32. Weights have one scale per row; activations one per layer, fixed by the range that they have on `inputs`.
    EAMLP's stem loses its unfoldings, see `Int8T2TStem`.

    Args:
        model: a float32 model on the CPU; it is not changed.
        inputs: a batch, or several in a list or a loader, each a tensor, or (images, labels) of which the images are
            taken.

    Raises:
        UserError: weights that are not float32 on the CPU, no inputs, nothing to quantise, a copy that cannot run, or a
            PyTorch without oneDNN.

    A linear layer that meets one row per sample (a head behind the pooling) is left: there is nothing to win.
    The kernels are oneDNN's. Without VNNI they give the same answers, slower.
    """
    _check(model)
    result = copy.deepcopy(model).eval().requires_grad_(False)
    batches = _batches(inputs)
    first = next(batches)
    ranges = observe(result, itertools.chain([first], batches))
    layers = dict(result.named_modules())
    plan = make_plan(result, set(ranges))
    if not plan:
        raise UserError(
            f"{type(model).__name__} has nothing to quantise: no nn.Linear over tokens, no split spatial gate; "
            "keep it in float32"
        )
    install(result, plan)
    for name in plan:
        own = f"{name}."
        found = {key.removeprefix(own): value for key, value in ranges.items() if key.startswith(own)}
        fill(result.get_submodule(name), layers[name], found)
    try:
        result(first)
    except (UserError, AssertionError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} runs in float32 but not in int8: {_first(error)}; keep it in float32"
        ) from error
    return result


def _batches(inputs: Any) -> Iterator[Tensor]:
    """The batches that have samples; `UserError` if there is none."""
    if not isinstance(inputs, Iterable):
        raise UserError(f"inputs must be a tensor or batches of tensors, got {type(inputs).__name__}")
    empty = True
    for batch in [inputs] if isinstance(inputs, Tensor) else inputs:
        x = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(x, Tensor):
            raise UserError(
                f"a batch must be a tensor, or a tuple that starts with one, got {type(x).__name__}; "
                "for example quantize(model, [images])"
            )
        if x.numel():
            empty = False
            yield x
    if empty:
        raise UserError("no inputs to find the ranges of activations with; give a hundred or so of the training images")


def save_quantized(model: nn.Module, path: Path | str) -> None:
    """Write an int8 model as safetensors; no pickle. The file holds weights, and where in the model they belong.

    Raises:
        UserError: a model without int8 layers, or a path that cannot be written.
    """
    plan = plan_of(model)
    if not plan:
        raise UserError(f"{type(model).__name__} has no int8 layers; make them with tokenmix.quantize(model, images)")
    # A layer used twice has its tensors twice, and the format allows none to share memory.
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in model.state_dict().items()}
    try:
        save_file(tensors, str(path), metadata={_KEY: json.dumps(plan)})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {_first(error)}") from None


def load_quantized(model: nn.Module, path: Path | str) -> nn.Module:
    """An int8 model from a file of `save_quantized` and a float32 model of the same architecture, which is not changed.

    Raises:
        UserError: not such a file, or one of another architecture.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            plan = json.loads((file.metadata() or {}).get(_KEY, "null"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if plan is None:
        raise UserError(f"{path} holds no int8 model; write one with tokenmix.cpu.save_quantized(model8, path)")
    _check(model)
    result = copy.deepcopy(model).eval().requires_grad_(False)
    try:
        install(result, plan)
        result.load_state_dict(load_file(str(path)))
    except (AttributeError, RuntimeError, AssertionError) as error:
        raise UserError(f"{path} is of another architecture than {type(model).__name__}: {_first(error)}") from None
    return result


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check(model: nn.Module) -> None:
    require_operators()
    if any(kind_of(m) is not None for m in model.modules()):
        raise UserError(f"{type(model).__name__} is in int8 already; give the float32 model")
    for name, tensor in model.named_parameters():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise UserError(
                f"int8 starts from float32 on the CPU, got {name} in {tensor.dtype} on {tensor.device}; "
                "call model.float().cpu() first"
            )
