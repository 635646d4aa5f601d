"""One forward pass that finds the tokens and arguments of each attention module, and the cost of the model.

The pass runs on the meta device, without computation or memory. A model whose path depends on values, such as
`nn.TransformerEncoder` with a causal mask, runs on its own device. Attention runs as plain products, so that the
counter sees them.
"""

import copy
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.node import map_aggregate

from tokenmix.errors import OwnMixerError, UserError, one_line
from tokenmix.layers.base import Mixer, count_macs
from tokenmix.layers.table import checked_own_mixers
from tokenmix.registry import Arguments
from tokenmix.swap.adapter import AttentionAdapter, ObservedCall

META = torch.device("meta")
Seen = TypeVar("Seen")
P = ParamSpec("P")
Mixed = TypeVar("Mixed")


@dataclass(frozen=True)
class Probe:
    """Result of a forward pass."""

    macs: int | None = None  # multiply-adds of the whole model; None if it could not run
    # The calls of attention modules in order, each with the id of the module and the method: "__call__", or "mix" of
    # a stack that passes scores.
    seen: Sequence[tuple[int, str, ObservedCall]] = ()
    note: str = ""  # why the model could not run
    device: torch.device = META  # device of the pass


Example = Tensor | Sequence[Any] | Arguments
"""Arguments of a forward pass, in order or by name, or a single argument."""


def example_of(model: nn.Module, img_size: int | tuple[int, int] | None) -> Example | None:
    """An example input in the size that a model of a known library expects; None if unknown."""
    size = _own_size(model) if img_size is None else _pair(img_size)
    like = next(model.parameters(), None)
    dtype = torch.float32 if like is None else like.dtype
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return _transformers_example(model, size, dtype)
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels: Any = getattr(model, "in_chans", None if first is None else first.in_channels)
    if channels is None or size is None:
        return None
    return (torch.zeros(1, int(channels), *size, dtype=dtype, device=META),)


