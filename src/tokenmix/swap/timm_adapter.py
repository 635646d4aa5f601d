"""timm's `Attention`, the one of its ViT, DeiT and all that are built from their blocks.

timm itself is never imported: the model brings it along.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer
from tokenmix.swap.adapter import (
    Affine,
    AttentionAdapter,
    AttentionWeights,
    ObservedCall,
    SwapError,
    check_causal,
    shared_mask,
)


class MixerInTimm(nn.Module):
    """A mixer with the signature of timm's `Attention`: `(x, attn_mask=None, is_causal=False)`.

    Raises:
        UserError: a mask of pairs of tokens, or a causal call of a mixer that is not causal.
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens (B, N, D) to the same; a mask (B, 1, 1, N), True = the token takes part."""
        check_causal(self.mixer, is_causal)
        return self.mixer(x, shared_mask(attn_mask, x))


class TimmAdapter(AttentionAdapter):
    """timm's `Attention`, and what inherits its forward pass."""

    about = "timm.layers.Attention (ViT, DeiT and what has their blocks)"

    def matches(self, module: nn.Module) -> bool:
        """Whether the module computes what timm's `Attention` does."""
        timms: Any = sys.modules.get("timm.layers")
        return (
            timms is not None
            and isinstance(module, timms.Attention)
            and type(module).forward is timms.Attention.forward
        )

    def read(self, module: Any) -> AttentionWeights:
        """Its projections; those next to norms of their own or a gate are left out."""
        dim = module.qkv.in_features
        if module.proj.out_features != dim:
            raise SwapError(f"it makes tokens of width {module.proj.out_features} from width {dim}")
        query = key = value = out = None
        remarks = []
        # timm before 1.0.31 has no width of its own for the heads, and no gate.
        inner = getattr(module, "attn_dim", dim)
        if inner != dim:
            remarks.append(f"its heads are together {inner} wide, not {dim}")
        else:
            query, key, value = Affine.parts(module.qkv.weight, module.qkv.bias)
            out = Affine.of(module.proj)
        if not isinstance(module.q_norm, nn.Identity):
            query = key = None
            remarks.append("query and key had norms of their own")
        if not isinstance(module.norm, nn.Identity) or getattr(module, "gate", None) is not None:
            out = None
            remarks.append("the output projection stood after a norm or a gate")
        return AttentionWeights(
            dim=dim,
            num_heads=module.num_heads,
            like=module.proj.weight,
            query=query,
            key=key,
            value=value,
            out=out,
            qkv_bias=module.qkv.bias is not None,
            dropout=module.proj_drop.p,
            attention_dropout=module.attn_drop.p,
            remark="; ".join(remarks),
        )

    def observe(self, module: nn.Module, arguments: Mapping[str, Any]) -> ObservedCall:
        """Masks of pairs cannot be honoured; their values tell them from masks of tokens."""
        x, mask, reason = arguments["x"], arguments.get("attn_mask"), ""
        if mask is not None and mask.is_meta and mask.shape[-2] > 1:
            raise SwapError("its attention mask has no values on the meta device")
        try:
            shared_mask(mask, x)
        except UserError as refusal:
            reason = str(refusal)
        return ObservedCall(x.shape[1], bool(arguments.get("is_causal")), reason)

    def adapt(self, module: nn.Module, mixer: Mixer) -> nn.Module:
        """See `MixerInTimm`."""
        return MixerInTimm(mixer)
