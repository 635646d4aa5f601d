"""Properties of shapes, numbers of tokens, dependence between tokens, and independence of samples."""

import copy
import inspect

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, one_line
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


def shape(build: Build, x: Tensor) -> None:
    """The output has the shape and the dtype of the input."""
    out = call(awake(build), x)
    if out.shape != x.shape:
        raise PropertyFailure(f"the output for {tuple(x.shape)} has shape {tuple(out.shape)}")
    if out.dtype != x.dtype:
        raise PropertyFailure(f"the output for {x.dtype} input is {out.dtype}")


def lengths(build: Build, x: Tensor) -> None:
    """One sample, one token, odd and other numbers of tokens than at construction work, as far as the layer allows."""
    layer = awake(build)
    kind = traits(layer, build).length
    with torch.no_grad():
        for size in _sizes(x, kind):
            given = noise(*size)
            try:
                out = call(layer, given)
            except Exception as error:
                raise PropertyFailure(f"input {size}: {one_line(error)}") from error
            if out.shape != given.shape or not torch.isfinite(out).all():
                raise PropertyFailure(f"input {size} gives shape {tuple(out.shape)}, finite: {out.isfinite().all()}")
        if kind in ("fixed", "up-to"):
            _refuses(layer, torch.cat((x, x), dim=1), "more tokens than it was built for")
        if kind == "fixed":
            _refuses(layer, x[:, :-1], "fewer tokens than it was built for")


def _sizes(x: Tensor, kind: str | None) -> list[tuple[int, ...]]:
    if x.dim() == 4:
        channels, (height, width) = x.shape[1], x.shape[2:]
        return [(1, *x.shape[1:]), (2, channels, height, width + 2), (1, channels, 5, 3), (2, channels, 1, 1)]
    tokens, dim = x.shape[1:]
    batches: list[tuple[int, ...]] = [(1, tokens, dim), (tokens, tokens, dim)]
    if kind not in ("any", "up-to"):
        return batches
    shorter: list[tuple[int, ...]] = [(2, 1, dim), (3, tokens - 3, dim), (tokens - 1, 2, dim)]
    return batches + shorter + ([(2, 2 * tokens + 1, dim)] if kind == "any" else [])


def _refuses(
    layer: nn.Module,
    x: object,
    what: str,
    mask: object = None,
    accepted: type[PropertyFailure] = PropertyFailure,
) -> None:
    try:
        layer(x) if mask is None else layer(x, mask=mask)
    except UserError:
        return
    except Exception as error:
        raise Advice(f"{what}: {one_line(error)} instead of a UserError with the remedy") from error
    raise accepted(f"{what}: accepted without an error")


def empty_batch(build: Build, x: Tensor) -> None:
    """An empty batch gives an empty output and gradients of 0."""
    layer = awake(build)
    given = x[:0].clone().requires_grad_()
    try:
        out = call(layer, given)
        out.sum().backward()
    except Exception as error:
        raise Advice(f"input {tuple(given.shape)}: {one_line(error)}") from error
    if out.shape != given.shape:
        raise Advice(f"input {tuple(given.shape)} gives shape {tuple(out.shape)}")
    assert_finite_gradients(layer, given, "an empty batch gives {} a gradient that is not finite")


def batch_independence(build: Build, x: Tensor) -> None:
    """In eval mode a sample's output does not depend on the rest of the batch."""
    layer, x, tolerance = exact(build, x)
    expected = call(layer, x)[:1]
    assert_close(call(layer, _other_mates(x))[:1], expected, tolerance, "sample 0 changes with its batch mates")
    assert_close(call(layer, x[:1]), expected, tolerance, "sample 0 changes when it is alone in its batch")


def batch_independence_training(build: Build, x: Tensor) -> None:
    """In training mode a sample's output does not depend on the rest of the batch, for layers without BatchNorm."""
    layer, x, tolerance = exact(build, x)
    if not traits(layer, build).independent:
        raise NotApplicable("normalises over the batch while training, by declaration")
    # A layer may take a step while training, as spectral norm does, so both outputs are from the first step.
    twin, before = copy.deepcopy(layer).train(), copy.deepcopy(dict(layer.named_buffers()))
    expected = call(layer.train(), x)[:1]
    try:
        assert_close(call(twin, _other_mates(x))[:1], expected, tolerance, "sample 0 changes with its batch mates")
    except PropertyFailure as failure:
        moved = [name for name, value in layer.named_buffers() if not torch.equal(value, before[name])]
        if not moved or traits(layer, build).declared:
            raise
        cause = "running statistics over the batch, which are right where samples are to share them"
        raise Advice(f"{failure}, and so does {moved[0]}", cause) from None


