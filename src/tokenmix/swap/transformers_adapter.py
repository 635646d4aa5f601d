"""Hugging Face's ViT attention and its copies. transformers itself is never imported: the model brings it along."""

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
    is_causal,
    shared_mask,
)

# transformers copies its code from model to model: these have one and the same forward pass.
CLASSES = (
    "ViTAttention",
    "DeiTAttention",
    "ViTMAEAttention",
    "ViTMSNAttention",
    "IJepaAttention",
    "Dinov2Attention",
    "Dinov2WithRegistersAttention",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class MixerInTransformers(nn.Module):
    """A mixer with the signature of transformers' `ViTAttention`; the second result, its map, is None.

    Raises:
        UserError: a mask of pairs of tokens, or `output_attentions=True`.
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, N, D) to the same; the keywords are those that transformers hands through every layer."""
        if kwargs.get("output_attentions"):
            raise UserError(
                "output_attentions=True, and swapped layers have no attentions in transformers' form; call "
                "attention_map(x) of the layer's mixer"
            )
        return self.mixer(hidden_states, shared_mask(attention_mask, hidden_states)), None


class TransformersAdapter(AttentionAdapter):
    """`ViTAttention` of transformers 5, and its copies in DeiT, MAE, MSN, I-JEPA and DINOv2."""

    about = "transformers' ViTAttention (ViT, DeiT, MAE, MSN, I-JEPA, DINOv2)"

    def matches(self, module: nn.Module) -> bool:
        """By name, so that transformers need not be there."""
        return type(module).__module__.startswith("transformers.") and type(module).__name__ in CLASSES

    def read(self, module: nn.Module) -> AttentionWeights:
        """Its four projections."""
        if not all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS):
            raise SwapError(
                "this version of transformers names its projections differently; 5.x has q_proj, ..., o_proj"
            )
        if getattr(getattr(module, "config", None), "output_attentions", False):
            raise SwapError("its config has output_attentions=True, which no mixer supports; set it to False")
        query, key, value, out = (Affine.of(getattr(module, name)) for name in PROJECTIONS)
        dim, inner = out.weight.shape
        fits = inner == dim
        return AttentionWeights(
            dim=dim,
            num_heads=int(module.num_attention_heads),  # type: ignore[arg-type]
            like=out.weight,
            query=query if fits else None,
            key=key if fits else None,
            value=value if fits else None,
            out=out if fits else None,
            qkv_bias=query.bias is not None,
            attention_dropout=float(module.attention_dropout),  # type: ignore[arg-type]
            remark="" if fits else f"its heads are together {inner} wide, not {dim}",
        )

    def observe(self, module: nn.Module, arguments: Mapping[str, Any]) -> ObservedCall:
        """Its masks are those of padding."""
        return ObservedCall(arguments["hidden_states"].shape[1])

    def adapt(self, module: nn.Module, mixer: Mixer) -> nn.Module:
        """See `MixerInTransformers`."""
        if is_causal(mixer):
            raise SwapError("transformers' vision attention is not causal; leave out causal=True")
        return MixerInTransformers(mixer)
