"""Names and sizes of the models, without PyTorch; importing this module registers them."""

from collections.abc import Mapping
from functools import partial

from tokenmix.registry import MODELS, ModelEntry, Published

Arguments = dict[str, object]


def _register(
    tasks: tuple[str, ...],
    build: str,
    pretrained_cfg: Mapping[str, object] | None,
    name: str,
    about: str,
    published: Published | None = None,
    /,
    **arguments: object,
) -> None:
    MODELS.register(
        ModelEntry(
            name=name,
            tasks=tasks,
            about=about,
            build=f"tokenmix.{build}",
            arguments=arguments,
            pretrained_cfg=pretrained_cfg,
            published=published,
        )
    )


# Image classifiers, with timm's data settings: by default 224 px, 1000 classes, bicubic, crop 0.875. timm adapts first
# convolutions to other channels; EAMLP unfolds pixels instead, see `EAMLP.adapt_channels`.
SHARED: Arguments = {"fixed_input_size": True, "classifier": "head", "license": "apache-2.0"}
IMAGENET: Arguments = {**SHARED, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF: Arguments = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
WHOLE: Arguments = {"input_size": (3, 32, 32), "num_classes": 10, "crop_pct": 1.0, "interpolation": "bilinear"}
SMALL: Arguments = {**SHARED, **HALF, **WHOLE}
PATCHES, UNFOLDED = {"first_conv": "stem.proj"}, {"first_conv": None}

FROM_TABLES = "arXiv:2105.08050, tables 1 and 2, a third party's extraction; parameters and MACs checked by our count"
FROM_LOG = "the authors' released log of a run at 384 px; no parameter count is printed"
FROM_TABLE = "a third party's table; parameters checked against the released checkpoint layout"
EXTRACTED = "arXiv:2406.00427, from a third party's extraction; the layout is ours, none was published"
MLP_MIXER_SOURCE = "arXiv:2105.01601, table 1"
T2T_SOURCE = "arXiv:2101.11986, table 1; counted with a Performer in the stem"

_image = partial(_register, ("image-classification",))

# Fashion-MNIST, 12,000 images, 5 epochs, one seed: self-attention reaches 0.778 with a convolutional stem, 0.735 with
# patches. External attention reaches 0.804 with 3 blocks and 0.777 with 4 in 12 seconds of one core. On pairs of
# pictures, 3 blocks reach 0.851 and 4 blocks 0.809 in 16 seconds.
_net = partial(_image, "models.mixer_net:MixerNet", {**SMALL, "first_conv": "stem.convs.0"}, stem="conv")
_net("mixer_nano", "the skeleton of comparisons, 3 blocks of width 64: give mixer=", depth=3)
_net("mixer_small", "the same skeleton, 8 blocks of width 128", embed_dim=128, depth=8)
_vit = partial(_image, "models.mixer_net:MixerNet", {**SMALL, **PATCHES})
_vit("vit_nano", "a ViT on bare patches, 4 blocks of width 64", mixer="self")

GMLP_CFG = {**IMAGENET, **HALF, **PATCHES}
TIMM_WEIGHTS = {"tag": "ra3_in1k", "hf_hub_id": "timm/gmlp_s16_224.ra3_in1k"}
_gmlp = partial(_image, "models.gmlp:GMLP", GMLP_CFG)
_gmlp("gmlp_tiny", "gMLP-Ti: 30 blocks of width 128", Published(5.9, 1.4, 72.3, FROM_TABLES), embed_dim=128)
_image(
    "models.gmlp:GMLP",
    {**GMLP_CFG, **TIMM_WEIGHTS},
    "gmlp_small",
    "gMLP-S: 30 blocks of width 256; timm has weights",
    Published(19.5, 4.5, 79.6, FROM_TABLES),
    embed_dim=256,
)
_gmlp("gmlp_base", "gMLP-B: 30 blocks of width 512", Published(73.4, 15.8, 81.6, FROM_TABLES), embed_dim=512)
_gmlp("amlp_tiny", "gmlp_tiny with tiny attention of width 64", embed_dim=128, attention_dim=64)
_gmlp("amlp_small", "gmlp_small with tiny attention of width 64", embed_dim=256, attention_dim=64)
# Fashion-MNIST, 18,000 images seen: 0.80, 0.80 with the layers' initialisation, 0.72, 0.70 with timm's.
GMLP_NANO: Arguments = {"patch_size": 4, "embed_dim": 64, "depth": 4, "expansion": 4.0, "init": "torch"}
_gmlp_nano = partial(_image, "models.gmlp:GMLP", {**SMALL, **PATCHES}, **GMLP_NANO)
_gmlp_nano("gmlp_nano", "4 blocks of width 64 for images of 28 to 64 px")
_gmlp_nano("amlp_nano", "gmlp_nano with tiny attention of width 32", attention_dim=32)

MLP_MIXER: Arguments = {"mixer": "token-mlp", "patch_size": 16, "positions": "none", "mlp_ratio": 4.0}
_mlp_mixer = partial(_image, "models.mixer_net:MixerNet", GMLP_CFG, **MLP_MIXER)
_S16, _B16 = (Published(parameters, None, None, MLP_MIXER_SOURCE) for parameters in (18.0, 59.0))
_mlp_mixer("mlp_mixer_s16", "MLP-Mixer-S/16: 8 blocks of width 512", _S16, embed_dim=512, depth=8)
_mlp_mixer("mlp_mixer_b16", "MLP-Mixer-B/16: 12 blocks of width 768", _B16, embed_dim=768, depth=12)

EAMLP_14: Arguments = {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}
EAMLP_19: Arguments = {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0}
EAMLP_NANO: Arguments = {"embed_dim": 64, "depth": 4, "num_splits": 2, "init": "torch"}
_eamlp = partial(_image, "models.eamlp:EAMLP", {**IMAGENET, **UNFOLDED, "crop_pct": 0.9})
_eamlp("eamlp_7", "EAMLP-7: 7 blocks of width 256", Published(None, None, 71.658, FROM_LOG))
# The author reports +1.1 points; there is no public code.
_eamlp("eamlp_7_bn", "eamlp_7 with BatchNorm in its blocks", norm="batch")
_eamlp("eamlp_14", "EAMLP-14: 14 blocks of width 384", Published(30.0, None, 78.9, FROM_TABLE), **EAMLP_14)
_eamlp("eamlp_19", "EAMLP-19: 19 blocks of width 448", Published(55.0, None, 79.4, FROM_TABLE), **EAMLP_19)
# Fashion-MNIST, 18,000 images seen: 0.63, 0.65 with the layers' initialisation, 0.34, 0.24 with the paper's.
_eamlp_nano = partial(_image, "models.eamlp:EAMLP", {**SMALL, **UNFOLDED}, **EAMLP_NANO)
_eamlp_nano("eamlp_nano", "4 blocks of width 64 after two unfoldings, for images of 28 to 64 px", num_slots=32)
_t2t = partial(_eamlp, attention="softmax", init="torch")
_t2t("t2t_vit_7", "T2T-ViT-7: eamlp_7 with self-attention", Published(4.3, None, None, T2T_SOURCE))
_t2t("t2t_vit_14", "T2T-ViT-14", Published(21.5, None, None, T2T_SOURCE), **EAMLP_14)
_t2t("t2t_vit_19", "T2T-ViT-19", Published(39.2, None, None, T2T_SOURCE), **EAMLP_19)
_eamlp_nano("t2t_vit_nano", "eamlp_nano's skeleton with self-attention", attention="softmax")

EMBED = {"first_conv": "stages.0.embed"}
_lavit = partial(_image, "models.lavit:LaViT", {**IMAGENET, **EMBED, "pool_size": (7, 7)})
_lavit(
    "lavit_tiny",
    "LaViT-T in our layout",
    Published(10.9, 1.6, 79.2, EXTRACTED),
    embed_dims=(48, 96, 240, 432),
    num_heads=(1, 2, 5, 9),
    depths=(2, 2, 5, 3),
    num_vanilla=(2, 2, 2, 1),
)
_lavit("lavit_small", "LaViT-S in our layout", Published(22.4, 3.3, 82.6, EXTRACTED))
LAVIT_BASE: Arguments = {"depths": (3, 3, 14, 5), "num_vanilla": (3, 3, 4, 1)}
_lavit("lavit_base", "LaViT-B in our layout", Published(39.6, 6.1, 83.1, EXTRACTED), **LAVIT_BASE)
_image(
    "models.lavit:LaViT",
    {**SMALL, **EMBED, "pool_size": (2, 2)},
    "lavit_nano",
    "four narrow stages for images of 28 to 64 px",
    patch_size=2,
    embed_dims=(32, 64, 96, 128),
    num_heads=(1, 2, 3, 4),
    depths=(1, 1, 4, 2),
    num_vanilla=(1, 1, 2, 1),
    mlp_ratio=2.0,
)

CONVOLUTIONS: Arguments = {"fixed_input_size": False, "first_conv": "backbone.conv1", "classifier": "backbone.fc"}
THIN: Arguments = {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 128)}
_eanet = partial(_image, "models.eanet:EANet", {**IMAGENET, **CONVOLUTIONS, "pool_size": (7, 7)})
_eanet("eanet_resnet50", "ResNet-50 and the EANet block", backbone="resnet50")
_eanet("eanet_resnet101", "ResNet-101 and the EANet block", backbone="resnet101")
_image(
    "models.eanet:EANet",
    {**SMALL, **CONVOLUTIONS, "pool_size": (4, 4)},
    "eanet_nano",
    "four stages of one basic block for images of 28 to 64 px",
    img_size=32,
    backbone="resnet18",
    stem="small",
    num_slots=32,
    backbone_kwargs=THIN,
)

