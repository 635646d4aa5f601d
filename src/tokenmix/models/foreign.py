"""Models from other libraries: torchvision's by name, and models that a user's function returns."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError, as_user_error, unknown_name
from tokenmix.models.registry import create_model, fetching
from tokenmix.registry import TORCHVISION, Arguments, import_object, imported_plugins, is_foreign
from tokenmix.trust import check_typed, is_typed

ELSEWHERE = "connect to the internet, or give --init-from FILE.safetensors"
IMAGENET = {"num_classes": 1000, "in_chans": 3}
"""Defaults without a data set."""
Kind = Literal["classifier", "segmenter", "detector"]
LOGITS = {"classifier": "(B, {})", "segmenter": "(B, {}, H, W)", "points": "(B, N, {})"}
"""Shape of logits by the kind of model, with the number of classes to fill in."""


def create_foreign(
    name: str, kind: Kind, *, num_classes: int, in_chans: int, img_size: tuple[int, int], **kwargs: object
) -> nn.Module:
    """A model of `load_foreign` whose call returns the logits, checked with two images.

    Modules and weights keep their names. An output `.logits`, a dict with "out" or "logits", and a tuple, whose first
    entry counts, are unwrapped. Coarse pixel logits are interpolated to the image size. Grey images are repeated for
    three channels.

    Shape: images (B, in_chans, H, W) to (B, num_classes); for a segmenter (B, num_classes, H, W).
    """
    sizes = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size}
    return as_ours(load_foreign(name, sizes, kind, **kwargs), name, kind, **sizes)


def as_ours(
    model: nn.Module, name: str, kind: Kind, *, num_classes: int, in_chans: int, img_size: tuple[int, int]
) -> nn.Module:
    """Wrap a model from another library as `create_foreign` does."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if in_chans == 1 and first is not None and first.in_channels == 3:
        model.register_forward_pre_hook(_repeat_grey)
    model.register_forward_hook(partial(_unwrap_logits, name=name, classes=num_classes, kind=kind))
    shape = (2, in_chans, *img_size)
    remedy = "give another --in-chans or size of images, or let its function take in_chans and img_size"
    with as_user_error(f"{name} does not run on images {shape}: ", f"; {remedy}"):
        _run_once(model, shape)
    return model


@torch.no_grad()
def _run_once(model: nn.Module, shape: Sequence[int], *more: Tensor) -> None:
    """Run the model in evaluation mode on zeros of this shape; its mode and the random state stay."""
    like, training = next(model.parameters(), torch.empty(0)), model.training
    try:
        with torch.random.fork_rng(devices=[]):
            model.eval()(like.new_zeros(shape), *(x.to(like.device) for x in more))
    finally:
        model.train(training)


def create_foreign_points(
    name: str, *, in_chans: int, num_points: int, outputs: Arguments, per_point: bool, **kwargs: object
) -> nn.Module:
    """A point-cloud model that a user's function returns, called as ours: (points, mask), or (points, category, mask).

    Modules and weights keep their names. Its forward gets `category` and `mask` if it has arguments of these names.
    Without `mask`, a cloud's points are repeated up to the batch's length. Of a tuple the first entry counts.

    `name` is "module:factory", whose function gets those of the other arguments that it accepts. `per_point` requires
    an output for each point: then `outputs` has, besides `num_classes`, `num_parts`, the same, and `num_categories`.

    Shape: points (B, N, in_chans), category (B,), mask (B, N) bool to (B, num_classes), or (B, N, num_parts).
    """
    if name.startswith(TORCHVISION):
        raise UserError(f"{name} is a model of images; a function of yours for point clouds is module:NAME")
    model = load_foreign(name, {"in_chans": in_chans, "num_points": num_points, **outputs}, **kwargs)
    calls = partial(_points_as_taken, takes=_arguments(model.forward), per_point=per_point)
    model.register_forward_pre_hook(calls, with_kwargs=True)
    kind = "points" if per_point else "classifier"
    model.register_forward_hook(partial(_unwrap_logits, name=name, classes=outputs["num_classes"], kind=kind))
    shape, category = (2, num_points, in_chans), [torch.zeros(2, dtype=torch.long)] * per_point
    remedy = "take points (B, N, C), as torch.nn.MultiheadAttention with batch_first does"
    with as_user_error(f"{name} does not run on points {shape}: ", f"; {remedy}"):
        _run_once(model, shape, *category)
    return model


