"""Token parallelism: the tokens of an image split over processes, applied to a model from outside.

Layers, models and segmenters contain no code for it. Hooks split and join tensors between modules, and modules that
need all tokens get another `forward`. Parameters, their names and call signatures do not change.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models import FeatureListNet
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer
from tokenmix.layers.external import ExternalAttention, ExternalAttention2d, Memory, MultiHeadExternalAttention
from tokenmix.layers.local import IdentityMixer
from tokenmix.models.isotropic import IsotropicNet, TokenBatchNorm
from tokenmix.models.segmentation import EANetSegmenter
from tokenmix.ops.external import sharded_external_attention
from tokenmix.ops.less import Scores

__all__ = ["TokenParallel"]

logger = logging.getLogger(__name__)
EXTERNAL = (ExternalAttention, ExternalAttention2d, MultiHeadExternalAttention)
SPLITTABLE = {
    nn.Conv2d,
    nn.BatchNorm2d,
    nn.MaxPool2d,
    nn.ReLU,
    nn.Dropout2d,
    nn.Identity,
    nn.Sequential,
    DropPath,
    FeatureListNet,
    BasicBlock,
    Bottleneck,
}
"""Module types that can be split by rows; subclasses and other modules may mix rows."""

NOTED: set[str] = set()
"""Mixers whose gathering cost was reported."""


class TokenParallel(ParallelStyle):
    """Split the tokens of each image over the processes of a one-dimensional mesh.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tokens"))
        parallelize_module(model, mesh["tokens"], TokenParallel())

    A *model* takes whole images, the same in every process of the mesh. A classifier's blocks see the process's own
    tokens, and its logits are equal in every process. A segmenter returns the logits of the process's own rows:
    `model.own_rows(labels, 1)` gives the matching labels, and `model.all_rows(logits)` all logits.

    A *mixer* takes and returns its own tokens, with their mask. External attention exchanges 12 B H S bytes per layer
    in float32. Any other mixer gathers the tokens, and reports the cost once.

    Parameters stay whole and keep their names. Average their gradients over **all** processes, including those of the
    mesh, with `DistributedDataParallel` or `fully_shard`. The result is the gradient of the mean of the losses.

    Raises:
        UserError: the model cannot be split, or an option of a mixer has no token-parallel form.
    """

    def __init__(self) -> None:
        self.shards: dict[DeviceMesh, TokenShard] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_token_parallel(module, device_mesh.size())
        if getattr(module, "splits_tokens", False):
            raise UserError(f"the tokens of this {type(module).__name__} are split already; apply TokenParallel once")
        if device_mesh not in self.shards:
            group: Any = device_mesh.get_group()
            if group is dist.group.WORLD:
                # A separate group, because gradients are averaged while layers run backward.
                group = dist.new_group()
            self.shards[device_mesh] = TokenShard(group)
        shard = self.shards[device_mesh]
        if isinstance(module, Mixer):
            _split_mixer(module, shard)
        elif isinstance(module, IsotropicNet):
            module.blocks[0].register_forward_pre_hook(
                lambda _, args: (args[0].tensor_split(shard.size, 1)[shard.rank], *args[1:])
            )
            for block in module.blocks:
                for part in block.children():
                    if isinstance(part, Mixer):
                        _split_mixer(part, shard)
                    elif isinstance(part, TokenBatchNorm):
                        part.forward = partial(_batch_norm, part, shard)
            module.norm.register_forward_hook(lambda _, __, out: shard.gather(out, 1)[0])
            vars(module).update(forward_intermediates=_whole_tokens_only, attention_maps=_whole_tokens_only)
        elif isinstance(module, EANetSegmenter):
            _split_segmenter(module, shard)
        vars(module)["splits_tokens"] = True
        return module


def check_token_parallel(model: nn.Module, size: int) -> None:
    """Raise `UserError` unless the tokens of images of the model's size can be split over `size` processes."""
    if isinstance(model, Mixer):
        mixers = [model]
    elif isinstance(model, IsotropicNet):
        if model.num_tokens < size:
            raise UserError(
                f"{model.num_tokens} tokens of an image cannot be split over {size} processes; give larger images, or "
                "a smaller token_parallel"
            )
        mixers = [part for block in model.blocks for part in block.children() if isinstance(part, Mixer)]
    elif isinstance(model, EANetSegmenter):
        own_rows(model.img_size[0], model.feature_info[-1]["reduction"], 0, size)
        unknown = next((part for part in _around_context(model) if type(part) not in SPLITTABLE), None)
        if unknown is not None:
            raise UserError(
                f"{type(unknown).__name__} in this network has no token-parallel form; take a plain ResNet, such as "
                "resnet18 or resnet50s, as the backbone"
            )
        mixers = [model.context] if isinstance(model.context, Mixer) else []
    else:
        raise UserError(
            f"{type(model).__name__} has no token-parallel form; take an image classifier of patches (mixer_nano, "
            "vit_nano, gmlp_*, eamlp_*), or for segmentation an eanet_seg_* model"
        )
    for mixer in mixers:
        if not isinstance(mixer, EXTERNAL):
            continue
        options, dropout = mixer.memory.options, mixer.memory.dropout
        if options["backend"] is not None:
            raise UserError(f"backend={options['backend']!r} has no token-parallel form; leave backend out")
        if options["normalization"] not in ("double", "softmax"):
            raise UserError(f"normalization={options['normalization']!r} has no token-parallel form; give 'double'")
        if dropout:
            raise UserError(f"attention_dropout={dropout:g} has no token-parallel form; give 0")


