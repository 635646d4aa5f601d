"""After a swap the rest of a model works as before: export, ONNX, compile, copies, checkpointing, other sizes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from swap_families import FAMILIES, OTHERS
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError

pytest.importorskip("transformers", reason="transformers is optional and not installed")
MIXERS = ("external", "gating")


def timm_vit(**kwargs: Any) -> nn.Module:
    size: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "num_classes": 5,
    }
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**size, **kwargs})
    return model.eval()


class First(nn.Module):
    """The first output of a model of transformers, called by name, which traced exports need."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.model(**dict(zip(self.names, args, strict=True)))[0]
        return out


FAST = ("timm", "vit", "bert")
# They cannot be exported so by themselves, without a swap.
NO_ONNX = {("siglip2", True), ("patchtst", False), ("dinov3", False)}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, *OTHERS) if name not in FAST]


@pytest.fixture(params=[*FAST, *SLOW])
def made(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and its inputs, padding among those of the text encoders."""
    torch.manual_seed(0)
    if request.param == "timm":
        return timm_vit(), (torch.randn(2, 3, 16, 16),)
    if request.param in OTHERS:
        if request.param in ("monai", "diffusers"):
            pytest.importorskip(request.param, reason=f"{request.param} is optional and not installed")
        model, inputs = OTHERS[request.param]()
        return model.eval(), inputs
    family = FAMILIES[request.param]
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in family.inputs().items()}
    return First(family.build().float(), tuple(inputs)).eval(), tuple(inputs.values())


def swap(made: tuple[nn.Module, tuple[Tensor, ...]], mixer: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    model, inputs = made
    tokenmix.swap_attention(model, mixer, example_inputs=inputs, drop="positions")
    return model, inputs, model(*inputs)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_export_with_a_fixed_and_with_any_batch(made: Any, mixer: str) -> None:
    model, inputs, expected = swap(made, mixer)
    torch.testing.assert_close(torch.export.export(model, inputs).module()(*inputs), expected, rtol=1e-4, atol=1e-5)
    batch = torch.export.Dim("batch", min=2)
    shapes: Any = tuple({0: batch} for _ in inputs)
    program = torch.export.export(model, inputs, dynamic_shapes=(shapes,) if isinstance(model, First) else shapes)
    more = tuple(torch.cat([x, x.flip(0)]) for x in inputs)
    torch.testing.assert_close(program.module()(*more), model(*more), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_onnx_by_both_exporters(
    made: Any, mixer: str, dynamo: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if (request.node.callspec.params["made"], dynamo) in NO_ONNX:
        pytest.skip("the model itself cannot be exported by this exporter")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is optional and not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is optional and not installed")
    model, inputs, expected = swap(made, mixer)
    file, names = tmp_path / "model.onnx", [f"input_{i}" for i in range(len(inputs))]
    torch.onnx.export(model, inputs, file, dynamo=dynamo, verbose=False, input_names=names)
    found = runtime.InferenceSession(file).run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_compile_copy_and_state_dict(made: Any) -> None:
    plain = copy.deepcopy(made)
    model, inputs, expected = swap(made, "external")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    torch.testing.assert_close(copy.deepcopy(model)(*inputs), expected)
    again = swap(plain, "external")[0]
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(*inputs), expected)


@pytest.mark.parametrize("name", ["bert", "vit", "videomae", "wav2vec2"])
def test_gradient_checkpointing(name: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    model: Any = family.build()
    tokenmix.swap_attention(model, "external")
    inputs, gradients = family.inputs(), []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
            for part in model.modules():
                # Dropout and masks of training would differ between the two passes.
                part.training = "Layer" in type(part).__name__ and not isinstance(part, nn.LayerNorm)
        model.zero_grad()
        model(**inputs)[0].square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any(".mixer." in n for n in gradients[0])
    for n, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][n], gradient)


@torch.no_grad()
def test_another_image_size() -> None:
    """Before the swap as the model does it; after it, a learned matrix over tokens is resized with the model."""
    x = torch.randn(2, 3, 32, 32)
    for mixer in ("external", "gating", "less"):
        before: Any = timm_vit()
        before.set_input_size((32, 32))
        tokenmix.swap_attention(before, mixer)
        assert before(x).shape == (2, 5)
    free: Any = timm_vit()
    tokenmix.swap_attention(free, "external")
    free.set_input_size((32, 32))
    assert free(x).shape == (2, 5)
    for mixer in ("gating", "less", "external"):
        model = timm_vit(class_token=False, global_pool="avg")
        tokenmix.swap_attention(model, mixer)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        layer: Any = model.get_submodule("blocks.1.attn")
        by_hand: Any = copy.deepcopy(layer)
        tokenmix.swap.set_input_size(model, 32)
        assert model(x).shape == (2, 5)
        by_hand.mixer.set_grid((4, 4), (8, 8))
        tokens = torch.randn(2, 64, 32)
        torch.testing.assert_close(layer(tokens), by_hand(tokens))


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_small_patch16_224"])
@torch.no_grad()
def test_another_image_size_where_positions_were_dropped(name: str) -> None:
    """These models resize the positions of their attention, which is gone."""
    model: Any = timm.create_model(name, img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=5)
    tokenmix.swap_attention(model, "external", drop="positions")
    model.set_input_size((64, 64))
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)


def test_a_size_that_does_not_fit_changes_nothing() -> None:
    model: Any = timm_vit()
    tokenmix.swap_attention(model, "gating")
    with pytest.raises(UserError, match="over 17 tokens, and the grid has 4 x 4"):
        tokenmix.swap.set_input_size(model, 32)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 5)
    with pytest.raises(UserError, match="has no set_input_size"):
        tokenmix.swap.set_input_size(nn.Linear(2, 2), 32)
