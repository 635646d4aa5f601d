"""GANs: the published counts, each block against the equations written out, a start that spectral norm knows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import create_model, list_models
from tokenmix.errors import UserError
from tokenmix.models.generation import (
    ConditionalBatchNorm2d,
    DiscriminatorBlock,
    GeneratorBlock,
    orthogonal_start,
)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.one_fast
@pytest.mark.parametrize(("size", "classes", "published"), [(32, 10, 4_386_308), (64, 200, 13_387_396)])
def test_the_generator_has_the_published_parameters(size, classes, published):
    assert count(create_model("sagan", num_classes=classes, img_size=size).generator) == published


@pytest.mark.parametrize("size", [32, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 128))])
@pytest.mark.parametrize("name", list_models("*_nano", task="image-generation"))
def test_shapes_and_where_attention_stands(name, size):
    gan = create_model(name, num_classes=3, img_size=size, channels=1)
    seen = []
    for network in (gan.generator, gan.discriminator):
        if network.attention is not None:
            network.attention.register_forward_hook(lambda _, args, out: seen.append((args[0].shape[-1], out.shape)))
    labels = torch.zeros(2, dtype=torch.long)
    images = gan(torch.randn(2, 64), labels)
    assert images.shape == (2, 1, size, size)
    assert gan.discriminator(images, labels).shape == (2,)
    # As in PyTorch-StudioGAN's SAGAN configs of 2021: 16 x 16, 32 x 32 and 64 x 64 in the generator, half the image's
    # side in the discriminator.
    assert [side for side, _ in seen] == ([] if name == "resnet_gan_nano" else [size // 2, size // 2])


@pytest.mark.one_fast
@pytest.mark.parametrize("size", [32, 64])
def test_multiply_adds_are_those_that_run(size):
    gan = create_model("resnet_gan_nano", num_classes=5, img_size=size).eval()
    labels = torch.zeros(1, dtype=torch.long)
    rows = {row.part: row.macs for row in gan.cost_table()}
    with FlopCounterMode(display=False) as counted:
        images = gan(torch.randn(1, 64), labels)
    assert counted.get_total_flops() == 2 * gan.macs() == 2 * rows["generator"]
    with FlopCounterMode(display=False) as counted:
        gan.discriminator(images, labels)
    # The product with the class's embedding is elementwise to the counter.
    assert counted.get_total_flops() == 2 * (rows["discriminator"] - gan.discriminator.score.in_features)


@pytest.mark.parametrize(
    ("name", "size", "generator", "discriminator"),
    [
        ("sagan_nano", 32, 35_225_600, 23_027_968),
        ("sagan_nano", 128, 634_388_480, 335_741_440),
        ("eagan_nano", 32, 36_143_104, 23_945_472),
        pytest.param("eagan_nano", 128, 570_425_344, 302_973_440, marks=pytest.mark.slow),
        ("resnet_gan_nano", 32, 34_570_240, 22_372_608),
        pytest.param("resnet_gan_nano", 128, 545_259_520, 292_487_680, marks=pytest.mark.slow),
    ],
)
def test_multiply_adds_are_those_by_equation(name, size, generator, discriminator):
    """Nine, or one, for each pixel of an output and each pair of its channels; the attention's own; the scores."""
    gan = create_model(name, img_size=size)
    assert [row.macs for row in gan.cost_table()] == [generator, discriminator]
    assert gan.macs() == generator