# Detectors.
RESNET, LAVIT = (f"models.detection.detector:{body}_detector" for body in ("resnet", "lavit"))
RETINA: Arguments = {"octaves": 3, "extra": "p6p7"}
# For objects of 8 to 64 px: maps of stride 4, 8 and 16 only.
DETECTOR_NANO: Arguments = {
    "backbone": "resnet18",
    "backbone_kwargs": {"layers": (1, 1, 1, 1), "channels": (32, 48, 64, 96), "output_stride": 16},
    "norm": "group",
    "levels": (1, 2, 4),
    "min_size": 128,
    "max_size": 256,
    "multiple": 16,
    "img_size": 128,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.25, 0.25, 0.25),
}
HEADS_NANO: Arguments = {
    "width": 48,
    "anchors": (12, 24, 48),
    "extra": "none",
    "hidden": 128,
    "mask": (48, 48),
    "proposals": (300, 200),
    "anchors_learnt": 128,
    "boxes_learnt": 64,
}
RETINA_NANO: Arguments = {
    **DETECTOR_NANO,
    "levels": (2, 4),
    "heads": {**HEADS_NANO, "anchors": (12, 32), "octaves": 3},
}


def _detector(kind: str, build: str, name: str, about: str, **arguments: object) -> None:
    task = "instance-segmentation" if kind == "mask-rcnn" else "detection"
    given: Arguments = {"kind": kind, "heads": {}, **arguments}
    _register((task,), build, None, name, about, **given)


