"""Tiny models of the families that a swap knows, and a list of names with what a swap says to each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**SIZE, "vocab_size": 50, "max_position_embeddings": 40}
IMAGE = {**SIZE, "image_size": 16, "patch_size": 4}
VIDEO = {**SIZE, "image_size": 16, "num_frames": 4}
SOUND = {**SIZE, "patch_size": 4, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}
WAVE = {
    **SIZE,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
SERIES = {
    "context_length": 32,
    "num_input_channels": 2,
    "d_model": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "patch_length": 8,
    "patch_stride": 8,
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 50, "max_position_embeddings": 40}


class Family(NamedTuple):
    """A tiny model of transformers: its name without "Model" and "Config", arguments of its config, its inputs.

    Attributes:
        taking_part: of outputs (B, N, D), those that are not padding.
        positions: what brings positions into the attention, which only goes by consent.
    """

    name: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    taking_part: Tensor | None = None
    positions: str = ""

    def build(self) -> nn.Module:
        """The model, with weights that leave no layer without effect."""
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config = getattr(
            transformers, f"{self.name.removesuffix('Vision')}{'Vision' * self.name.endswith('Vision')}Config"
        )
        model: nn.Module = getattr(transformers, f"{self.name}Model")(config(**self.config)).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                nn.init.normal_(p, std=0.2)
        return model


PADDING = (torch.arange(7) < torch.tensor([[4], [7], [7]])).long()


def texts() -> dict[str, Tensor]:
    """Three texts, the first with padding."""
    return {"input_ids": torch.randint(3, 50, (3, 7)), "attention_mask": PADDING}


def images() -> dict[str, Tensor]:
    """Two images."""
    return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)}


def videos() -> dict[str, Tensor]:
    """Two videos of four frames."""
    return {"pixel_values": torch.randn(2, 4, 3, 16, 16, dtype=torch.float64)}


def sounds() -> dict[str, Tensor]:
    """Two spectrograms."""
    return {"input_values": torch.randn(2, 32, 16, dtype=torch.float64)}


def waves() -> dict[str, Tensor]:
    """Two waves, the second with padding."""
    return {
        "input_values": torch.randn(2, 400, dtype=torch.float64),
        "attention_mask": (torch.arange(400) < torch.tensor([[400], [300]])).long(),
    }


def patches() -> dict[str, Tensor]:
    """Patches of two images, the second of which is smaller."""
    return {
        "pixel_values": torch.randn(2, 16, 48, dtype=torch.float64),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [12]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


def series() -> dict[str, Tensor]:
    """Two time series of two channels."""
    return {"past_values": torch.randn(2, 32, 2, dtype=torch.float64)}


TEXT_HERE = PADDING.bool()
FAMILIES = {
    "bert": Family("Bert", TEXT, texts, TEXT_HERE),
    "roberta": Family("Roberta", TEXT, texts, TEXT_HERE),
    "distilbert": Family("DistilBert", DISTIL, texts, TEXT_HERE),
    "electra": Family("Electra", {**TEXT, "embedding_size": 16}, texts, TEXT_HERE),
    "mpnet": Family("MPNet", TEXT, texts, TEXT_HERE, "position_bias"),
    "albert": Family("Albert", {**TEXT, "embedding_size": 16}, texts, TEXT_HERE),
    "vit": Family("ViT", IMAGE, images),
    "clip": Family("CLIPVision", IMAGE, images),
    "siglip": Family("SiglipVision", IMAGE, images),
    "siglip2": Family(
        "Siglip2Vision",
        {**SIZE, "patch_size": 4, "num_patches": 16},
        patches,
        torch.arange(16) < torch.tensor([[16], [12]]),
    ),
    "yolos": Family("Yolos", {**IMAGE, "image_size": [16, 16], "num_detection_tokens": 3}, images),
    "videomae": Family("VideoMAE", {**VIDEO, "patch_size": 4}, videos),
    "vivit": Family("Vivit", {**VIDEO, "tubelet_size": [2, 4, 4]}, videos),
    "ast": Family("AST", SOUND, sounds),
    "wav2vec2": Family("Wav2Vec2", WAVE, waves, torch.arange(39) < torch.tensor([[39], [29]])),
    "patchtst": Family("PatchTST", SERIES, series),
    "beit": Family("Beit", {**IMAGE, "vocab_size": 10}, images),
    "beit-relative": Family(
        "Beit", {**IMAGE, "vocab_size": 10, "use_relative_position_bias": True}, images, None, "attention_mask"
    ),
    "dinov3": Family("DINOv3ViT", IMAGE, images, None, "position_embeddings"),
}

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
TOKENS, IGNORED = (torch.zeros(2, 7, 32), torch.zeros(2, 5, 32)), torch.arange(7) >= torch.tensor([[4], [7]])


def tiny_timm(name: str, img_size: int | tuple[int, int], **kwargs: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tiny model of timm and two images."""
    import timm

    model: nn.Module = timm.create_model(name, img_size=img_size, num_classes=5, **{**SMALL, **kwargs})
    size = img_size if isinstance(img_size, tuple) else (img_size, img_size)
    return model, (torch.randn(2, 3, *size),)


class Decoder(nn.Module):
    """PyTorch's decoder, with its tokens' padding in the place of a third argument."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, batch_first=True), 2)

    def forward(self, x: Tensor, memory: Tensor, ignored: Tensor) -> Tensor:
        """Decode."""
        out: Tensor = self.decoder(x, memory, tgt_key_padding_mask=ignored)
        return out


class Encoder(nn.Module):
    """PyTorch's encoder of padded tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        """Encode."""
        out: Tensor = self.encoder(x, src_key_padding_mask=ignored)
        return out


