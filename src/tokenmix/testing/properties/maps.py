"""The attention map that a layer shows is the one that it used, and is a proper one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tokenmix.testing.harness import (
    Build,
    NotApplicable,
    PropertyFailure,
    awake,
    call,
    contents,
    exact,
    gap,
    to_tokens,
    traits,
)


def _map(layer: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    show = getattr(layer, "attention_map", None)
    known = getattr(layer, "capabilities", None)
    if not callable(show) or (known is not None and known.map is None):
        raise NotApplicable("has no attention_map" if known is None else "its capabilities say map=None")
    shown = show(x) if mask is None else show(x, mask)
    assert isinstance(shown, Tensor)
    return shown.detach()


def map_shape(build: Build, x: Tensor) -> None:
    """The map has the declared shape; rows and columns of tokens under False are 0."""
    layer = awake(build)
    shown, known = _map(layer, x), traits(layer, build, x)
    batch, tokens = to_tokens(x).shape[:2]
    per_head = shown.dim() == 4 and shown.shape[0] == batch and shown.shape[2] == tokens
    proper = {"gate": shown.shape == (tokens, tokens), "tokens": per_head, "slots": per_head}
    if known.map is not None and not proper[known.map]:
        raise PropertyFailure(f"a map of {known.map} for {batch} samples, {tokens} tokens has {tuple(shown.shape)}")
    if known.map in ("tokens", "slots") and known.mask:
        mask = torch.ones(batch, tokens, dtype=torch.bool)
        mask[:, -2:] = False
        masked = _map(layer, x, mask)
        if masked[:, :, -2:].any() or (masked.shape[3] == tokens and masked[..., -2:].any()):
            raise PropertyFailure("the map is not 0 for a masked token")


def map_rows(build: Build, x: Tensor) -> None:
    """Rows of an attention map sum to 1, from tiny to large logits, in every type."""
    layer = awake(build)
    shown = _map(layer, x)
    if traits(layer, build, x).map == "gate" or shown.dim() < 3:
        raise NotApplicable("its map is a gate; rows of a gate sum to anything")
    square = shown.shape[-1] == shown.shape[-2]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        typed = awake(build).to(dtype)
        for scale in (0.1, 1.0, 10.0, 100.0):
            # Logits between tokens are of second order in the input, those against a memory of first.
            given = x * (scale**0.5 if square else scale)
            rows = _map(typed, given.to(dtype)).double().sum(-1)
            worst = float((rows - 1).abs().max())
            allowed = max(8 * torch.finfo(dtype).eps, 1e-5)
            if not worst <= allowed:
                raise PropertyFailure(f"rows of the map sum to 1 ± {worst:.1e} in {dtype}, input times {scale:g}")


def map_used(build: Build, x: Tensor) -> None:
    """The map that the layer shows is one that forward multiplies with."""
    layer, x, tolerance = exact(build, x)
    shown = _map(layer, x)
    with torch.no_grad(), _Operands() as seen:
        call(layer, x)
    if not any(_same_map(candidate, shown, tolerance) for candidate in seen.tensors):
        raise PropertyFailure("attention_map returns a map that forward does not use")


def _same_map(candidate: Tensor, shown: Tensor, tolerance: float) -> bool:
    """Equal up to a leading batch of copies, dropped dimensions of size 1, and a transposition."""
    if candidate.dim() < 2 or candidate.numel() % shown.numel() != 0:
        return False
    views = (candidate, candidate.transpose(-1, -2))
    fitting = [v for v in views if v.shape[-2:] == shown.shape[-2:]]
    return any(gap(v.reshape(-1, *shown.shape), shown.unsqueeze(0)) <= tolerance for v in fitting)


class _Operands(TorchFunctionMode):
    """Collects what enters and leaves torch's functions, and the probabilities inside fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.tensors.append(_probabilities(*args, **kwargs))
        self.tensors.extend(t for t in contents((args, out)) if isinstance(t, Tensor) and t.is_floating_point())
        return out


def _probabilities(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """softmax(QK^T * scale + mask), which fused attention never writes down: its output with the identity as values."""
    identity = torch.eye(key.shape[-2]).to(value).expand(*key.shape[:-1], -1)
    return F.scaled_dot_product_attention(query, key, identity, attn_mask, 0.0, is_causal, **options)
