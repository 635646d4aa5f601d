"""Layers of an image whose rows are split over processes: mixers, convolutions, pooling and batch norms.

Parameters, their names and a layer's calls stay as they are. Layers that process each token by itself need nothing.
"""

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer
from tokenmix.layers.external import ExternalAttention, ExternalAttention2d
from tokenmix.layers.memory import Memory
from tokenmix.layers.multihead_external import MultiHeadExternalAttention
from tokenmix.ops.less import Scores
from tokenmix.ops.token_shard import TokenShard

EXTERNAL = (ExternalAttention, ExternalAttention2d, MultiHeadExternalAttention)
logger = logging.getLogger(__name__)


def splittable(model: nn.Module) -> Any:
    """The model, or `UserError` if it has no token-parallel form."""
    if not hasattr(model, "split_tokens"):
        raise UserError(
            f"{type(model).__name__} has no token-parallel form; take an image classifier of patches (mixer_nano, "
            "vit_nano, gmlp_*, eamlp_*), or for segmentation an eanet_seg_* model"
        )
    return model


def split_mixer(mixer: Mixer, shard: TokenShard) -> None:
    """Let a mixer take and return this process's tokens, in order, with the result of all of them.

    External attention exchanges the offsets of its slots, 12 B H S bytes a layer in float32. Any other mixer gathers
    the tokens of the image and computes its result whole in every process, so neither its memory nor its time is split.

    Raises:
        UserError: an option of external attention that has no token-parallel form.
    """
    if not isinstance(mixer, EXTERNAL):
        kept = type(mixer).mix is Mixer.mix
        mixer.__class__ = _subclass(GatheredMixer if kept else GatheredStackMixer, type(mixer))
        mixer.token_shard = shard  # type: ignore[assignment]
        return
    check_mixer(mixer)
    for module in mixer.modules():
        if isinstance(module, Memory):
            module.token_shard = shard
        elif isinstance(module, nn.BatchNorm2d):
            split_batch_norm(module, shard)


def check_mixer(mixer: Mixer) -> None:
    """Raise `UserError` for external attention with an option that has no token-parallel form."""
    memory = next((part for part in mixer.modules() if isinstance(part, Memory)), None)
    if memory is None or not isinstance(mixer, EXTERNAL):
        return
    if memory.backend is not None:
        raise UserError(f"backend={memory.backend!r} has no token-parallel form; leave backend out")
    if memory.normalization not in ("double", "softmax"):
        raise UserError(f"normalization={memory.normalization!r} has no token-parallel form; give 'double'")
    if dropout := getattr(mixer, "attention_dropout", 0.0):
        raise UserError(f"attention_dropout={dropout:g} has no token-parallel form; give 0")


def _subclass(kind: type[Mixer], own: type[Mixer]) -> type[Mixer]:
    return type(f"{kind.__name__}[{own.__name__}]", (kind, own), {})


class GatheredMixer(Mixer):
    """A mixer of this process's tokens that computes on those of all processes: a base put before the mixer's class."""

    token_shard: TokenShard

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        """This process's tokens or rows of a map, after mixing all."""
        x, mask, own = _whole(self, x, mask)
        return super().forward(x, mask, **more)[own]


