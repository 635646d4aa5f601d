"""Blocks that are inserted into models of other libraries: the identity at the start, then what the equation says."""

import copy
import json
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import tokenmix
from tokenmix import UserError
from tokenmix.layers import ExternalAttention, list_mixers
from tokenmix.swap import insert, remove_inserted
from tokenmix.swap.inserting import InsertedBlock


class Net(nn.Module):
    """Convolutions in 1, 2 or 3 dimensions, with SiLU at the end of each."""

    def __init__(self, dims: int, width: int = 16) -> None:
        super().__init__()
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first = nn.Sequential(conv(3, width, 3, padding=1), nn.SiLU())
        self.second = conv(width, width, 3, padding=1)
        self.pairs = nn.ModuleList([conv(width, 4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs[0](torch.nn.functional.silu(self.second(self.first(x))))


EXAMPLES = {1: (2, 3, 12), 2: (2, 3, 6, 4), 3: (2, 3, 2, 6, 4)}


@pytest.mark.parametrize("dims", EXAMPLES)
@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_in_every_layout_starts_as_the_identity(name: str, dims: int):
    torch.manual_seed(0)
    model, x = Net(dims).eval(), torch.randn(EXAMPLES[dims])
    before, keys = model(x), set(model.state_dict())
    if dims == 3 and name in ("pool", "depthwise-2d"):
        with pytest.raises(UserError, match=r"would take the end of one slice .* for neighbours"):
            insert(model, ["first", "second"], name, example_inputs=(x,))
        return
    report = insert(model, ["first", "second"], name, example_inputs=(x,))
    assert torch.equal(model(x), before)
    assert [row.dim for row in report.rows] == [16, 16]
    assert [row.num_tokens for row in report.rows] == [(x[0, 0].numel(),)] * 2
    assert report.rows[0].layout == ("(B, C, L)", "(B, C, H, W)", "(B, C, D, H, W)")[dims - 1]
    assert keys < set(model.state_dict()), "names of the model's own weights stay"
    model.train()(x).square().mean().backward()
    gates = [p for n, p in model.named_parameters() if n.endswith("gamma")]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in gates)
    report.remove()
    assert set(model.state_dict()) == keys
    assert torch.equal(model.eval()(x), before)


@pytest.mark.parametrize("name", ["external", "self", "sagan", "external-2d", "depthwise-2d", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_start_is_the_identity_to_the_last_bit(name: str, dtype: torch.dtype):
    torch.manual_seed(7)
    block = InsertedBlock(tokenmix.create_mixer(name, 16), "channels-first").to(dtype).eval()
    x = torch.randn(2, 16, 6, 4, dtype=dtype).relu() * -1
    assert x.signbit().logical_and(x == 0).any(), "zeros of both signs"
    x[0, 3, 2, 1], x[0, 4, 5, 3] = torch.inf, -torch.inf
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        y = block(given)
        assert torch.equal(y.view(bits), x.view(bits))
        assert y.stride() == given.stride()
    x[1, 0, 0, 0] = torch.nan
    assert block(x).isnan().sum() == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert block(x).dtype == dtype


@torch.no_grad()
def loop(block: InsertedBlock, x: Tensor) -> Tensor:
    """x + gamma * mixer(norm(x)) with external attention, position by position."""
    mixer: Any = block.mixer
    assert block.norm is not None
    assert block.gamma is not None
    flat = x.flatten(2)
    out = flat.clone()
    for b in range(flat.shape[0]):
        columns = []
        for n in range(flat.shape[2]):
            token = flat[b, :, n]
            token = (token - token.mean()) / (token.var(unbiased=False) + block.norm.eps).sqrt()
            columns.append(token * block.norm.weight + block.norm.bias)
        out[b] += block.gamma[:, None] * mixer(torch.stack(columns)[None])[0].T
    return out.view(x.shape)


@pytest.mark.parametrize("dims", EXAMPLES)
def test_the_equation(dims: int):
    torch.manual_seed(1)
    block = InsertedBlock(ExternalAttention(16, num_slots=8), "channels-first").double().eval()
    for p in block.parameters():
        nn.init.normal_(p)
    x = torch.randn(2, 16, *EXAMPLES[dims][2:], dtype=torch.float64)
    torch.testing.assert_close(block(x), loop(block, x), rtol=1e-12, atol=1e-12)
    moved = InsertedBlock(block.mixer, "channels-last").double()
    moved.load_state_dict(block.state_dict())
    torch.testing.assert_close(moved.eval()(x.movedim(1, -1)).movedim(-1, 1), block(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["external", "self", "sagan", "external-2d", "depthwise-2d", "linear"])
def test_a_volume_of_one_slice_is_a_map(name: str):
    torch.manual_seed(2)
    mixer = tokenmix.create_mixer(name, 16, **({"num_heads": 2} if name in ("self", "linear") else {}))
    block = InsertedBlock(mixer, "channels-first").double().eval()
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 16, 6, 4, dtype=torch.float64)
    assert torch.equal(block(x.unsqueeze(2)).squeeze(2), block(x))


def models() -> dict[str, tuple[Any, str, str]]:
    vision = torchvision.models
    plain = {"weights": None, "weights_backbone": None}
    return {
        "resnet18": (lambda: vision.resnet18(weights=None), "layer3", "(B, C, H, W)"),
        "resnet18 blocks": (lambda: vision.resnet18(weights=None), "layer[34].*", "(B, C, H, W)"),
        "fcn": (lambda: vision.segmentation.fcn_resnet50(**plain), "backbone.layer4", "(B, C, H, W)"),
        "lraspp": (lambda: vision.segmentation.lraspp_mobilenet_v3_large(**plain), "classifier.cbr", "(B, C, H, W)"),
        "convnext": (lambda: timm.create_model("convnext_atto"), "stages.2", "(B, C, H, W)"),
        "vit": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=64), "blocks.[01]", "(B, N, C)"),
        "swin": (
            lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)),
            "layers.1",
            "(B, H, W, C)",
        ),
    }