def _transformers_example(model: Any, size: tuple[int, int] | None, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Inputs for transformers' models of images, text, video, sound and time series, sized by their config."""
    config, kwargs = model.config, {"dtype": dtype, "device": META}
    vision, text = getattr(config, "vision_config", config), getattr(config, "text_config", config)
    found: dict[str, Tensor] = {}
    both = vision is not config and text is not config
    if model.main_input_name == "input_ids" or both:
        # Some models count positions from the padding token's id.
        counted = [
            i
            for n, m in model.named_modules()
            if n.endswith("position_embeddings") and (i := getattr(m, "padding_idx", None)) is not None
        ]
        limit = getattr(text, "max_position_embeddings", 512) - (max(counted) + 1 if counted else 0)
        token = (getattr(text, "pad_token_id", None) or 0) + 1
        found["input_ids"] = torch.full((1, limit), token)
    if model.main_input_name == "pixel_values" or both:
        channels, patches = getattr(vision, "num_channels", 3), getattr(vision, "num_patches", None)
        frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
        if size is not None:
            found["pixel_values"] = torch.zeros(1, *frames, channels, *size, **kwargs)
        elif patches is not None:
            found["pixel_values"] = torch.zeros(1, patches, channels * vision.patch_size**2, **kwargs)
            found["pixel_attention_mask"] = torch.ones(1, patches, dtype=torch.long)
            found["spatial_shapes"] = torch.tensor([[1, patches]])
    if model.main_input_name == "input_values":
        mels = [config.max_length, config.num_mel_bins] if hasattr(config, "num_mel_bins") else [16000]
        found["input_values"] = torch.zeros(1, *mels, **kwargs)
    if model.main_input_name == "past_values":
        found["past_values"] = torch.zeros(1, config.context_length, config.num_input_channels, **kwargs)
    return found or None


def _own_size(model: nn.Module) -> tuple[int, int] | None:
    """Size attributes of our, timm's, torchvision's and transformers' models, in this order."""
    settings, config = getattr(model, "pretrained_cfg", None), getattr(model, "config", None)
    said: Any = (
        getattr(model, "img_size", None),
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        getattr(model, "image_size", None),
        getattr(config, "image_size", None),
        getattr(getattr(config, "vision_config", None), "image_size", None),
        settings.get("input_size", (None,))[1:] if isinstance(settings, Mapping) else None,
    )
    size = next((size for size in said if size), None)
    return None if size is None else _pair(size)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def probe_model(
    model: nn.Module, attentions: Sequence[tuple[nn.Module, AttentionAdapter]], example: Example | None
) -> Probe:
    """Run the model on an example and observe these modules."""
    if example is None:
        return Probe(note="the model does not tell its input")

    def observe(
        place: int, method: str, args: Sequence[object], kwargs: Arguments, _: object
    ) -> tuple[int, str, ObservedCall]:
        module, adapter = attentions[place]
        function = module.forward if method == "__call__" else getattr(module, method)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return id(module), method, adapter.observe(module, bound.arguments)

    try:
        seen, macs, device = watch_pass(model, example, [module for module, _ in attentions], observe)
    except UserError as error:
        return Probe(note=str(error))
    return Probe(macs, seen, device=device)


def watch_pass(
    model: nn.Module,
    example: Example,
    modules: Sequence[nn.Module],
    observe: Callable[..., Seen],
    *,
    before_hooks: bool = False,
) -> tuple[list[Seen], int, torch.device]:
    """Run a forward pass; return what `observe` says of each call in order, multiply-adds and device."""
    own, failure = next((p.device for p in model.parameters()), META), ""
    for device in dict.fromkeys((META, own)):
        calls: list[Seen] = []
        with ExitStack() as stack:
            for place, module in enumerate(modules):
                noted = functools.partial(observe, place)
                stack.enter_context(watch_calls(module, calls, noted, before_hooks=before_hooks))
            try:
                return calls, model_macs(model, example, device), device
            except Exception as error:  # a user's forward pass may raise anything
                failure = one_line(error)
    raise UserError(f"the forward pass on the example fails with {failure}; give example_inputs that fit the model")


@contextmanager
def watch_calls(
    module: nn.Module, calls: list[Seen], note: Callable[..., Seen], *, before_hooks: bool = False
) -> Iterator[None]:
    """Append note(method, args, kwargs, result) after each call of the module or its `mix`; nested calls count once.

    The result is that after the module's hooks, or before them.
    """
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(method: str, args: tuple[object, ...], kwargs: Arguments, result: object) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            calls.append(note(method, args, kwargs, result))

    def noted(mix: Callable[P, Mixed]) -> Callable[P, Mixed]:
        @functools.wraps(mix)
        def called(*args: P.args, **kwargs: P.kwargs) -> Mixed:
            enter()
            result = mix(*args, **kwargs)
            leave("mix", args, kwargs, result)
            return result

        return called

    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(
            lambda _, args, kwargs, result: leave("__call__", args, kwargs, result),
            with_kwargs=True,
            prepend=before_hooks,
        ),
    ]
    if isinstance(module, Mixer):
        object.__setattr__(module, "mix", noted(module.mix))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        vars(module).pop("mix", None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes after the block: mode, hooks, caches, such as anchors on the meta device.

    What a dict, list or set among them held is restored too, but not what lies deeper.
    """
    kept = [(vars(part), dict(vars(part))) for part in model.modules()]
    held = [(value, copy.copy(value)) for _, before in kept for value in before.values() if type(value) in CONTAINERS]
    try:
        yield
    finally:
        for now, before in kept:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for value, contents in held:
            if _members(value) != _members(contents):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(contents)


CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


def _members(value: Any) -> list[int]:
    """What a container holds, in order, by identity: tensors are not compared."""
    return [*map(id, value), *map(id, value.values() if isinstance(value, dict) else ())]


def model_macs(model: nn.Module, inputs: Example, device: torch.device = META) -> int:
    """Multiply-adds of a forward pass in evaluation mode: convolutions, linear layers, attention products.

    Weights, buffers, attributes and random state do not change. On a device other than meta, the model must be on that
    device.
    """
    tensors: dict[str, Tensor] = {}
    # By module, because a module with two names would keep its temporary tensors.
    for prefix, part in model.named_modules():
        # Detached, because the counter follows gradients into a backward pass that does not exist.
        tensors |= {name: p.detach().to(device) for name, p in part.named_parameters(prefix, recurse=False)}
        tensors |= {name: b.to(device, copy=True) for name, b in part.named_buffers(prefix, recurse=False)}
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.zeros_like(x, device=device) if x.is_meta else x.to(device)

    given: Any = map_aggregate((args, kwargs), moved)
    # PyTorch's fused encoder layer would bypass the attention, and packs padded tokens, which fails on meta tensors.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with unchanged(model), torch.random.fork_rng(devices=[]):
            model.eval()
            return count_macs(functools.partial(functional_call, tie_weights=False), model, tensors, *given)[1]
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def check_runs(
    model: nn.Module,
    example: Example,
    undo: Callable[[], None],
    device: torch.device = META,
    change: str = "swap",
    remedy: str = "layers that pass scores to each other must be swapped together",
) -> int:
    """Multiply-adds of a changed model; if it does not run, the change is undone and an error raised."""
    try:
        with checked_own_mixers(model):
            return model_macs(model, example, device)
    except Exception as error:
        own = next((p.device for p in model.parameters()), device)
        if device != own:
            # A user's mixer may not run on meta tensors.
            return check_runs(model, example, undo, own, change, remedy)
        undo()
        if isinstance(error, OwnMixerError):
            raise
        raise UserError(
            f"the model does not run with the mixer, so the {change} was undone: {one_line(error)}; {remedy}"
        ) from error
