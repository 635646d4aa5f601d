"""Token mixers as modules: tokens (B, N, D) to tokens, or maps (B, C, H, W) to maps where the name ends in 2d."""

from tokenmix.layers.attention_residual import AttentionResidual
from tokenmix.layers.base import Capabilities, Mixer
from tokenmix.layers.external import ExternalAttention, ExternalAttention2d
from tokenmix.layers.gated_mlp import GatedMLP
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.multihead_external import MultiHeadExternalAttention
from tokenmix.layers.offset_attention import OffsetAttention
from tokenmix.layers.sagan import SAGANAttention2d
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.layers.simplified import SimplifiedSelfAttention
from tokenmix.layers.spatial_gating import SpatialGatingUnit
from tokenmix.layers.table import MIXERS, MixerSpec, create_mixer, list_mixers, register_mixer
from tokenmix.layers.tiny_attention import TinyAttention

__all__ = [
    "MIXERS",
    "AttentionResidual",
    "Capabilities",
    "ExternalAttention",
    "ExternalAttention2d",
    "GatedMLP",
    "LessAttention",
    "Mixer",
    "MixerSpec",
    "MultiHeadExternalAttention",
    "OffsetAttention",
    "SAGANAttention2d",
    "SelfAttention",
    "SimplifiedSelfAttention",
    "SpatialGatingUnit",
    "TinyAttention",
    "create_mixer",
    "list_mixers",
    "register_mixer",
]