@pytest.mark.parametrize("case", models())
def test_models_of_other_libraries(case: str):
    build, after, layout = models()[case]
    torch.manual_seed(3)
    model = build().eval()
    size = 224 if case == "swin" else 64
    x = torch.randn(1, 3, size, size)

    def out(network: nn.Module) -> Tensor:
        found = network(x)
        return found["out"] if isinstance(found, dict) else found

    before = out(model)
    report = insert(model, after, "external", img_size=size, mixer_kwargs={"num_slots": 8})
    assert {row.layout for row in report.rows} == {layout}
    assert torch.equal(out(model), before)
    assert report.macs_after > report.macs_before
    assert report.parameters_after - report.parameters_before == sum(row.parameters for row in report.rows)
    for name, p in model.named_parameters():
        if name.endswith("gamma") and "inserted" in name:
            nn.init.normal_(p)
    assert not torch.equal(out(model), before)
    # Rebuilt, copied, traced to a graph.
    again = build().eval()
    insert(again, after, "external", img_size=size, mixer_kwargs={"num_slots": 8})
    again.load_state_dict(model.state_dict())
    assert torch.equal(out(again), out(model))
    assert torch.equal(out(copy.deepcopy(model)), out(model))
    json.dumps(report.to_json())
    assert remove_inserted(again) == [row.name for row in report.rows]
    assert torch.equal(out(again), before)


def test_graphs_of_a_model_with_a_block(tmp_path: Any):
    torch.manual_seed(4)
    model, x = torchvision.models.resnet18(weights=None).eval(), torch.randn(2, 3, 64, 64)
    insert(model, "layer3", "external", img_size=64)
    nn.init.normal_(model.layer3.inserted.gamma)
    wanted = model(x)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), wanted)
    # torch.fx cannot look into layers that check their input: the block is a leaf of the graph.
    leaf = {"leaf_modules": [InsertedBlock]}
    nodes = torchvision.models.feature_extraction.create_feature_extractor(model, {"layer3": "f"}, tracer_kwargs=leaf)
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2, model.layer3)
    torch.testing.assert_close(nodes(x)["f"], stem(x))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


