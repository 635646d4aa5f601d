"""Copies in float32 and bfloat16: the answers of the original, in fewer and larger steps; refusals of every dtype."""

import copy
import warnings
from typing import Any

import pytest
import torch
from nano_nets import NANO, nano_images, nano_model
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.inference import FoldedExternalAttention, FoldedT2TStem, FusedLinear, Int8Linear, save_quantized
from tokenmix.layers import MultiHeadExternalAttention
from tokenmix.profiling.machine import Timing

FLOATS = {"float32": 1e-5, "bfloat16": 0.03}
"""The largest error of an answer relative to the largest answer, of nets with nothing that hides it."""


def _worst(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NANO)
def test_the_same_answers(name: str, dtype: Any, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmix.inference.linear.has_fused_linear", lambda: fused)
    model, images = nano_model(name), nano_images(9)
    fast = tokenmix.optimize(model, images[:4], dtype=dtype, measure=False)
    assert any(isinstance(module, FusedLinear) for module in fast.modules())
    found = fast(images)
    assert found.dtype == torch.float32
    assert _worst(found, model(images)) < FLOATS[dtype]


def test_float32_is_the_default_and_the_model_stays() -> None:
    model, images = nano_model("eamlp_nano").train(), nano_images(2)
    before = copy.deepcopy(model.state_dict())
    fast = tokenmix.optimize(model, images, measure=False)
    assert model.training
    assert not fast.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    assert isinstance(fast.stem, FoldedT2TStem)
    assert isinstance(fast.get_submodule("blocks.0.mixer"), FoldedExternalAttention)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "place"),
    [("vit_nano", "blocks.1.mlp.2"), ("vit_nano", "blocks.1.mlp.1"), ("eamlp_nano", "stem")],
)
def test_a_layer_with_an_inserted_block_stays(name: str, place: str) -> None:
    model, images = nano_model(name), nano_images(3)
    tokenmix.insert(model, place, "external")
    nn.init.constant_(model.get_parameter(f"{place}.inserted.gamma"), 0.5)
    fast = tokenmix.optimize(model, images, measure=False)
    assert f"{place}.inserted.gamma" in dict(fast.named_parameters())
    assert _worst(fast(images), model(images)) < FLOATS["float32"]


def test_the_gelu_behind_a_linear_layer_is_taken_in() -> None:
    fast = tokenmix.optimize(nano_model("gmlp_nano"), nano_images(2), measure=False)
    mixer: Any = fast.get_submodule("blocks.0.mixer")
    assert mixer.proj_in.act == "gelu"
    assert isinstance(mixer.act, nn.Identity)


class _Stranger(nn.Module):
    """A model of somebody else with a layer of ours, whose weights it reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(24, 24)
        self.mix = MultiHeadExternalAttention(24, num_heads=3, num_slots=8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.mix(self.inside(x))
        return {"tokens": y @ self.inside.weight, "first": y[:, 0]}


@torch.no_grad()
def test_a_model_of_a_stranger() -> None:
    torch.manual_seed(0)
    model, x = _Stranger().eval(), torch.randn(3, 7, 24)
    fast = tokenmix.optimize(model, x, measure=False)
    assert isinstance(fast.mix, FoldedExternalAttention)
    for name, expected in model(x).items():
        assert _worst(fast(x)[name], expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 60.0, -60.0])
def test_masks_and_logits_of_any_size(scale: float) -> None:
    torch.manual_seed(0)
    layer, x = MultiHeadExternalAttention(24, num_heads=3, num_slots=8).eval(), torch.randn(3, 19, 24)
    layer.query.weight *= scale
    fast = tokenmix.optimize(nn.Sequential(layer), x, measure=False)[0]  # type: ignore[index]
    mask = torch.ones(3, 19, dtype=torch.bool)
    mask[0, 11:] = False
    mask[1] = False
    assert _worst(fast(x), layer(x)) < 1e-4
    assert _worst(fast(x, mask), layer(x, mask)) < 1e-4
    assert _worst(fast.attention_map(x, mask), layer.attention_map(x, mask)) < 1e-4
    x[1, 4, 2] = float("nan")
    assert fast(x)[1].isnan().all()
    assert fast(x)[[0, 2]].isfinite().all()
    assert fast(x[:0]).shape == (0, 19, 24)


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_weights_loaded_or_moved_after_the_first_call_are_those_that_count(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmix.inference.linear.has_fused_linear", lambda: fused)
    torch.manual_seed(0)
    x = torch.randn(5, 9, 16)
    one, other = (nn.Sequential(nn.Linear(16, 24), nn.GELU()) for _ in range(2))
    fast, second = (tokenmix.optimize(model, x, measure=False) for model in (one, other))
    for rows in (1, 5):
        torch.testing.assert_close(fast(x[:rows]), one(x[:rows]), rtol=1e-5, atol=1e-6)
    again = copy.deepcopy(fast)
    fast.load_state_dict(second.state_dict())
    torch.testing.assert_close(fast(x), other(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again(x), one(x), rtol=1e-5, atol=1e-6)
    again.double()
    assert again[0].weight.dtype == torch.float64
    torch.testing.assert_close(again(x), one(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_gradients_are_refused(dtype: Any) -> None:
    fast, images = (
        tokenmix.optimize(nano_model("gmlp_nano"), nano_images(4), dtype=dtype, measure=False),
        nano_images(4),
    )
    with pytest.raises(UserError, match=r"torch\.no_grad"):
        fast(images.requires_grad_())
    assert not fast(images.detach()).requires_grad


def test_a_float32_copy_is_exported_and_compiled_in_operators_of_pytorch() -> None:
    model, images = nano_model("gmlp_nano"), nano_images(4)
    fast = tokenmix.optimize(model, images, measure=False)
    graph = torch.export.export(fast, (images,), strict=False)
    assert not any("mkldnn" in str(node.target) for node in graph.graph.nodes)
    assert _worst(graph.module()(images), fast(images)) < 1e-5
    with torch.no_grad():
        assert _worst(torch.compile(fast, backend="eager")(images), fast(images)) < 1e-5


def test_refusals(tmp_path: Any) -> None:
    model, images = nano_model("gmlp_nano"), nano_images(4)
    with pytest.raises(UserError, match="unknown dtype 'float16'"):
        tokenmix.optimize(model, images, dtype="float16", measure=False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="nothing to optimise in float32"):
        tokenmix.optimize(nn.Sequential(nn.Conv2d(1, 2, 3)), images, measure=False)
    fast = tokenmix.optimize(model, images, measure=False)
    with pytest.raises(UserError, match="an optimised copy already"):
        tokenmix.optimize(fast, images, dtype="int8", measure=False)
    with pytest.raises(UserError, match="no int8 layers"):
        save_quantized(fast, tmp_path / "a")


def test_a_copy_that_answers_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmix.inference.FusedLinear.forward", lambda layer, x: torch.zeros_like(x))
    with pytest.raises(UserError, match=r"float32 copy of Sequential is off by 1 .* at most 0\.001"):
        tokenmix.optimize(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 3, 4), measure=False)


class Between(nn.Module):
    """An MLP with a step between its linear layer and its activation, or with two ways from one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.fc1, self.act, self.norm, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)
        self.gate, self.way = nn.Linear(8, 16), way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if self.way == "norm":
            hidden = self.act(self.norm(hidden))
        elif self.way == "gate":
            hidden = self.act(self.gate(x)) * hidden
        elif self.way == "twice":
            hidden = self.act(hidden) + self.fc1(x)
        else:
            hidden = self.act(hidden)
        return x + self.fc2(hidden)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("way", ["norm", "gate", "twice", "plain"])