class Shortcut(nn.Module):
    """x + attention(x)."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        out: Tensor = x + self.attention(x)
        return out


def sablock() -> nn.Module:
    """MONAI's attention."""
    from monai.networks.blocks.selfattention import SABlock

    return Shortcut(SABlock(32, 2, qkv_bias=True))


def diffusers_attention() -> nn.Module:
    """That of diffusers."""
    from diffusers.models.attention_processor import Attention

    return Shortcut(Attention(32, heads=2, dim_head=16))


OTHERS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "timm-eva02": lambda: tiny_timm("eva02_tiny_patch14_224", 28),
    "timm-dinov3": lambda: tiny_timm("vit_small_patch16_dinov3", 32),
    "timm-beit": lambda: tiny_timm("beit_base_patch16_224", 32),
    "timm-deit3": lambda: tiny_timm("deit3_small_patch16_224", 32),
    "timm-deit-distilled": lambda: tiny_timm("deit_tiny_distilled_patch16_224", 32),
    "torch-encoder": lambda: (Encoder(), (torch.randn_like(TOKENS[0]), IGNORED)),
    "torch-decoder": lambda: (Decoder(), (*map(torch.randn_like, TOKENS), IGNORED)),
    "monai": lambda: (sablock(), (torch.randn_like(TOKENS[0]),)),
    "diffusers": lambda: (diffusers_attention(), (torch.randn_like(TOKENS[0]),)),
}
"""Models that are not of transformers, with inputs."""

TALKING, WINDOWS, NOT_ONE_MAP, FEW_ASK = "talking heads", "windows", "not one map over all tokens", "only a few tokens"
NONE, UNKNOWN = "nothing called attention", "has no attention that can be swapped: what it has is"

TIMM: dict[str, str] = {
    "vit_tiny_patch16_224": "ok",
    "vit_small_patch14_reg4_dinov2": "ok",
    "vit_so150m_patch16_reg4_gap_256": "ok",
    "vit_small_r26_s32_224": "ok",
    "deit_tiny_distilled_patch16_224": "ok",
    "deit3_small_patch16_224": "ok",
    "flexivit_small": "ok",
    "pit_ti_224": "ok",
    "mobilevit_xs": "ok",
    "vitamin_small_224": "ok",
    "vit_base_mci_224": "ok",
    "naflexvit_base_patch16_gap": "ok",
    "eva_giant_patch14_224": "ok",
    "aimv2_large_patch14_224": "ok",
    "vit_base_patch16_siglip_224": f"ok but {FEW_ASK}",
    "crossvit_9_240": f"ok but {FEW_ASK}",
    "hiera_tiny_224": "ok but use_mask_unit_attn is True",
    "eva02_tiny_patch14_224": "drop rope",
    "vit_small_patch16_dinov3": "drop rope",
    "vit_pe_core_tiny_patch16_384": "drop rope",
    "vit_base_patch16_rope_224": "drop rope",
    "beit_base_patch16_224": "drop relative_position_bias_table",
    "vit_relpos_small_patch16_224": "drop rel_pos",
    "cait_xxs24_224": TALKING,
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
    "gcvit_xxtiny": WINDOWS,
    "maxvit_tiny_tf_224": WINDOWS,
    "davit_tiny": WINDOWS,
    "coatnet_0_rw_224": NOT_ONE_MAP,
    "samvit_base_patch16": NOT_ONE_MAP,
    "mvitv2_tiny": NOT_ONE_MAP,
    "pvt_v2_b0": NOT_ONE_MAP,
    "xcit_nano_12_p16_224": NOT_ONE_MAP,
    "levit_128s": NOT_ONE_MAP,
    "tiny_vit_5m_224": NOT_ONE_MAP,
    "twins_svt_small": NOT_ONE_MAP,
    "volo_d1_224": NOT_ONE_MAP,
    "efficientformer_l1": NOT_ONE_MAP,
    "sam2_hiera_tiny": NOT_ONE_MAP,
    "nest_tiny": UNKNOWN,
    "visformer_tiny": UNKNOWN,
    "mobilevitv2_050": UNKNOWN,
    "resnet18": NONE,
    "mixer_s32_224": NONE,
}
"""ok; ok but: some layers are left, for this reason; drop: with drop="positions" only; else a word of the refusal."""

TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    "Dinov2": (IMAGE, "ok"),
    "DeiT": (IMAGE, "ok"),
    "ViTMAE": (IMAGE, "ok"),
    "ViTMSN": (IMAGE, "ok"),
    "IJepa": (IMAGE, "ok"),
    "XLMRoberta": (TEXT, "ok"),
    "Camembert": (TEXT, "ok"),
    "Hubert": (WAVE, "ok"),
    "CLIP": ({"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8}, "ok but causal by a mask of pairs"),
    "CLIPText": (TEXT, "causal by a mask of pairs"),
    "DebertaV2": ({**TEXT, "relative_attention": True}, "disentangled"),
    "ModernBert": ({**TEXT, "pad_token_id": 0}, "packs sequences"),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 40}, "decoder"),
    "T5": ({"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 50}, "relative positions"),
    "Bart": ({"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50}, "decoder"),
    "Swin": ({"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}, WINDOWS),
    "Segformer": ({}, NOT_ONE_MAP),
    "ConvNext": ({}, NONE),
}
