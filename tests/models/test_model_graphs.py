"""Every family as one graph: compiled, exported and in ONNX, each with any batch."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from tokenmix import create_model, list_models

# As a graph, mixer_nano is vit_nano: it differs by its arguments alone.
GRAPHS = [name for name in list_models("*_nano", task="image-classification") if name != "mixer_nano"]
# The exporter takes seconds for each; what a dynamic batch does to a model shows in torch.export already.
IN_ONNX = [pytest.param(name, marks=[] if name == "gmlp_nano" else pytest.mark.slow) for name in GRAPHS]
# A pyramid of four stages takes as long as all others together, and its own tests compile it.
COMPILED = [pytest.param(name, marks=[pytest.mark.slow] if name == "lavit_nano" else []) for name in GRAPHS]
BATCH = ({0: torch.export.Dim("batch", min=1, max=1024)},)


def build(name: str) -> nn.Module:
    """The model with weights that all count: no head, gate or scale of nought."""
    torch.manual_seed(0)
    model = create_model(name).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def images(size: int = 2) -> Tensor:
    return torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name) -> None:
    torch._dynamo.reset()
    model = build(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = images()
    assert torch.allclose(compiled(batch), model(batch), atol=1e-5)
    model.train()
    compiled(batch).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_compiles_with_inductor(name) -> None:
    torch._dynamo.reset()
    model = build(name)
    batch = images()
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, fullgraph=True)(batch), model(batch), atol=1e-4)


@pytest.mark.parametrize("name", GRAPHS)
def test_exports_with_any_batch(name) -> None:
    model = build(name)
    program = torch.export.export(model, (images(),), dynamic_shapes=BATCH)
    batch = images(5)
    assert torch.allclose(program.module()(batch), model(batch), atol=1e-5)


@pytest.mark.parametrize("name", IN_ONNX)
def test_onnx_with_any_batch(name, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build(name)
    file = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (images(),), dynamo=True, verbose=False, dynamic_shapes=BATCH)
    program.save(str(file), external_data=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    batch = images(5)
    (logits,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(logits), model(batch), atol=1e-4)
