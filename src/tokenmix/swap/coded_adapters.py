"""Adapters that need code: `nn.MultiheadAttention` and our own mixers."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import GridMixer, Mixer
from tokenmix.layers.offset_attention import OffsetAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.registry import Arguments
from tokenmix.swap.adapter import (
    CROSS,
    Affine,
    AttentionAdapter,
    AttentionWeights,
    ObservedCall,
    SwapError,
    check_causal,
    from_added,
    is_causal,
    rate_of,
)
from tokenmix.swap.carrying import Carrying

PAIRS = "its attn_mask says which pairs of tokens meet"


class MixerInTorch(nn.Module):
    """A mixer with the signature and the results of `nn.MultiheadAttention`.

    As in PyTorch, key_padding_mask is True for ignored tokens, or additive (0 and -inf). The second result is the map
    (B, N, N), or (B, H, N, N) without `average_attn_weights`; None if the mixer has no map over tokens. The output at
    ignored positions is 0.

    Raises:
        UserError: query, key and value are not one tensor; or attn_mask is not the causal mask of `is_causal=True` for
            a causal mixer.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None

    def __init__(self, mixer: Mixer, embed_dim: int, num_heads: int, *, batch_first: bool) -> None:
        super().__init__()
        self.mixer = mixer
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        # nn.TransformerEncoderLayer reads these: None disables its fused path, which would bypass the mixer.
        self.in_proj_weight = self.in_proj_bias = None
        self._qkv_same_embed_dim = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query is not key or key is not value:
            raise UserError(f"{CROSS}; leave this attention out by where=")
        check_causal(self.mixer, is_causal)
        if attn_mask is not None and not is_causal:
            raise UserError(f"{PAIRS}; a mixer can only mask tokens (key_padding_mask) or be causal (is_causal)")
        batched, x = query.dim() == 3, query
        if not batched:
            x = query.unsqueeze(0)
        elif not self.batch_first:
            x = query.transpose(0, 1)
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask.unsqueeze(0)
            mask = ~mask if mask.dtype == torch.bool else from_added(mask)
        out, weights = self.mixer(x, mask), None
        capabilities = self.mixer.capabilities
        if need_weights and capabilities.map == "tokens" and capabilities.layout == "tokens":
            weights = self.mixer.attention_map(x, mask)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights


class TorchAdapter(AttentionAdapter):
    """Adapter of `nn.MultiheadAttention` for self-attention."""

    about = "torch.nn.MultiheadAttention (torchvision's ViT, nn.TransformerEncoderLayer, your own blocks)"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward

    def read(self, module: nn.Module) -> AttentionWeights:
        assert isinstance(module, nn.MultiheadAttention)
        if module.in_proj_weight is None:
            raise SwapError(f"keys of width {module.kdim}, values of width {module.vdim}: it is cross-attention")
        query, key, value = Affine.parts(module.in_proj_weight, module.in_proj_bias)
        own_keys = module.bias_k is not None or module.add_zero_attn
        return AttentionWeights(
            dim=module.embed_dim,
            num_heads=module.num_heads,
            like=module.in_proj_weight,
            query=None if own_keys else query,
            key=None if own_keys else key,
            value=value,
            out=Affine.of(module.out_proj),
            qkv_bias=module.in_proj_bias is not None,
            attention_dropout=module.dropout,
            remark="it attended to a key of its own as well" if own_keys else "",
        )

    def observe(self, module: nn.Module, arguments: Arguments) -> ObservedCall:
        query, causal = arguments["query"], bool(arguments.get("is_causal"))
        reason = ""
        if query is not arguments["key"] or query is not arguments["value"]:
            reason = CROSS
        elif arguments.get("attn_mask") is not None and not causal:
            reason = PAIRS
        axis = 1 if getattr(module, "batch_first", True) and query.dim() == 3 else 0
        samples = query.shape[1 - axis] if query.dim() == 3 else 1
        return ObservedCall(query.shape[axis], causal, reason, samples=samples)

    def macs(self, module: nn.Module, num_tokens: int) -> int:
        assert isinstance(module, nn.MultiheadAttention)
        return 4 * num_tokens * module.embed_dim**2 + 2 * num_tokens**2 * module.embed_dim

    def attends_to_itself(self, module: nn.Module, holder: nn.Module) -> bool | None:
        if isinstance(holder, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return module is holder.self_attn
        return None

    def adapt(self, module: nn.Module, mixer: Mixer, *, drop_positions: bool = False) -> nn.Module:
        assert isinstance(module, nn.MultiheadAttention)
        return MixerInTorch(mixer, module.embed_dim, module.num_heads, batch_first=module.batch_first)


class TokenmixAdapter(AttentionAdapter):
    """Adapter of token mixers; a new mixer is not wrapped, so stacks still call `mix`."""

    about = "tokenmix's own mixers of tokens"

    def matches(self, module: nn.Module) -> bool:
        """Only mixers of tokens; the modules around 2-d mixers handle maps."""
        return isinstance(module, GridMixer) or (isinstance(module, Mixer) and module.capabilities.layout == "tokens")

    def read(self, module: nn.Module) -> AttentionWeights:
        """The projections of self-attention; other mixers have none that can be reused."""
        module = module.inner if isinstance(module, Carrying) else module
        assert isinstance(module, Mixer)
        heads: Any = getattr(module, "num_heads", None)
        like, causal = next(module.parameters(), None), is_causal(module)
        memory = getattr(module, "memory", None)
        found = AttentionWeights(
            dim=module.dim,
            num_heads=heads,
            like=like,
            causal=causal,
            dropout=rate_of(getattr(module, "dropout", 0.0)),
            attention_dropout=rate_of(getattr(module, "attention_dropout", getattr(memory, "dropout", 0.0))),
        )
        if type(module) is not SelfAttention:
            remark = f"{type(module).__name__} has no projections of attention"
            if type(module) is OffsetAttention:
                remark += "; its shortcut, linear layer and BatchNorm go with it"
            return replace(found, remark=remark)
        query, key, value = Affine.parts(module.qkv.weight, module.qkv.bias)
        return replace(
            found,
            query=query,
            key=key,
            value=value,
            out=Affine.of(module.proj),
            qkv_bias=module.qkv.bias is not None,
        )

    def observe(self, module: nn.Module, arguments: Arguments) -> ObservedCall:
        """An attention residual is added to scores, which other mixers do not have."""
        residual, (samples, num_tokens, _) = arguments.get("residual") is not None, arguments["x"].shape
        refusal = "an attention residual is added to its scores" if residual else ""
        return ObservedCall(num_tokens, refusal=refusal, samples=samples)

    def macs(self, module: nn.Module, num_tokens: int) -> int:
        assert isinstance(module, Mixer)
        return module.macs(num_tokens)

    def adapt(self, module: nn.Module, mixer: Mixer, *, drop_positions: bool = False) -> nn.Module:
        return mixer
