"""The tokens of an image over two and four processes: losses, weights and outputs of one, and how little is sent."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tokenmix.errors import UserError
from tokenmix.layers import MIXERS, ExternalAttention, MultiHeadExternalAttention, create_mixer
from tokenmix.models import create_model
from tokenmix.models.isotropic import IsotropicNet
from tokenmix.models.segmentation import EANetSegmenter
from tokenmix.models.stems import PatchStem
from tokenmix.parallel import NOTED, TokenParallel, TokenShard, check_token_parallel, own_rows, split_convolution

CLASSES = 5


def mixer_net(mixer: str, **given: Any) -> nn.Module:
    return create_model(
        "mixer_nano", stem="patch", num_classes=CLASSES, img_size=24, mixer=mixer, depth=2, embed_dim=16, **given
    )


def with_class_token() -> nn.Module:
    stem = PatchStem(16, img_size=24, patch_size=4)
    mixers = (MultiHeadExternalAttention(16, num_heads=2, num_slots=8) for _ in range(2))
    return IsotropicNet(stem, mixers, 2, num_classes=CLASSES, mlp_ratio=2.0, class_token=True, global_pool="token")


def segmenter(**given: Any) -> nn.Module:
    return create_model("eanet_seg_nano", num_classes=CLASSES, drop_rate=0.0, **{"img_size": (68, 24), **given})


THIN: dict[str, Any] = {"layers": (1, 1, 2, 2), "channels": (8, 8, 8, 8)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "external": lambda: mixer_net("external"),
    "multihead-external": lambda: mixer_net("multihead-external"),
    "batch norm": lambda: mixer_net("external", norm="batch"),
    "class token": with_class_token,
    "self": lambda: mixer_net("self"),
    "less": lambda: mixer_net("less"),
    "gating": lambda: mixer_net("gating"),
    "a map": lambda: mixer_net("external-2d"),
    "EAMLP": lambda: create_model("eamlp_7", num_classes=CLASSES, img_size=(64, 24), embed_dim=16, depth=1),
    "EAMLP of two unfoldings": lambda: create_model(
        "eamlp_7_bn", num_classes=CLASSES, img_size=24, embed_dim=16, depth=1, num_splits=2
    ),
    "stem of convolutions": lambda: create_model(
        "mixer_nano", num_classes=CLASSES, img_size=24, mixer="external", depth=2, embed_dim=16
    ),
    "EANet": lambda: segmenter(upsampling="corners"),
    "EANet of self-attention": lambda: segmenter(mixer="self"),
    # Max pooling, bottlenecks, dilations up to 4.
    "EANet of bottlenecks": lambda: segmenter(
        backbone="resnet26", stem="large", output_stride=16, backbone_kwargs=THIN, img_size=(256, 24)
    ),
    "frozen EANet": lambda: segmenter().eval(),
}
HEIGHTS = {"EAMLP": 64, "EANet": 68, "frozen EANet": 68, "EANet of self-attention": 68, "EANet of bottlenecks": 256}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in float64, whole images, and labels of images or of pixels."""
    torch.manual_seed(0)
    model, gen = MODELS[name]().double(), torch.Generator().manual_seed(1)
    height = HEIGHTS.get(name, 24)
    shape = (4, height, 24) if "EANet" in name else (4,)
    images = torch.randn(4, 3, height, 24, generator=gen).double()
    return model, images, torch.randint(CLASSES, shape, generator=gen)


def loss_of(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy whose mean over the processes is that of one: of a segmenter each has pixels of its own."""
    own: Any = model.module if isinstance(model, DistributedDataParallel) else model
    logits = model(images)
    if not hasattr(own, "own_rows"):
        return F.cross_entropy(logits, labels)
    parts = own.all_rows(torch.ones(1, 1, 1, 1)).numel()
    return parts * F.cross_entropy(logits, own.own_rows(labels, 1), reduction="sum") / labels.numel()


def trained(model: nn.Module, images: Tensor, labels: Tensor, steps: int, average: bool = False) -> list[float]:
    """The losses of some steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, images, labels)
        loss.backward()
        for parameter in model.parameters() if average else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(model: nn.Module, expected: nn.Module, losses: list[float], right: list[float], what: str) -> None:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    assert (total / dist.get_world_size()).tolist() == pytest.approx(right, rel=1e-9), what
    assert right[-1] != pytest.approx(right[0], rel=1e-3), what
    for (key, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-8, atol=1e-10, msg=lambda m, key=key: f"{what}, {key}: {m}")


