"""Scenes: images with a class per pixel, boxes, or a mask per object; sets and batches, augmented by torchvision.

The augmentation of a sample is a function of (seed, epoch, index); global random states stay unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from tokenmix.environment import check_mask_memory
from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.image_set import normalize
from tokenmix.lab.data.indexed import Batch, DataSet, IndexedDataset, hash_indices, restored_random_state, seed_all
from tokenmix.lab.data.lookup import load_data
from tokenmix.lab.data.reading import NAMED, LeftOut

Want = Literal["classes", "boxes", "masks"]
IGNORE = 255
T = TypeVar("T")


@dataclass(frozen=True)
class Objects:
    """Objects of a scene."""

    boxes: Tensor  # float32 (M, 4), left, top, right, bottom in pixels
    labels: Tensor  # int64 (M,), counted from 0 as in `SceneData.classes`; a detector adds its own background class
    masks: Tensor | None  # bool (M, H, W); None if only boxes are known
    crowd: Tensor  # bool (M,), regions that COCO marks as a crowd: ignored in training and evaluation
    # float32 (M,), area in pixels that decides an object's size class in evaluation, as in COCO's annotations; None
    # for the area of the mask or box.
    area: Tensor | None = None

    def kept(self, keep: Tensor) -> "Objects":
        """The objects that `keep`, bool (M,), marks."""
        if keep.all():
            return self  # masks fill gigabytes
        masks, area = (None if values is None else values[keep] for values in (self.masks, self.area))
        return Objects(self.boxes[keep], self.labels[keep], masks, self.crowd[keep], area)

    def areas(self) -> Tensor:
        """`area`, or the area of each mask or box: float32 (M,)."""
        if self.area is not None:
            return self.area
        if self.masks is not None:
            # One by one: a sum would convert all masks to eight bytes per pixel.
            return torch.tensor([float(mask.count_nonzero()) for mask in self.masks])
        return (self.boxes[:, 2] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 1])


@dataclass(frozen=True)
class Scene:
    """An image with its labels."""

    image: Tensor  # uint8 (3, H, W)
    name: str  # the file, or another identification
    # uint8 or int64 (H, W), the class of each pixel or `SceneData.ignore`; None for tasks on objects.
    classes: Tensor | None = None
    objects: Objects | None = None  # None for tasks on pixels
    key: int | None = None  # number of the image in a published layout, such as COCO's image_id; None for the index


class Scenes(Generic[T]):
    """Numbered scenes of any size, opened one by one; `read` returns an item's scene, without augmentation."""

    def __init__(self, items: Sequence[T], read: Callable[[T], Scene]) -> None:
        self.items, self.read = items, read

    def __len__(self) -> int:
        return len(self.items)

    def scene(self, index: int) -> Scene:
        return self.read(self.items[index])

    def subset(self, indices: Tensor) -> "Scenes[int]":
        return Scenes(indices.tolist(), self.scene)


def repeated(scenes: Scenes, times: int) -> Scenes:
    """Each scene `times` times in a row, so that any even spread over the numbers has many scenes."""
    return scenes.subset(torch.arange(len(scenes)).repeat_interleave(times))


@dataclass(frozen=True, kw_only=True)
class SceneData(DataSet[Scenes]):
    """Scenes for training and testing."""

    palette: Sequence[tuple[int, int, int]]  # colour of each class for figures, 0 to 255
    ignore: int = IGNORE  # label of pixels that are neither learned nor counted
    # Mean and deviation per channel, in 0..1; ImageNet's if nothing is decoded at the start.
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    crop: tuple[int, int] | None = None  # default (height, width) for training on this set; None for whole scenes
    # Further entries of the published layout as JSON values, such as COCO's category numbers.
    notes: Values = field(default_factory=dict)