class GatheredStackMixer(Mixer):
    """The same for a mixer that passes scores on, which are those of all tokens."""

    token_shard: TokenShard

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mix` without scores."""
        return self.mix(x, None, mask)[0]

    def mix(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Scores | None]:
        """This process's tokens after mixing all, and the scores of all."""
        x, mask, own = _whole(self, x, mask)
        out, carry = super().mix(x, carry, mask, **more)
        return out[own], carry


def _whole(mixer: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[slice, ...]]:
    """All tokens with their mask, and where this process's are in them."""
    shard, dim = mixer.token_shard, 1 if x.dim() == 3 else 2
    whole, own = shard.gather(x, dim)
    _note_cost(type(mixer).__mro__[2].__name__, (whole.numel() - x.numel()) * x.element_size())
    if mask is not None:
        mask = shard.gather(mask.byte(), 1)[0].bool()
    return whole, mask, (*[slice(None)] * dim, own)


NOTED: set[str] = set()


def _note_cost(name: str, received: int) -> None:
    """Report once what gathering costs."""
    if name not in NOTED and dist.get_rank() == 0:
        NOTED.add(name)
        logger.warning(
            "tokenmix: %s mixes all tokens of an image in every process: each layer receives %s bytes of tokens "
            "forward and as many of gradients backward, growing with N, and its time and memory are not split; "
            "external attention exchanges 12 B H S bytes, whatever N",
            name,
            f"{received:,}",
        )


def split_convolution(conv: nn.Conv2d, shard: TokenShard) -> None:
    """Let a convolution of this process's rows read its neighbours' where its kernel reaches over the edge.

    Raises:
        UserError: padding that is not zeros, or not half of the kernel.
    """
    kernel, _, padding, dilation = _vertical(conv)
    reach = (kernel - 1) * dilation
    if conv.padding_mode != "zeros" or reach != 2 * padding:
        raise UserError(
            f"a convolution of kernel {conv.kernel_size}, padding {conv.padding} ({conv.padding_mode}) cannot be split "
            "by rows; take one with an odd kernel that is padded by zeros on both sides"
        )
    if reach:
        conv.register_forward_hook(partial(_add_edges, shard))


def _vertical(layer: Any) -> tuple[int, int, int, int]:
    """Kernel, stride, padding and dilation along the rows."""
    sizes = (getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation"))
    kernel, stride, padding, dilation = (size if isinstance(size, int) else size[0] for size in sizes)
    return kernel, stride, padding, dilation


def _add_edges(shard: TokenShard, conv: nn.Conv2d, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Add to a convolution of zero-padded rows the part of the neighbours' rows, which it is linear in.

    So nothing of the size of the map is copied or kept for the backward pass.
    """
    (x,), (kernel, stride, padding, dilation) = args, _vertical(conv)
    reach, height = (kernel - 1) * dilation, x.shape[2]
    below = max(0, reach - padding - stride + 1)
    upper, lower = shard.edges(x, padding, below)

    def part(rows: Tensor, before: int, after: int) -> Tensor:
        rows = F.pad(rows, (0, 0, before, after))
        return F.conv2d(rows, conv.weight, None, conv.stride, (0, conv.padding[1]), conv.dilation, conv.groups)  # type: ignore[arg-type]

    reaching = -(-padding // stride)  # Output rows that reach above.
    length = (reaching - 1) * stride + reach + 1
    out[:, :, :reaching] += part(upper, 0, length - upper.shape[2])
    if below:
        first = max(0, -(-(height + padding - reach) // stride))  # The first output row that reaches below.
        length = height + below - (first * stride - padding)
        out[:, :, first:] += part(lower, length - below, below - lower.shape[2])
    return out


def split_pooling(pool: nn.MaxPool2d, shard: TokenShard) -> None:
    """Let a maximum over this process's rows read its neighbours' as well."""
    kernel, stride, padding, dilation = _vertical(pool)
    below = max(0, (kernel - 1) * dilation - padding - stride + 1)
    across = pool.padding if isinstance(pool.padding, int) else pool.padding[1]
    pool.padding = (0, across)
    pool.register_forward_pre_hook(lambda _, args: shard.with_edges(args[0], padding, below, -torch.inf))


class SplitBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm over the rows of all processes of a shard; torch's SyncBatchNorm refuses a CPU."""

    token_shard: TokenShard

    def forward(self, input: Tensor) -> Tensor:
        """Normalise maps (B, C, H_r, W)."""
        return super().forward(input) if not self.training else sharded_batch_norm(self, input, self.token_shard)


def split_batch_norm(norm: nn.BatchNorm2d, shard: TokenShard) -> None:
    """Let a batch norm take its statistics over the rows of all processes."""
    norm.__class__ = SplitBatchNorm2d
    norm.token_shard = shard  # type: ignore[assignment]


def sharded_batch_norm(norm: Any, x: Tensor, shard: TokenShard) -> Tensor:
    """`norm` of x (B, C, ...) in training, with mean and variance over the shards of all processes."""
    dims, wide = [0, *range(2, x.dim())], x.to(torch.promote_types(x.dtype, torch.float32))
    own_var, own_mean = torch.var_mean(wide, dims, correction=0)
    count = torch.full_like(own_mean, x.numel() // x.shape[1])
    total, scaled = shard.sum(torch.stack([count, count * own_mean]))
    mean = scaled / total
    var = shard.sum(count * (own_var + (own_mean - mean).square())) / total
    if norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_((var * total / (total - 1)).to(norm.running_var.dtype), share)
    scale = torch.rsqrt(var + norm.eps) * (1 if norm.weight is None else norm.weight)
    shift = (0 if norm.bias is None else norm.bias) - mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return torch.addcmul(shift.view(shape), wide, scale.view(shape)).to(x.dtype)