_retina = partial(_detector, "retinanet")
_faster, _mask = partial(_detector, "faster-rcnn"), partial(_detector, "mask-rcnn")
_retina(RESNET, "retinanet_resnet50", "RetinaNet over ResNet-50", heads=RETINA, levels=(2, 3, 4))
_faster(RESNET, "faster_rcnn_resnet50", "Faster R-CNN over ResNet-50")
_mask(RESNET, "mask_rcnn_resnet50", "Mask R-CNN over ResNet-50")
_retina_lavit = partial(_retina, LAVIT, heads=RETINA, levels=(1, 2, 3))
_retina_lavit("retinanet_lavit_tiny", "RetinaNet over LaViT-T")
_retina_lavit("retinanet_lavit_small", "RetinaNet over LaViT-S", backbone="lavit_small")
_mask(LAVIT, "mask_rcnn_lavit_tiny", "Mask R-CNN over LaViT-T")
_mask(LAVIT, "mask_rcnn_lavit_small", "Mask R-CNN over LaViT-S", backbone="lavit_small")
_retina(RESNET, "retinanet_nano", "RetinaNet at nano size", **RETINA_NANO)
_faster(RESNET, "faster_rcnn_nano", "Faster R-CNN at nano size", heads=HEADS_NANO, **DETECTOR_NANO)
_mask(RESNET, "mask_rcnn_nano", "Mask R-CNN at nano size", heads=HEADS_NANO, **DETECTOR_NANO)
_mask(
    LAVIT,
    "mask_rcnn_lavit_nano",
    "Mask R-CNN over LaViT at nano size",
    heads={**HEADS_NANO, "anchors": (12, 24, 48, 96)},
    backbone="lavit_nano",
    backbone_kwargs={"patch_size": 4},
    img_size=128,
)