def test_a_gelu_is_fused_only_where_it_follows(way: str, dtype: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Between(way)), torch.randn(4, 6, 8)
    fast = tokenmix.optimize(model, x, dtype, measure=False)
    assert fast.get_submodule("0.fc1").act == ("gelu" if way == "plain" else "none")
    assert _worst(fast(x), model(x)) < {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.05}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("way", ["kept", "changed", "again"])
def test_a_model_whose_gelu_only_seems_to_follow_is_copied_without_fusion(way: str, dtype: Any) -> None:
    class Seems(Between):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.fc1(x)
            if way == "kept":
                return x + self.fc2(self.act(hidden) + hidden)
            if way == "again":
                return x + self.act(self.fc2(self.act(hidden)))
            hidden += 1.0
            return x + self.fc2(self.act(hidden))

    torch.manual_seed(0)
    model, x = nn.Sequential(Seems("plain")), torch.randn(4, 6, 8)
    fast = tokenmix.optimize(model, x, dtype, measure=False)
    assert _worst(fast(x), model(x)) < {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.05}[dtype]


def test_nothing_is_said_on_the_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenmix.optimize(nano_model("eamlp_nano"), nano_images(2), measure=False)


@pytest.mark.parametrize(
    ("times", "kept", "says"),
    [
        ({"int8": 1.0, "float32": 2.0, "unchanged": 3.0}, Int8Linear, "kept int8: "),
        (
            {"int8": 2.0, "float32": 1.0, "unchanged": 3.0},
            FusedLinear,
            "kept float32, since the int8 copy is not faster",
        ),
        ({"int8": 2.0, "float32": 0.98, "unchanged": 1.0}, nn.Linear, "kept the model unchanged in float32, since"),
    ],
)
def test_the_fastest_is_kept(
    times: dict[str, float], kept: type[nn.Module], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: Timing.of([seconds]) for name, seconds in times.items()}
    monkeypatch.setattr("tokenmix.inference.optimizing.time_interleaved", lambda *_, **__: known)
    model, images = nano_model("gmlp_nano"), nano_images(4)
    fast = tokenmix.optimize(model, images, dtype="int8")
    assert str(fast.optimization).startswith(says)
    assert type(fast.get_submodule("blocks.0.mixer.proj_in")) is kept
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    if kept is nn.Linear:
        assert fast is not model
        assert torch.equal(fast(images), model(images))


def test_a_dtype_of_torch_and_an_example_that_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU())
    fast = tokenmix.optimize(model, torch.randn(5, 9, 16), torch.float32, measure=False)
    assert fast.optimization == "float32, not measured"
    with pytest.raises(UserError, match=r"on the example, first \(5, 9, 8\), fails with"):
        tokenmix.optimize(model, torch.randn(5, 9, 8))
