"""Detectors: torchvision's parameters and multiply-adds, any image size, labels from 0, starting weights, mistakes."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import (
    fasterrcnn_resnet50_fpn,
    maskrcnn_resnet50_fpn,
    retinanet_resnet50_fpn,
)

from tokenmix import create_model, list_models
from tokenmix.errors import UserError
from tokenmix.lab.tasks.detection.task import ObjectTask
from tokenmix.models.detection.backbones import LaViTBackbone
from tokenmix.swap import swap_attention

THEIRS = {
    "retinanet_resnet50": (retinanet_resnet50_fpn, 91),
    "faster_rcnn_resnet50": (fasterrcnn_resnet50_fpn, 90),
    "mask_rcnn_resnet50": (maskrcnn_resnet50_fpn, 90),
}
DETECTORS = [*list_models(task="detection"), *list_models(task="instance-segmentation")]
RESNETS = [name for name in DETECTORS if name.endswith("_nano") and "lavit" not in name]
MIXERS = "none", "self", "external"
SMALL = [
    *(
        (name, {"mixer": mixer, "min_size": 64, "max_size": 96})
        for name in RESNETS
        for mixer in ("none", "self", "external")
    ),
    ("mask_rcnn_lavit_nano", {"img_size": 96}),
]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def targets(classes: int, masks: bool) -> list[dict[str, Tensor]]:
    one: dict[str, Tensor] = {
        "boxes": torch.tensor([[4.0, 6, 30, 40], [20, 20, 60, 50]]),
        "labels": torch.tensor([0, classes - 1]),
    }
    empty = {"boxes": torch.empty(0, 4), "labels": torch.empty(0, dtype=torch.int64)}
    if masks:
        one["masks"] = torch.zeros(2, 64, 80, dtype=torch.bool)
        one["masks"][0, 6:40, 4:30] = one["masks"][1, 20:50, 20:60] = True
        empty["masks"] = torch.zeros(0, 48, 48, dtype=torch.bool)
    return [one, empty]


@pytest.mark.parametrize("name", THEIRS)
def test_without_a_block_it_is_torchvisions(name: str):
    build, classes = THEIRS[name]
    with torch.device("meta"):
        theirs = build(weights=None, weights_backbone=None, num_classes=91)
    ours = create_model(name, mixer="none", num_classes=classes, device="meta")
    assert count(ours) == count(theirs)
    # torchvision's published weights have a frozen BatchNorm, whose scale and shift are no parameters.
    frozen = create_model(name, mixer="none", norm="frozen", num_classes=classes, device="meta")
    norms = sum(count(m) for m in theirs.modules() if isinstance(m, nn.BatchNorm2d))
    assert (
        count(frozen)
        == count(theirs) - norms
        == {"retinanet_resnet50": 34_014_999, "faster_rcnn_resnet50": 41_755_286, "mask_rcnn_resnet50": 44_401_393}[
            name
        ]
    )


@pytest.mark.parametrize(("name", "published"), [("retinanet_resnet50", 151.54), ("faster_rcnn_resnet50", 134.38)])
def test_multiply_adds_are_those_that_torchvision_publishes(name: str, published: float):
    classes = THEIRS[name][1]
    assert create_model(name, mixer="none", num_classes=classes, device="meta").macs() / 1e9 == pytest.approx(
        published, abs=0.005
    )


def test_the_block_costs_what_its_equation_says():
    none, external = (create_model("retinanet_resnet50", mixer=m, device="meta") for m in ("none", "external"))
    block = external.body.block  # type: ignore[attr-defined]
    assert count(external) - count(none) == count(block)
    assert external.macs() - none.macs() == block.macs(25 * 25)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.endswith("_nano") else [pytest.mark.slow]) for name in DETECTORS]
)
def test_parts_make_up_the_whole(name: str):
    model = create_model(name, num_classes=3, device="meta")
    table = model.cost_table()
    assert sum(row.parameters for row in table) == count(model)
    assert sum(row.macs for row in table) == model.macs() > 0
    assert len(model.sizes.anchors) == len(
        model.net.backbone.neck(
            [
                torch.empty(1, i["num_chs"], 64 // i["reduction"], 64 // i["reduction"], device="meta")
                for i in model.feature_info
            ]
        )
    )


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_losses_and_detections(name: str, options: dict[str, object]):
    torch.manual_seed(0)
    model = create_model(name, num_classes=2, score=0.0, detections=7, **options)
    images = [torch.rand(3, 64, 80), torch.rand(3, 48, 48)]
    losses = model(images, targets(2, "mask" in name))
    sum(losses.values()).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []
    found = model.eval()(images)
    for image, one in zip(images, found, strict=True):
        assert 0 < len(one["boxes"]) <= 7
        assert set(one["labels"].tolist()) <= {0, 1}
        assert (one["boxes"][:, 2:] <= torch.tensor(image.shape[:0:-1]) + 1e-3).all()
        assert ("masks" in one) == ("mask" in name)
        assert "masks" not in one or (one["masks"].shape[1:] == image.shape[1:] and one["masks"].dtype == torch.bool)


def test_maps_do_not_depend_on_the_other_images_of_a_size():
    torch.manual_seed(1)
    model = create_model("retinanet_nano", num_classes=2).eval()
    images = torch.rand(2, 3, 64, 64)
    for together, alone in zip(model.net.backbone(images).values(), model.net.backbone(images[:1]).values()):
        torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-4)


def small_lavit(kind: str, **kwargs):
    thin = {
        "embed_dims": (16, 16, 32, 32),
        "num_heads": (1, 1, 2, 2),
        "depths": (1, 1, 2, 2),
        "num_vanilla": (1, 1, 1, 1),
    }
    return create_model(f"{kind}_lavit_tiny", backbone_kwargs=thin, num_classes=2, **{"img_size": 64, **kwargs})


def test_lavit_takes_images_of_any_size_in_the_corner_of_its_square():
    model = small_lavit("retinanet", score=0.0, detections=5).eval()
    images, _ = model.net.transform([torch.rand(3, 40, 100), torch.rand(3, 128, 32)])
    assert images.tensors.shape == (2, 3, 64, 64)
    assert [max(size) for size in images.image_sizes] == [64, 64]
    assert images.image_sizes[1] == (64, 16)
    found = model([torch.rand(3, 40, 100)])[0]
    assert len(found["boxes"]) == 5


def test_levels_of_a_lavit_are_counted_before_the_others_are_dropped():
    net = LaViTBackbone(backbone="lavit_nano", img_size=(64, 64), levels=(0, -2))
    maps = net(torch.rand(1, 3, 64, 64))
    assert net.levels == [0, 2]
    assert [64 // side for side in (maps[0].shape[-1], maps[1].shape[-1])] == net.reductions
    assert net.reductions[1] == 4 * net.reductions[0]


def test_a_lavit_of_another_size_keeps_its_weights_by_interpolation():
    small, large = small_lavit("retinanet"), small_lavit("retinanet", img_size=96)
    fitted, line = large.starting_weights(small.state_dict(), (64, 64))
    assert line is None
    small.set_input_size(96)
    large.load_state_dict(fitted)
    images = [torch.rand(3, 96, 96)]
    for a, b in zip(small.eval()(images), large.eval()(images)):
        torch.testing.assert_close(a, b)


def test_it_starts_from_a_classifier():
    thin = {
        "embed_dims": (16, 16, 32, 32),
        "num_heads": (1, 1, 2, 2),
        "depths": (1, 1, 2, 2),
        "num_vanilla": (1, 1, 1, 1),
    }
    classifier = create_model("lavit_tiny", img_size=32, num_classes=5, **thin)
    model = small_lavit("retinanet")
    fitted, line = model.starting_weights(classifier.state_dict(), (32, 32))
    assert line is not None
    assert "classifier" in line
    key = "stages.0.embed.weight"
    torch.testing.assert_close(fitted[f"net.backbone.body.net.{key}"], classifier.state_dict()[key])
    model.load_state_dict(fitted)


def test_an_eanet_hands_its_block_on():
    kwargs = {"backbone": "resnet18", "backbone_kwargs": {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 16)}}
    classifier = create_model("eanet_resnet50", num_classes=5, num_slots=4, **kwargs)
    model = create_model("retinanet_nano", norm="batch", num_slots=4, num_classes=2, **kwargs)
    fitted, _ = model.starting_weights(classifier.state_dict())
    torch.testing.assert_close(fitted["net.backbone.body.block.conv1.weight"], classifier.context.mixer.conv1.weight)
    other = create_model("retinanet_nano", num_slots=4, num_classes=2, **kwargs)
    with pytest.raises(UserError, match="GroupNorm"):
        other.starting_weights(classifier.state_dict())


def test_other_classes_start_fresh():
    source, model = (create_model("faster_rcnn_nano", num_classes=n) for n in (2, 3))
    fitted, line = model.starting_weights(source.state_dict())
    assert line is not None
    model.load_state_dict(fitted)
    key = "net.rpn.head.cls_logits.weight"
    torch.testing.assert_close(fitted[key], source.state_dict()[key])


def test_autocast_keeps_boxes_in_float32():
    torch.manual_seed(0)
    model = create_model("faster_rcnn_nano", num_classes=2, min_size=64, max_size=64, score=0.0).eval()
    seen = []
    model.net.backbone.fpn.register_forward_hook(lambda m, args, out: seen.append(out["0"].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = model([torch.rand(3, 64, 64)])[0]
    assert seen == [torch.bfloat16]
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32


def test_checkpointing_changes_no_gradient():
    losses = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = create_model("retinanet_nano", num_classes=2, min_size=64, max_size=64)
        model.set_grad_checkpointing(enable)
        loss = sum(model([torch.rand(3, 64, 64)], targets(2, False)[:1]).values())
        loss.backward()
        losses.append((loss.detach(), model.body.net.conv1.weight.grad))  # type: ignore[union-attr]
    torch.testing.assert_close(*losses)


def test_frozen_stages_and_maps():
    model = create_model("faster_rcnn_nano", num_classes=2, frozen_stages=2)
    frozen = {n.split(".")[4] for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1", "bn1", "layer1"}
    (block,) = model.eval().attention_maps(torch.rand(1, 3, 64, 96))
    assert block.grid == (4, 6)
    assert block.map.shape == (1, 1, 24, 64)


def test_models_are_listed_and_built_by_name():
    assert create_model("retinanet_nano", num_classes=4).num_classes == 4


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        ("retinanet_resnet5", {}, "did you mean|retinanet_resnet50"),
        ("retinanet_nano", {"mixr": "none"}, "'mixr'"),
        ("retinanet_nano", {"mixer": "gating"}, "gating"),
        ("retinanet_nano", {"norm": "layer"}, "layer"),
        ("retinanet_nano", {"mixer": "none", "num_slots": 8}, "num_slots"),
        ("retinanet_nano", {"backbone": "vgg16"}, "vgg16"),
        ("retinanet_nano", {"num_classes": 0}, "num_classes=0"),
        ("retinanet_nano", {"min_size": 800, "max_size": 300}, "max_size=300"),
        ("retinanet_lavit_tiny", {"img_size": (64, 96)}, "64 x 96"),
        ("retinanet_lavit_tiny", {"backbone": "resnet50"}, "not a LaViT"),
    ],
)
def test_mistakes_are_told(name: str, kwargs: dict, told: str):
    with pytest.raises(UserError, match=told):
        create_model(name, **kwargs, device="meta")


def test_images_that_are_no_list_are_told():
    model = create_model("retinanet_nano", num_classes=2)
    with pytest.raises(UserError, match="list of images"):
        model(torch.rand(1, 3, 64, 64))
    with pytest.raises(UserError, match="needs targets"):
        model([torch.rand(3, 64, 64)])


def test_a_swap_is_tried_on_an_image_and_undone():
    model = small_lavit("retinanet").eval()
    before = list(model.modules())
    task = SimpleNamespace(data={"img_size": (64, 64)})
    with pytest.raises(UserError, match="does not run with the mixer"):
        swap_attention(model, "external", example_inputs=ObjectTask.swap_example(task))  # type: ignore[arg-type]
    assert list(model.modules()) == before
