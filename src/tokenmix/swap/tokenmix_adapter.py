"""Our own mixers, in our models or anybody's."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenmix.layers.base import GridMixer, Mixer
from tokenmix.layers.offset_attention import OffsetAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.swap.adapter import Affine, AttentionAdapter, AttentionWeights, ObservedCall, is_causal
from tokenmix.swap.carrying import Carrying


class TokenmixAdapter(AttentionAdapter):
    """A mixer of tokens; another replaces it without anything around it, so that stacks continue calling `mix`."""

    about = "tokenmix's own mixers of tokens"

    def matches(self, module: nn.Module) -> bool:
        """Mixers of maps do not match: what is around them holds maps."""
        return isinstance(module, GridMixer) or (isinstance(module, Mixer) and module.capabilities.layout == "tokens")

    def read(self, module: nn.Module) -> AttentionWeights:
        """The projections of self-attention; other mixers have none that another could use."""
        module = module.inner if isinstance(module, Carrying) else module
        assert isinstance(module, Mixer)
        like, causal = next(module.parameters(), None), is_causal(module)
        if type(module) is not SelfAttention:
            remark = f"{type(module).__name__} has no projections of attention"
            if type(module) is OffsetAttention:
                remark += "; its shortcut, linear layer and BatchNorm go with it"
            return AttentionWeights(
                dim=module.dim, num_heads=getattr(module, "num_heads", None), like=like, causal=causal, remark=remark
            )
        query, key, value = Affine.parts(module.qkv.weight, module.qkv.bias)
        return AttentionWeights(
            dim=module.dim,
            num_heads=module.num_heads,
            like=like,
            query=query,
            key=key,
            value=value,
            out=Affine.of(module.proj),
            qkv_bias=module.qkv.bias is not None,
            causal=causal,
            dropout=module.dropout.p,
            attention_dropout=module.attention_dropout,
        )

    def observe(self, module: nn.Module, arguments: Mapping[str, Any]) -> ObservedCall:
        """An attention residual is added to scores, which other mixers do not have."""
        residual, (samples, num_tokens, _) = arguments.get("residual") is not None, arguments["x"].shape
        refusal = "an attention residual is added to its scores" if residual else ""
        return ObservedCall(num_tokens, refusal=refusal, samples=samples)

    def macs(self, module: nn.Module, num_tokens: int) -> int:
        """By its own equation."""
        assert isinstance(module, Mixer)
        return module.macs(num_tokens)

    def adapt(self, module: nn.Module, mixer: Mixer, *, drop_positions: bool = False) -> nn.Module:
        """The mixer itself."""
        return mixer
