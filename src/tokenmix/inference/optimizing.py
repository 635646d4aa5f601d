"""Optimise a float32 model for inference on CPUs, given a few inputs; save and load int8 copies."""

import copy
import functools
import itertools
import json
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenmix.errors import UserError, as_user_error, one_line
from tokenmix.files import check_regular, replacing, user_path
from tokenmix.inference.folded import (
    FoldedExternalAttention,
    FoldedT2TStem,
    Folding,
    folded,
    folds,
    make_external,
    num_heads,
)
from tokenmix.inference.linear import FusedLinear, Int8Linear, Range, make_linear
from tokenmix.inference.operators import Activation, Dtype, require_operators
from tokenmix.models.eamlp import StemAttention, T2TStem
from tokenmix.ops.checks import check_choice
from tokenmix.ops.external import external_attention_map
from tokenmix.profiling.machine import time_interleaved

# Replacement by module name: `external`, `stem`, or `linear` with the fused activation.
CopyPlan = dict[str, str]

_PAIRS = (("proj_in", "act"), ("fc1", "act"))


def observe(model: nn.Module, batches: Iterable[Tensor]) -> tuple[dict[str, Range], set[str]]:
    """Input ranges of the replaceable modules, as `module.what`; and the linear layers that an activation follows."""
    ranges: dict[str, Range] = {}
    # An activation follows if it is called on what the linear layer returned, as often as the layer is called.
    returned: dict[str, weakref.ref[Tensor]] = {}
    calls, followed = Counter[str](), Counter[str]()

    def after(name: str, output: Tensor) -> None:
        returned[name] = weakref.ref(output)
        calls[name] += 1

    def before(name: str, args: tuple[object, ...]) -> None:
        followed[name] += bool(args and name in returned and returned[name]() is args[0])

    def hook(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        for what, x in _met(module, args[0]) if args else ():
            if x.numel() == 0:
                continue
            key = f"{name}.{what}"
            low, high = ranges.get(key, (float("inf"), float("-inf")))
            ranges[key] = (min(low, x.min().item()), max(high, x.max().item()))

    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: hook(name, m, args))
        for name, module in model.named_modules()
    ]
    for name, linear, act in _pairs(model):
        hooks.append(linear.register_forward_hook(lambda m, args, output, name=name: after(name, output)))
        hooks.append(act.register_forward_pre_hook(lambda m, args, name=name: before(name, args)))
    for batch in batches:
        model(batch)
    for handle in hooks:
        handle.remove()
    bad = next((name for name, (low, high) in ranges.items() if not abs(low) + abs(high) < float("inf")), None)
    if bad is not None:
        raise UserError(f"{bad} met NaN or infinite values; check the model and the inputs")
    return ranges, {name for name, count in calls.items() if followed[name] == count}


def _met(module: nn.Module, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors whose ranges `fill` needs, for a module with input x."""
    if folds(module):
        assert isinstance(module, Folding)
        yield "x", x
        yield "map", module.attention_map(x)
    elif isinstance(module, StemAttention):
        h = module.query(module.norm1(x))
        yield "h", h
        yield "map", external_attention_map(h, module.key_memory)
    # Subclasses of nn.Linear may compute something else, or have weights that other code reads.
    elif type(module) is nn.Linear and x.dim() > 2:
        yield "x", x


def plan_copy(model: nn.Module, seen: set[str], followed: set[str]) -> CopyPlan:
    """The replacements of the modules with known ranges; `followed` are linear layers before an activation."""
    plan: CopyPlan = {}
    met = {key.rpartition(".")[0] for key in seen}
    # PyTorch's encoder layer reads these weights itself if it has no hooks.
    read = {
        linear
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        for linear in layer.children()
        if isinstance(linear, nn.Linear)
    }
    for name, module in model.named_modules():
        # The copy of a module has no hooks, such as that of a block inserted after it.
        if _hooked(module):
            continue
        kind = None
        if type(module) is T2TStem and all(isinstance(part, StemAttention) for part in module.attentions):
            kind = "stem"
        elif folds(module):
            kind = "external"
        elif type(module) is nn.Linear and module not in read:
            kind = "linear none"
        # The model itself has no parent in which it could be replaced.
        if kind is not None and name and not _inside(name, plan) and (name in met or kind == "stem"):
            plan[name] = kind
    for name, _, act in _pairs(model):
        if name in followed and plan.get(name) == "linear none" and not _hooked(act):
            plan[name] = "linear gelu-tanh" if act.approximate == "tanh" else "linear gelu"
    return plan


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def plan_of(model: nn.Module) -> CopyPlan:
    plan: CopyPlan = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and not _inside(name, plan):
            plan[name] = kind
    return plan


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module of a copy, in the plan."""
    if isinstance(module, FusedLinear | Int8Linear):
        return f"linear {module.act}"
    if isinstance(module, FoldedExternalAttention):
        return "external"
    return "stem" if type(module) is FoldedT2TStem else None


def _inside(name: str, plan: CopyPlan) -> bool:
    return any(name.startswith(f"{whole}.") for whole in plan)


def _followed(parent: nn.Module) -> list[tuple[str, str]]:
    """Pairs of children that may be called directly after each other."""
    return list(pairwise(parent._modules)) if isinstance(parent, nn.Sequential) else list(_PAIRS)


def _pairs(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.GELU]]:
    """Linear layers by name, each with the GELU that may follow it."""
    for parent, module in model.named_modules():
        for first, second in _followed(module):
            linear, act = module._modules.get(first), module._modules.get(second)
            if type(linear) is nn.Linear and type(act) is nn.GELU:
                yield f"{parent}.{first}".lstrip("."), linear, act


