"""From a float32 model and a few inputs to an int8 one, to a file and back."""

import copy
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.int8.layers import Activation, Int8Gate, Int8Linear
from tokenmix.layers.spatial_gating import SpatialGatingUnit

__all__ = ["load_quantized", "quantize", "save_quantized"]

_KEY = "tokenmix_int8"
_PAIRS = (("proj_in", "act"), ("fc1", "act"))
Plan = dict[str, str]


@torch.no_grad()
def quantize(model: nn.Module, inputs: Tensor | Iterable[Tensor]) -> nn.Module:
    """An int8 copy of a model, for inference on a CPU.

        model8 = tokenmix.quantize(model, images)          # images: a hundred or so of the training images, as the
        logits = model8(batch)                             # model takes them; batches of any size afterwards

    Linear layers (with the GELU behind them) and the products of spatial gates over tokens become int8, see
    `Int8Linear` and `Int8Gate`; norms, softmax, convolutions and the head stay float32. Weights have one scale per row;
    activations one per layer, fixed by the range that they have on `inputs`.

    Args:
        model: a float32 model on the CPU; it is not changed.
        inputs: one batch, or several.

    Raises:
        UserError: weights that are not float32 on the CPU, no inputs, nothing to quantise, or a PyTorch without oneDNN.

    A linear layer that meets one row per sample (a head behind the pooling) is left: there is nothing to win.
    The kernels are oneDNN's. Without VNNI they give the same answers, slower.
    """
    _check(model)
    result = copy.deepcopy(model).eval().requires_grad_(False)
    ranges = _observe(result, [inputs] if isinstance(inputs, Tensor) else inputs)
    layers = dict(result.named_modules())
    plan = _plan(result, set(ranges))
    if not plan:
        raise UserError(
            f"{type(model).__name__} has nothing to quantise: no nn.Linear over tokens, no split spatial gate; "
            "keep it in float32"
        )
    _install(result, plan)
    for name in plan:
        place, source, (low, high) = result.get_submodule(name), layers[name], ranges[name]
        if isinstance(place, Int8Linear):
            assert isinstance(source, nn.Linear)
            place.fill(source, low, high)
        elif isinstance(place, Int8Gate):
            assert isinstance(source, SpatialGatingUnit)
            place.fill(source, max(-low, high))
    return result


def save_quantized(model: nn.Module, path: Path | str) -> None:
    """Write an int8 model as safetensors; no pickle. The file holds weights, and where in the model they belong."""
    plan = {name: _kind(m) for name, m in model.named_modules() if isinstance(m, Int8Linear | Int8Gate)}
    if not plan:
        raise UserError(f"{type(model).__name__} has no int8 layers; make them with tokenmix.quantize(model, images)")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(path), metadata={_KEY: json.dumps(plan)})


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
        raise UserError(f"{path} holds no int8 model; write one with tokenmix.int8.save_quantized(model8, path)")
    _check(model)
    result = copy.deepcopy(model).eval().requires_grad_(False)
    try:
        _install(result, plan)
        result.load_state_dict(load_file(str(path)))
    except (AttributeError, RuntimeError, AssertionError) as error:
        raise UserError(f"{path} is of another architecture than {type(model).__name__}: {_first(error)}") from None
    return result


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check(model: nn.Module) -> None:
    if "onednn" not in torch.backends.quantized.supported_engines:
        raise UserError("this PyTorch has no oneDNN, whose int8 kernels are needed; install the wheel of pytorch.org")
    if any(isinstance(m, Int8Linear | Int8Gate) for m in model.modules()):
        raise UserError(f"{type(model).__name__} is in int8 already; give the float32 model")
    for name, tensor in model.named_parameters():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise UserError(
                f"int8 starts from float32 on the CPU, got {name} in {tensor.dtype} on {tensor.device}; "
                "call model.float().cpu() first"
            )


def _observe(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, tuple[float, float]]:
    """Range of what each layer that can become int8 meets."""
    ranges: dict[str, tuple[float, float]] = {}

    def see(name: str, x: Tensor) -> None:
        low, high = ranges.get(name, (float("inf"), float("-inf")))
        ranges[name] = (min(low, x.min().item()), max(high, x.max().item()))

    def hook(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(module, SpatialGatingUnit):
            see(name, module.norm(args[0].chunk(2, dim=-1)[1]))
        elif args[0].dim() > 2:
            see(name, args[0])

    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: hook(name, m, args))
        for name, module in model.named_modules()
        if _can(module)
    ]
    seen = 0
    for batch in batches:
        model(batch)
        seen += len(batch)
    for handle in hooks:
        handle.remove()
    if not seen:
        raise UserError("no inputs to find the ranges of activations with; give a hundred or so of the training images")
    bad = next((name for name, (low, high) in ranges.items() if not abs(low) + abs(high) < float("inf")), None)
    if bad is not None:
        raise UserError(f"{bad} meets values that are no numbers; look at the model and the inputs")
    return ranges


def _can(module: nn.Module) -> bool:
    if isinstance(module, SpatialGatingUnit):
        return module.variant == "split" and module.gate != "toeplitz-fft"
    # Others' subclasses of nn.Linear are there because something reads their weight, or they compute something else.
    kind = type(module)
    return kind is nn.Linear or (issubclass(kind, nn.Linear) and kind.__module__.startswith("tokenmix."))


def _plan(model: nn.Module, seen: set[str]) -> Plan:
    """What becomes of which module: `gate`, or `linear` with the activation that it takes in."""
    plan = {
        name: "gate" if isinstance(module, SpatialGatingUnit) else "linear none"
        for name, module in model.named_modules()
        if name in seen
    }
    for parent, module in model.named_modules():
        for first, second in _followed(module):
            act, name = _activation(module._modules.get(second)), f"{parent}.{first}".lstrip(".")
            if act is not None and plan.get(name) == "linear none":
                plan[name] = f"linear {act}"
    return plan


def _followed(parent: nn.Module) -> list[tuple[str, str]]:
    """Names of children that are called one directly after the other, as far as the parent's kind tells."""
    return list(pairwise(parent._modules)) if isinstance(parent, nn.Sequential) else list(_PAIRS)


def _activation(module: nn.Module | None) -> Activation | None:
    if type(module) is not nn.GELU:
        return None
    return "gelu-tanh" if module.approximate == "tanh" else "gelu"


def _kind(module: Int8Linear | Int8Gate) -> str:
    return "gate" if isinstance(module, Int8Gate) else f"linear {module.act}"


def _install(model: nn.Module, plan: Plan) -> None:
    """Put empty int8 layers where the plan says, wherever the module stands; activations taken in become identities."""
    old = {name: model.get_submodule(name) for name in plan}
    new = {old[name]: _empty(old[name], kind) for name, kind in plan.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None or child not in new:
                continue
            made = new[child]
            parent._modules[name] = made
            if isinstance(made, Int8Linear) and made.act != "none":
                parent._modules[dict(_followed(parent))[name]] = nn.Identity()


def _empty(module: nn.Module, kind: str) -> nn.Module:
    if isinstance(module, SpatialGatingUnit):
        return Int8Gate(module)
    assert isinstance(module, nn.Linear), f"{kind} does not fit a {type(module).__name__}"
    act: Activation = kind.removeprefix("linear ")  # type: ignore[assignment]
    return Int8Linear(module.in_features, module.out_features, bias=module.bias is not None, act=act)
