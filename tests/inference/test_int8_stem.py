"""The T2T stem in int8: patches that are never written, against the written ones in float64."""

import pytest
import torch
import torch.nn.functional as F
from nano_nets import to_int8
from torch import Tensor, nn

import tokenmix
from tokenmix.inference import FoldedT2TStem
from tokenmix.inference.folded import FoldedStemAttention
from tokenmix.models.eamlp import EAMLP, Split, StemAttention


def _block(channels: int, split: Split) -> StemAttention:
    torch.manual_seed(0)
    block = StemAttention(channels * split[0] ** 2, 16, 8, dropout=0.0).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def _features(block: StemAttention, split: Split, x: Tensor) -> Tensor:
    kernel, stride, padding = split
    block, patches = block.double(), F.unfold(x.double(), kernel, stride=stride, padding=padding).transpose(1, 2)
    return block.query(block.norm1(patches))


def _eight(block: StemAttention, split: Split) -> FoldedStemAttention:
    made = FoldedStemAttention(block, split, "int8")
    ranges = dict.fromkeys(("h", "map", "mlp.0.x", "mlp.2.x"), (-1.0, 1.0))
    made.fill(block, ranges)
    return made


@torch.no_grad()
@pytest.mark.parametrize(("channels", "split"), [(3, (7, 4, 2)), (16, (3, 2, 1)), (1, (5, 5, 0))])
@pytest.mark.parametrize("size", [(30, 33), (7, 16)])
def test_features_are_those_of_written_patches(channels: int, split: Split, size: tuple[int, int]) -> None:
    block = _block(channels, split)
    x = 3.0 + torch.randn(2, channels, *size)
    found = _eight(block, split).features(x)
    torch.testing.assert_close(found.double(), _features(block, split, x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("level", [0.0, 2.64, 255.0])
def test_patches_that_are_flat_but_for_a_pixel(level: float) -> None:
    split = (7, 4, 2)
    block = _block(3, split)
    x = torch.full((1, 3, 40, 40), level)
    x[0, 1, 20, 21] += max(level, 1.0) / 255.0
    found, expected = _eight(block, split).features(x).double(), _features(block, split, x)
    # A convolution in float32 leaves of the mean what the smallest deviation, sqrt(eps), makes this large.
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5 + 2e-4 * level)


def _model(**options: object) -> EAMLP:
    torch.manual_seed(0)
    model = tokenmix.create_model("eamlp_nano", num_classes=5, **{"img_size": 32, "num_splits": 3, **options}).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def _images(size: int = 32) -> Tensor:
    return torch.randn(6, 3, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("splits", [2, 3])
def test_tokens_are_near_those_of_the_stem(splits: int) -> None:
    model = _model(num_splits=splits)
    eight = to_int8(model, _images())
    assert isinstance(eight.stem, FoldedT2TStem)
    expected, found = model.stem(_images()), eight.stem(_images())
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert not torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 5])
def test_tokens_do_not_depend_on_the_batch(count: int) -> None:
    # Maps of 8 x 8 pixels and 64 channels: F.conv2d sends one to another kernel than several.
    eight = to_int8(_model(num_splits=2), _images())
    assert torch.equal(eight.stem(_images())[:count], eight.stem(_images()[:count]))


@torch.no_grad()
def test_another_image_size() -> None:
    model = _model()
    eight = to_int8(model, _images())
    for net in (model, eight):
        net.set_input_size((40, 48))  # type: ignore[operator]
    x = torch.randn(2, 3, 40, 48)
    expected, found = model(x), eight(x)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert eight.stem.macs() < model.stem.macs()  # type: ignore[operator, union-attr]


@torch.no_grad()
def test_a_pixel_that_is_no_number_spoils_its_image_alone() -> None:
    model, images = _model(), _images()
    eight = to_int8(model, images)
    expected = eight(images)
    images[2, 1, 9, 9] = float("nan")
    found = eight(images)
    assert model(images)[2].isnan().all()
    assert found[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(found[kept], expected[kept])


@torch.no_grad()
def test_maps_of_an_int8_model_are_those_of_float32_nearly() -> None:
    model = _model()
    for one, other in zip(model.attention_maps(_images()), to_int8(model, _images()).attention_maps(_images())):  # type: ignore[operator]
        assert one.name == other.name
        assert one.map.shape == other.map.shape
        assert (one.map - other.map).abs().max() < 0.1 * one.map.max()