def test_a_module_that_is_called_several_times():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).mean() + self.head(x[..., ::2, ::2]).mean()

    model, x = Twice(), torch.randn(1, 4, 8, 8)
    before = model(x)
    report = insert(model, "head", "external", example_inputs=(x,))
    assert report.rows[0].num_tokens == (64, 16)
    assert torch.equal(model(x), before)
    report.remove()
    with pytest.raises(UserError, match=r"takes one size, .* \[\(4, 4\), \(8, 8\)\]"):
        insert(model, "head", "token-mlp", example_inputs=(x,))


class Up(nn.Module):
    """The convolution that is registered last runs first, and has as many channels as the map has columns."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse, self.skip = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(self.skip(x))


class Fixed(nn.Module):
    """One image size only; `last` moves the channels to the end."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.up, self.last, self.head = Up(), nn.LayerNorm(32) if last else nn.Identity(), nn.Linear(32 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.head(self.last(x if isinstance(self.last, nn.Identity) else x.movedim(1, -1)).flatten(1))


@pytest.mark.parametrize(
    ("build", "after", "size", "layout"),
    [
        (lambda: nn.Sequential(Up()), "0", 32, "(B, C, H, W)"),  # C = H = W
        (lambda: nn.Sequential(Up()), "0", 8, "(B, C, H, W)"),
        (lambda: Fixed(False), "up", 8, "(B, C, H, W)"),
        (lambda: Fixed(True), "last", 8, "(B, H, W, C)"),
        (lambda: torchvision.models.densenet121(weights=None), "features.transition1", 128, "(B, C, H, W)"),
        # C = H = W, and the last layer of a block has the channels last.
        (lambda: torchvision.models.convnext_tiny(weights=None), "features.1", 384, "(B, C, H, W)"),
        (lambda: torchvision.models.swin_t(weights=None), "features.1", 384, "(B, H, W, C)"),
    ],
)
def test_the_channel_axis_where_sizes_agree(build: Any, after: str, size: int, layout: str):
    x = torch.zeros(1, 3, size, size, device="meta")
    assert insert(build(), after, "identity", example_inputs=(x,)).rows[0].layout == layout


def test_a_layout_that_nothing_shows_is_a_warning():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Conv2d(3, 3, 1))
    with pytest.warns(UserWarning, match=r"AdaptiveAvgPool2d does not show .* give layout='channels-last'"):
        insert(model, "0", "external", img_size=8)


@pytest.mark.parametrize("mixer", ["gating", "token-mlp"])
def test_weights_per_position_refuse_another_map(mixer: str):
    model = nn.Sequential(nn.Conv2d(3, 8, 1))
    insert(model, "0", mixer, img_size=(4, 8))
    model(torch.randn(1, 3, 4, 8))
    for other in ((8, 4), (4, 4)):
        with pytest.raises(UserError, match=r"per position of a map of \(4, 8\), got .* images of the size"):
            model(torch.randn(1, 3, *other))


def test_a_module_under_several_names():
    class Shared(nn.Module):
        def __init__(self, last: int) -> None:
            super().__init__()
            self.act = nn.SiLU()
            self.first = nn.Sequential(nn.Conv2d(3, 8, 1), self.act)
            self.last = nn.Sequential(nn.Conv2d(8, last, 1), self.act)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    x = torch.randn(1, 3, 4, 4)
    assert insert(Shared(8), "last.1", "external", example_inputs=(x,)).rows[0].num_tokens == (16, 16)
    assert len(insert(Shared(8), "*.1", "external", example_inputs=(x,)).rows) == 1
    with pytest.raises(UserError, match=r"after last\.1 \(SiLU\): its calls give outputs of widths \[6, 8\]"):
        insert(Shared(6), "last.1", "external", example_inputs=(x,))


