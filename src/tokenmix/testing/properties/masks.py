"""What a mask promises: True takes part, False neither gives nor takes."""

import torch
from torch import Tensor, nn

from tokenmix.testing.harness import (
    Advice,
    Build,
    NotApplicable,
    PropertyFailure,
    assert_close,
    assert_finite_gradients,
    awake,
    call,
    exact,
    gap,
    noise,
    size_like,
    to_tokens,
    traits,
)


def _all_true(layer: nn.Module, build: Build, x: Tensor) -> Tensor:
    """A mask that leaves nothing out; `NotApplicable` for a layer that takes none."""
    if not traits(layer, build, x).mask:
        raise NotApplicable("takes no mask")
    return torch.ones(to_tokens(x).shape[:2], dtype=torch.bool)


def _check_used(layer: nn.Module, x: Tensor, mask: Tensor) -> None:
    """Raise `PropertyFailure` if the mask changes nothing at all, so that no other bug is blamed for it."""
    with torch.no_grad():
        if torch.equal(call(layer, x, mask), call(layer, x)):
            raise PropertyFailure("the mask changes nothing", "forward takes a mask and never uses it")


def full_mask(build: Build, x: Tensor) -> None:
    """A mask that leaves nothing out gives the output without a mask."""
    layer, x, tolerance = exact(build, x)
    mask = _all_true(layer, build, x)
    assert_close(call(layer, x, mask), call(layer, x), tolerance, "an all-True mask changes the output")


def _replace(x: Tensor, places: slice, seed: int) -> Tensor:
    tokens = to_tokens(x).clone()
    tokens[:, places] = 10 * noise(*tokens[:, places].shape, seed=seed).to(x)
    return size_like(x, tokens)


def polarity(build: Build, x: Tensor) -> None:
    """Tokens under False are not seen by the others; tokens under True are."""
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
    """Padded tokens under a mask: the output for the others is that of the input without padding."""
    layer, x, tolerance = exact(build, x)
    mask, known = _all_true(layer, build, x), traits(layer, build, x)
    # Two rows of a map, so that a 2 x 2 pooling is cropped at its border.
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
    """The output at a masked position is 0, also in a sample without any token."""
    layer = awake(build)
    mask = _all_true(layer, build, x)
    mask[0], mask[1, -2:] = False, False
    with torch.no_grad():
        out = to_tokens(call(layer, x, mask))[~mask]
    out = out[out.isfinite()]  # `empty_row` is about the others
    if out.any():
        _check_used(layer, x, mask)
        raise Advice(f"the output at a masked position is up to {out.abs().max():.1e} instead of 0")


def not_a_number(build: Build, x: Tensor) -> None:
    """NaN at masked positions reaches neither the output at the others nor a gradient."""
    broken = PropertyFailure if traits(awake(build), build, x).declared else Advice
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
    """A sample without any token: finite, the other samples unchanged, gradients finite."""
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