def load_scenes(spec: str, *, want: Want, seed: int = 0, root: Path | None = None) -> SceneData:
    """Scenes with classes of pixels, or with boxes or masks of objects.

    Test scenes do not depend on the seed.

    Args:
        spec: a name of `tokenmix list data`, or a published layout with its folder, such as `voc:PATH`.
        want: kind of labels.
        seed: seed of training scenes composed on the fly; other scenes do not depend on it.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, a set without these labels, an unusable folder, or a data set that cannot be obtained.
    """
    if want not in get_args(Want):
        raise UserError(f"want is one of {', '.join(get_args(Want))}, got {want!r}")
    return load_data(spec, want, root=root, seed=seed)


def objects_of(
    labels: Tensor | list[int],
    *,
    boxes: np.ndarray | Tensor | None = None,
    masks: Tensor | None = None,
    crowd: list[bool] | None = None,
) -> Objects:
    """Objects from boxes (M, 4), or from masks bool (M, H, W), not empty, whose boxes end after the last pixel."""
    if boxes is None:
        assert masks is not None
        boxes = masks_to_boxes(masks).float() + torch.tensor([0.0, 0.0, 1.0, 1.0])
    corners = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    marked = torch.tensor([False] * len(corners) if crowd is None else crowd, dtype=torch.bool)
    return Objects(corners, torch.as_tensor(labels, dtype=torch.int64), masks, marked)


def warn_of_absent(absent: Sequence[str], source: Path | str, ignore: str = "") -> None:
    """Report on stderr the classes without training images."""
    if absent:
        more = f" and {len(absent) - NAMED} more" if len(absent) > NAMED else ""
        log(f"{source} has no example of {', '.join(map(repr, absent[:NAMED]))}{more}, so it cannot be learned{ignore}")


def bit_palette(count: int) -> list[tuple[int, int, int]]:
    """Colours of classes 0 to count - 1 as in Pascal VOC, from the bits of the class number.

    Bits 0, 3 and 6 are the highest bits of red, bits 1, 4 and 7 of green, bits 2, 5 and 8 of blue.
    """
    return [  # pyrefly: ignore[bad-return]
        tuple(sum((n >> 3 * place + c & 1) << 7 - place for place in range(8)) for c in range(3)) for n in range(count)
    ]


