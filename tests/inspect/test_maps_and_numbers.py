import math

import numpy as np
import pytest
import timm
import torch
from matplotlib import colormaps
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.compare.report import signed
from tokenmix.lab.inspect import SIGNED, attention_maps, grid_of, map_numbers, tiles_of
from tokenmix.layers import MIXERS
from tokenmix.layers.external import ExternalAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.models import BlockMap, create_model


def nano(mixer: str) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 3}
    return create_model("mixer_nano", mixer=mixer, embed_dim=16, depth=3, num_heads=2, **size).eval()


@pytest.mark.parametrize("mixer", [name for name, row in MIXERS.items() if row.layer.capabilities.map is not None])
def test_every_mixer_shows_a_map_for_each_block(mixer: str):
    maps = attention_maps(nano(mixer), torch.randn(2, 1, 16, 16))
    assert [m.name for m in maps] == [f"blocks.{i}.mixer" for i in range(3)]
    for block, numbers in zip(maps, map_numbers(maps)):
        assert block.map.isfinite().all()
        assert 0 <= numbers.entropy <= 1 + 1e-9
        assert 1 <= numbers.effective_columns <= block.map.shape[-1] + 1e-9
        assert 0 < numbers.saturation <= 1 + 1e-9
        tiles = tiles_of(block, image=1, limit=5)
        assert 1 <= len(tiles) <= 5
        assert all(tile.values.dim() == 2 and tile.values.isfinite().all() for tile in tiles)


class Stranger(nn.Module):
    """A model that is not ours and calls our layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(16, num_heads=2), ExternalAttention(16, num_slots=5)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(2).transpose(1, 2)
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        mask[:, -1] = False
        return self.second(self.first(x), mask=mask)


def test_a_strangers_model_shows_its_maps_with_the_masks_that_it_used():
    model = Stranger().eval()
    images = torch.randn(1, 16, 2, 3)
    maps = attention_maps(model, images)
    assert [(m.name, m.kind, m.grid) for m in maps] == [("first", "tokens", (2, 3)), ("second", "slots", (2, 3))]
    x = images.flatten(2).transpose(1, 2)
    torch.testing.assert_close(maps[0].map, model.first.attention_map(x))
    assert maps[1].map[..., -1, :].abs().max() == 0
    assert not model.first._forward_hooks


def test_a_model_without_mixers_is_an_error_and_never_an_empty_answer():
    with pytest.raises(UserError, match="Linear has no token mixer"):
        attention_maps(nn.Linear(3, 3), torch.randn(1, 3))


def block(values: Tensor, kind: str = "tokens", prefix: int = 0) -> BlockMap:
    side = math.isqrt(values.shape[-2] - prefix)
    return BlockMap("b", kind, values, (side, side), prefix)


def test_numbers_of_known_maps():
    one_hot, uniform = torch.eye(4).expand(1, 2, 4, 4), torch.full((1, 2, 4, 4), 0.25)
    sharp, flat = map_numbers([block(one_hot), block(uniform)])
    assert (sharp.entropy, sharp.saturation, sharp.diagonality, sharp.distance) == (0, 1, 1, None)
    assert sharp.effective_columns == pytest.approx(4)
    assert (flat.entropy, flat.saturation, flat.diagonality) == (pytest.approx(1), 0.25, 0.25)
    assert flat.distance is None


def test_slots_in_use_are_counted():
    two_of_eight = torch.zeros(1, 1, 4, 8)
    two_of_eight[..., :2, 0] = two_of_eight[..., 2:, 5] = 1
    (numbers,) = map_numbers([block(two_of_eight, "slots")])
    assert numbers.effective_columns == pytest.approx(2)
    assert numbers.diagonality is None


def test_distance_is_0_for_the_same_grouping_under_other_slots_and_large_for_another():
    torch.manual_seed(0)
    first = torch.randn(1, 1, 16, 8).softmax(-1)
    renamed, other = first[..., torch.randperm(8)], torch.randn(1, 1, 16, 8).softmax(-1)
    _, same, different = map_numbers([block(first, "slots"), block(renamed, "slots"), block(other, "slots")])
    assert same.distance == pytest.approx(0, abs=1e-9)
    assert different.distance is not None
    assert different.distance > 0.3


def test_gates_are_read_by_size():
    (numbers,) = map_numbers([block(torch.diag(torch.tensor([1.0, -2.0, 3.0, -4.0])), "gate")])
    assert (numbers.saturation, numbers.diagonality) == (1, 1)


class Padded(nn.Module):
    def __init__(self, mixer: str) -> None:
        super().__init__()
        self.first, self.second = (tokenmix.create_mixer(mixer, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.abs().sum(-1) > 0
        return self.second(self.first(x, mask), mask)


@pytest.mark.parametrize("mixer", ["self", "external", "multihead-external"])
def test_masked_tokens_do_not_count(mixer: str):
    torch.manual_seed(0)
    model, x = Padded(mixer).eval(), torch.randn(1, 20, 16)
    alone, padded = (
        map_numbers(attention_maps(model, some)) for some in (x, torch.cat([x, torch.zeros(1, 20, 16)], 1))
    )
    for one, other in zip(alone, padded, strict=True):
        for field in ("entropy", "effective_columns", "saturation", "diagonality", "distance"):
            expected = getattr(one, field)
            assert getattr(other, field) == (None if expected is None else pytest.approx(expected, rel=1e-4)), field
    nothing = BlockMap("block", "tokens", torch.zeros(1, 1, 4, 4), (2, 2))
    assert map_numbers([nothing])[0].entropy == 0


@pytest.mark.parametrize("side", [(28, 28), (12, 20), (4, 4), (8, 16)])
def test_tiles_of_pooled_keys_on_odd_grids(side: tuple[int, int]):
    """The last window of an odd side is smaller."""
    model = tokenmix.create_model("mixer_nano", mixer="sagan", img_size=side, in_chans=1, num_classes=3).eval()
    (block, *_) = attention_maps(model, torch.randn(1, 1, *side))
    height, width = (-(-size // 2) for size in block.grid)
    assert {tile.values.shape for tile in tiles_of(block)} == {(height, width)}


def test_tiles_of_self_attention_lie_where_the_tokens_do():
    values = torch.zeros(1, 1, 9, 9)
    values[0, 0, 4, 5] = 1
    looks, received = tiles_of(block(values), limit=2)
    assert looks.mark == (1, 1)
    assert looks.values[1, 2] == 1
    assert received.values[1, 2] == pytest.approx(1 / 9)


def test_a_class_token_has_no_place_on_the_image():
    values = torch.zeros(1, 1, 10, 10)
    values[0, 0, 5, 6] = 1
    assert tiles_of(block(values, prefix=1), limit=1)[0].values[1, 2] == 1


def test_the_slots_shown_are_those_that_vary_over_the_image():
    values = torch.full((1, 2, 4, 3), 0.1)
    values[0, 1, 2, 2] = 0.9
    tile = tiles_of(block(values, "slots"), limit=1)[0]
    assert tile.label == "head 1, slot 2"
    assert tile.values[1, 0] == pytest.approx(0.9)


def test_gate_tiles_start_with_the_matrix_and_the_centre_token():
    matrix = torch.arange(81.0).view(9, 9)
    whole, centre, *_ = tiles_of(block(matrix, "gate"), limit=4)
    assert whole.values.equal(matrix)
    assert not whole.on_image
    assert centre.values.equal(matrix[4].view(3, 3))
    assert centre.signed


def test_signed_numbers_are_red_above_zero_and_blue_below_in_every_picture():
    red, _, blue, _ = colormaps[SIGNED]([0.0, 1.0]).T
    assert red[0] < blue[0]
    assert red[1] > blue[1]
    in_the_report = signed(np.array([[-1.0, 1.0]]))[0].astype(int)
    assert in_the_report[0, 0] < in_the_report[0, 2]
    assert in_the_report[1, 0] > in_the_report[1, 2]


@pytest.mark.parametrize(
    ("tokens", "aspect", "prefix", "grid"),
    [
        (64, 1.0, 0, (8, 8)),
        (65, 1.0, 1, (8, 8)),
        (201, 1.0, 5, (14, 14)),
        (129, 0.5, 1, (8, 16)),
        (70, 0.7, 0, (7, 10)),
        (12, math.nan, 0, (3, 4)),
    ],
)
def test_tokens_in_front_of_the_grid_are_no_positions(tokens: int, aspect: float, prefix: int, grid: tuple[int, int]):
    assert grid_of(tokens, aspect) == (prefix, grid)


class Windows(nn.Module):
    """Attention in the four quarters of an image, then over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = SelfAttention(16, num_heads=2), SelfAttention(16, num_heads=2)

    def forward(self, images: Tensor) -> Tensor:
        halves = images.unflatten(3, (2, -1)).unflatten(2, (2, -1)).permute(0, 2, 4, 3, 5, 1)
        x = self.inner(halves.flatten(3, 4).flatten(0, 2))
        return self.outer(x.reshape(len(images), -1, 16))