def install(model: nn.Module, plan: CopyPlan, dtype: Dtype) -> None:
    """Replace modules by empty layers according to the plan; fused activations become identities."""
    old = {name: model.get_submodule(name) for name in plan}
    new = {old[name]: _empty(old[name], kind, dtype) for name, kind in plan.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None or child not in new:
                continue
            made = new[child]
            parent.add_module(name, made)
            if isinstance(made, FusedLinear | Int8Linear) and made.act != "none":
                parent.add_module(dict(_followed(parent))[name], nn.Identity())


def _empty(module: nn.Module, kind: str, dtype: Dtype) -> nn.Module:
    if kind == "external":
        assert isinstance(module, Folding), f"{kind} does not fit a {type(module).__name__}"
        slots = module.memory.key_memory.shape[0]
        return make_external(dtype, module.dim, heads=num_heads(module), num_slots=slots)
    if kind == "stem":
        assert isinstance(module, T2TStem), f"{kind} does not fit a {type(module).__name__}"
        return FoldedT2TStem(module, dtype)
    assert isinstance(module, nn.Linear), f"{kind} does not fit a {type(module).__name__}"
    act: Activation = kind.removeprefix("linear ")  # type: ignore[assignment]
    return make_linear(dtype)(module.in_features, module.out_features, bias=module.bias is not None, act=act)


def fill(place: nn.Module, source: nn.Module, ranges: Mapping[str, Range]) -> None:
    if isinstance(place, FusedLinear | Int8Linear):
        assert isinstance(source, nn.Linear)
        place.fill(source.weight.detach(), source.bias, ranges["x"])
    elif isinstance(place, FoldedExternalAttention):
        assert isinstance(source, Folding)
        place.fill(*folded(source), inputs=ranges["x"], weights=ranges["map"])
    elif isinstance(place, FoldedT2TStem):
        assert isinstance(source, T2TStem)
        place.fill(source, ranges)


TOLERANCES: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.5}
"""Largest relative difference (norm) between outputs of copy and original on the first batch.

Sound copies of trained models differ far less. A copy in float32 is checked for every dtype: one that computes another
function may pass the other limits.
"""

MEASURED = 1.0
"""Approximate time limit of the timing, in seconds."""
ENOUGH = 0.97
"""A copy is kept if it needs at most this fraction of the model's time; smaller gains are within the noise."""
_KEY = "tokenmix_int8"
_UNCHANGED = "unchanged"


