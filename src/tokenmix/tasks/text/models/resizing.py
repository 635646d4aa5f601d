"""What is learned over the places of a sequence, for another longest sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.layers.base import replace_parameter
from tokenmix.layers.gated_mlp import GatedMLP
from tokenmix.tasks.text.models.relative import PlaceRule

__all__ = ["extend_gate", "resize_gated_mlp", "resize_positions"]


@torch.no_grad()
def extend_gate(weight: Tensor, bias: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A gate for n places that gates the places of before as before.

    A Toeplitz W keeps the weight of each distance, a dense one its leading block; what is new is 0. New places have the
    bias of the last.

    Shape:
        weight (2m-1,) or (m, m) and bias (m,) to (2n-1,) or (n, n) and (n,). An n below m cuts.
    """
    more = n - len(bias)
    # A negative number cuts, on every side that is named.
    weight = F.pad(weight, (more, more) if weight.dim() == 1 else (0, more, 0, more))
    return weight, torch.cat([bias[:n], bias[-1:].expand(max(more, 0))])


def resize_gated_mlp(layer: GatedMLP, n: int, how: PlaceRule) -> None:
    """Put a gate for n places in the layer; new parameters if n is another number than before."""
    if how == "interpolate":
        layer.set_grid((layer.num_tokens,), (n,))
        return
    gating = layer.gating
    weight, bias = extend_gate(gating.weight, gating.bias, n)
    replace_parameter(gating, "weight", weight)
    replace_parameter(gating, "bias", bias)
    gating.num_tokens = layer.num_tokens = n


@torch.no_grad()
def resize_positions(table: nn.Embedding, n: int, how: PlaceRule, std: float) -> nn.Embedding:
    """A table of n learned positions: the first ones kept and new ones drawn, or all interpolated linearly."""
    old = table.weight
    if how == "interpolate":
        new = F.interpolate(old.T[None], size=n, mode="linear", align_corners=False)[0].T.contiguous()
    else:
        new = torch.cat([old[:n], old.new_empty(max(n - len(old), 0), old.shape[1]).normal_(std=std)])
    return nn.Embedding.from_pretrained(new, freeze=not old.requires_grad)