def test_conditional_norm_is_batch_norm_with_the_gain_and_shift_of_the_class():
    norm = ConditionalBatchNorm2d(4, 3, dtype=torch.float64)
    nn.init.normal_(norm.gain)
    nn.init.normal_(norm.shift)
    x, labels = torch.randn(5, 4, 3, 2, dtype=torch.float64), torch.tensor([2, 0, 1, 1, 2])
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    rows = []
    for sample, label in zip(x, labels):
        normed = (sample - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
        rows.append(norm.gain[label][:, None, None] * normed + norm.shift[label][:, None, None])
    torch.testing.assert_close(norm(x, labels), torch.stack(rows))


def test_generator_block_as_written():
    torch.manual_seed(0)
    block = GeneratorBlock(6, 4, 3, dtype=torch.float64).eval()
    x, labels = torch.randn(2, 6, 4, 4, dtype=torch.float64), torch.tensor([0, 2])
    out = block.conv1(nn.Upsample(scale_factor=2)(block.norm1(x, labels).relu()))
    out = block.conv2(block.norm2(out, labels).relu()) + block.shortcut(nn.Upsample(scale_factor=2)(x))
    torch.testing.assert_close(block(x, labels), out)


@pytest.mark.parametrize(("first", "halves", "width"), [(True, True, 4), (False, True, 6), (False, False, 6)])
def test_discriminator_block_as_written(first, halves, width):
    torch.manual_seed(0)
    block = DiscriminatorBlock(6, width, first=first, halves=halves, dtype=torch.float64).eval()
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    half = nn.AvgPool2d(2) if halves else nn.Identity()
    out = half(block.conv2(block.conv1(x if first else x.relu()).relu())) + half(block.shortcut(x))
    torch.testing.assert_close(block(x), out)


def test_the_score_projects_features_on_the_class():
    torch.manual_seed(0)
    judge = create_model("resnet_gan_nano", num_classes=3, channels=1).discriminator.eval()
    images, labels = torch.randn(3, 1, 32, 32), torch.tensor([1, 0, 1])
    x = images
    for block in judge.blocks:
        x = block(x)
    h = F.relu(x).sum((2, 3))
    expected = [
        judge.score.weight[0] @ f + judge.score.bias[0] + judge.classes.weight[c] @ f for f, c in zip(h, labels)
    ]
    torch.testing.assert_close(judge(images, labels), torch.stack(expected))


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 8, 3), nn.Linear(20, 6), nn.Embedding(7, 5)])
def test_spectral_norm_knows_the_orthogonal_start(layer):
    torch.manual_seed(0)
    normed = spectral_norm(layer)
    nn.init.normal_(normed.parametrizations["weight"].original, std=9.0)
    orthogonal_start(normed)
    matrix = normed.eval().weight.flatten(1)
    torch.testing.assert_close(torch.linalg.svdvals(matrix), torch.ones(min(matrix.shape)))
    if getattr(layer, "bias", None) is not None:
        assert not layer.bias.any()


@pytest.mark.parametrize("attention", ["sagan", "external"])
def test_every_layer_of_both_networks_is_normed(attention):
    gan = create_model("resnet_gan_nano", num_classes=3, attention=attention)
    for name, module in gan.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding):
            singular = torch.linalg.svdvals(module.weight.flatten(1))[0].item()
            assert singular == pytest.approx(1, abs=0.05), name


def test_the_average_follows_the_generator():
    torch.manual_seed(0)
    gan = create_model("resnet_gan_nano", num_classes=2).keep_average()
    assert gan.average is not None
    start = gan.average.last.bias.detach().clone()
    nn.init.constant_(gan.generator.last.bias, 1.0)
    gan.update_average(0.5)
    torch.testing.assert_close(gan.average.last.bias, 0.1 * start + 0.9)
    nn.init.constant_(gan.generator.last.bias, 3.0)
    for _ in range(30):
        gan.update_average(0.5)
    torch.testing.assert_close(gan.average.last.bias, torch.full((3,), 3.0))
    gan.generator.norm.running_mean.fill_(7.0)
    gan.update_average(0.5)
    assert (gan.average.norm.running_mean == 7).all()
    assert not any(p.requires_grad for p in gan.average.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"img_size": 48}, "32, 64 or 128 px, got 48"),
        ({"channels": 4}, "1 or 3 channels, got 4"),
        ({"attention": "sagen"}, "did you mean sagan"),
        ({"attention": "external", "variant": "paper"}, "variant='paper' only applies to SAGAN's"),
        ({"num_slots": 8}, "num_slots=8 only applies to external"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"width": 2.5}, "width must be a whole number"),
        ({"variant": "printed"}, "unknown variant"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UserError, match=message):
        create_model("sagan_nano", **{"num_classes": 2, **arguments})


def test_unknown_name():
    with pytest.raises(UserError, match="did you mean sagan"):
        create_model("sagann", num_classes=2)
    assert create_model("eagan_nano").mixer_name == "external-2d"