@torch.no_grad()
def optimize(
    model: nn.Module,
    example: Tensor | Iterable[Tensor | Sequence[object]],
    dtype: Dtype | torch.dtype = "float32",
    *,
    measure: bool = True,
) -> nn.Module:
    """A copy of a model for inference on a CPU, in eval mode and without gradients.

        fast = tokenmix.optimize(model, images)                      # the same outputs up to float32's rounding
        fast = tokenmix.optimize(model, images, dtype="int8")        # images: a hundred or so of the training images
        logits = fast(batch)                                         # batches of any size
        print(fast.optimization)                                     # what was kept, and why

    This works on any model with `nn.Linear` or our layers. Linear layers prepack their weights and fuse the following
    GELU. Memories of external attention are folded into adjacent projections. EAMLP's stem needs no unfold operations.
    See `FusedLinear`, `FoldedExternalAttention`, `FoldedT2TStem`.

    bfloat16 is faster on CPUs with AVX512-BF16 or AMX, int8 mostly with VNNI or AMX. Without them the outputs are
    correct, but the copy may be slower.

    Args:
        model: a float32 model on the CPU; it does not change.
        example: a batch, or several in a list or a loader, each a tensor or (images, labels). The copy is checked on
            the first batch. For int8, all batches determine the ranges of the activations.
        dtype: of the products, a name or `torch.dtype`. `"float32"`; `"bfloat16"`, with rounded weights and inputs;
            `"int8"`, with one scale per weight row and per layer's activations, see `Int8Linear` and
            `Int8ExternalAttention`. Spatial gates, norms, softmax, convolutions and linear layers with one row per
            sample (a head after pooling) stay float32.
        measure: time the copy, the float32 copy and the model in turns on the first batch, for about a second, and
            return the fastest. If no copy is faster, return the model in eval mode. The first batch should have the
            size used later: small batches of small models are slower in bfloat16 and int8. False: return the copy in
            `dtype`.

    Returns:
        The copy. Its attribute `optimization` is a sentence with the decision and the measured times.

    Raises:
        UserError: the dtype is unknown; weights are not float32 on the CPU; there are no inputs or nothing to optimise;
            the copy, or one in float32, fails or its outputs on the first batch differ by more than `TOLERANCES`; or
            PyTorch lacks the operators.
    """
    if isinstance(dtype, torch.dtype):
        dtype = cast(Dtype, str(dtype).removeprefix("torch."))
    check_choice("dtype", dtype, get_args(Dtype))
    if not isinstance(model, nn.Module):
        raise UserError(f"optimize takes a model, an nn.Module; got {type(model).__name__}")
    _check_optimizable(model, dtype)
    unchanged = copy.deepcopy(model).eval().requires_grad_(False)
    batches = _batches(example)
    first = next(batches)
    failed = f"the forward pass of {type(model).__name__} on the example, first {tuple(first.shape)}, fails with "
    with as_user_error(failed, "; give batches that the model takes"):
        ranges, followed = observe(unchanged, itertools.chain([first], batches))
    plan = plan_copy(unchanged, set(ranges), followed)
    if not plan:
        raise UserError(
            f"{type(model).__name__} has nothing to optimise in {dtype}: no layer of ours, no nn.Linear over tokens "
            "that can be replaced; keep it as it is"
        )
    expected = unchanged(first)

    def made(kind: Dtype, plan: CopyPlan) -> nn.Module:
        result = copy.deepcopy(unchanged)
        install(result, plan, kind)
        for name in plan:
            own = f"{name}."
            found = {key.removeprefix(own): value for key, value in ranges.items() if key.startswith(own)}
            fill(result.get_submodule(name), unchanged.get_submodule(name), found)
        _check_answers(result, first, expected, kind)
        return result

    try:
        exact = made("float32", plan)
    except UserError:
        # The linear layer's output may change on its way to the activation, or have other uses.
        plan = {name: "linear none" if kind.startswith("linear") else kind for name, kind in plan.items()}
        exact = made("float32", plan)
    copies: dict[str, nn.Module] = {dtype: exact if dtype == "float32" else made(dtype, plan)}
    if not measure:
        copies[dtype].optimization = f"{dtype}, not measured"  # type: ignore[assignment]
        return copies[dtype]
    copies |= {"float32": exact, _UNCHANGED: unchanged}
    calls = {name: functools.partial(made, first) for name, made in copies.items()}
    once = sum(timing.median for timing in time_interleaved(calls, repeats=1, warmup=1).values())
    timings = time_interleaved(calls, repeats=max(3, int(MEASURED / max(1e-6, once))), warmup=0)
    seconds = {name: timing.median for name, timing in timings.items()}
    best = min(copies, key=lambda name: seconds[name])
    if seconds[best] > ENOUGH * seconds[_UNCHANGED]:
        best = _UNCHANGED
    times = ", ".join(f"{name} {seconds[name] * 1e3:.3g} ms" for name in copies)
    kept = best if best != _UNCHANGED else "the model unchanged in float32"
    why = "" if best == dtype else f", since the {dtype} copy is not faster on the example"
    copies[best].optimization = f"kept {kept}{why}: {times} a batch of {len(first)}"  # type: ignore[assignment]
    return copies[best]