@pytest.mark.parametrize(
    ("after", "mixer", "message"),
    [
        ("layr3", "external", "unknown module of the model 'layr3'; did you mean layer3"),
        ("fc", "external", r"after fc \(Linear\): its output .* is neither tokens"),
        ("layer3", "extern", "unknown mixer 'extern'"),
        ("layer3", 3, "mixer must be a name"),
        ([], "external", "after is names of modules or a glob over them, got an empty list"),
        (nn.ReLU(), "external", "got ReLU; give one, such as 'layer3'"),
    ],
)
def test_refusals(after: Any, mixer: Any, message: str):
    model = torchvision.models.resnet18(weights=None)
    keys = set(model.state_dict())
    with pytest.raises(UserError, match=message):
        insert(model, after, mixer, img_size=32)
    assert set(model.state_dict()) == keys
    insert(model, "layer3", "external", img_size=32)
    with pytest.raises(UserError, match="has an inserted block already"):
        insert(model, "layer3", "external", img_size=32)
    with pytest.raises(UserError, match="unknown layout 'nchw'; known: channels-first"):
        insert(model, "layer2", "external", layout="nchw", img_size=32)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"of avgpool is one token"):
        assert "input (1, 3, 32, 32)" in str(insert(model, "avgpool", "external", img_size=32))
    with pytest.raises(UserError, match=r"model must be an nn\.Module"):
        insert("resnet18", "layer3", "external")  # type: ignore[arg-type]