def folder_in(path: Path, candidates: Sequence[str], marker: str, layout: str) -> Path:
    """The first of path / candidate that contains `marker`; `UserError` describes the layout."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give one in the layout of {layout}")
    for candidate in candidates:
        if (path / candidate / marker).exists():
            return path / candidate
    raise UserError(
        f"{path} has no {marker} in it, so it is not in the layout of {layout}; give the folder that has it"
    )


@dataclass(frozen=True, kw_only=True)
class SceneAugment:
    """Random scale, crop, flip and colours of an image with its labels.

    Objects that become smaller than `min_size`, or without area, are dropped. A cropped box becomes its remaining part;
    with masks, the box of the remaining mask.
    """

    seed: int  # with the epoch and the sample's index, determines the augmentation
    # (height, width) of the output, padded if needed; None keeps the size, which a detector changes itself.
    crop: tuple[int, int] | None = None
    ignore: int = IGNORE  # class of the padding, if the scaled image is smaller than the crop
    scales: tuple[float, ...] = (1.0,)  # factors to choose from
    flip: float = 0.5  # probability of mirroring
    color_jitter: float = 0.0  # largest relative change of brightness, contrast and saturation
    # Colour of the padding, in 0..1; the subtracted mean makes the padding 0.
    fill: Sequence[float] = IMAGENET_DEFAULT_MEAN
    min_size: float = 1.0  # least width and height of an object in pixels

    def __post_init__(self) -> None:
        if not self.scales:
            raise UserError("there are no scales to choose from; give at least one, such as 1")

    def __call__(self, scene: Scene, epoch: int, index: int) -> Scene:
        """The scene in an epoch, with classes in their type; crowd regions, which are not learned, are left out."""
        parts: list[Tensor] = [tv_tensors.Image(scene.image)]
        objects = None if scene.objects is None else scene.objects.kept(~scene.objects.crowd)
        if scene.classes is not None:
            parts.append(tv_tensors.Mask(scene.classes))
        if objects is not None:
            whole = (scene.image.shape[1], scene.image.shape[2])
            parts.append(tv_tensors.BoundingBoxes(objects.boxes, format="XYXY", canvas_size=whole))  # type: ignore[call-arg]
            if objects.masks is not None:
                parts.append(tv_tensors.Mask(objects.masks.view(torch.uint8)))
        steps = list[v2.Transform]()
        if self.crop is not None:
            colour = [round(255 * level) for level in self.fill]
            # Masks of objects are padded with background.
            outside = 0 if scene.classes is None else self.ignore
            steps.append(
                v2.RandomCrop(
                    self.crop,
                    pad_if_needed=True,
                    fill={tv_tensors.Image: colour, tv_tensors.Mask: outside, "others": 0},
                )
            )
        steps += [v2.RandomHorizontalFlip(self.flip)] if self.flip else []
        steps += [v2.ColorJitter(*3 * [self.color_jitter])] if self.color_jitter else []
        with restored_random_state():
            seed_all(int(hash_indices(self.seed, epoch, torch.tensor([index]), purpose=3)[0]))
            if self.scales != (1.0,):
                scale = self.scales[int(torch.randint(len(self.scales), ()))]
                size = [max(round(side * scale), 1) for side in scene.image.shape[1:]]
                if objects is not None and objects.masks is not None:
                    check_mask_memory(len(objects.masks), (size[0], size[1]))
                # Images bilinear, classes nearest-neighbour.
                parts = [F.resize(part, size, antialias=True) for part in parts]
            image, *others = v2.Compose(steps or [v2.Identity()])(*parts)
        changed = replace(scene, image=image.as_subclass(Tensor))
        if scene.classes is not None:
            return replace(changed, classes=others[0].as_subclass(Tensor))
        if objects is None:
            return changed
        boxes = F.clamp_bounding_boxes(others[0]).as_subclass(Tensor)
        masks = None if objects.masks is None else others[1].as_subclass(Tensor).view(torch.bool)
        # A given area belongs to the whole object.
        return replace(changed, objects=left_over(boxes, replace(objects, area=None), masks, self.min_size))


def left_over(boxes: Tensor, objects: Objects, masks: Tensor | None, min_size: float) -> Objects:
    """The objects of these changed boxes and masks that are large enough."""
    objects = replace(objects, boxes=boxes, masks=masks)
    if masks is not None:
        objects = objects.kept(masks.flatten(1).any(1))
        assert objects.masks is not None
        # The last pixel belongs to the object, so its box ends one pixel further.
        objects = replace(objects, boxes=masks_to_boxes(objects.masks) + torch.tensor([0.0, 0.0, 1.0, 1.0]))
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
    return objects.kept((sides > 0).all(1) & (sides >= min_size).all(1))


REPLACES = -1
# After this many unreadable scenes in a row the set is considered broken.
TRIED = 10


class SceneSamples(IndexedDataset[Batch]):
    """Scenes as a task takes them, with `augment` in training; see `PixelSamples` and `ObjectSamples`.

    An unreadable scene is left out of its batch, with a message on stderr. If a whole batch is unreadable, the next
    readable scene replaces it; its index is -1, so that no metric counts it.
    """

    unit = "images"
    wanted: ClassVar[Literal["classes", "objects"]]

    def __init__(self, scenes: Scenes, augment: SceneAugment | None = None) -> None:
        self.scenes, self.augment = scenes, augment
        self._left_out = LeftOut()

    def __len__(self) -> int:
        return len(self.scenes)

    def readable(self, indices: Tensor, epoch: int) -> tuple[list[Scene], list[int]]:
        """Readable scenes, as training or testing uses them, and their indices; -1 for one that replaces others."""
        wanted, problem = indices.tolist(), None
        found, kept = list[Scene](), list[int]()
        for number in range(len(wanted) + TRIED):
            if found and number >= len(wanted):
                break
            index = wanted[number] if number < len(wanted) else (wanted[-1] + 1 + number - len(wanted)) % len(self)
            try:
                scene = self.scenes.scene(index)
                if self.wanted == "classes" and scene.classes is None:
                    raise UserError(f"{scene.name} has no classes of its pixels; load_scenes with want='classes'")
                if self.wanted == "objects" and scene.objects is None:
                    raise UserError(f"{scene.name} has no objects; load_scenes with want='boxes' or 'masks'")
                found.append(scene if self.augment is None else self.augment(scene, epoch, index))
                kept.append(index if number < len(wanted) else REPLACES)
            except UserError as reason:
                self._left_out.add(index, str(reason))
                problem = problem or reason
        if not found:
            assert problem is not None
            raise problem
        return found, kept


class PixelSamples(SceneSamples[dict[str, Tensor]]):
    """Images with the class of each pixel.

    `read` gives {"image": float32 (B, 3, H, W), normalised, "classes": int64 (B, H, W), "index": int64 (B,)}. `data`
    has mean, std and the ignored class. A scene without classes is a `UserError`.

    Whole images of different sizes are padded below and on the right to the largest of the batch, with the ignored
    class. Networks that mix all tokens see the padding, so evaluate such sets one image at a time.
    """

    wanted = "classes"

    def __init__(self, data: SceneData, scenes: Scenes, augment: SceneAugment | None = None) -> None:
        super().__init__(scenes, augment)
        self.mean, self.std, self.ignore = data.mean, data.std, data.ignore
        if augment is not None and augment.crop is None and set(augment.scales) != {1.0}:
            raise UserError(
                f"scales {augment.scales} without a crop give images of several sizes; give a crop, or scale 1"
            )

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        found, kept = self.readable(indices, epoch)
        classes = [scene.classes.long() for scene in found if scene.classes is not None]
        images = [normalize(scene.image, self.mean, self.std) for scene in found]
        size = max(len(part) for part in classes), max(part.shape[1] for part in classes)
        return {
            "image": _stacked(images, size, 0.0),
            "classes": _stacked(classes, size, self.ignore),
            "index": torch.tensor(kept),
        }

    def shown(self, index: int) -> set[int]:
        """Classes in this image, or in the next readable one, without the ignored class."""
        classes = self.readable(torch.tensor([index]), 0)[0][0].classes
        assert classes is not None
        return set(classes.unique().tolist()) - {self.ignore}


class ObjectSamples(SceneSamples[dict[str, Any]]):
    """Images with their objects, as torchvision's detectors take them.

    `read` gives {"images": list of float32 (3, H, W) in 0..1, not normalised since the detectors do it, "targets": list
    of dicts of boxes (M, 4), labels (M,) counted from 0, masks bool (M, H, W) if known, iscrowd (M,), area (M,) and
    image_id (), "index": int64 (B,)}. Objects without area are left out, and with `augment` crowd regions: neither can
    be learned. A scene without objects is a `UserError`; a scene with zero objects is not.
    """

    wanted = "objects"

    def read(self, indices: Tensor, epoch: int) -> dict[str, Any]:
        images, targets = [], []
        found, kept = self.readable(indices, epoch)
        for index, scene in zip(kept, found):
            objects = scene.objects
            assert objects is not None
            # Boxes as annotated: a mask's own may be smaller or, of a thin object, missing.
            sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
            objects = objects.kept((sides > 0).all(1))
            images.append(scene.image.float().div_(255))
            targets.append(
                {
                    "boxes": objects.boxes,
                    "labels": objects.labels,
                    "iscrowd": objects.crowd,
                    "image_id": torch.tensor(index if scene.key is None else scene.key),
                    "area": objects.areas(),
                    **({} if objects.masks is None else {"masks": objects.masks}),
                }
            )
        return {"images": images, "targets": targets, "index": torch.tensor(kept)}


def _stacked(parts: Sequence[Tensor], size: tuple[int, int], fill: float) -> Tensor:
    """Parts in the top left corner of a batch of this height and width."""
    out = parts[0].new_full((len(parts), *parts[0].shape[:-2], *size), fill)
    for place, part in zip(out, parts):
        place[..., : part.shape[-2], : part.shape[-1]] = part
    return out
