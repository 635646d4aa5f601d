"""Properties of masks and of the attention map."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tokenmix.testing.harness import (
    Advice,
    Build,
    NotApplicable,
    PropertyFailure,
    assert_close,
    assert_finite_gradients,
    awake,
    call,
    contents,
    exact,
    gap,
    noise,
    size_like,
    to_tokens,
    traits,
)


def _all_true(layer: nn.Module, build: Build, x: Tensor) -> Tensor:
    """An all-True mask; `NotApplicable` for layers without a mask."""
    if not traits(layer, build).mask:
        raise NotApplicable("takes no mask")
    return torch.ones(to_tokens(x).shape[:2], dtype=torch.bool)


def _check_used(layer: nn.Module, x: Tensor, mask: Tensor) -> None:
    """Raise `PropertyFailure` if the mask changes nothing, so that no other bug is blamed."""
    with torch.no_grad():
        if torch.equal(call(layer, x, mask), call(layer, x)):
            raise PropertyFailure("the mask changes nothing", "forward takes a mask and never uses it")


def full_mask(build: Build, x: Tensor) -> None:
    """An all-True mask gives the output without a mask."""
    layer, x, tolerance = exact(build, x)
    mask = _all_true(layer, build, x)
    assert_close(call(layer, x, mask), call(layer, x), tolerance, "an all-True mask changes the output")


def _replace(x: Tensor, places: slice, seed: int) -> Tensor:
    tokens = to_tokens(x).clone()
    tokens[:, places] = 10 * noise(*tokens[:, places].shape, seed=seed).to(x)
    return size_like(x, tokens)


def polarity(build: Build, x: Tensor) -> None:
    """Tokens under False do not affect the others; tokens under True do."""
    layer, x, tolerance = exact(build, x)
    mask = _all_true(layer, build, x)
    count = mask.shape[1]
    first, last = slice(0, count // 4), slice(count // 2, count)
    mask[:, last] = False
    watched = slice(count // 4, count // 2)
    with torch.no_grad():
        expected = to_tokens(call(layer, x, mask))[:, watched]
        without = to_tokens(call(layer, _replace(x, last, 5), mask))[:, watched]
        within = to_tokens(call(layer, _replace(x, first, 6), mask))[:, watched]
        unmasked = to_tokens(call(layer, _replace(x, first, 6)) - call(layer, x))[:, watched]
        if gap(unmasked, torch.zeros_like(unmasked)) <= tolerance:
            raise NotApplicable("does not mix tokens")
    if gap(within, expected) <= tolerance:
        seen = "they see those under False instead: the mask is inverted" if gap(without, expected) > tolerance else ""
        raise PropertyFailure(f"unmasked tokens do not affect the others; {seen}".rstrip("; "))
    if gap(without, expected) > tolerance:
        _check_used(layer, x, mask)
    assert_close(without, expected, tolerance, "masked tokens affect the others")


def padding(build: Build, x: Tensor) -> None:
    """Masked padding does not change the output of the other tokens."""
    layer, x, tolerance = exact(build, x)
    mask, known = _all_true(layer, build, x), traits(layer, build)
    # Two rows of a map, so that 2 x 2 pooling is cropped at its border.
    count = mask.shape[1]
    kept = count - (2 * x.shape[3] if x.dim() == 4 else 3)
    mask[:, kept:] = False
    with torch.no_grad():
        padded = to_tokens(call(layer, _replace(x, slice(kept, count), 5), mask))
        if known.length not in ("any", "up-to"):
            return
        cropped = x[:, :kept] if x.dim() == 3 else x[:, :, :-2]
        expected = to_tokens(call(layer, cropped))
    if gap(padded[:, :kept], expected) > tolerance:
        _check_used(layer, x, mask)
    assert_close(padded[:, :kept], expected, tolerance, "masked padding changes the output")


def zero_rows(build: Build, x: Tensor) -> None:
    """The output at a masked position is 0, also if all tokens of a sample are masked."""
    layer = awake(build)
    mask = _all_true(layer, build, x)
    mask[0], mask[1, -2:] = False, False
    with torch.no_grad():
        out = to_tokens(call(layer, x, mask))[~mask]
    out = out[out.isfinite()]  # `empty_row` checks the others
    if out.any():
        _check_used(layer, x, mask)
        raise Advice(f"the output at a masked position is up to {out.abs().max():.1e} instead of 0")


def not_a_number(build: Build, x: Tensor) -> None:
    """NaN at masked positions reaches neither other outputs nor gradients."""
    broken = PropertyFailure if traits(awake(build), build).declared else Advice
    for training in (False, True):
        layer = awake(build).train(training)
        mask = _all_true(layer, build, x)
        mask[1, -3:] = False
        tokens = to_tokens(x).clone()
        tokens[~mask] = torch.nan
        given = size_like(x, tokens).requires_grad_()
        out = to_tokens(call(layer, given, mask))[mask]
        if not torch.isfinite(out).all():
            raise broken("NaN at masked positions reaches the output at the others")
        out.square().mean().backward()
        try:
            assert_finite_gradients(layer, given, "NaN at masked positions gives {} a gradient that is not finite")
        except PropertyFailure as failure:
            raise broken(str(failure)) from failure


def empty_row(build: Build, x: Tensor) -> None:
    """A fully masked sample gives finite outputs and gradients and does not change other samples."""
    layer = awake(build)
    mask = _all_true(layer, build, x)
    with torch.no_grad():
        expected = call(layer, x, mask)[1:]
    mask[0] = False
    given = x.clone().requires_grad_()
    out = call(layer, given, mask)
    if not torch.isfinite(out).all():
        raise PropertyFailure("a sample without any token gives NaN or infinity")
    assert_close(out[1:], expected, 1e-5, "a sample without any token changes the others")
    out.square().mean().backward()
    assert_finite_gradients(layer, given, "a sample without any token gives {} a gradient that is not finite")


def _map(layer: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    show = getattr(layer, "attention_map", None)
    known: Any = getattr(layer, "capabilities", None)
    if not callable(show) or (known is not None and known.map is None):
        raise NotApplicable("has no attention_map" if known is None else "its capabilities say map=None")
    shown = show(x) if mask is None else show(x, mask)
    assert isinstance(shown, Tensor)
    return shown.detach()


def map_shape(build: Build, x: Tensor) -> None:
    """The map has the declared shape; rows and columns of tokens under False are 0."""
    layer = awake(build)
    shown, known = _map(layer, x), traits(layer, build)
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
    """Rows of an attention map sum to 1, from tiny to large logits, in every dtype."""
    layer = awake(build)
    shown = _map(layer, x)
    if traits(layer, build).map == "gate" or shown.dim() < 3:
        raise NotApplicable("its map is a gate; rows of a gate sum to anything")
    square = shown.shape[-1] == shown.shape[-2]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        typed = awake(build).to(dtype)
        for scale in (0.1, 1.0, 10.0, 100.0):
            # Logits between tokens are quadratic in the input, logits against a memory linear.
            given = x * (scale**0.5 if square else scale)
            rows = _map(typed, given.to(dtype)).double().sum(-1)
            worst = float((rows - 1).abs().max())
            allowed = max(8 * torch.finfo(dtype).eps, 1e-5)
            if not worst <= allowed:
                raise PropertyFailure(f"rows of the map sum to 1 ± {worst:.1e} in {dtype}, input times {scale:g}")


def map_used(build: Build, x: Tensor) -> None:
    """Forward multiplies with the attention map that the layer returns."""
    layer, x, tolerance = exact(build, x)
    shown = _map(layer, x)
    with torch.no_grad(), _Operands() as seen:
        call(layer, x)
    if not any(_same_map(candidate, shown, tolerance) for candidate in seen.tensors):
        raise PropertyFailure("attention_map returns a map that forward does not use")


def _same_map(candidate: Tensor, shown: Tensor, tolerance: float) -> bool:
    """Equality up to a leading batch of copies, dropped dimensions of size 1, and a transposition."""
    if candidate.dim() < 2 or candidate.numel() % shown.numel() != 0:
        return False
    views = (candidate, candidate.transpose(-1, -2))
    fitting = [v for v in views if v.shape[-2:] == shown.shape[-2:]]
    return any(gap(v.reshape(-1, *shown.shape), shown.unsqueeze(0)) <= tolerance for v in fitting)


class _Operands(TorchFunctionMode):
    """Collects inputs and outputs of torch's functions, and the probabilities inside fused attention."""

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
    """softmax(QK^T * scale + mask) of fused attention: its output with the identity as values."""
    identity = torch.eye(key.shape[-2]).to(value).expand(*key.shape[:-1], -1)
    return F.scaled_dot_product_attention(query, key, identity, attn_mask, 0.0, is_causal, **options)
