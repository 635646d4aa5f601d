"""Every family as one graph: compiled, exported and in ONNX, each with any batch; and traced by torch.fx."""

import warnings
from typing import Any

import pytest
import timm
import torch
from timm.models import FeatureGraphNet
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from tokenmix import create_model, list_mixers, list_models

# As a graph, mixer_nano is vit_nano: it differs by its arguments alone.
GRAPHS = [name for name in list_models("*_nano", task="image-classification") if name != "mixer_nano"]
# A capture takes seconds, and the contract captures every mixer.
CAPTURED = [pytest.param(name, marks=[] if name == "gmlp_nano" else pytest.mark.slow) for name in GRAPHS]
BATCH = ({0: torch.export.Dim("batch", min=1, max=1024)},)


def build(name: str, **kwargs: Any) -> nn.Module:
    """The model with weights that all count: no head, gate or scale of nought."""
    torch.manual_seed(0)
    model = create_model(name, **kwargs).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def images(size: int = 2) -> Tensor:
    return torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CAPTURED)
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


@pytest.mark.parametrize("name", CAPTURED)
def test_exports_with_any_batch(name) -> None:
    model = build(name)
    program = torch.export.export(model, (images(),), dynamic_shapes=BATCH)
    batch = images(5)
    assert torch.allclose(program.module()(batch), model(batch), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
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


# BatchNorm in the blocks is in this model alone, and in no nano size.
BATCH_NORM = {"img_size": 32, "embed_dim": 32, "depth": 3, "num_slots": 8}


def hooked(model: nn.Module, names: list[str], batch: Tensor) -> list[Tensor]:
    """What forward hooks see: the first thing that each module returns."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def keep(_module: nn.Module, _inputs: Any, out: Any) -> None:
            seen[name] = out[0] if isinstance(out, tuple) else out

        model.get_submodule(name).register_forward_hook(keep)

    for name in names:
        watch(name)
    model(batch)
    return [seen[name] for name in names]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *((name, {}) for name in list_models("*_nano", task="image-classification")),
        *(("mixer_nano", {"mixer": mixer}) for mixer in list_mixers()),
        ("eamlp_7_bn", BATCH_NORM),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("mixer", "")),
)
def test_fx_extracts_what_hooks_see(name: str, kwargs: dict[str, Any]) -> None:
    model: Any = build(name, **kwargs)
    names = [entry["module"] for entry in model.feature_info] + [model.pretrained_cfg["classifier"]]
    extractor, whole = create_feature_extractor(model, names).eval(), torch.fx.symbolic_trace(model)
    batch = images(3)
    with torch.no_grad():
        found = extractor(batch)
        torch.testing.assert_close([found[name] for name in names], hooked(model, names, batch))
        torch.testing.assert_close(whole(batch), model(batch))


@pytest.mark.parametrize("name", list_models("*_nano", task="image-classification"))
def test_timm_extracts_by_fx(name: str) -> None:
    model: Any = build(name)
    indices = tuple(range(len(model.feature_info)))
    extractor = FeatureGraphNet(model, out_indices=indices).eval()
    with torch.no_grad():
        wanted = hooked(model, [entry["module"] for entry in model.feature_info], images())
        torch.testing.assert_close(extractor(images()), wanted)
    by_name = timm.create_model(name, features_only=True, feature_cls="fx", out_indices=(0, 2))
    assert [tuple(x.shape) for x in by_name(images())] == [tuple(wanted[i].shape) for i in (0, 2)]
