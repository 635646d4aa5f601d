"""Properties of shapes, numbers of tokens, samples, masks and the attention map: what an output depends on."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tokenmix.errors import UserError, one_line
from tokenmix.testing.harness import (
    Advice,
    Build,
    NotApplicable,
    NotFinite,
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


def shape(build: Build, x: Tensor) -> None:
    """The output has the shape and the dtype of the input, and finite numbers."""
    out = call(awake(build), x)
    if out.shape != x.shape:
        raise PropertyFailure(f"the output for {tuple(x.shape)} has shape {tuple(out.shape)}")
    if out.dtype != x.dtype:
        raise PropertyFailure(f"the output for {x.dtype} input is {out.dtype}")
    if not out.isfinite().all():
        raise NotFinite(
            "the output for random tokens has NaN or infinity", "a logarithm or root of 0, or a division by 0"
        )


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
    shorter = [size for size in shorter if size[0] > 0 and 0 < size[1] <= tokens]
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
    """(N, N): entry i, j is the change of output token i with input token j of the first sample; 0 below rounding."""
    x = x[:1].clone().requires_grad_()
    out = to_tokens(call(layer, x))
    weights = noise(out.shape[-1], seed=4).to(out)
    rows = []
    for i in range(out.shape[1]):
        (gradient,) = torch.autograd.grad((out[0, i] * weights).sum(), x, retain_graph=True)
        rows.append(to_tokens(gradient)[0].norm(dim=-1))
    seen = torch.stack(rows)
    # Rounding errors of an FFT are no influence.
    return seen * (seen > 100 * torch.finfo(seen.dtype).eps * seen.max())


def causality(build: Build, x: Tensor) -> None:
    """A causal layer never sees a later token; any other layer does."""
    layer, wide, _ = exact(build, x)
    known = traits(layer, build)
    causal, seen = known.causal, influence(layer, wide)
    silent, later = not (causal or known.declared), bool(seen.triu(1).any())
    if silent and any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in layer.modules()):
        raise NotApplicable(f"a recurrent layer, declares nothing; measured: {'not ' * later}causal")
    if silent and not later and seen.tril(-1).any():
        raise Advice("no token ever sees a later one; if that is meant, give the layer an attribute causal = True")
    _check_triangle(seen, causal=causal)
    if not causal and "causal" in inspect.signature(type(layer)).parameters:
        try:
            twin, wide, _ = exact(build, x, causal=True)
        except (ValueError, TypeError):  # no causal form, or a factory without the argument
            return
        _check_triangle(influence(twin, wide), causal=True)


def _check_triangle(seen: Tensor, *, causal: bool) -> None:
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


def _replace(x: Tensor, positions: Tensor, seed: int) -> Tensor:
    """x with noise for the tokens at the positions, (B, N) bool."""
    tokens = to_tokens(x).clone()
    tokens[positions] = 10 * noise(*tokens[positions].shape, seed=seed).to(x)
    return size_like(x, tokens)


def polarity(build: Build, x: Tensor) -> None:
    """Tokens under False do not affect the others; tokens under True do."""
    layer, x, tolerance = exact(build, x)
    samples, count = _all_true(layer, build, x).shape
    quarter = count // 4
    # A first quarter that acts on a second, and the rest under False; elsewhere in each of up to three samples.
    part = torch.tensor([0] * quarter + [1] * quarter + [2] * (count - 2 * quarter))
    parts = torch.stack([part.roll(i * quarter) for i in range(samples)])
    first, watched, last = (parts == i for i in range(3))
    mask = ~last
    with torch.no_grad():
        expected = to_tokens(call(layer, x, mask))[watched].view(samples, quarter, -1)
        without = to_tokens(call(layer, _replace(x, last, 5), mask))[watched].view(expected.shape)
        within = to_tokens(call(layer, _replace(x, first, 6), mask))[watched].view(expected.shape)
        unmasked = to_tokens(call(layer, _replace(x, first, 6)) - call(layer, x))[watched].view(expected.shape)
    mixed = [i for i, change in enumerate(unmasked) if gap(change, torch.zeros_like(change)) > tolerance]
    if not mixed:
        raise NotApplicable("does not mix tokens")
    if any(gap(within[i], expected[i]) <= tolerance for i in mixed):
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
        padded = to_tokens(call(layer, _replace(x, ~mask, 5), mask))
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