def _check_answers(result: nn.Module, first: Tensor, expected: object, dtype: Dtype) -> None:
    """Raise `UserError` unless the copy runs and reproduces the outputs of the original."""
    name = type(result).__name__
    try:
        found = result(first)
    except (UserError, AssertionError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{name} runs unchanged but not optimised in {dtype}: {one_line(error)}; keep it as it is"
        ) from error
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        error = ((one - other).norm() / other.norm().clamp_min(1e-6)).item()
        if not error <= TOLERANCES[dtype]:
            raise UserError(
                f"the {dtype} copy of {name} is off by {error:.2g} of its output on the example, at most "
                f"{TOLERANCES[dtype]:g} is allowed; keep it as it is{', or take another dtype' * (dtype != 'float32')}"
            )


def _tensors(answer: object) -> Iterator[Tensor]:
    if isinstance(answer, Tensor):
        if answer.is_floating_point():
            yield answer
    elif isinstance(answer, Mapping):
        yield from (tensor for value in answer.values() for tensor in _tensors(value))
    elif isinstance(answer, Sequence) and not isinstance(answer, str):
        yield from (tensor for value in answer for tensor in _tensors(value))


def _batches(inputs: object) -> Iterator[Tensor]:
    """The non-empty batches; `UserError` if there is none."""
    if not isinstance(inputs, Iterable):
        raise UserError(
            f"inputs must be a tensor or batches of tensors, got {type(inputs).__name__}; "
            "for example optimize(model, images)"
        )
    empty = True
    for batch in [inputs] if isinstance(inputs, Tensor) else inputs:
        x = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(x, Tensor):
            raise UserError(
                f"a batch must be a tensor, or a tuple that starts with one, got {type(x).__name__}; "
                "for example optimize(model, [images])"
            )
        if x.numel():
            empty = False
            yield x
    if empty:
        raise UserError("no inputs to calibrate the ranges of activations; give about a hundred training images")


def save_quantized(model: nn.Module, path: Path | str) -> None:
    """Save the weights of an int8 model and their places in the model, as safetensors without pickle.

    Raises:
        UserError: the model has no int8 layers, or the path is not writable.
    """
    if not any(isinstance(module, Int8Linear) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} has no int8 layers; make them with tokenmix.optimize(model, images, dtype='int8')"
        )
    # A layer used twice has its tensors twice, and safetensors does not allow shared memory.
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in model.state_dict().items()}
    refused = as_user_error(f"cannot write {path}: ", "; give another path", OSError, SafetensorError)
    with refused, replacing(user_path(path)) as partial:
        save_file(tensors, partial, metadata={_KEY: json.dumps(plan_of(model))})


def load_quantized(model: nn.Module, path: Path | str) -> nn.Module:
    """An int8 model from a file of `save_quantized` and a float32 model of the same architecture, which does not
    change.

    Raises:
        UserError: the file is invalid, or from another architecture.
    """
    path = user_path(path)
    remedy = "; give a file that tokenmix.inference.save_quantized wrote"
    wrong = as_user_error(f"cannot read {path}: ", remedy, OSError, SafetensorError, RecursionError, ValueError)
    with wrong, safe_open(check_regular(path), framework="pt") as file:
        plan = json.loads((file.metadata() or {}).get(_KEY, "null"))
    if plan is None:
        raise UserError(f"{path} holds no int8 model; write one with tokenmix.inference.save_quantized(model8, path)")
    _check_optimizable(model, "int8")
    result = copy.deepcopy(model).eval().requires_grad_(False)
    other = f"{path} has another architecture than {type(model).__name__}: "
    with as_user_error(other, "; give its own model", AttributeError, RuntimeError, AssertionError):
        install(result, plan, "int8")
        result.load_state_dict(load_file(str(path)))
    return result


def _check_optimizable(model: nn.Module, dtype: Dtype) -> None:
    require_operators(dtype)
    if any(kind_of(m) is not None for m in model.modules()):
        raise UserError(f"{type(model).__name__} is an optimised copy already; give the model that it was made from")
    for name, tensor in model.named_parameters():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise UserError(
                f"optimize starts from float32 on the CPU, got {name} in {tensor.dtype} on {tensor.device}; "
                "call model.float().cpu() first"
            )
