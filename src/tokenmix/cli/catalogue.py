"""What `tokenmix list models` says of each model.

It is written down because building them all takes ten seconds, most of it importing what they are made of;
tests/cli/test_catalogue.py builds them and holds every row to what it finds.
"""

from typing import NamedTuple

__all__ = ["MODELS", "Row"]


class Row(NamedTuple):
    """A model as its name alone builds it."""

    name: str
    task: str
    parameters: int
    mixer: str


MODELS: tuple[Row, ...] = (
    Row("mixer_nano", "image-classification", 141_898, "self"),
    Row("vit_nano", "image-classification", 141_898, "self"),
    Row("amlp_nano", "image-classification", 163_530, "gating-attention"),
    Row("amlp_small", "image-classification", 22_400_576, "gating-attention"),
    Row("amlp_tiny", "image-classification", 7_359_168, "gating-attention"),
    Row("gmlp_base", "image-classification", 73_075_392, "gating"),
    Row("gmlp_nano", "image-classification", 121_674, "gating"),
    Row("gmlp_small", "image-classification", 19_422_656, "gating"),
    Row("gmlp_tiny", "image-classification", 5_867_328, "gating"),
    Row("eamlp_7", "image-classification", 6_096_206, "multihead-external"),
    Row("eamlp_7_bn", "image-classification", 6_096_206, "multihead-external"),
    Row("eamlp_14", "image-classification", 29_801_422, "multihead-external"),
    Row("eamlp_19", "image-classification", 54_470_798, "multihead-external"),
    Row("eamlp_nano", "image-classification", 272_640, "multihead-external"),
    Row("lavit_base", "image-classification", 40_162_075, "less"),
    Row("lavit_nano", "image-classification", 638_719, "less"),
    Row("lavit_small", "image-classification", 22_644_707, "less"),
    Row("lavit_tiny", "image-classification", 10_900_149, "less"),
    Row("eanet_nano", "image-classification", 381_898, "external-2d"),
    Row("eanet_resnet50", "image-classification", 34_213_928, "external-2d"),
    Row("eanet_resnet101", "image-classification", 53_206_056, "external-2d"),
    Row("eanet_seg_resnet50", "semantic-segmentation", 34_846_933, "external"),
    Row("eanet_seg_resnet101", "semantic-segmentation", 53_839_061, "external"),
    Row("eanet_seg_nano", "semantic-segmentation", 468_053, "external"),
    Row("fpn_seg_resnet50", "semantic-segmentation", 26_118_613, "none"),
    Row("fpn_seg_lavit_tiny", "semantic-segmentation", 12_302_722, "less"),
    Row("fpn_seg_lavit_small", "semantic-segmentation", 23_924_880, "less"),
    Row("fpn_seg_lavit_base", "semantic-segmentation", 41_442_248, "less"),
    Row("fpn_seg_nano", "semantic-segmentation", 623_893, "none"),
    Row("retinanet_resnet50", "detection", 42_496_820, "external-2d"),
    Row("faster_rcnn_resnet50", "detection", 50_414_052, "external-2d"),
    Row("mask_rcnn_resnet50", "instance-segmentation", 53_057_589, "external-2d"),
    Row("retinanet_lavit_tiny", "detection", 27_640_113, "less"),
    Row("retinanet_lavit_small", "detection", 41_708_039, "less"),
    Row("mask_rcnn_lavit_tiny", "instance-segmentation", 38_147_730, "less"),
    Row("mask_rcnn_lavit_small", "instance-segmentation", 52_219_784, "less"),
    Row("retinanet_nano", "detection", 861_940, "external-2d"),
    Row("faster_rcnn_nano", "detection", 782_148, "external-2d"),
    Row("mask_rcnn_nano", "instance-segmentation", 836_949, "external-2d"),
    Row("pct_cls", "point-classification", 2_876_136, "offset"),
    Row("pct_naive_cls", "point-classification", 1_360_552, "offset"),
    Row("pct_part", "point-segmentation", 2_446_130, "offset"),
    Row("eapct_cls", "point-classification", 2_941_672, "external"),
    Row("eapct_part", "point-segmentation", 2_495_282, "external"),
    Row("pct_cls_nano", "point-classification", 190_088, "offset"),
    Row("pct_naive_cls_nano", "point-classification", 152_488, "offset"),
    Row("pct_part_nano", "point-segmentation", 261_330, "offset"),
    Row("eapct_cls_nano", "point-classification", 218_760, "external"),
    Row("eapct_part_nano", "point-segmentation", 290_002, "external"),
    Row("sagan", "image-generation", 5_461_894, "sagan"),
    Row("eagan", "image-generation", 5_573_636, "external-2d"),
    Row("resnet_gan", "image-generation", 5_359_492, "none"),
    Row("sagan_nano", "image-generation", 630_502, "sagan"),
    Row("eagan_nano", "image-generation", 640_420, "external-2d"),
    Row("resnet_gan_nano", "image-generation", 627_940, "none"),
    Row("gmlp_text_base", "text", 130_106_576, "gating-toeplitz"),
    Row("gmlp_text_large", "text", 365_308_064, "gating-toeplitz"),
    Row("gmlp_text_xlarge", "text", 940_616_816, "gating-toeplitz"),
    Row("amlp_text_base", "text", 108_824_540, "gating-attention"),
    Row("amlp_text_large", "text", 315_661_496, "gating-attention"),
    Row("gmlp_text_nano", "text", 1_931_066, "gating-toeplitz"),
    Row("amlp_text_nano", "text", 1_931_847, "gating-attention"),
    Row("bert_text_nano", "text", 1_931_420, "self"),
)
