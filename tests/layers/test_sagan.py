"""SAGAN's block in its three forms, against plain steps and published parameter counts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.sagan import SAGANAttention2d, SpectralNorm
from tokenmix.profiling.machine import peak_memory

VARIANTS = ("official", "paper", "compact")


def awake(variant="official", dim=16, **kwargs):
    """A block whose gamma has left 0, so that attention shows."""
    torch.manual_seed(0)
    layer = SAGANAttention2d(dim, variant=variant, **kwargs)
    torch.nn.init.constant_(layer.gamma, 0.7)
    return layer


def plain(layer, x, mask=None):
    """The published steps, one image at a time; masked pixels are removed one by one. Returns output and map."""
    outs, maps = [], []
    height, width = x.shape[2:]
    for b, image in enumerate(x):
        kept = [(r, c) for r in range(height) for c in range(width) if mask is None or mask[b, r * width + c]]
        query, key, value = (conv(image[None])[0] for conv in (layer.query, layer.key, layer.value))
        cells = {}
        for r, c in kept:
            cells.setdefault((r // 2, c // 2) if layer.variant == "official" else (r, c), []).append((r, c))
        keys = [torch.stack([key[:, r, c] for r, c in cell]).amax(0) for cell in cells.values()]
        values = [torch.stack([value[:, r, c] for r, c in cell]).amax(0) for cell in cells.values()]
        out = torch.zeros_like(image)
        for r, c in kept:
            weights = torch.softmax(torch.stack([query[:, r, c] @ k for k in keys]), 0)
            mixed = sum(w * v for w, v in zip(weights, values, strict=True))
            out[:, r, c] = image[:, r, c] + layer.gamma * layer.proj(mixed[None, :, None, None])[0, :, 0, 0]
            maps.append(weights)
        outs.append(out)
    return torch.stack(outs), maps


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(4, 6), (5, 3), (1, 1)])
def test_equals_the_plain_steps(variant, size):
    layer = awake(variant).double().eval()
    x = torch.randn(2, 16, *size, dtype=torch.float64)
    expected, rows = plain(layer, x)
    torch.testing.assert_close(layer(x), expected)
    used = layer.attention_map(x)
    keys = -(-size[0] // 2) * -(-size[1] // 2) if variant == "official" else size[0] * size[1]
    assert used.shape == (2, 1, size[0] * size[1], keys)
    torch.testing.assert_close(used.flatten(0, 2), torch.stack(rows))


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_pixels_are_as_if_absent(variant):
    layer = awake(variant).double().eval()
    x = torch.randn(3, 16, 5, 4, dtype=torch.float64)
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[1], mask[2] = False, False
    mask[2, 7] = True
    expected, _ = plain(layer, x, mask)
    x.flatten(2).transpose(1, 2)[~mask] = torch.nan
    x.requires_grad_()
    out = layer(x, mask)
    torch.testing.assert_close(out, expected)
    assert (out[1] == 0).all()
    assert (layer.attention_map(x, mask)[1] == 0).all()
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("variant", "dim", "count"),
    [
        ("official", 256, 81_920 + 1),
        ("official", 128, 20_480 + 1),
        ("paper", 256, 4 * 256 * 32 + 1),
        ("compact", 256, 2 * (256 * 32 + 32) + 256 * 256 + 256 + 1),
    ],
)
def test_parameter_counts(variant, dim, count):
    assert sum(p.numel() for p in SAGANAttention2d(dim, variant=variant).parameters()) == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_starts_as_the_identity(variant):
    x = torch.randn(2, 16, 4, 5)
    torch.testing.assert_close(SAGANAttention2d(16, variant=variant)(x), x, rtol=0, atol=0)


def test_spectral_norm_bounds_the_convolutions():
    layer = awake(dim=32)

    def largest(weight):
        return torch.linalg.matrix_norm(weight.detach().flatten(1), 2).item()

    assert largest(layer.value.weight) == pytest.approx(1, abs=2e-2)
    assert largest(layer.value.parametrizations.weight.original) != pytest.approx(1, abs=2e-2)
    assert awake("paper", spectral_norm=True).spectral_norm
    assert not awake(spectral_norm=False).spectral_norm


def test_evaluation_changes_nothing_and_training_only_the_estimate():
    layer, x = awake(), torch.randn(2, 16, 4, 4)
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    layer.train()(x)
    changed = {name for name, value in layer.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.endswith(("._u", "._v")) for name in changed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_and_saved_copies_take_the_same_training_step(variant, tmp_path):
    layer, x = awake(variant), torch.randn(2, 16, 4, 4)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    loaded = SAGANAttention2d(16, variant=variant)
    loaded.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    results = []
    for one in (copy.deepcopy(layer), loaded, layer):
        one.train()(x).square().sum().backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter -= 0.01 * parameter.grad
        results.append(one(x))
    for result in results[:2]:
        torch.testing.assert_close(result, results[2], rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_types(variant):
    layer, x = awake(variant).eval(), torch.randn(2, 16, 4, 5)
    out = layer(x)
    for dtype, tolerance in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1), (torch.float64, 1e-5)):
        other = copy.deepcopy(layer).to(dtype)(x.to(dtype))
        assert other.dtype == dtype
        torch.testing.assert_close(other.float(), out, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), out, rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(4, 6), (5, 5)])
def test_counted_macs(variant, size):
    layer, x = awake(variant).eval(), torch.randn(2, 16, *size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(x)
    assert counter.get_total_flops() // 2 // 2 == layer.macs(size[0] * size[1])


@pytest.mark.parametrize("variant", ["paper", "compact"])
def test_no_map_of_pixels_by_pixels_is_written(variant):
    layer, x = awake(variant, dim=32), torch.randn(1, 32, 40, 40, requires_grad=True)
    assert peak_memory(lambda: layer(x).sum().backward()) < 4 * 1600 * 1600 / 2


def test_equals_the_popular_port():
    """The compact block as the ports write it: transposes, bmm, softmax over the keys."""
    layer, x = awake("compact"), torch.randn(2, 16, 3, 5)
    query, key, value = (conv(x).flatten(2) for conv in (layer.query, layer.key, layer.value))
    weights = F.softmax(torch.bmm(query.transpose(1, 2), key), dim=-1)
    expected = layer.gamma * torch.bmm(value, weights.transpose(1, 2)).view_as(x) + x
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SAGANAttention2d(12), "multiple of 8, got 12"),
        (lambda: SAGANAttention2d(16, variant="offical"), "did you mean official"),
        (lambda: SAGANAttention2d(16)(torch.randn(2, 4, 16)), "unflatten"),
        (lambda: SAGANAttention2d(16)(torch.randn(2, 16, 4, 4), torch.ones(2, 4, dtype=torch.bool)), "mask must be"),
    ],
)
def test_errors(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_spectral_norm_is_torchs():
    """Number by number, with the same names in a checkpoint, also while it iterates."""
    for dtype in (torch.float32, torch.float64):
        ours, theirs = (torch.nn.Conv2d(16, 6, 1, bias=False, dtype=dtype) for _ in range(2))
        theirs.load_state_dict(ours.state_dict())
        torch.manual_seed(3)
        parametrize.register_parametrization(ours, "weight", SpectralNorm(ours.weight))
        torch.manual_seed(3)
        parametrizations.spectral_norm(theirs)
        x = torch.randn(2, 16, 3, 3, dtype=dtype)
        for training in (True, True, False):
            outs = [layer.train(training)(x) for layer in (ours, theirs)]
            assert torch.equal(*outs)
            assert torch.equal(
                *(
                    torch.autograd.grad(o.square().sum(), layer.parametrizations.weight.original)[0]
                    for o, layer in zip(outs, (ours, theirs), strict=True)
                )
            )
            states = ours.state_dict(), theirs.state_dict()
            assert list(states[0]) == list(states[1])
            assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