def check_models(mesh: DeviceMesh) -> None:
    """Twenty steps of every model, and its output in evaluation."""
    for name in MODELS:
        model, images, labels = problem(name)
        expected = copy.deepcopy(model)
        right = trained(expected, images, labels, 20)
        parallelize_module(model, mesh, TokenParallel())
        with pytest.raises(UserError, match="split already"):
            parallelize_module(model, mesh, TokenParallel())
        if isinstance(model, (IsotropicNet, EANetSegmenter)):
            with pytest.raises(UserError, match="before TokenParallel"):
                model.attention_maps(images)
        losses = trained(model, images, labels, 20, average=True)
        assert_same(model, expected, losses, right, name)
        with torch.no_grad():
            out, whole = model.eval()(images), expected.eval()(images)
            if labels.dim() > 1:
                torch.testing.assert_close(model.all_rows(out), whole)  # type: ignore[operator]
                whole = model.own_rows(whole, 2)  # type: ignore[operator]
        torch.testing.assert_close(out, whole)
    assert {"SelfAttention", "MixerBlock2d", "LessAttention", "GatedMLP", "GridMixer"} >= NOTED
    assert (dist.get_rank() == 0) == bool(NOTED)


def check_masks(mesh: DeviceMesh) -> None:
    """Every mixer of tokens with a mask: output and gradients, each process having other numbers of tokens."""
    rank, cuts = mesh.get_local_rank(), [0, 3, 4, 8, 12]
    cuts = cuts if mesh.size() == 4 else [0, 5, 12]
    own = slice(cuts[rank], cuts[rank + 1])
    gen = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 2, 12, 8, generator=gen).double()
    mask = torch.rand(2, 12, generator=gen) < 0.6
    mask[1] = False
    for name, spec in MIXERS.items():
        if spec.layer.capabilities.layout == "2d":
            continue
        torch.manual_seed(0)
        mixer = create_mixer(name, 8, num_tokens=12 if spec.layer.capabilities.length != "any" else None).double()
        expected = copy.deepcopy(mixer)
        parallelize_module(mixer, mesh, TokenParallel())
        whole, part = x.clone().requires_grad_(), x[:, own].clone().requires_grad_()
        right, out = expected(whole, mask), mixer(part, mask[:, own])
        torch.testing.assert_close(out, right[:, own], rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
        (right * weight).sum().backward()
        (out * weight[:, own]).sum().backward()
        assert part.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad[:, own], rtol=1e-8, atol=1e-10)