def test_a_window_is_not_drawn_as_the_image():
    model, images = Windows().eval(), torch.randn(3, 16, 4, 8)
    inner, outer = attention_maps(model, images)
    assert (inner.windows, outer.windows, outer.grid) == (4, 1, (4, 8))
    tiles = tiles_of(inner, image=1, limit=2)
    assert tiles[0].label == "window 1 of 4, head 0, centre token"
    assert not any(tile.on_image for tile in tiles)
    torch.testing.assert_close(tiles[1].values.flatten(), inner.map[4, 0].mean(0))
    first, second = map_numbers([inner, outer])
    assert first.shape == (12, 2, 8, 8)
    assert second.distance is None


def test_registers_that_the_model_tells_are_not_guessed():
    """Nine tokens: 3 x 3, or a class token and four registers before 2 x 2."""
    assert grid_of(9, 1.0) == (0, (3, 3))
    assert grid_of(9, 1.0, known=5) == (5, (2, 2))
    assert grid_of(10, 1.0, known=5) == (1, (3, 3)), "of another part of the model"


def test_a_class_token_of_a_swapped_model_is_left_out_of_the_picture():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=3).eval()
    tokenmix.swap_attention(model, "self")
    (block,) = attention_maps(model, torch.randn(1, 3, 64, 64))
    assert (block.grid, block.prefix, tuple(block.map.shape[-2:])) == ((4, 4), 1, (17, 17))
    assert tiles_of(block)[0].values.shape == (4, 4)