# GANs: SAGAN's networks with the published widths.
STUDIO = "the authors' logs of PyTorch-StudioGAN, CIFAR-10 with 10 classes at 32 px"
_gan = partial(_register, ("image-generation",), "models.generation:create_gan", None)
_gan("sagan", "SAGAN at the published widths", Published(4.386308, None, None, STUDIO, "generator"), attention="sagan")
_gan("eagan", "the same networks with external attention", attention="external")
_gan("resnet_gan", "the same networks without attention", attention="none")
_gan_nano = partial(_gan, layout="narrowing", width=16, latent_dim=64)
_gan_nano("sagan_nano", "SAGAN at nano size", attention="sagan")
_gan_nano("eagan_nano", "external attention at nano size", attention="external")
_gan_nano("resnet_gan_nano", "no attention at nano size", attention="none")

# Point models: the paper's sizes, the same with external attention, and small ones for short runs. The parameter counts
# of the first two equal the reported ones (test_point_models.py).
POINTS, COUNTED = "models.points:create_point_model", "arXiv:2012.09688, ModelNet40 with 40 classes"
POINTS_NANO: Arguments = {"dim": 64, "fuse_dim": 256, "head_dims": (128, 64), "drop_rate": 0.3}
FEW: Arguments = {"stem_dim": 32, "stage_dims": (48, 64), "centres": (128, 64), "num_neighbours": 16}
ALL: Arguments = {"stem_dim": 32, "stage_dims": (32, 64), "centres": "all", "num_neighbours": 12}
NAIVE: Arguments = {"embedding": "naive", "dim": 128}
_cloud = partial(_register, ("point-classification",), POINTS, None)
_parts = partial(_register, ("point-segmentation",), POINTS, None, parts=True)
_cloud("pct_cls", "PCT with neighbour embedding", Published(2.88, None, None, COUNTED))
_cloud("pct_naive_cls", "PCT point by point (NPCT)", Published(1.36, None, None, COUNTED), **NAIVE)
_parts("pct_part", "PCT for parts, point by point as released", **NAIVE)
_cloud("eapct_cls", "PCT with external attention in its four layers", mixer="external")
_parts("eapct_part", "PCT for parts with external attention in its four layers", mixer="external", **NAIVE)
_cloud_nano, _parts_nano = partial(_cloud, **POINTS_NANO), partial(_parts, **POINTS_NANO, **ALL)
_cloud_nano("pct_cls_nano", "PCT at nano size", **FEW)
_cloud_nano("pct_naive_cls_nano", "NPCT at nano size", embedding="naive")
_parts_nano("pct_part_nano", "PCT for parts at nano size, every point with its neighbours")
_cloud_nano("eapct_cls_nano", "external attention at nano size", mixer="external", **FEW)
_parts_nano("eapct_part_nano", "external attention for parts at nano size", mixer="external")