def test_another_layout_than_in_the_example_is_refused():
    class Heads(nn.Module):
        """As a language model, whose head gets some of the tokens in training."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 20)

        def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
            return self.head(x if chosen is None else x[chosen])

    model, x = Heads(), torch.randn(2, 16, 8)
    insert(model, "head", "external", example_inputs=(x,))
    with pytest.raises(UserError, match=r"got \(32, 20\); insert after modules that give the same"):
        model(x, torch.ones(2, 16, dtype=torch.bool))


def test_outputs_that_are_no_tensor_and_modules_that_are_not_called():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.unused, self.conv = Pair(), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.pair(x)[0])

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(UserError, match="its output is of type tuple"):
        insert(Odd(), "pair", "external", example_inputs=(x,))
    with pytest.raises(UserError, match="forward pass does not call it"):
        insert(Odd(), "unused", "external", example_inputs=(x,))
    report = insert(Odd(), "*", "external", example_inputs=(x,))
    assert [row.name for row in report.rows] == ["conv"]
    assert {s.name for s in report.skipped} == {"pair", "unused"}
    with pytest.raises(UserError, match="forward pass on the example fails"):
        insert(Odd(), "conv", "external", example_inputs=(x[0, 0],))


@pytest.mark.parametrize("mixer", ["external", "self", "sagan"])
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_by_both_exporters(mixer: str, dynamo: bool, tmp_path: Any):
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(8)
    model, x = Net(2).eval(), torch.randn(1, 3, 6, 4)
    report = insert(model, "first", mixer, example_inputs=(x,))
    assert report.rows
    for name, p in model.named_parameters():
        if name.endswith("gamma"):
            nn.init.normal_(p)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=dynamo)
    session = runtime.InferenceSession(file)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_features_of_other_libraries_keep_the_block():
    model, x = timm.create_model("resnet18", features_only=True).eval(), torch.randn(1, 3, 64, 64)
    before, channels = model(x), model.feature_info.channels()
    insert(model, "layer[34]", "external", img_size=64)
    assert all(torch.equal(a, b) for a, b in zip(before, model(x), strict=True))
    assert model.feature_info.channels() == channels
    nn.init.normal_(model.layer3.inserted.gamma)
    changed = [not torch.equal(a, b) for a, b in zip(before, model(x), strict=True)]
    assert changed == [False, False, False, True, True]
    vision = torchvision.models.resnet18(weights=None).eval()
    insert(vision, "layer3", "external", img_size=64)
    nn.init.normal_(vision.layer3.inserted.gamma)
    getter = torchvision.models._utils.IntermediateLayerGetter(vision, {"layer3": "out"})
    stem = nn.Sequential(
        *(module for name, module in vision.named_children() if name not in ("layer4", "avgpool", "fc"))
    )
    assert torch.equal(getter(x)["out"], stem(x))


def test_a_name_without_its_parents_is_completed():
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    with pytest.raises(UserError, match=r"unknown module of the model '4'; did you mean backbone\.4"):
        insert(model, "4", "external", img_size=64)
    with pytest.raises(UserError, match=r"the outermost are backbone, classifier; see model\.named_modules"):
        insert(model, "zzz", "external", img_size=64)


def test_a_yolo():
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    torch.manual_seed(9)
    model, x = tasks.DetectionModel("yolo11n.yaml", verbose=False).eval(), torch.rand(1, 3, 64, 64)
    before = model(x)[0]
    with pytest.warns(UserWarning, match="Ultralytics' trainer builds the model again"):
        report = insert(model, ["model.4", "model.1[0-3]"], "external", img_size=64)
    assert [row.name for row in report.rows] == ["model.4", *(f"model.{i}" for i in range(10, 14))]
    assert {row.layout for row in report.rows} == {"(B, C, H, W)"}
    assert torch.equal(model(x)[0], before)
    nn.init.normal_(model.model[4].inserted.gamma)
    wanted = model(x)[0]
    assert not torch.equal(wanted, before)
    torch.testing.assert_close(model.fuse(verbose=False)(x)[0], wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match=r"SiLU.*its calls give outputs of widths"):
        insert(model, "model.6.cv1.act", "external", img_size=64)
    with pytest.raises(UserError, match="its output is of type"):
        insert(model, "model.23", "external", img_size=64)


def test_a_unet_of_monai_in_three_dimensions():
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(5)
    model = nets.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)).eval()
    x = torch.randn(1, 1, 16, 16, 16)
    before = model(x)
    report = insert(model, "model.1.submodule.1.submodule", "external", example_inputs=(x,))
    assert report.rows[0].layout == "(B, C, D, H, W)"
    assert torch.equal(model(x), before)


def test_a_unet_of_segmentation_models_pytorch():
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(6)
    model, x = smp.Unet("resnet18", encoder_weights=None, classes=2).eval(), torch.randn(1, 3, 64, 64)
    before = model(x)
    report = insert(model, ["encoder.layer4", "decoder.blocks.*"], "external", img_size=64)
    assert len(report.rows) == 6
    assert torch.equal(model(x), before)


def test_a_swap_leaves_the_mixer_of_a_block_alone():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.attn(x, x, x)[0])

    model, x = Net(), torch.randn(1, 5, 8)
    insert(model, "norm", "self", example_inputs=(x,))
    mixer = model.norm.inserted.mixer
    report = tokenmix.swap_attention(model, "external", example_inputs=(x,))
    assert [row.name for row in report.rows] == ["attn"]
    assert model.norm.inserted.mixer is mixer
    with pytest.raises(UserError, match=r"norm\.inserted\.mixer"):
        tokenmix.swap_attention(model, "external", ["norm.inserted.mixer"], example_inputs=(x,))


def test_a_swap_loses_no_block_that_follows_an_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))  # called without a mask
    insert(model, "0.layers.1.linear2", "external", example_inputs=(torch.randn(1, 5, 8),))
    report = tokenmix.swap_attention(model, "external", example_inputs=(torch.randn(1, 5, 8),))
    assert len(report.rows) == 2
    net = tokenmix.create_model("mixer_nano")
    insert(net, "blocks.0.mlp", "external")
    assert len(tokenmix.swap_attention(net, "external").rows) == len(net.blocks)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    insert(vit, "blocks.0.attn", "external")
    report = tokenmix.swap_attention(vit, "external")
    assert [row.name for row in report.rows] == ["blocks.1.attn"]
    assert "remove_inserted" in report.skipped[0].reason
    assert vit.blocks[0].attn.inserted.gamma is not None


def test_padding_does_not_reach_a_block_of_tokens():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 6, 16)
    left_out = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    before = encoder(x, src_key_padding_mask=left_out)
    insert(encoder, "layers.0", "external", example_inputs=(x,))
    assert torch.equal(encoder(x, src_key_padding_mask=left_out), before)
    encoder.layers[0].inserted.gamma.data.normal_()
    other = torch.where(left_out.unsqueeze(2), torch.full_like(x, 9.0), x)
    for graph in (True, False):  # without one PyTorch would pack the batch
        with torch.set_grad_enabled(graph):
            out = encoder(x, src_key_padding_mask=left_out)
            assert torch.allclose(encoder(other, src_key_padding_mask=left_out)[~left_out], out[~left_out], atol=1e-6)
            assert torch.allclose(encoder(x[1:, :4])[0], out[1, :4], atol=1e-5)
    assert (encoder(x, src_key_padding_mask=left_out) - before)[~left_out].abs().max() > 1e-3
    with pytest.raises(UserError, match=r"layers\.0\.norm1 .LayerNorm. is called without"):
        insert(encoder, "layers.0.norm1", "external", example_inputs=(x,))
    pairs = torch.zeros(6, 6, dtype=torch.bool).fill_diagonal_(True)
    with pytest.raises(UserError, match=r"one mask|masks pairs"):
        encoder(x, mask=pairs)


def test_padding_of_transformers_and_of_our_text_models():
    transformers = pytest.importorskip("transformers")
    from tokenmix.text import GMLPForMaskedLM, create_config

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=40, max_position_embeddings=20, **sizes))
    ours = GMLPForMaskedLM(create_config("gmlp_text_nano", vocab_size=40))
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    ids = torch.randint(1, 40, (2, 7))
    for model, after in ((bert, "encoder.layer.0"), (ours, "gmlp.layers.0")):
        insert(model.eval(), after, "external")
        model.get_submodule(after).inserted.gamma.data.normal_()
        out = model(ids, attention_mask=mask)[0]
        other = model(torch.where(mask.bool(), ids, 3), attention_mask=mask)[0]
        assert torch.allclose(out[mask.bool()], other[mask.bool()], atol=1e-6)
        assert torch.allclose(model(ids[1:, :5], attention_mask=mask[1:, :5])[0][0], out[1, :5], atol=1e-5)
    with pytest.raises(UserError, match=r"takes attention_mask, which embeddings .* is called without"):
        insert(bert, "embeddings", "external")


def test_samples_that_come_second_are_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16)  # tokens (N, B, C)
    with pytest.raises(UserError, match="batch_first=False"):
        insert(nn.TransformerEncoder(layer, 2), "layers.0", "external", example_inputs=(torch.randn(5, 2, 8),))


def test_a_block_in_causal_attention_is_causal():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=20)
    model = transformers.GPT2LMHeadModel(config).eval()
    with pytest.raises(UserError, match="see future tokens"):
        insert(model, "transformer.h.0", "external")
    insert(model, "transformer.h.0", "self", mixer_kwargs={"causal": True})
    model.transformer.h[0].inserted.gamma.data.normal_()
    ids = torch.randint(1, 40, (1, 7))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 40
    assert torch.allclose(model(ids).logits[0, :6], model(other).logits[0, :6], atol=1e-6)


def test_a_block_has_the_layout_before_hooks():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output[:, :4].flatten(2).transpose(1, 2))
    images = torch.randn(1, 3, 16, 16)
    expected = model(images)
    report = insert(model, after="0", mixer="external", example_inputs=(images,))
    assert (report.rows[0].layout, report.rows[0].dim) == ("(B, C, H, W)", 8)
    assert model(images).equal(expected)


def test_a_hook_that_takes_the_output_sees_the_block():
    from transformers import Dinov2Backbone, Dinov2Config

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    backbone = Dinov2Backbone(Dinov2Config(**sizes, out_features=["stage2"])).eval()
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    seen: list[Tensor] = []
    plain[0].register_forward_hook(lambda module, args, output: seen.append(output))
    images = torch.randn(1, 3, 28, 28)
    for model, after in ((backbone, "encoder.layer.1"), (plain, "0")):
        insert(model, after=after, mixer="external", example_inputs=(images,))

        def outputs(model: Any = model) -> Tensor:
            result = model(images)
            return result.feature_maps[0] if model is backbone else seen[-1]

        before = outputs()
        nn.init.ones_(model.get_submodule(after).inserted.gamma)  # type: ignore[arg-type]
        changed = outputs()
        assert not torch.allclose(before, changed)
        changed.sum().backward()
        assert model.get_submodule(after).inserted.gamma.grad.any()  # type: ignore[union-attr]


class Branches(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        return sum(branch(x) for branch in self)  # type: ignore[return-value]


class Loop(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [Branches, Loop])
def test_a_module_that_calls_its_children_takes_no_block(kind: type[nn.Module]):
    layers = [nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)]
    host = kind(layers) if kind is Branches else kind(*layers)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), host), torch.randn(1, 3, 4, 4)
    before = model(x)
    with pytest.raises(UserError, match=f"after 1 \\({kind.__name__}\\) ran 2 times, the module 1"):
        insert(model, after="1", mixer="external", img_size=4)
    assert model(x).equal(before)
    assert not hasattr(host, "inserted")


def test_a_compiled_model_sees_a_block():
    model = Net(2).eval()
    compiled, x = torch.compile(model, backend="eager"), torch.randn(1, 3, 4, 4)
    plain = compiled(x)
    report = insert(model, after="second", mixer="external", img_size=4)
    nn.init.normal_(model.second.inserted.gamma)
    assert compiled(x).equal(model(x))
    assert not compiled(x).equal(plain)
    report.remove()
    assert compiled(x).equal(plain)


def test_what_ddp_wraps_is_changed_before(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 8, 1)))
        for change in (partial(insert, after="module.0"), tokenmix.swap_attention):
            with pytest.raises(UserError, match="change the model first, then wrap it"):
                change(model, mixer="external")
    finally:
        torch.distributed.destroy_process_group()


def test_a_block_has_no_cache_of_earlier_tokens():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 40, "n_positions": 20}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()
    insert(model, "transformer.h.0", "self", mixer_kwargs={"causal": True})
    ids = torch.randint(2, 40, (1, 5))
    with pytest.raises(UserError, match="generate with use_cache=False"):
        model.generate(ids, max_new_tokens=3, pad_token_id=0)
    assert model.generate(ids, max_new_tokens=3, pad_token_id=0, use_cache=False).shape[1] > 5


def test_a_model_that_generates_without_attention_is_causal():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=40))
    ids = torch.randint(1, 40, (1, 6))
    for network, after in ((model, "backbone.layers.0"), (model.backbone, "layers.0")):
        with pytest.raises(UserError, match="would see future tokens"):
            insert(network, after, "external", example_inputs=(ids,))
    insert(model, "backbone.layers.0", "self", mixer_kwargs={"causal": True}, example_inputs=(ids,))
    with pytest.raises(UserError, match="generate with use_cache=False"):
        model.generate(ids, max_new_tokens=3, pad_token_id=0)
    assert model.generate(ids, max_new_tokens=3, pad_token_id=0, use_cache=False).shape[1] == 9


def test_the_tower_of_a_model_of_images_and_text_tells_what_its_tokens_are():
    from transformers import CLIPConfig, CLIPModel

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    text = {**sizes, "vocab_size": 40, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2}
    images = {**sizes, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=images, projection_dim=16)).eval()
    for after in ("vision_model.embeddings", "vision_model.encoder.layers.0.mlp"):
        insert(model, after, "external")
    with pytest.raises(UserError, match="would see future tokens"):
        insert(model, "text_model.encoder.layers.0", "external")


def test_a_mask_of_pairs_is_not_padding():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

        def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
            return self.encoder(x, mask=pairs)

    example = torch.randn(2, 6, 16), torch.zeros(6, 6, dtype=torch.bool)
    insert(Net(), "encoder.layers.0.linear2", "external", example_inputs=example)


def test_fx_keeps_a_hook_with_its_block():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, InsertedBlock) or super().is_leaf_module(m, module_qualified_name)

    model, x = torchvision.models.resnet18(num_classes=4).eval(), torch.randn(1, 3, 64, 64)
    insert(model, "layer3.1", "external", img_size=64)
    nn.init.normal_(model.layer3[1].inserted.gamma)  # type: ignore[union-attr, arg-type]
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    torch.testing.assert_close(traced(x), model(x))


class Wrapped(nn.Module):
    """A model of transformers that takes a batch."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.bert = BertModel(BertConfig(**sizes, intermediate_size=64, vocab_size=40, max_position_embeddings=20))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.bert(**batch).last_hidden_state


