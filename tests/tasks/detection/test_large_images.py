"""Large images and many boxes: the same answers as torchvision's, part after part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.roi_heads import RoIHeads, paste_masks_in_image
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import box_iou

from tokenmix import create_model
from tokenmix.errors import UserError
from tokenmix.models.detection import detector as networks
from tokenmix.models.detection import pictures
from tokenmix.models.detection.detector import BlockMatcher, BlockRoIHeads, Pairs
from tokenmix.models.detection.pictures import PictureTransform, PlacedMasks, bilinear_blocks, place_masks
from tokenmix.profiling import peak_memory


def noise(height: int, width: int) -> torch.Tensor:
    return torch.randint(256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(height))


@pytest.mark.parametrize("size", [(7, 9), (60, 41), (37, 53), (1, 1), (100, 8)])
@pytest.mark.parametrize("block", [1, 300, 1 << 20])
def test_blocks_are_interpolated_as_the_whole(size: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pictures, "BLOCK_PIXELS", block)
    image = noise(37, 53)
    expected = F.interpolate(image[None].float(), size=size, mode="bilinear", align_corners=False)[0]
    blocks = list(bilinear_blocks(image, size))
    assert block > 300 or len(blocks) > 1 or size[0] == 1
    torch.testing.assert_close(torch.cat(blocks, 1), expected, atol=1e-3, rtol=1e-5)


def test_pictures_are_transformed_as_floats_are():
    images = [noise(300, 77), noise(40, 50)]
    own = PictureTransform(64, 100, [0.4, 0.5, 0.6], [0.2, 0.3, 0.1], 16).eval()
    theirs = GeneralizedRCNNTransform(64, 100, [0.4, 0.5, 0.6], [0.2, 0.3, 0.1], 16).eval()
    expected, _ = theirs([image.float() / 255 for image in images])
    found, _ = own(images)
    assert found.image_sizes == expected.image_sizes
    torch.testing.assert_close(found.tensors, expected.tensors, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="9000 x 1 pixels is too narrow"):
        own([noise(1, 9000)])


@pytest.mark.parametrize("model", ["retinanet_nano", "faster_rcnn_nano", "mask_rcnn_nano"])
def test_a_detector_finds_the_same_in_a_picture(model: str):
    torch.manual_seed(0)
    detector: Any = create_model(model, num_classes=2, score=0.0, detections=20).eval()
    image = noise(300, 500)
    with torch.no_grad():
        (expected,), (found,) = detector([image.float() / 255]), detector.find([image])
    torch.testing.assert_close(found["scores"], expected["scores"], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found["boxes"].mean(0), expected["boxes"].mean(0), atol=2.0, rtol=0.05)
    if "masks" in found:
        assert expected["masks"].shape == (20, 300, 500)
        assert found["masks"].dense().shape == (20, 300, 500)


def test_no_part_of_a_picture_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pictures, "BLOCK_PIXELS", 10_000)
    image, parts = noise(1000, 900), []
    taken = peak_memory(lambda: parts.extend(len(rows[0]) for rows in bilinear_blocks(image, (100, 90))))
    assert len(parts) > 10
    assert taken < image.numel()


def test_masks_are_placed_as_torchvision_pastes_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pictures, "BLOCK_PIXELS", 500)
    shares = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[0.0, 0, 90, 60], [10.2, 5.7, 33.3, 44.1], [80, 50, 90, 60], [-9, -9, 20, 20], [3, 3, 3, 3]])
    expected = paste_masks_in_image(shares, boxes, (60, 90))[:, 0] > 0.5
    placed = place_masks(shares, boxes, (60, 90))
    assert (placed.dense() == expected).float().mean() > 0.999
    assert torch.equal(placed[torch.tensor([False, True, False, False, True])].dense(), placed.dense()[[1, 4]])
    assert sum(crop.numel() for crop, _, _ in placed.crops) < expected.numel() / 2
    assert place_masks(shares[:0], boxes[:0], (60, 90)).dense().shape == (0, 60, 90)


def test_dense_masks_that_would_not_fit_are_refused():
    masks = PlacedMasks([(torch.ones(1, 1, dtype=torch.bool), 0, 0)] * 100, (20_000, 20_000))
    with pytest.raises(UserError, match="100 masks of 20000 x 20000 pixels fill more than"):
        masks.dense()


@pytest.mark.parametrize("low_quality", [True, False])
@pytest.mark.parametrize("block", [1, 64, 1 << 20])
def test_blocks_match_as_the_whole_table(low_quality: bool, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(networks, "BLOCK_PAIRS", block)
    generator = torch.Generator().manual_seed(1)
    corners = torch.randint(0, 40, (230, 2), generator=generator).float()
    boxes = torch.cat([corners, corners + torch.randint(5, 20, (230, 2), generator=generator)], 1)
    true, anchors = torch.cat([boxes[:29], boxes[:1]]), boxes[20:]
    expected = Matcher(0.5, 0.4, low_quality)(box_iou(true, anchors))
    assert torch.equal(BlockMatcher(0.5, 0.4, low_quality)(Pairs(true, anchors)), expected)
    assert {-2, -1} < set(expected.tolist())


def test_proposals_are_matched_in_blocks(monkeypatch: pytest.MonkeyPatch):
    heads: Any = create_model("faster_rcnn_nano", num_classes=2).net.roi_heads
    corners = torch.rand(50, 2, generator=torch.Generator().manual_seed(0)) * 30
    proposals = torch.cat([corners, corners + 12], 1)
    given = ([proposals, proposals], [proposals[:7], proposals[:0]], [torch.arange(7) % 2 + 1, torch.arange(0)])
    expected = RoIHeads.assign_targets_to_proposals(heads, *given)
    monkeypatch.setattr(networks, "BLOCK_PAIRS", 20)
    for found, right in zip(heads.assign_targets_to_proposals(*given), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("model", ["retinanet_nano", "faster_rcnn_nano"])
def test_losses_are_those_of_the_whole_table(model: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    detector: Any = create_model(model, num_classes=2).train()
    image = noise(64, 64).float() / 255
    corners = torch.rand(40, 2) * 40
    target = {"boxes": torch.cat([corners, corners + 15], 1), "labels": torch.arange(40) % 2}
    losses = []
    for block in (1 << 22, 5000):
        monkeypatch.setattr(networks, "BLOCK_PAIRS", block)
        torch.manual_seed(1)
        losses.append(detector([image], [target]))
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value)


def test_only_masks_of_sampled_boxes_are_resized(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    detector: Any = create_model("mask_rcnn_nano", num_classes=2, min_size=64, max_size=64).train()
    detector.net.roi_heads.fg_bg_sampler.batch_size_per_image = 16
    corners = torch.rand(40, 2) * 20
    boxes = torch.cat([corners, corners + 10], 1)
    masks = torch.zeros(40, 32, 32, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    target = {"boxes": boxes, "labels": torch.arange(40) % 2, "masks": masks}
    images, targets = [noise(32, 32).float() / 255] * 2, [target, {k: v[:0] for k, v in target.items()}]
    resized, losses, resize = [], [], F.interpolate

    def counted(masks: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        resized.append(masks.shape[0] if masks.shape[1] == 1 else 0)
        return resize(masks, *args, **kwargs)

    monkeypatch.setattr(F, "interpolate", counted)
    for heads, transform in ((RoIHeads, GeneralizedRCNNTransform), (None, None)):
        net = detector.net
        net.roi_heads.__class__, net.transform.__class__ = heads or BlockRoIHeads, transform or PictureTransform
        resized.clear()
        torch.manual_seed(1)
        losses.append(detector(images, targets))
    assert 0 < max(resized) <= 4
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value)


def test_json_lists_are_plain(tmp_path: Path):
    masks = place_masks(torch.ones(1, 1, 28, 28), torch.tensor([[2.0, 3, 12, 13]]), (20, 30))
    from tokenmix.lab.tasks.detection.task import coco_results, object_rows

    found = {
        "boxes": torch.tensor([[2.0, 3, 12, 13]]),
        "scores": torch.tensor([0.5]),
        "labels": torch.tensor([0]),
        "masks": masks,
    }
    (entry,) = json.loads(json.dumps(coco_results(found, image_id=1, file="a", category_ids=[3])))
    (row,) = object_rows("a", found, ["x"])
    mask_of = pytest.importorskip("pycocotools.mask")
    assert int(mask_of.area(entry["segmentation"])) == row["pixels"] == int(masks.dense().sum())