# Segmenters.
SEGMENTER_NANO: Arguments = {
    "img_size": 64,
    "upsampling": "pixels",
    "backbone": "resnet18",
    "backbone_kwargs": THIN,
    "width": 64,
    "head_width": 64,
}
BLOCK = Published(0.55, None, None, "arXiv:2105.02358, from memory, not looked up", part="block")
EANET_SEG: Arguments = {"mixer": "external", "width": 512, "head_width": 256, "img_size": 513, "upsampling": "corners"}
_eanet_seg = partial(_register, ("semantic-segmentation",), "models.segmentation:EANetSegmenter", None, **EANET_SEG)
_eanet_seg("eanet_seg_resnet50", "dilated ResNet-50 and the EANet block", BLOCK, backbone="resnet50s")
_eanet_seg("eanet_seg_resnet101", "dilated ResNet-101 and the EANet block", BLOCK, backbone="resnet101s")
_eanet_seg("eanet_seg_nano", "the EANet block at nano size", stem="small", output_stride=4, **SEGMENTER_NANO)
_fpn_seg = partial(_register, ("semantic-segmentation",), "models.segmentation:FPNSegmenter", None)
_fpn_seg("fpn_seg_resnet50", "feature pyramid over ResNet-50", backbone="resnet50")
_fpn_seg("fpn_seg_lavit_tiny", "feature pyramid over LaViT-T", backbone="lavit_tiny", img_size=224)
_fpn_seg("fpn_seg_lavit_small", "feature pyramid over LaViT-S", backbone="lavit_small", img_size=224)
_fpn_seg("fpn_seg_lavit_base", "feature pyramid over LaViT-B", backbone="lavit_base", img_size=224)
_fpn_seg("fpn_seg_nano", "feature pyramid at nano size", **SEGMENTER_NANO)

# Text models: the paper's sizes, and small ones with equal parameters. The paper counts two FLOPs per multiply-add.
PRINTED = "arXiv:2105.08050, with a vocabulary of 32,000 and 512 tokens"
_text = partial(
    _register, ("masked-lm", "text-classification", "question-answering"), "text.heads:create_text_model", None
)
# Blocks, width, hidden width, width of tiny attention, millions of parameters and GFLOPs.
_PRINTED_SIZES = {
    "gmlp_text_base": (48, 512, 3072, 0, 130, 158.0),
    "gmlp_text_large": (96, 768, 3072, 0, 365, 430.1),
    "gmlp_text_xlarge": (144, 1024, 4096, 0, 941, 1091.3),
    "amlp_text_base": (36, 512, 3072, 64, 109, 128.9),
    "amlp_text_large": (72, 768, 3072, 128, 316, 370.3),
}
for name, (blocks, width, hidden, tiny, parameters, flops) in _PRINTED_SIZES.items():
    _text(
        name,
        f"{name[0]}MLP-{name.rpartition('_')[2]}: {blocks} blocks of width {width}"
        + (f", tiny attention of width {tiny}" if tiny else ""),
        Published(parameters, flops / 2, None, PRINTED),
        num_hidden_layers=blocks,
        hidden_size=width,
        intermediate_size=hidden,
        tiny_attention_dim=tiny,
    )
_text_nano = partial(_text, vocab_size=8000, hidden_size=128, max_position_embeddings=128)
_text_nano("gmlp_text_nano", "six blocks of width 128, up to 128 tokens", num_hidden_layers=6, intermediate_size=768)
_text_nano(
    "amlp_text_nano",
    "gmlp_text_nano's parameters with tiny attention of width 32",
    num_hidden_layers=5,
    intermediate_size=792,
    tiny_attention_dim=32,
)
_text_nano(
    "bert_text_nano",
    "gmlp_text_nano's parameters with self-attention and learned positions, blocks pre-norm",
    num_hidden_layers=4,
    intermediate_size=599,
    mixer="self",
    num_attention_heads=4,
)