@pytest.mark.parametrize("after", ["bert.embeddings", "bert.encoder.layer.0.output"])
def test_padding_is_known_through_a_wrapper(after: str):
    batch = {"input_ids": torch.randint(1, 40, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    with pytest.raises(UserError, match=r"takes attention_mask, which .* is called without"):
        insert(Wrapped(), after, "external", example_inputs=(batch,))
    insert(Wrapped(), "bert.encoder.layer.0", "external", example_inputs=(batch,))


class Masked(nn.Module):
    """A layer whose argument `name` masks tokens, on tokens or on maps of one axis."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class WithPadding(Masked):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return self.layer(x)


class WithMask(Masked):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("kind", "layer"), [(WithPadding, nn.Linear(8, 8)), (WithMask, nn.Conv1d(8, 8, 1))])
def test_a_block_takes_the_mask_of_its_module(kind: type[Masked], layer: nn.Module):
    torch.manual_seed(0)
    host, axis = kind(layer), 1 if isinstance(layer, nn.Linear) else 2
    x = torch.randn(2, 6, 8) if axis == 1 else torch.randn(2, 8, 6)
    model = nn.Sequential(host)
    insert(model, "0", "external", example_inputs=(x,))
    nn.init.normal_(host.inserted.gamma)
    kept = torch.arange(6) < torch.tensor([[6], [4]])
    mask = ~kept if kind is WithPadding else kept
    other = x.clone()
    other.select(0, 1).narrow(axis - 1, 4, 2).fill_(9)
    one, two = host(x, mask), host(other, mask)
    assert not host(x, mask).equal(host(x))
    torch.testing.assert_close(one.narrow(axis, 0, 4), two.narrow(axis, 0, 4))
    torch.testing.assert_close(two[1].narrow(axis - 1, 4, 2), layer(other)[1].narrow(axis - 1, 4, 2))


def test_a_mask_of_pytorchs_encoder_is_of_pairs():
    """As many samples as tokens, so that its shape does not tell."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    x = torch.randn(6, 6, 16)
    insert(nn.Sequential(encoder), "0", "external", example_inputs=(x,))
    with pytest.raises(UserError, match="masks pairs of tokens"):
        encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(6))


def test_sound_without_a_channel_axis_shows_its_layout():
    class Sound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv1d(1, 16, 5, stride=16), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.conv(x.unsqueeze(1)))

    model = Sound()
    assert insert(model, "act", "external", example_inputs=(torch.randn(1, 1000),)).rows[0].dim == 16
    assert model(torch.randn(1, 2000)).shape == (1, 16, 125)
