"""Which parts of a model are replaced in its copy, and the ranges of their inputs."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.inference.external import FoldedExternalAttention, Folding, folded, folds, make_external, num_heads
from tokenmix.inference.linear import FusedLinear, Int8Linear, Range, make_linear
from tokenmix.inference.operators import Activation, Dtype
from tokenmix.inference.stem import FoldedT2TStem
from tokenmix.models.eamlp import StemAttention, T2TStem
from tokenmix.ops.external import external_attention_map

# What becomes of which module: `external`, `stem`, or `linear` with the activation that it takes in.
CopyPlan = dict[str, str]

_PAIRS = (("proj_in", "act"), ("fc1", "act"))


def observe(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Range]:
    """Ranges of the inputs of the modules that are replaced, as `module.what`."""
    ranges: dict[str, Range] = {}

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
    for batch in batches:
        model(batch)
    for handle in hooks:
        handle.remove()
    bad = next((name for name, (low, high) in ranges.items() if not abs(low) + abs(high) < float("inf")), None)
    if bad is not None:
        raise UserError(f"{bad} met NaN or infinite values; check the model and the inputs")
    return ranges


def _met(module: nn.Module, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What `fill` asks for of a module with the input x."""
    if folds(module):
        assert isinstance(module, Folding)
        yield "x", x
        yield "map", module.attention_map(x)
    elif isinstance(module, StemAttention):
        h = module.query(module.norm1(x))
        yield "h", h
        yield "map", external_attention_map(h, module.key_memory)
    elif _is_linear(module) and x.dim() > 2:
        yield "x", x


def _is_linear(module: nn.Module) -> bool:
    # Subclasses of nn.Linear are there because something reads their weight, or they compute something else.
    return type(module) is nn.Linear


def plan_copy(model: nn.Module, seen: set[str]) -> CopyPlan:
    """The replacements of the modules whose ranges are known."""
    plan: CopyPlan = {}
    met = {key.rpartition(".")[0] for key in seen}
    # PyTorch's encoder layer reads these weights itself when no hook watches it.
    read = {
        linear
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        for linear in layer.children()
        if isinstance(linear, nn.Linear)
    }
    for name, module in model.named_modules():
        kind = None
        if type(module) is T2TStem:
            kind = "stem"
        elif folds(module):
            kind = "external"
        elif _is_linear(module) and module not in read:
            kind = "linear none"
        # The model itself has no place where another could be put.
        if kind is not None and name and not _inside(name, plan) and (name in met or kind == "stem"):
            plan[name] = kind
    for parent, module in model.named_modules():
        for first, second in _followed(module):
            act, name = _activation(module._modules.get(second)), f"{parent}.{first}".lstrip(".")
            if act is not None and plan.get(name) == "linear none":
                plan[name] = f"linear {act}"
    return plan


def plan_of(model: nn.Module) -> CopyPlan:
    """The plan that a copy came from."""
    plan: CopyPlan = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and not _inside(name, plan):
            plan[name] = kind
    return plan


def kind_of(module: nn.Module) -> str | None:
    """The word in the plan for a module of a copy."""
    if isinstance(module, FusedLinear | Int8Linear):
        return f"linear {module.act}"
    if isinstance(module, FoldedExternalAttention):
        return "external"
    return "stem" if type(module) is FoldedT2TStem else None


def _inside(name: str, plan: CopyPlan) -> bool:
    return any(name.startswith(f"{whole}.") for whole in plan)


def _followed(parent: nn.Module) -> list[tuple[str, str]]:
    """Names of children that are called one directly after the other, as far as the parent's class determines it."""
    return list(pairwise(parent._modules)) if isinstance(parent, nn.Sequential) else list(_PAIRS)


def _activation(module: nn.Module | None) -> Activation | None:
    if type(module) is not nn.GELU:
        return None
    return "gelu-tanh" if module.approximate == "tanh" else "gelu"


def install(model: nn.Module, plan: CopyPlan, dtype: Dtype) -> None:
    """Put empty layers where the plan says; activations that are fused become identities."""
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
    """Copy a module into its replacement, given the ranges of its inputs."""
    if isinstance(place, FusedLinear | Int8Linear):
        assert isinstance(source, nn.Linear)
        place.fill(source.weight.detach(), source.bias, ranges["x"])
    elif isinstance(place, FoldedExternalAttention):
        assert isinstance(source, Folding)
        place.fill(*folded(source), inputs=ranges["x"], shares=ranges["map"])
    elif isinstance(place, FoldedT2TStem):
        assert isinstance(source, T2TStem)
        place.fill(source, ranges)
