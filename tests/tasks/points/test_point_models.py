"""The point cloud transformer: published sizes, order and padding change nothing, counted against a run."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import create_model, list_models
from tokenmix.errors import UserError
from tokenmix.registry import MODELS

POINT_MODELS = [*list_models(task="point-classification"), *list_models(task="point-segmentation")]
NANO = [name for name in POINT_MODELS if name.endswith("_nano")]
BN = 2


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def arguments(name: str, clouds: int) -> list[Tensor]:
    return [torch.arange(clouds) % 16] if MODELS[name].tasks == ("point-segmentation",) else []


def answers(name: str, model: nn.Module, points: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(points, *arguments(name, len(points)), mask=mask)


def lbr(inside: int, out: int, bias: int = 0) -> int:
    return inside * out + bias * out + BN * out


def attention(dim: int) -> int:
    return dim * dim // 4 + 2 * (dim * dim + dim) + BN * dim


HEAD = lbr(1024, 512) + lbr(512, 256, bias=1) + 256 * 40 + 40
PUBLISHED = {
    "pct_cls": lbr(3, 64)
    + lbr(64, 64)
    + lbr(128, 128)
    + lbr(128, 128)
    + 4 * lbr(256, 256)
    + 4 * attention(256)
    + lbr(1280, 1024)
    + HEAD,
    "pct_naive_cls": lbr(3, 128) + lbr(128, 128) + 4 * attention(128) + lbr(512, 1024) + HEAD,
    "pct_part": lbr(3, 128)
    + lbr(128, 128)
    + 4 * attention(128)
    + lbr(512, 1024)
    + 16 * 64
    + BN * 64
    + lbr(3136, 512, bias=1)
    + lbr(512, 256, bias=1)
    + 256 * 50
    + 50,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_layout(name: str) -> None:
    assert size(create_model(name, device="meta")) == PUBLISHED[name]


def test_sizes_are_those_that_are_reported() -> None:
    """2.88 M and 1.36 M."""
    assert size(create_model("pct_cls", device="meta")) == 2_876_136
    assert size(create_model("pct_naive_cls", device="meta")) == 1_360_552


def test_external_attention_stands_in_all_four_layers() -> None:
    model = create_model("eapct_cls", device="meta")
    mixers = [type(block.mixer).__name__ for block in model.trunk.blocks]  # type: ignore[union-attr]
    assert mixers == ["ExternalAttention"] * 4
    # q of C x C and two memories instead of q of C x C / 4 and v.
    dim = 256
    each = dim * dim + dim + 2 * 64 * dim - (dim * dim // 4 + dim * dim + dim)
    assert size(model) == PUBLISHED["pct_cls"] + 4 * each


@pytest.mark.parametrize("name", POINT_MODELS)
def test_multiply_adds_are_those_of_a_run(name: str) -> None:
    model = create_model(name).eval()
    with FlopCounterMode(display=False) as counter:
        answers(name, model, torch.randn(1, 600, 3))
    assert counter.get_total_flops() == pytest.approx(2 * model.macs(600), rel=1e-6)


@pytest.mark.parametrize("name", NANO)
def test_a_padded_cloud_answers_as_alone(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name).eval()
    small = torch.randn(1, 40, 3)
    padded = torch.full((2, 130, 3), torch.nan)
    padded[0], padded[1, :40] = torch.randn(130, 3), small[0]
    mask = torch.arange(130) < torch.tensor([[130], [40]])
    got = answers(name, model, padded, mask)[1:]
    labels = [label[1:] for label in arguments(name, 2)]
    with torch.no_grad():
        alone = model(small, *labels)
    torch.testing.assert_close(got[:, :40] if got.dim() == 3 else got, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NANO)
def test_the_order_of_points_changes_no_answer(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name).eval()
    # On a grid, where many distances are equal.
    points = torch.randint(0, 4, (2, 150, 3)).float() / 4
    order = torch.randperm(150)
    expected, got = answers(name, model, points), answers(name, model, points[:, order])
    torch.testing.assert_close(got, expected[:, order] if expected.dim() == 3 else expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pct_cls_nano", "eapct_part_nano", "pct_naive_cls_nano"])
def test_training_under_a_mask_sees_no_padding(name: str) -> None:
    losses = []
    for fill in (torch.nan, 7.0):
        torch.manual_seed(0)
        model = create_model(name, drop_rate=0.0)
        points, mask = torch.randn(3, 60, 3), torch.arange(60) < torch.tensor([[60], [20], [5]])
        out = model(points.masked_fill(~mask[..., None], fill), *arguments(name, 3), mask=mask)
        loss = (out[mask] if out.dim() == 3 else out).square().sum()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("position", ["none", "each-layer"])
def test_coordinates_reach_each_layer_if_wanted(position: str) -> None:
    model = create_model("pct_cls", device="meta", position=position)
    more = 3 * 256 if position == "each-layer" else 0
    assert size(model) == PUBLISHED["pct_cls"] + more
    with torch.no_grad():
        model = model.to_empty(device="cpu")
        assert model(torch.randn(2, 600, 3)).shape == (2, 40)


def test_normals_and_any_mixer_of_tokens() -> None:
    assert create_model("pct_cls_nano", embedding="naive")(torch.randn(2, 30, 3)).shape == (2, 40)
    for mixer in ("offset", "external", "self", "multihead-external"):
        model = create_model("pct_cls_nano", mixer=mixer, in_chans=6, num_classes=3).eval()
        assert model(torch.randn(2, 30, 6)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("pct", {}, "unknown model"),
        ("pct_cls", {"width": 3}, "has no argument 'width'; it takes .*dim"),
        ("pct_cls", {"mixer": "gating"}, "points have no order"),
        ("pct_cls", {"mixer": "sagan"}, "takes maps"),
        ("pct_cls", {"in_chans": 2}, "3 coordinates"),
        ("pct_cls", {"centres": (5, 9)}, "one number for each, decreasing"),
        ("pct_cls", {"num_neighbours": 0}, "num_neighbours=0"),
        ("pct_cls", {"num_neighbours": 1.5}, "num_neighbours=1.5"),
        ("pct_cls", {"num_neighbours": "many"}, "num_neighbours='many'"),
        ("pct_naive_cls", {"num_neighbours": 8}, "has no num_neighbours; leave it out"),
        ("pct_cls", {"num_parts": 3}, "classifies clouds"),
        ("pct_part", {"num_classes": 3}, "segments parts"),
        ("pct_part", {"embedding": "neighbour"}, "centres='all'"),
        ("pct_cls", {"embedding": "other"}, "unknown embedding"),
        ("pct_cls", {"position": "other"}, "unknown position"),
        ("pct_cls", {"depth": 0}, "depth=0"),
    ],
)
def test_mistakes_are_told(name: str, changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        create_model(name, device="meta", **changes)


@pytest.mark.parametrize("name", ["pct_cls_nano", "eapct_cls_nano"])
def test_a_batch_may_be_empty_and_a_cloud_may_not(name: str):
    model = create_model(name, num_classes=5).eval()
    assert model(torch.randn(0, 20, 3)).shape == (0, 5)
    with pytest.raises(UserError, match="a cloud without points"):
        model(torch.randn(1, 0, 3))