def _whole_tokens_only(*args: object, **kwargs: object) -> NoReturn:
    raise UserError("between its blocks this model holds the tokens of one process; call it before TokenParallel")


def own_rows(total: int, unit: int, rank: int, size: int) -> slice:
    """Rows of process `rank` out of `size`, in multiples of `unit`; parts differ by at most one unit."""
    if total % unit or total < unit * size:
        raise UserError(
            f"images of {total} rows cannot be split over {size} processes by multiples of {unit} rows; "
            f"give images of a multiple of {unit} rows and at least {unit * size}, or a smaller token_parallel"
        )
    units = total // unit
    return slice(unit * (units * rank // size), unit * (units * (rank + 1) // size))


def _split_mixer(mixer: Mixer, shard: "TokenShard") -> None:
    """Let a mixer take and return this process's tokens, in order; the result is that of all tokens."""
    if isinstance(mixer, EXTERNAL):
        mixer.memory.forward = partial(_sharded_memory, mixer.memory, shard)
        if isinstance(mixer, ExternalAttention2d):
            mixer.norm.forward = partial(_batch_norm, mixer.norm, shard)
    elif not isinstance(mixer, IdentityMixer):
        mixer.mix = partial(_gathered, mixer, shard)
        mixer.forward = partial(lambda mixer, x, mask=None: mixer.mix(x, None, mask)[0], mixer)


def _sharded_memory(memory: Memory, shard: "TokenShard", query: Tensor, mask: Tensor | None = None) -> Tensor:
    if memory.options["normalization"] != "double":
        return type(memory).forward(memory, query, mask)
    return sharded_external_attention(
        query,
        memory.key_memory,
        memory.key_memory if memory.value_memory is None else memory.value_memory,
        key_bias=memory.key_bias,
        value_bias=memory.value_bias,
        mask=mask,
        num_steps=memory.options["num_steps"],
        chunk_size=memory.options["chunk_size"],
        group=shard.group,
    )


def _gathered(
    mixer: Mixer,
    shard: "TokenShard",
    x: Tensor,
    carry: Scores | None = None,
    mask: Tensor | None = None,
    **more: Tensor,
) -> tuple[Tensor, Scores | None]:
    """`Mixer.mix` on the tokens of all processes; returns this process's output and all scores."""
    kind, dim = type(mixer), 1 if x.dim() == 3 else 2
    whole, own = shard.gather(x, dim)
    if kind.__name__ not in NOTED and shard.rank == 0:
        NOTED.add(kind.__name__)
        logger.warning(
            "tokenmix: %s mixes all tokens of an image in every process: each layer receives %s bytes of tokens "
            "forward and as many of gradients backward, growing with N, and its time and memory are not split; "
            "external attention exchanges 12 B H S bytes, whatever N",
            kind.__name__,
            f"{(whole.numel() - x.numel()) * x.element_size():,}",
        )
    mask = None if mask is None else shard.gather(mask.byte(), 1)[0].bool()
    if kind.mix is Mixer.mix:
        out = kind.forward(mixer, whole, mask, **more)
    else:
        out, carry = kind.mix(mixer, whole, carry, mask, **more)
    return out.narrow(dim, own.start, own.stop - own.start), carry


def _batch_norm(norm: nn.BatchNorm1d | nn.BatchNorm2d, shard: "TokenShard", x: Tensor) -> Tensor:
    """BatchNorm of maps (B, C, H_r, W) or tokens (B, N_r, C) over all processes; torch's SyncBatchNorm needs a GPU."""
    if not norm.training:
        forward: Callable[..., Tensor] = type(norm).forward
        return forward(norm, x)
    across = -1 if isinstance(norm, TokenBatchNorm) else 1
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(across, -1)
    own_var, own_mean = torch.var_mean(wide, list(range(x.dim() - 1)), correction=0)
    count = torch.full_like(own_mean, x.numel() // len(own_mean))
    total, scaled = shard.sum(torch.stack([count, count * own_mean]))
    mean = scaled / total
    var = shard.sum(count * (own_var + (own_mean - mean).square())) / total
    if norm.track_running_stats:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_((var * total / (total - 1)).to(norm.running_var.dtype), share)
    scale = torch.rsqrt(var + norm.eps) * (1 if norm.weight is None else norm.weight)
    shift = (0 if norm.bias is None else norm.bias) - mean * scale
    return torch.addcmul(shift, wide, scale).to(x.dtype).movedim(-1, across)


def _split_segmenter(model: EANetSegmenter, shard: "TokenShard") -> None:
    """Split images before the backbone, join logits on the coarse grid, upsample this process's own pixels."""
    unit = model.feature_info[-1]["reduction"]

    def own(x: Tensor, dim: int) -> Tensor:
        rows = own_rows(x.shape[dim], unit, shard.rank, shard.size)
        return x.narrow(dim, rows.start, rows.stop - rows.start)

    def forward(model: EANetSegmenter, images: Tensor) -> Tensor:
        coarse, corners = model.decode(model.forward_features(images)), model.upsampling == "corners"
        total, height = coarse.shape[2], images.shape[2]
        y = own(torch.arange(height, device=coarse.device, dtype=torch.float64), 0)
        y = y * ((total - 1) / max(1, height - 1)) if corners else ((y + 0.5) * (total / height) - 0.5).clamp_min(0)
        upper = y.floor().long().clamp_max(total - 1)
        above, below = (coarse.index_select(2, i) for i in (upper, (upper + 1).clamp_max(total - 1)))
        rows = torch.lerp(above, below, (y - upper).to(coarse.dtype).unsqueeze(1))
        return F.interpolate(rows, size=(len(y), images.shape[3]), mode="bilinear", align_corners=corners)

    model.backbone.register_forward_pre_hook(lambda _, args: own(args[0], 2))
    model.classifier.register_forward_hook(lambda _, __, out: shard.gather(out, 2)[0])
    model.forward = partial(forward, model)
    vars(model).update(own_rows=own, all_rows=lambda x: shard.gather(x, 2)[0], attention_maps=_whole_tokens_only)
    if isinstance(model.context, Mixer):
        _split_mixer(model.context, shard)
    for part in _around_context(model):
        if isinstance(part, nn.Conv2d):
            split_convolution(part, shard)
        elif isinstance(part, nn.BatchNorm2d):
            part.forward = partial(_batch_norm, part, shard)
        elif isinstance(part, nn.MaxPool2d):
            kernel, stride, padding, dilation = _vertical(part)
            part.padding = (0, part.padding if isinstance(part.padding, int) else part.padding[1])
            below = max(0, (kernel - 1) * dilation - padding - stride + 1)
            part.register_forward_pre_hook(partial(_with_edges, shard, padding, below))


def _around_context(model: EANetSegmenter) -> list[nn.Module]:
    """All modules except the network itself and its attention block."""
    inside = {model, *model.context.modules()}
    return [part for part in model.modules() if part not in inside]


def _vertical(layer: nn.Conv2d | nn.MaxPool2d) -> tuple[int, int, int, int]:
    """Kernel, stride, padding and dilation along the rows."""
    sizes = (getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation"))
    kernel, stride, padding, dilation = (size if isinstance(size, int) else size[0] for size in sizes)
    return kernel, stride, padding, dilation


def split_convolution(conv: nn.Conv2d, shard: "TokenShard") -> None:
    """Let a convolution on this process's rows read the neighbours' rows within its kernel."""
    kernel, _, padding, dilation = _vertical(conv)
    reach = (kernel - 1) * dilation
    if conv.padding_mode != "zeros" or reach != 2 * padding:
        raise UserError(
            f"a convolution of kernel {conv.kernel_size}, padding {conv.padding} ({conv.padding_mode}) cannot be split "
            "by rows; take one with an odd kernel that is padded by zeros on both sides"
        )
    if reach:
        conv.register_forward_hook(partial(_add_edges, shard))


def _add_edges(shard: "TokenShard", conv: nn.Conv2d, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Add the neighbours' part of a convolution of zero-padded rows, by linearity, without copies of the map."""
    (x,), (kernel, stride, padding, dilation) = args, _vertical(conv)
    reach, height = (kernel - 1) * dilation, x.shape[2]
    below = max(0, reach - padding - stride + 1)
    upper, lower = shard.edges(x, padding, below)

    def part(rows: Tensor, before: int, after: int) -> Tensor:
        rows = F.pad(rows, (0, 0, before, after))
        return F.conv2d(rows, conv.weight, None, conv.stride, (0, conv.padding[1]), conv.dilation, conv.groups)  # type: ignore[arg-type]

    reaching = -(-padding // stride)  # output rows that reach above
    length = (reaching - 1) * stride + reach + 1
    out[:, :, :reaching] += part(upper, 0, length - upper.shape[2])
    if below:
        first = max(0, -(-(height + padding - reach) // stride))  # the first output row that reaches below
        length = height + below - (first * stride - padding)
        out[:, :, first:] += part(lower, length - below, below - lower.shape[2])
    return out


def _with_edges(shard: "TokenShard", above: int, below: int, _: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """A map (B, C, above + H_r + below, W) with the neighbours' rows, and -inf beyond the image."""
    upper, lower = shard.edges(args[0], above, below)
    upper = F.pad(upper, (0, 0, above - upper.shape[2], 0), value=-torch.inf)
    lower = F.pad(lower, (0, 0, 0, below - lower.shape[2]), value=-torch.inf)
    return torch.cat([upper, args[0], lower], 2)


class TokenShard:
    """One process's part of an image whose rows, and so its tokens, are split over a group in order.

    All processes of the group must call `sum`, `gather` and `edges` together. Gradients are those of the sum of the
    processes' losses. DistributedDataParallel and FSDP2 average parameter gradients over all processes, which gives the
    gradient of the mean of the losses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return self: a copied module exchanges with the same processes."""
        return self

    def sum(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Sum.apply(x, self.group))

    def gather(self, x: Tensor, dim: int) -> tuple[Tensor, slice]:
        """Concatenate the parts of all processes, of any lengths, along `dim`; also return this process's slice."""
        lengths = [torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.full_like(lengths[0], x.shape[dim]), group=self.group)
        counts = [int(length) for length in lengths]
        first = x.movedim(dim, 0)
        sent = first.expand(self.size, *first.shape).flatten(0, 1)
        whole = _Exchange.apply(sent, [len(first)] * self.size, counts, self.group).movedim(0, dim)
        start = sum(counts[: self.rank])
        return whole, slice(start, start + counts[self.rank])

    def edges(self, x: Tensor, above: int, below: int) -> tuple[Tensor, Tensor]:
        """The rows before and after a map x (B, C, H_r, W). Use both results, or the backward pass hangs."""
        height, here, last = x.shape[2], self.rank, self.size - 1
        if height < max(above, below):
            raise UserError(
                f"a process has {height} rows of a map of which its neighbours need {max(above, below)}; "
                "give larger images, or a smaller token_parallel"
            )
        sent, received = [0] * self.size, [0] * self.size
        if here > 0:
            sent[here - 1], received[here - 1] = below, above
        if here < last:
            sent[here + 1], received[here + 1] = above, below
        first = x.movedim(2, 0)
        parts = torch.cat([first[: below if here > 0 else 0], first[height - (above if here < last else 0) :]])
        found = _Exchange.apply(parts, sent, received, self.group).movedim(0, 2)
        upper, lower = found.tensor_split((above if here > 0 else 0,), dim=2)
        return upper, lower


class _Context(Protocol):
    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return _Sum.forward(ctx, grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    """Send `sent[r]` rows of x to process r in order, and receive `received[r]` rows from it, with a gradient."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return _Exchange.forward(ctx, grad, ctx.received, ctx.sent, ctx.group), None, None, None
