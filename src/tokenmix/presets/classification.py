"""The image classifiers by name: the class of each, what makes it that size, and what timm knows of its data."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmix.registry import MODELS, ModelEntry, Published, is_foreign

# 224 px and 1000 classes, bicubic, crop 0.875 unless said otherwise: timm's own defaults.
SHARED: dict[str, Any] = {"fixed_input_size": True, "classifier": "head", "license": "apache-2.0"}
IMAGENET: dict[str, Any] = {**SHARED, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# Small images, whole.
SMALL: dict[str, Any] = {
    **SHARED,
    **HALF,
    "input_size": (3, 32, 32),
    "num_classes": 10,
    "crop_pct": 1.0,
    "interpolation": "bilinear",
}


def _register(
    name: str,
    build: str,
    about: str,
    pretrained_cfg: dict[str, Any],
    arguments: dict[str, Any] | None = None,
    published: Published | None = None,
) -> None:
    MODELS.register(
        ModelEntry(
            name=name,
            tasks=("image-classification",),
            about=about,
            build=f"tokenmix.models.{build}",
            arguments=arguments or {},
            pretrained_cfg=pretrained_cfg,
            published=published,
        )
    )


FROM_TABLES = "arXiv:2105.08050, tables 1 and 2, a third party's extraction; parameters and MACs checked by our count"
FROM_LOG = "the authors' released log of a run at 384 px; no parameter count is printed"
FROM_TABLE = "a third party's table; parameters checked against the released checkpoint layout"
EXTRACTED = "arXiv:2406.00427, from a third party's extraction; the layout is ours, none was published"

# timm adapts first convolutions to other channels; EAMLP unfolds pixels instead, see `EAMLP.adapt_channels`.
PATCHES, UNFOLDED = {"first_conv": "stem.proj"}, {"first_conv": None}

NET, NET_CFG, CONV_CFG = "mixer_net:MixerNet", {**SMALL, **PATCHES}, {**SMALL, "first_conv": "stem.convs.0"}
# Measured, Fashion-MNIST, 12,000 images, 5 epochs, one seed: self 0.778 with convolutions, 0.735 with bare patches.
CONV = {"stem": "conv"}
_register("mixer_nano", NET, "the skeleton of comparisons, 4 blocks of width 64: give mixer=", CONV_CFG, CONV)
_register(
    "mixer_small", NET, "the same skeleton, 8 blocks of width 128", CONV_CFG, {**CONV, "embed_dim": 128, "depth": 8}
)
_register("vit_nano", NET, "a ViT on bare patches, 4 blocks of width 64", NET_CFG, {"mixer": "self"})

GMLP, GMLP_CFG = "gmlp:GMLP", {**IMAGENET, **HALF, **PATCHES}
TIMM_WEIGHTS = {"tag": "ra3_in1k", "hf_hub_id": "timm/gmlp_s16_224.ra3_in1k"}
# Measured, Fashion-MNIST, 18,000 images seen: 0.80, 0.80 with the layers' start, 0.72, 0.70 with timm's.
GMLP_NANO = {"patch_size": 4, "embed_dim": 64, "depth": 4, "expansion": 4.0, "init": "torch"}
AMLP_NANO = {**GMLP_NANO, "attention_dim": 32}
AMLP_TINY, AMLP_SMALL = ({"embed_dim": dim, "attention_dim": 64} for dim in (128, 256))
_register(
    "gmlp_tiny",
    GMLP,
    "gMLP-Ti: 30 blocks of width 128",
    GMLP_CFG,
    {"embed_dim": 128},
    Published(5.9, 1.4, 72.3, FROM_TABLES),
)
_register(
    "gmlp_small",
    GMLP,
    "gMLP-S: 30 blocks of width 256; timm has weights",
    {**GMLP_CFG, **TIMM_WEIGHTS},
    {"embed_dim": 256},
    Published(19.5, 4.5, 79.6, FROM_TABLES),
)
_register(
    "gmlp_base",
    GMLP,
    "gMLP-B: 30 blocks of width 512",
    GMLP_CFG,
    {"embed_dim": 512},
    Published(73.4, 15.8, 81.6, FROM_TABLES),
)
_register("amlp_tiny", GMLP, "gmlp_tiny with tiny attention of width 64", GMLP_CFG, AMLP_TINY)
_register("amlp_small", GMLP, "gmlp_small with tiny attention of width 64", GMLP_CFG, AMLP_SMALL)
_register("gmlp_nano", GMLP, "4 blocks of width 64 for images of 28 to 64 px", {**SMALL, **PATCHES}, GMLP_NANO)
_register("amlp_nano", GMLP, "gmlp_nano with tiny attention of width 32", {**SMALL, **PATCHES}, AMLP_NANO)

MLP_MIXER: dict[str, Any] = {"mixer": "token-mlp", "patch_size": 16, "positions": "none", "stem": "patch"}
MLP_MIXER_CFG, MLP_MIXER_SOURCE = GMLP_CFG, "arXiv:2105.01601, table 1"
_register(
    "mlp_mixer_s16",
    NET,
    "MLP-Mixer-S/16: 8 blocks of width 512",
    MLP_MIXER_CFG,
    {**MLP_MIXER, "embed_dim": 512, "depth": 8, "mlp_ratio": 4.0},
    Published(18.0, None, None, MLP_MIXER_SOURCE),
)
_register(
    "mlp_mixer_b16",
    NET,
    "MLP-Mixer-B/16: 12 blocks of width 768",
    MLP_MIXER_CFG,
    {**MLP_MIXER, "embed_dim": 768, "depth": 12, "mlp_ratio": 4.0},
    Published(59.0, None, None, MLP_MIXER_SOURCE),
)

EAMLP, EAMLP_CFG = "eamlp:EAMLP", {**IMAGENET, **UNFOLDED, "crop_pct": 0.9}
EAMLP_14 = {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}
EAMLP_19 = {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0}
# Measured, Fashion-MNIST, 18,000 images seen: 0.63, 0.65 with the layers' start, 0.34, 0.24 with the paper's.
EAMLP_NANO = {"embed_dim": 64, "depth": 4, "num_slots": 32, "num_splits": 2, "init": "torch"}
_register(
    "eamlp_7", EAMLP, "EAMLP-7: 7 blocks of width 256", EAMLP_CFG, published=Published(None, None, 71.658, FROM_LOG)
)
# The author reports +1.1 points; no public code has it.
_register("eamlp_7_bn", EAMLP, "eamlp_7 with BatchNorm in its blocks", EAMLP_CFG, {"norm": "batch"})
_register(
    "eamlp_14", EAMLP, "EAMLP-14: 14 blocks of width 384", EAMLP_CFG, EAMLP_14, Published(30.0, None, 78.9, FROM_TABLE)
)
_register(
    "eamlp_19", EAMLP, "EAMLP-19: 19 blocks of width 448", EAMLP_CFG, EAMLP_19, Published(55.0, None, 79.4, FROM_TABLE)
)
_register(
    "eamlp_nano",
    EAMLP,
    "4 blocks of width 64 after two unfoldings, for images of 28 to 64 px",
    {**SMALL, **UNFOLDED},
    EAMLP_NANO,
)

T2T, T2T_CFG = "eamlp:T2TViT", EAMLP_CFG
T2T_SOURCE = "arXiv:2101.11986, table 1; counted with a Performer in the stem"
_register(
    "t2t_vit_7",
    T2T,
    "T2T-ViT-7: eamlp_7 with self-attention",
    T2T_CFG,
    {},
    Published(4.3, None, None, T2T_SOURCE),
)
_register("t2t_vit_14", T2T, "T2T-ViT-14", T2T_CFG, EAMLP_14, Published(21.5, None, None, T2T_SOURCE))
_register("t2t_vit_19", T2T, "T2T-ViT-19", T2T_CFG, EAMLP_19, Published(39.2, None, None, T2T_SOURCE))
_register(
    "t2t_vit_nano",
    T2T,
    "eamlp_nano's skeleton with self-attention",
    {**SMALL, **UNFOLDED},
    {"embed_dim": 64, "depth": 4, "num_splits": 2},
)

LAVIT, EMBED = "lavit:LaViT", {"first_conv": "stages.0.embed"}
LAVIT_CFG = {**IMAGENET, **EMBED, "pool_size": (7, 7)}
LAVIT_NANO_CFG = {**SMALL, **EMBED, "pool_size": (2, 2)}
LAVIT_TINY = {
    "embed_dims": (48, 96, 240, 432),
    "num_heads": (1, 2, 5, 9),
    "depths": (2, 2, 5, 3),
    "num_vanilla": (2, 2, 2, 1),
}
LAVIT_BASE = {"depths": (3, 3, 14, 5), "num_vanilla": (3, 3, 4, 1)}
LAVIT_NANO = {
    "patch_size": 2,
    "embed_dims": (32, 64, 96, 128),
    "num_heads": (1, 2, 3, 4),
    "depths": (1, 1, 4, 2),
    "num_vanilla": (1, 1, 2, 1),
    "mlp_ratio": 2.0,
}
_register("lavit_tiny", LAVIT, "LaViT-T in our layout", LAVIT_CFG, LAVIT_TINY, Published(10.9, 1.6, 79.2, EXTRACTED))
_register("lavit_small", LAVIT, "LaViT-S in our layout", LAVIT_CFG, published=Published(22.4, 3.3, 82.6, EXTRACTED))
_register("lavit_base", LAVIT, "LaViT-B in our layout", LAVIT_CFG, LAVIT_BASE, Published(39.6, 6.1, 83.1, EXTRACTED))
_register("lavit_nano", LAVIT, "four narrow stages for images of 28 to 64 px", LAVIT_NANO_CFG, LAVIT_NANO)

EANET = "eanet:EANet"
CONVOLUTIONS = {"fixed_input_size": False, "first_conv": "backbone.conv1", "classifier": "backbone.fc"}
EANET_CFG = {**IMAGENET, **CONVOLUTIONS, "pool_size": (7, 7)}
EANET_NANO_CFG = {**SMALL, **CONVOLUTIONS, "pool_size": (4, 4)}
EANET_NANO = {
    "img_size": 32,
    "backbone": "resnet18",
    "stem": "small",
    "num_slots": 32,
    "backbone_kwargs": {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 128)},
}
_register("eanet_resnet50", EANET, "ResNet-50 and the EANet block", EANET_CFG, {"backbone": "resnet50"})
_register("eanet_resnet101", EANET, "ResNet-101 and the EANet block", EANET_CFG, {"backbone": "resnet101"})
_register(
    "eanet_nano",
    EANET,
    "four stages of one basic block for images of 28 to 64 px",
    EANET_NANO_CFG,
    EANET_NANO,
)


def may_be_others(name: str) -> bool:
    """Whether it may be a model of timm's or torchvision's, or one that the user's function builds."""
    return is_foreign(name) or may_be_timms(name)


def may_be_timms(name: str) -> bool:
    """Whether timm may have a model of that name, without importing it: a file of its models then mentions the name."""
    # Once it is imported, timm itself can be asked.
    if "timm" in sys.modules or name.startswith(("hf-hub:", "local-dir:")):
        return True
    source = _timm_source()
    return not source or re.search(rf"\b{re.escape(name.split('.')[0])}\b", source) is not None


def timm_names() -> list[str]:
    """The names of timm's models, without importing it; none if it is not installed."""
    return re.findall(r"@register_model\s*\ndef (\w+)", _timm_source())


def _timm_source() -> str:
    spec = find_spec("timm")
    if spec is None or spec.origin is None:
        return ""
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