def check_traffic(mesh: DeviceMesh) -> None:
    """A layer of external attention sends three numbers for each sample, head and slot; gathering grows with N."""
    for mixer, numbers in (
        (ExternalAttention(16, num_slots=8), 8),
        (MultiHeadExternalAttention(16, num_heads=2, num_slots=8), 8 * 8),
    ):
        parallelize_module(mixer, mesh, TokenParallel())
        for num_tokens in (6, 12):
            with counted() as sent:
                mixer(torch.randn(3, num_tokens, 16, requires_grad=True)).sum().backward()
            assert sum(sent) == 12 * 3 * numbers, (type(mixer), num_tokens)
    gathered = create_mixer("self", 16)
    parallelize_module(gathered, mesh, TokenParallel())
    found = []
    for num_tokens in (6, 12):
        with counted() as sent:
            gathered(torch.randn(3, num_tokens, 16, requires_grad=True)).sum().backward()
        found.append(sum(sent) - 8)
    assert found[1] == 2 * found[0] > 12 * 3 * 8


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each tensor that is given to a collective."""
    sent: list[int] = []
    places = {"all_reduce": 0, "all_gather": 1, "all_to_all_single": 1}
    kept = {name: getattr(dist, name) for name in places}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[places[name]]
            sent.append(tensor.numel() * tensor.element_size())
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


def check_data_parallel(world: int) -> None:
    """Two parts of the batch, each image over half of the processes: DDP and FSDP2 give what one process does."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tokens"))
    part = slice(2 * mesh["data"].get_local_rank(), 2 * mesh["data"].get_local_rank() + 2)
    # In training, batch norm sees only the images of its part of the batch, so that of EANet is frozen.
    for name in ("external", "class token", "self", "frozen EANet"):
        for wrap in ("ddp", "fsdp"):
            model, images, labels = problem(name)
            expected = copy.deepcopy(model)
            right = trained(expected, images, labels, 5)
            parallelize_module(model, mesh["tokens"], TokenParallel())
            wrapped: Any = model
            if wrap == "ddp":
                wrapped = DistributedDataParallel(model, broadcast_buffers=False)
            else:
                everyone = init_device_mesh("cpu", (world,))
                for block in getattr(model, "blocks", ()):
                    fully_shard(block, mesh=everyone)
                fully_shard(model, mesh=everyone)
            losses = trained(wrapped, images[part], labels[part], 5)
            assert_same(model, expected, losses, right, f"{name}, {wrap}")


def worker(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    try:
        mesh = init_device_mesh("cpu", (world,))
        check_models(mesh)
        check_masks(mesh)
        check_traffic(mesh)
        check_data_parallel(world)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one(tmp_path: Path, world: int) -> None:
    mp.spawn(worker, (str(tmp_path / "store"), world), nprocs=world)


def test_rows_that_cannot_be_shared() -> None:
    assert [own_rows(20, 4, rank, 3) for rank in range(3)] == [slice(0, 4), slice(4, 12), slice(12, 20)]
    with pytest.raises(UserError, match=r"images of 10 rows cannot be split over 2 processes by multiples of 4 rows"):
        own_rows(10, 4, 0, 2)
    with pytest.raises(UserError, match="at least 16"):
        own_rows(12, 4, 0, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: create_model("fpn_seg_nano"), "FPNSegmenter has no token-parallel form"),
        (
            lambda: segmenter(backbone="seresnet18", stem="large", output_stride=8, img_size=64, backbone_kwargs={}),
            "has no token-parallel form; take a plain ResNet",
        ),
        (
            lambda: mixer_net("external", mixer_kwargs={"backend": "eager"}),
            "backend='eager' has no token-parallel form",
        ),
        (
            lambda: mixer_net("multihead-external", mixer_kwargs={"attention_dropout": 0.1}),
            "attention_dropout=0.1 has no token-parallel form",
        ),
        (lambda: create_model("vit_nano", img_size=8, patch_size=8), "1 tokens of an image cannot be split over 2"),
        (lambda: segmenter(img_size=(10, 24)), "images of 10 rows cannot be split over 2"),
    ],
)
def test_what_has_no_token_parallel_form(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_token_parallel(make(), 2)


def test_a_part_must_hold_the_rows_that_its_neighbours_need() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        conv = nn.Conv2d(3, 4, 5, padding=2)
        group: Any = dist.new_group()
        split_convolution(conv, TokenShard(group))
        assert conv(torch.randn(1, 3, 2, 8)).shape == (1, 4, 2, 8)
        with pytest.raises(UserError, match="has 1 rows of a map of which its neighbours need 2"):
            conv(torch.randn(1, 3, 1, 8))
    finally:
        dist.destroy_process_group()
    with pytest.raises(UserError, match=r"kernel \(4, 4\), padding \(1, 1\) \(zeros\) cannot be split by rows"):
        split_convolution(nn.Conv2d(3, 4, 4, padding=1), TokenShard.__new__(TokenShard))