def _points_as_taken(
    model: nn.Module, args: tuple[Tensor | None, ...], kwargs: Arguments, *, takes: set[str], per_point: bool
) -> tuple[tuple[Tensor | None], Arguments]:
    points, *rest = args
    mask = rest.pop() if len(rest) > per_point else None
    given = {**kwargs, **(dict(zip(("category",), rest)) if "category" in takes else {})}
    if "mask" in takes:
        given["mask"] = mask
    elif points is not None and mask is not None:
        # The true points come first.
        place = torch.arange(mask.shape[1], device=mask.device) % mask.sum(1, keepdim=True).clamp_min(1)
        points = points.gather(1, place[..., None].expand_as(points))
    return (points,), given


def load_foreign(name: str, sizes: Arguments, kind: Kind | None = None, /, **kwargs: object) -> nn.Module:
    """Build a model of torchvision or of a user's factory, without changes.

    `name` is "torchvision:NAME", of this `kind` if given; or "module:factory", which builds an `nn.Module`.
    `sizes` are `num_classes`, `in_chans` and `img_size`, passed on if the model accepts them. torchvision also takes
    `pretrained=True`, or `weights=NAME`.

    Raises:
        UserError: the model or an argument is unknown; weights cannot be loaded or do not fit; or a file names a
            factory whose module the user neither typed nor imported with `--import`.
    """
    if name.startswith(TORCHVISION):
        return _torchvision(name.removeprefix(TORCHVISION), sizes, kind, kwargs)
    factory = _trusted(name)
    sizes = {**sizes, **({"img_size": _side(sizes["img_size"])} if "img_size" in sizes else {})}
    given = {**{key: value for key, value in sizes.items() if key in _arguments(factory)}, **kwargs}
    shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
    with as_user_error(f"{name}({shown}) fails with ", "; correct it, or give --model-kwargs"):
        model = factory(**given)
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} returned a {type(model).__name__}; return an nn.Module")
    return model


def open_model(name: str, img_size: int | None = None) -> nn.Module:
    """Open a model by name, of ours, timm's or torchvision's, or from a user's "module:factory".

    `UserError` as in `create_model` and `load_foreign`; `TypeError` for an image size that a network does not accept.
    """
    vision = name.startswith(TORCHVISION)
    size = {} if img_size is None else {"image_size" if vision else "img_size": img_size}
    if not is_foreign(name):
        return create_model(name, **size)
    if vision:
        return load_foreign(name, {}, **size)
    return load_foreign(name, IMAGENET if img_size is None else {**IMAGENET, "img_size": (img_size, img_size)})


def _trusted(name: str) -> Callable[..., object]:
    """The factory typed by the user, or named by a file if `--import` named its package.

    The file also gives the arguments of the call, so a known module alone is not enough.
    """
    module, package = name.partition(":")[0], name.partition(":")[0].partition(".")[0]
    if is_typed(name):
        return import_object(name)
    imported = {PurePath(place).stem if place.endswith(".py") else place for place in imported_plugins()}
    remedy = f"tokenmix --import {module} VERB ..., in Python tokenmix.registry.load_plugin({module!r})"
    if module not in imported:
        check_typed(name, "code", "run", remedy)
    factory = import_object(name)
    if getattr(factory, "__module__", "").partition(".")[0] != package:
        raise UserError(
            f"a file names {name}, which {module} only imports from elsewhere; it is not run for its sake: name it "
            "where it is defined"
        )
    return factory


