"""Capture by torch.compile, torch.export, torch.jit.trace and the ONNX exporter of traced graphs; and torch.vmap."""

import contextlib
import functools
import inspect
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from tokenmix.errors import one_line
from tokenmix.testing.harness import (
    Advice,
    Build,
    NotApplicable,
    PropertyFailure,
    assert_close,
    assert_finite_gradients,
    awake,
    call,
    noise,
    to_tokens,
    traits,
)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide PyTorch's warnings of shape checks and slow paths, and its printed graphs."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@functools.cache
def best_backend() -> str:
    """`"inductor"` if a C++ compiler works; else `"aot_eager"`, which only captures."""
    try:
        torch.compile(torch.sin, backend="inductor")(torch.ones(2))
    except Exception:  # a missing or broken compiler may raise anything
        return "aot_eager"
    return "inductor"


def compiled(build: Build, x: Tensor, backend: str | None = None) -> None:
    """torch.compile gives the eager output and gradients in one graph: in eval mode, and masked in training mode."""
    backend = backend or best_backend()
    whole = _stopped(build, x, backend, whole=True)
    if whole is None:
        return
    parts = _stopped(build, x, backend, whole=False)
    if parts is None:
        raise Advice(f"compiles in parts, not with fullgraph=True: {whole}")
    if backend == "inductor" and _stopped(build, x, "aot_eager", whole=True) is None:
        raise Advice(f"is captured, but not compiled by inductor: {parts}", "a limit of PyTorch's inductor")
    raise PropertyFailure(f"does not compile: {parts}")


def _stopped(build: Build, x: Tensor, backend: str, *, whole: bool) -> str | None:
    """Why torch.compile failed; None if it gave the eager output and gradients."""
    # By default Inductor draws random numbers in its own order.
    options: Any = {"fallback_random": True} if backend == "inductor" else None
    try:
        for training in (False, True):
            mode = "training" if training else "eval"
            torch.compiler.reset()
            layer, plain = awake(build).train(training), awake(build).train(training)
            tokens = to_tokens(x).shape[:2]
            masked = training and traits(layer, build).mask
            mask = torch.arange(tokens.numel()).view(tokens) % 5 > 0 if masked else None
            graph = torch.compile(layer, fullgraph=whole, backend=backend, options=options)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected = call(plain, theirs, mask)
            out = call(graph, ours, mask)
            assert_close(out, expected, 1e-4, f"compiled in {mode} mode the output differs")
            expected.square().mean().backward()
            out.square().mean().backward()
            weights = zip(layer.named_parameters(), plain.parameters(), strict=True)
            for name, a, b in (("the input", ours, theirs), *((name, a, b) for (name, a), b in weights)):
                if a.grad is not None and b.grad is not None:
                    assert_close(a.grad, b.grad, 1e-4, f"compiled in {mode} mode the gradient of {name} differs")
    except PropertyFailure as failure:
        raise PropertyFailure(str(failure), "state that forward keeps in Python, which a graph does not see") from None
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """The first two lines of torch's long error messages, with the cause."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"


def exported(build: Build, x: Tensor) -> None:
    """torch.export gives the eager output, also for other numbers of tokens if the layer accepts them."""
    layer = awake(build)
    length = traits(layer, build).length
    dynamic = length in ("any", "up-to")
    places = {1: Dim.DYNAMIC} if x.dim() == 3 else {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    # Traced at another size than at construction, so that a dynamic size is not mistaken for a constant.
    traced = (x[:, :-3].contiguous() if x.dim() == 3 else noise(*x.shape[:2], 6, 8)) if dynamic else x
    try:
        with _quiet():
            program = torch.export.export(layer, (traced,), dynamic_shapes=(places,) if dynamic else None)
    except Exception as error:
        raise Advice(_reason(error)) from error
    with torch.no_grad():
        for given in (x, traced, x[:, : x.shape[1] // 2].contiguous()) if dynamic and x.dim() == 3 else (x, traced):
            try:
                out = program.module()(given)
            except Exception as error:
                raise Advice(f"exported, input {tuple(given.shape)}: {_reason(error)}") from error
            assert_close(out, call(layer, given), 1e-5, f"exported, the output for {tuple(given.shape)} differs")


def batched(build: Build, x: Tensor) -> None:
    """torch.vmap over several batches gives the output of each, and finite gradients of the weights."""
    layer = awake(build)
    batches = torch.stack((x, 2 * x)).requires_grad_()
    expected = torch.stack([call(layer, batch) for batch in batches])
    try:
        with _quiet():
            out = torch.vmap(layer)(batches)
        out.square().mean().backward()
    except Exception as error:
        raise Advice(f"under torch.vmap: {one_line(error)}") from error
    assert_close(out, expected, 1e-4, "under torch.vmap the output differs")
    assert_finite_gradients(layer, batches, "under torch.vmap the gradient of {} is not finite")


def _calls(layer: nn.Module, build: Build, x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Arguments of recorded calls: x, and x with a mask if that is the layer's second argument."""
    yield (x,)
    if traits(layer, build).mask and [*inspect.signature(layer.forward).parameters][1:2] == ["mask"]:
        tokens = to_tokens(x).shape[:2]
        yield x, torch.arange(tokens.numel()).view(tokens) % 5 > 0


def traced(build: Build, x: Tensor) -> None:
    """torch.jit.trace with its defaults works, and the trace gives the eager output for other inputs."""
    layer = awake(build)
    for inputs in _calls(layer, build, x):
        other = 2 * inputs[0].flip(0), *(mask.flip(0) for mask in inputs[1:])
        what = "traced with a mask" if len(inputs) > 1 else "traced"
        try:
            with _quiet():
                graph: Any = torch.jit.trace(layer, inputs)
                out = graph(*other)
        except Exception as error:
            raise Advice(f"{what}: {_reason(error)}") from error
        with torch.no_grad():
            expected = call(layer, *other)
        if out.shape != expected.shape:
            raise Advice(f"{what}, the output has shape {tuple(out.shape)} instead of {tuple(expected.shape)}")
        try:
            assert_close(out, expected, 1e-4, f"{what}, the output for other numbers differs")
        except PropertyFailure as failure:
            raise Advice(str(failure)) from failure


def onnx_by_tracing(build: Build, x: Tensor) -> None:
    """torch.onnx.export(dynamo=False) works for any batch size, and ONNX Runtime gives the eager output."""
    try:
        import onnx  # noqa: F401
        from onnxruntime import InferenceSession
    except ImportError as error:
        raise NotApplicable("onnxruntime is not installed: pip install 'tokenmix[onnx]'") from error
    layer = awake(build)
    for inputs in _calls(layer, build, x):
        names = ["x", "mask"][: len(inputs)]
        file: Any = io.BytesIO()
        try:
            with _quiet():
                torch.onnx.export(
                    layer,
                    inputs,
                    file,
                    dynamo=False,
                    opset_version=17,
                    input_names=names,
                    dynamic_axes={name: {0: "batch"} for name in names},
                )
            session = InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
            for given in (inputs, tuple(each[:1] for each in inputs)):
                (out,) = session.run(None, {name: each.numpy() for name, each in zip(names, given, strict=True)})
                with torch.no_grad():
                    expected = call(layer, *given)
                assert_close(torch.from_numpy(out), expected, 1e-4, f"in ONNX Runtime, {tuple(given[0].shape)} differs")
        except Exception as error:
            what = "with a mask: " if len(inputs) > 1 else ""
            raise Advice(f"{what}{_reason(error)}") from error