def _other_mates(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[1:] = 3 * noise(*x[1:].shape, seed=2).to(x)
    return changed


def equivariance(build: Build, x: Tensor) -> None:
    """Permuting the tokens permutes the output, if and only if the layer declares it."""
    layer, x, tolerance = exact(build, x)
    known = traits(layer, build)
    order = torch.randperm(to_tokens(x).shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        permuted = call(layer, size_like(x, to_tokens(x)[:, order]))
        expected = size_like(x, to_tokens(call(layer, x))[:, order])
    if known.equivariant is None or known.causal:
        reason = "built causal" if known.causal else "declares nothing"
        raise NotApplicable(f"{reason}; measured: {'' if gap(permuted, expected) <= tolerance else 'not '}equivariant")
    if known.equivariant:
        assert_close(permuted, expected, tolerance, "permuting the tokens does not permute the output")
    elif gap(permuted, expected) <= tolerance:
        raise PropertyFailure("declares that positions matter, yet permuting the tokens permutes the output")


def influence(layer: nn.Module, x: Tensor) -> Tensor:
    """(N, N): entry i, j is the change of output token i with input token j of the first sample."""
    x = x[:1].clone().requires_grad_()
    out = to_tokens(call(layer, x))
    weights = noise(out.shape[-1], seed=4).to(out)
    rows = []
    for i in range(out.shape[1]):
        (gradient,) = torch.autograd.grad((out[0, i] * weights).sum(), x, retain_graph=True)
        rows.append(to_tokens(gradient)[0].norm(dim=-1))
    return torch.stack(rows)


def causality(build: Build, x: Tensor) -> None:
    """A causal layer never sees a later token; any other layer does."""
    layer, wide, _ = exact(build, x)
    known = traits(layer, build)
    causal, seen = known.causal, influence(layer, wide)
    if not (causal or known.declared) and any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in layer.modules()):
        raise NotApplicable(f"a recurrent layer, declares nothing; measured: {'not ' * bool(seen.triu(1).any())}causal")
    _check_triangle(seen, causal=causal)
    if not causal and "causal" in inspect.signature(type(layer)).parameters:
        try:
            twin, wide, _ = exact(build, x, causal=True)
        except (ValueError, TypeError):  # no causal form, or a factory without the argument
            return
        _check_triangle(influence(twin, wide), causal=True)


def _check_triangle(seen: Tensor, *, causal: bool) -> None:
    # Rounding errors of an FFT are not a leak.
    seen = seen * (seen > 100 * torch.finfo(seen.dtype).eps * seen.max())
    later, earlier = seen.triu(1), seen.tril(-1)
    if causal and later.any():
        i, j = divmod(int(later.argmax()), seen.shape[1])
        raise PropertyFailure(f"causal, yet the output at token {i} changes with token {j}, by {later.max():.1e}")
    if not causal and earlier.any() and not later.any():
        raise PropertyFailure("not declared causal, yet no token ever sees a later one")
    if not causal and later.any() and not earlier.any():
        raise PropertyFailure("no token ever sees an earlier one")


def bad_input(build: Build, x: Tensor) -> None:
    """Wrong shapes, types and masks are refused with a `UserError`."""
    layer = awake(build)
    known = traits(layer, build)
    if not known.declared:
        raise NotApplicable("has no `capabilities`, so promises no particular error")
    tokens = to_tokens(x).shape[1]
    wrong: dict[str, tuple[object, object]] = {
        "an input of another width": (torch.cat((x, x), dim=2 if x.dim() == 3 else 1), None),
        "an input with a dimension too few": (x[0], None),
        "an input with a dimension too many": (x.unsqueeze(0), None),
        "integer input": (torch.ones_like(x, dtype=torch.long), None),
        "an input without tokens": (x[:, :0] if x.dim() == 3 else x[:, :, :0], None),
        "a numpy array": (x.numpy(), None),
        "a list": (x.tolist(), None),
        "no input": (None, None),
    }
    if known.mask:
        wrong["a mask of floats"] = (x, torch.ones(x.shape[0], tokens))
        wrong["a mask that is a list"] = (x, [[True] * tokens] * x.shape[0])
        wrong["a mask for other tokens"] = (x, torch.ones(x.shape[0], tokens + 1, dtype=torch.bool))
    for what, (given, mask) in wrong.items():
        _refuses(layer, given, what, mask, Advice)
