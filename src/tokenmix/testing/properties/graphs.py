"""Capture by torch.compile and torch.export."""

import torch
from torch import Tensor
from torch.export import Dim

from tokenmix.testing.harness import Build, PropertyFailure, assert_close, awake, call, noise, to_tokens, traits


def compiled(build: Build, x: Tensor, backend: str = "aot_eager") -> None:
    """torch.compile(fullgraph=True) gives the eager output and gradients: in eval mode, and masked in training mode."""
    for training in (False, True):
        mode = "training" if training else "eval"
        torch.compiler.reset()
        layer, plain = awake(build).train(training), awake(build).train(training)
        tokens = to_tokens(x).shape[:2]
        masked = training and traits(layer, build, x).mask
        mask = torch.arange(tokens.numel()).view(tokens) % 5 > 0 if masked else None
        graph = torch.compile(layer, fullgraph=True, backend=backend)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = call(plain, theirs, mask)
        try:
            out = call(graph, ours, mask)  # pyrefly: ignore[bad-argument-type]
        except Exception as error:
            raise PropertyFailure(f"in {mode} mode: {_reason(error)}") from error
        assert_close(out, expected, 1e-4, f"compiled in {mode} mode the output differs")
        expected.square().mean().backward()
        out.square().mean().backward()
        for name, a, b in [("the input", ours, theirs)] + [
            (name, a, b) for (name, a), b in zip(layer.named_parameters(), plain.parameters(), strict=True)
        ]:
            if a.grad is not None and b.grad is not None:
                assert_close(a.grad, b.grad, 1e-4, f"compiled in {mode} mode the gradient of {name} differs")


def _reason(error: Exception) -> str:
    """What stopped the capture: torch's messages explain themselves at length, the first lines say what and why."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"


def exported(build: Build, x: Tensor) -> None:
    """torch.export gives the eager output, for other numbers of tokens too where the layer takes them."""
    layer = awake(build)
    length = traits(layer, build, x).length
    dynamic = length in ("any", "up-to")
    places = {1: Dim.DYNAMIC} if x.dim() == 3 else {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    # Traced at another size than at design, so that a dynamic size is not mistaken for the one that is wired in.
    traced = (x[:, :-3].contiguous() if x.dim() == 3 else noise(*x.shape[:2], 6, 8)) if dynamic else x
    try:
        program = torch.export.export(layer, (traced,), dynamic_shapes=(places,) if dynamic else None)
    except Exception as error:
        raise PropertyFailure(_reason(error)) from error
    with torch.no_grad():
        for given in (x, traced, x[:, : x.shape[1] // 2].contiguous()) if dynamic and x.dim() == 3 else (x, traced):
            try:
                out = program.module()(given)
            except Exception as error:
                raise PropertyFailure(f"exported, input {tuple(given.shape)}: {_reason(error)}") from error
            assert_close(out, call(layer, given), 1e-5, f"exported, the output for {tuple(given.shape)} differs")
