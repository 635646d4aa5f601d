"""Token mixers as modules: tokens (B, N, D) to tokens; classes ending in `2d` take and return maps (B, C, H, W)."""

from tokenmix.layers.base import Capabilities, Mixer
from tokenmix.layers.external import ExternalAttention, ExternalAttention2d, MultiHeadExternalAttention
from tokenmix.layers.gating import GatedMLP, SpatialGatingUnit, TinyAttention, TokenMLP
from tokenmix.layers.less_attention import AttentionResidual, LessAttention
from tokenmix.layers.linear_attention import EMAttention, LinearAttention
from tokenmix.layers.local import DepthwiseConvolution, DepthwiseConvolution2d, IdentityMixer, Pooling2d
from tokenmix.layers.offset_attention import OffsetAttention
from tokenmix.layers.sagan import SAGANAttention2d
from tokenmix.layers.self_attention import SelfAttention, SimplifiedSelfAttention
from tokenmix.layers.table import MIXERS, MixerSpec, create_mixer, list_mixers, register_mixer

__all__ = [
    "MIXERS",
    "AttentionResidual",
    "Capabilities",
    "DepthwiseConvolution",
    "DepthwiseConvolution2d",
    "EMAttention",
    "ExternalAttention",
    "ExternalAttention2d",
    "GatedMLP",
    "IdentityMixer",
    "LessAttention",
    "LinearAttention",
    "Mixer",
    "MixerSpec",
    "MultiHeadExternalAttention",
    "OffsetAttention",
    "Pooling2d",
    "SAGANAttention2d",
    "SelfAttention",
    "SimplifiedSelfAttention",
    "SpatialGatingUnit",
    "TinyAttention",
    "TokenMLP",
    "create_mixer",
    "list_mixers",
    "register_mixer",
]

MIXERS.update(
    {
        "self": MixerSpec(SelfAttention, "multi-head self-attention, softmax(QK^T/sqrt(d))V"),
        "self-double": MixerSpec(
            SelfAttention,
            "self-attention with double normalisation of its N x N map",
            {"normalization": "double"},
            causal=False,
        ),
        "simplified": MixerSpec(SimplifiedSelfAttention, "softmax(FF^T)F on the features themselves: no weights"),
        "sagan": MixerSpec(
            SAGANAttention2d, "SAGAN attention on (B, C, H, W): narrow q and k, pooled keys, gamma = 0 at start"
        ),
        "external": MixerSpec(ExternalAttention, "external attention: two learned memories of S slots, linear in N"),
        "external-softmax": MixerSpec(
            ExternalAttention,
            "external attention with plain softmax over the slots: the ablation",
            {"normalization": "softmax"},
        ),
        "external-2d": MixerSpec(ExternalAttention2d, "the EANet block on (B, C, H, W): convolutions, norm, residual"),
        "multihead-external": MixerSpec(
            MultiHeadExternalAttention, "EAMLP's multi-head external attention, memories shared by heads"
        ),
        "offset": MixerSpec(
            OffsetAttention,
            "offset attention of point clouds: x minus doubly normalised attention, norm, ReLU, residual",
        ),
        "gating": MixerSpec(GatedMLP, "gMLP's branch: U, GELU, spatial gating unit, V; dense n x n gate"),
        "gating-toeplitz": MixerSpec(GatedMLP, "the same with a Toeplitz gate of 2n-1 weights", {"gate": "toeplitz"}),
        "gating-attention": MixerSpec(
            GatedMLP, "aMLP's branch: the gate plus one head of tiny attention", {"attention_dim": 64}
        ),
        "less": MixerSpec(
            LessAttention,
            "less-attention: scores transformed from those of the layer before",
            leader=SelfAttention,
            later={"scores_from": "previous"},
        ),
        "linear": MixerSpec(LinearAttention, "linear attention with ReLU features, Sana's form"),
        "em": MixerSpec(EMAttention, "expectation-maximisation attention: S bases fitted to each sample, linear in N"),
        "token-mlp": MixerSpec(TokenMLP, "MLP-Mixer's MLP over the tokens"),
        "depthwise": MixerSpec(DepthwiseConvolution, "depthwise convolution over a sequence"),
        "depthwise-2d": MixerSpec(DepthwiseConvolution2d, "depthwise convolution over a map"),
        "pool": MixerSpec(Pooling2d, "PoolFormer's pooling on (B, C, H, W): no weights"),
        "identity": MixerSpec(IdentityMixer, "no mixing: the control of comparisons"),
    }
)
