"""Less-attention with the attention residual in models that pass tokens only: scores go from layer to layer unseen."""

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from swap_families import FAMILIES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import VisionTransformer as TorchvisionViT

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.inspect import attention_maps
from tokenmix.swap import SwapReport

transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")


def timm_vit(depth: int = 3, **kwargs: Any) -> Any:
    size: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**size, "depth": depth, **kwargs}).eval()


def swap(model: nn.Module, **kwargs: Any) -> SwapReport:
    return tokenmix.swap_attention(model, "less", **{"mixer_kwargs": {"residual": True}, **kwargs})


def moved(model: Any, std: float = 0.1) -> Any:
    """Weights that no start has, so that the scores of each layer count in the next."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return model


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 16, 16, dtype=dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@torch.no_grad()
def test_against_a_plain_loop_over_layers_and_heads() -> None:
    """A_1 = Q K^T / sqrt(d); A_l = Q K^T / sqrt(d) + s Psi(Theta(A_(l-1))^T)^T, with Linear layers over the tokens."""
    model = timm_vit().double()
    swap(model)
    moved(model)
    x, seen = images(torch.float64), []
    expected = model(x)
    tokens = model._pos_embed(model.patch_embed(x))
    before: list[Tensor] | None = None
    for block in model.blocks:
        layer: Any = block.attn.mixer.inner
        y, d = block.norm1(tokens), 16
        if before is None:
            query, key, value = layer.qkv(y).chunk(3, dim=-1)
        else:
            (query, key), value = layer.qk(y).chunk(2, dim=-1), layer.v(y)
        scores, heads = [], []
        for h in range(2):
            part = slice(h * d, h * d + d)
            one = query[..., part] @ key[..., part].mT / d**0.5
            if before is not None:
                turned = (before[h] @ layer.theta.T + layer.theta_bias).mT
                one = one + layer.residual_scale[h] * (turned @ layer.psi.T + layer.psi_bias).mT
            scores.append(one)
            heads.append(one.softmax(-1) @ value[..., part])
        seen.append(torch.stack(scores, 1).softmax(-1))
        tokens = tokens + layer.proj(torch.cat(heads, -1))
        tokens = tokens + block.mlp(block.norm2(tokens))
        before = scores
    torch.testing.assert_close(model.forward_head(model.norm(tokens)), expected, rtol=1e-10, atol=1e-10)
    for found, wanted in zip(attention_maps(model, x), seen, strict=True):
        torch.testing.assert_close(found.map, wanted, rtol=1e-10, atol=1e-10)


def torchvision_vit() -> nn.Module:
    model = TorchvisionViT(16, 4, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return model.double().eval()


@pytest.mark.parametrize("name", ["timm", "torchvision", "tokenmix", "vit", "bert", "distilbert", "clip", "videomae"])
@torch.no_grad()
def test_the_model_is_the_same_at_the_start_and_costs_what_the_report_says(name: str) -> None:
    build = {"timm": timm_vit, "torchvision": torchvision_vit, "tokenmix": lambda: tokenmix.create_model("vit_nano")}
    family = FAMILIES.get(name)
    model = (build[name] if family is None else family.build)().double().eval()
    size = 32 if name == "tokenmix" else 16
    inputs = {"x": torch.randn(2, 3, size, size, dtype=torch.float64)} if family is None else family.inputs()

    def run() -> Tensor:
        out = model(*inputs.values()) if family is None else model(**inputs)[0]
        return out if family is None or family.taking_part is None else out[family.taking_part]

    before = run()
    report = swap(model)
    torch.testing.assert_close(run(), before, rtol=1e-10, atol=1e-10)
    rows = [(row.macs_after or 0) - (row.macs_before or 0) for row in report.rows]
    if name != "tokenmix":  # its first layer has Theta and Psi and nothing to transform
        assert (report.macs_after or 0) - (report.macs_before or 0) == sum(rows) > 0
        assert [row.after for row in report.rows] == ["self", *["less"] * (len(report.rows) - 1)]
    moved(model)
    moved_once = run()
    for part in model.modules():
        if getattr(part, "residual_scale", None) is not None:
            part.residual_scale.zero_()  # type: ignore[operator, union-attr]
    assert not torch.allclose(run(), moved_once, rtol=1e-6, atol=1e-6), "the scores of the layer before count"


@pytest.mark.parametrize("segment", [1, 2])
def test_gradient_checkpointing_with_two_passes_before_the_gradients(segment: int) -> None:
    """A block is called again after a later pass has gone through it; it needs the scores of its own pass."""
    model = timm_vit(depth=4).double()
    swap(model)
    moved(model)
    first, second = images(torch.float64), images(torch.float64)

    def features(x: Tensor, checkpointed: bool) -> Tensor:
        x = model._pos_embed(model.patch_embed(x))
        for i in range(0, 4, segment):
            part = model.blocks[i : i + segment]
            x = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
        return x

    gradients = []
    for checkpointed in (False, True):
        model.zero_grad()
        loss = features(first, checkpointed).square().mean() + features(second, checkpointed).pow(3).mean()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert {"blocks.1.attn.mixer.inner.theta", "blocks.0.attn.mixer.inner.qkv.weight"} <= gradients[0].keys()
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_gradient_checkpointing_of_the_libraries(library: str) -> None:
    model, x = timm_vit() if library == "timm" else FAMILIES["vit"].build().float(), images()
    swap(model)
    moved(model)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.set_grad_checkpointing() if library == "timm" else model.gradient_checkpointing_enable()
            model.train()
        model.zero_grad()
        out = model(x)
        (out if isinstance(out, Tensor) else out[0]).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_what_would_lose_the_scores_is_one_line() -> None:
    model = timm_vit()
    swap(model)
    with pytest.raises(UserError, match="called without the layer before it"):
        model.blocks[1](torch.randn(1, 17, 32))
    model(images())
    with pytest.raises(UserError, match="called without the layer before it"):
        model.blocks[1].attn(torch.randn(1, 17, 32))
    x = model._pos_embed(model.patch_embed(images()))
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    with pytest.raises(UserError, match="use_reentrant=False"):
        x.sum().backward()


@torch.no_grad()
def test_copies_pickles_and_state_dicts() -> None:
    model, x = timm_vit(), images()
    plain = copy.deepcopy(model)
    swap(model)
    moved(model)
    with torch.enable_grad():
        model(x)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        moved(other)
        assert torch.equal(model(x), expected), "a copy has links of its own"
    swap(plain)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), expected)
    tokenmix.swap_attention(plain, "external")
    assert plain(x).isfinite().all()


@torch.no_grad()
def test_export_onnx_and_compile(tmp_path: Path) -> None:
    model, x = timm_vit(), images()
    swap(model)
    moved(model)
    expected, more = model(x), torch.randn(5, 3, 16, 16)
    batch = {"batch": torch.export.Dim("batch", min=2, max=64)}
    for shapes in (None, ({0: batch["batch"]},)):
        program = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
        torch.testing.assert_close(program(x), expected)
    torch.testing.assert_close(program(more), model(more), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), expected)
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is optional and not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is optional and not installed")
    for dynamo in (False, True):
        file = tmp_path / f"{dynamo}.onnx"
        torch.onnx.export(model, (x,), file, dynamo=dynamo, verbose=False, input_names=["x"])
        found = runtime.InferenceSession(file).run(None, {"x": x.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)


def test_compiled_training_has_the_same_gradients() -> None:
    model, x = timm_vit(), images()
    swap(model)
    moved(model)
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_transformers_saves_and_opens_it(tmp_path: Path) -> None:
    import tokenmix.register  # noqa: F401

    model, x = FAMILIES["vit"].build().float(), images()
    swap(model)
    moved(model).save_pretrained(tmp_path)
    (said,) = json.loads((tmp_path / "config.json").read_text())["tokenmix_swap"]
    assert said["mixer_kwargs"] == {"residual": True}
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(x)[0], model(x)[0])


@torch.no_grad()
def test_another_image_size() -> None:
    model = timm_vit(class_token=False, global_pool="avg")
    swap(model)
    tokenmix.swap.set_input_size(moved(model), 32)
    assert model.blocks[1].attn.mixer.inner.theta.shape == (64, 64)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(
    ("build", "kwargs", "message"),
    [
        (lambda: timm.create_model("pit_ti_224"), {}, "has 730 tokens and the second 197|has 962 tokens"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), {}, "windows"),
        (timm_vit, {"where": "blocks.1.*"}, "alone has no layer before it"),
        (timm_vit, {"img_size": None, "where": ["blocks.0.attn"]}, "alone has no layer before it"),
        (lambda: FAMILIES["albert"].build(), {}, "alone has no layer before it"),
        (timm_vit, {"mixer_kwargs": {"residual": True, "scores_from": "previous"}}, "leave out scores_from"),
    ],
)
def test_layers_that_do_not_share_a_grid_are_refused(build: Any, kwargs: dict[str, Any], message: str) -> None:
    model = build()
    before = str(model)
    with pytest.raises(UserError, match=message):
        swap(model, **kwargs)
    assert str(model) == before


def test_layers_without_scores_of_their_own() -> None:
    """The paper's layers proper: of the second layer on no query and key; it has to be trained."""
    model = timm_vit()
    report = swap(model, mixer_kwargs={"scores_from": "previous"})
    assert [row.kept for row in report.rows] == [("query", "key", "value", "out"), (), ()]
    model(images()).sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())


@torch.no_grad()
def test_threads_do_not_take_each_other_s_scores() -> None:
    model, (x, y) = timm_vit(depth=2), (images(), images() * 2)
    swap(model, mixer_kwargs={"scores_from": "previous"})
    expected, both = [model(x), model(y)], threading.Barrier(2, timeout=60)

    def wait(*_: object) -> None:
        both.wait()

    model.blocks[0].register_forward_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        for out, alone in zip(pool.map(torch.no_grad()(lambda x: model(x)), (x, y)), expected, strict=True):
            torch.testing.assert_close(out, alone)
