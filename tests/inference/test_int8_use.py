"""What users do with an int8 copy, and with wrong inputs: each works or is one clear line."""

import copy
from pathlib import Path

import pytest
import torch
from nano_nets import NANO, nano_images, nano_model, to_int8
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.inference import Int8Linear, load_quantized, save_quantized
from tokenmix.layers import MultiHeadExternalAttention


def _tokens(dim: int = 16) -> Tensor:
    return torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(1))


class _ReadsWeight(nn.Module):
    """A product with the weight of a linear layer that it calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ self.fc.weight


@pytest.mark.parametrize("name", NANO)
def test_gradients_to_the_inputs_are_refused(name: str) -> None:
    eight, images = to_int8(nano_model(name), nano_images(8)), nano_images(8)
    images.requires_grad_()
    with pytest.raises(UserError, match=r"torch\.no_grad"):
        eight(images)
    with torch.no_grad():
        followed = eight(images)
    assert torch.equal(followed, eight(images.detach()))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(16, 8),
        MultiHeadExternalAttention(16, num_heads=2, num_slots=4),
    ],
)
def test_every_layer_refuses_gradients(layer: nn.Module) -> None:
    eight, x = to_int8(nn.Sequential(layer), _tokens()), _tokens()
    assert not eight(x).requires_grad
    with pytest.raises(UserError, match=r"torch\.no_grad"):
        eight(x.requires_grad_())


def test_a_copy_is_frozen() -> None:
    eight = to_int8(nano_model("gmlp_nano"), nano_images(8))
    assert not any(parameter.requires_grad for parameter in eight.parameters())
    assert not eight(nano_images(8)).requires_grad


@pytest.mark.parametrize("name", NANO)
def test_methods_of_a_copy(name: str) -> None:
    model = nano_model(name)
    eight = to_int8(model, nano_images(8))
    pairs = zip(eight.attention_maps(nano_images(8)), model.attention_maps(nano_images(8)), strict=True)  # type: ignore[operator]
    for one, other in pairs:
        assert (one.map - other.map).abs().max() < 0.1 * other.map.abs().max()
    # EAMLP's memories are multiplied into the projections next to them.
    expected = 23_120_768 if name == "eamlp_nano" else model.macs()  # type: ignore[operator]
    assert eight.macs() == expected  # type: ignore[operator]
    for net in (model, eight):
        net.set_input_size(40)  # type: ignore[operator]
    with torch.no_grad():
        expected, found = model(nano_images(3, 40)), eight(nano_images(3, 40))
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("move", [nn.Module.half, nn.Module.double, nn.Module.bfloat16, lambda m: m.to("meta")])
@pytest.mark.parametrize("layer", [nn.Linear(16, 8), MultiHeadExternalAttention(16, num_heads=2, num_slots=4)])
def test_another_type_or_device_is_refused(move, layer: nn.Module) -> None:
    eight, x = to_int8(nn.Sequential(layer), _tokens()), _tokens()
    expected = eight(x)
    with pytest.raises(UserError, match="stays in float32 on the CPU"):
        move(eight)
    assert torch.equal(eight.float().cpu()(x), expected)


@pytest.mark.one_fast
@pytest.mark.parametrize("name", ["gmlp_nano", "eamlp_nano"])
def test_no_packed_weight_in_a_compiled_graph(name: str) -> None:
    eight, images = to_int8(nano_model(name), nano_images(8)), nano_images(8)
    expected, met = eight(images), []

    def backend(graph, example):
        met.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    for net in (eight, copy.deepcopy(eight)):
        with torch.no_grad():
            found = torch.compile(net, backend=backend)(images)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # Inductor takes no such node.
    assert met
    assert not any("onednn" in target or "qlinear" in target for target in met)


@pytest.mark.parametrize("name", ["gmlp_nano", "eamlp_nano"])
def test_exported_once_called(name: str) -> None:
    eight, images = to_int8(nano_model(name), nano_images(8)), nano_images(8)
    eight(images)
    exported = torch.export.export(eight, (images,), strict=False).module()
    found, expected = exported(images), eight(images)
    # Another last bit may round a number of one image to the next of 256 levels, as on processors with AMX.
    same = torch.isclose(found, expected, atol=1e-5).all(1)
    assert same.float().mean() >= 0.5
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    with pytest.raises(UserError, match="call it once"):
        torch.export.export(copy.deepcopy(eight), (images,), strict=False)


def test_weights_that_a_parent_reads() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model, x = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(layer, 2)).eval(), _tokens()
    eight = to_int8(model, x)
    assert isinstance(eight[0], Int8Linear)  # type: ignore[index]
    with torch.no_grad():
        expected, found = model(x), eight(x)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    with pytest.raises(UserError, match="not optimised in int8: AttributeError: 'Int8Linear' object has no attribute"):
        to_int8(_ReadsWeight(), x)


def test_images_of_pairs_with_labels() -> None:
    model, images = nano_model("gmlp_nano"), nano_images(8)
    labels = torch.zeros(8, dtype=torch.int64)
    expected = to_int8(model, images)(images)
    for batches in ([(images, labels)], iter([[images, labels]]), [images, images[:0]]):
        assert torch.equal(to_int8(model, batches)(images), expected)


def test_inputs_that_are_none() -> None:
    model, images = nano_model("gmlp_nano"), nano_images(8)
    for nothing in (images[:0], [images[:0]]):
        with pytest.raises(UserError, match="no inputs"):
            to_int8(model, nothing)
    for wrong in ([{"image": images}], images.numpy(), [((images,), 0)]):
        with pytest.raises(UserError, match="a batch must be a tensor"):
            to_int8(model, wrong)
    with pytest.raises(UserError, match="got NoneType"):
        to_int8(model, None)  # type: ignore[arg-type]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    eight = to_int8(nn.Sequential(nn.Linear(16, 8)), _tokens())
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(UserError, match=r"cannot write|is a folder"):
            save_quantized(eight, path)


def test_file_of_a_layer_used_twice(tmp_path: Path) -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, layer)
    eight = to_int8(model, _tokens())
    save_quantized(eight, tmp_path / "twice")
    again = load_quantized(model, tmp_path / "twice")
    assert torch.equal(again(_tokens()), eight(_tokens()))