def _arguments(factory: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except ValueError:  # for some builtins
        return set()


def _side(size: tuple[int, ...]) -> int | tuple[int, ...]:
    """The side of a square as one number; other sizes unchanged."""
    return size[0] if len(set(size)) == 1 else size


def _torchvision(name: str, sizes: Arguments, kind: Kind | None, given: Arguments) -> nn.Module:
    from torchvision import models

    kwargs = {key: value for key, value in given.items() if key not in ("pretrained", "weights")}
    weights = given.get("weights") or ("DEFAULT" if given.get("pretrained") else None)
    rooms = {None: None, "classifier": models, "segmenter": models.segmentation, "detector": models.detection}
    known = models.list_models(module=rooms[kind])  # type: ignore[arg-type]
    if name not in known:
        raise unknown_name(f"{kind or 'model'} of torchvision", name, known)
    build = partial(models.get_model, name, weights=None)
    if "weights_backbone" in _arguments(models.get_model_builder(name)):
        build = partial(build, weights_backbone=None)
    if kind is not None:
        build = partial(build, num_classes=sizes["num_classes"])
    side = _side(sizes.get("img_size", ()) or (1, 2))
    too_small = f"torchvision:{name} cannot be built for images of side {side} ("
    refused = as_user_error(too_small, "); give another --img-size", AssertionError, ValueError)
    with fetching(f"torchvision:{name}", ELSEWHERE), refused:  # weights are fetched for a backbone
        try:
            model = build(**{"image_size": side, **kwargs} if isinstance(side, int) else kwargs)
        except TypeError as error:
            if "image_size" not in str(error) or "image_size" in kwargs:
                raise
            model = build(**kwargs)
    if weights is None:
        return model
    rows = models.get_model_weights(name)
    if weights not in rows.__members__:
        raise unknown_name(f"weights of {name}", weights, rows.__members__)
    with fetching(f"torchvision:{name}", ELSEWHERE):
        fetched = rows[weights].get_state_dict(progress=False, check_hash=True, weights_only=True)
    other = f"the weights {weights} do not fit torchvision:{name}: "
    with as_user_error(other, "; leave --model-kwargs out", RuntimeError):
        fitting, _ = with_fresh_head(fetched, model, sizes.get("num_classes"), several=kind == "detector")
        missing = model.load_state_dict(fitting, strict=False).missing_keys
    if missing:
        raise UserError(f"the weights {weights} of torchvision:{name} have no {missing[0]}; leave --model-kwargs out")
    return model


def with_fresh_head(
    weights: Mapping[str, Tensor], model: nn.Module, num_classes: int | None, *, several: bool = False
) -> tuple[dict[str, Tensor], int | None]:
    """The weights with the model's own head, if the models differ only in the number of classes.

    `num_classes` are those of the model's head; with `several`, it may have several rows per class, as a detector's
    head for boxes and anchors. Returns also the number of classes of the dropped head; None if it is kept.
    """
    own = model.state_dict()
    other = {key: value for key, value in own.items() if key in weights and weights[key].shape != value.shape}
    theirs = set[int]()
    for key, value in other.items():
        ours, given = value.shape, weights[key].shape
        rows = max(1, ours[:1].numel() // num_classes) if several and num_classes else 1
        if not (ours and given) or ours[1:] != given[1:] or ours[0] != rows * (num_classes or 0) or given[0] % rows:
            return dict(weights), None
        theirs.add(given[0] // rows)
    return ({**weights, **other}, theirs.pop()) if len(theirs) == 1 else (dict(weights), None)


def _repeat_grey(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].expand(-1, 3, -1, -1), *args[1:])


def _unwrap_logits(
    model: nn.Module, args: tuple[Tensor, ...], out: object, *, name: str, classes: int, kind: str
) -> Tensor:
    if isinstance(out, Mapping):
        out = out.get("out", out.get("logits"))
    out = getattr(out, "logits", out)
    if isinstance(out, tuple) and out:
        out = out[0]
    wanted = LOGITS[kind]
    if not isinstance(out, Tensor):
        told = f"return logits {wanted.format(classes)}, or an output that has them"
        raise UserError(f"{name} returns a {type(out).__name__}; {told}")
    if out.dim() != 1 + wanted.count(",") or out.shape[2 if kind == "points" else 1] != classes:
        told = f"not logits {wanted.format(classes)}; let its function take num_classes"
        raise UserError(f"{name} returns {tuple(out.shape)} and {told}")
    if kind == "segmenter" and out.shape[2:] != args[0].shape[2:]:
        return F.interpolate(out, size=args[0].shape[2:], mode="bilinear", align_corners=False)
    return out
