"""What the papers print for our presets, and how far each figure can be trusted."""

from dataclasses import dataclass

__all__ = ["PUBLISHED", "Published"]


@dataclass(frozen=True)
class Published:
    """Figures of image classifiers at 224 px on ImageNet-1k, of others as `source` says; None where nothing is printed.

    Attributes:
        parameters: millions.
        macs: billions of multiply-adds.
        top1: per cent.
        source: where the figures were read. None of the accuracies was reproduced here.
        part: the figures are of this part of the model alone, a row of `tokenmix info`.
    """

    parameters: float | None
    macs: float | None
    top1: float | None
    source: str
    part: str | None = None


GMLP = "arXiv:2105.08050, tables 1 and 2, from a third party's extraction; parameters and MACs checked by our count"
LAVIT = "arXiv:2406.00427, from a third party's extraction; the layout is ours, none was published"
EAMLP = "a third party's table; parameters checked against the released checkpoint layout"
EANET = "arXiv:2105.02358, from memory, not looked up"
STUDIO = "the authors' logs of PyTorch-StudioGAN, CIFAR-10 with 10 classes at 32 px"
PCT = "arXiv:2012.09688, ModelNet40 with 40 classes"

PUBLISHED: dict[str, Published] = {
    "gmlp_tiny": Published(5.9, 1.4, 72.3, GMLP),
    "gmlp_small": Published(19.5, 4.5, 79.6, GMLP),
    "gmlp_base": Published(73.4, 15.8, 81.6, GMLP),
    "eamlp_7": Published(
        None, None, 71.658, "the authors' released log of a run at 384 px; no parameter count is printed"
    ),
    "eamlp_14": Published(30.0, None, 78.9, EAMLP),
    "eamlp_19": Published(55.0, None, 79.4, EAMLP),
    "lavit_tiny": Published(10.9, 1.6, 79.2, LAVIT),
    "lavit_small": Published(22.4, 3.3, 82.6, LAVIT),
    "lavit_base": Published(39.6, 6.1, 83.1, LAVIT),
    "eanet_seg_resnet50": Published(0.55, None, None, EANET, part="block"),
    "eanet_seg_resnet101": Published(0.55, None, None, EANET, part="block"),
    "sagan": Published(4.386308, None, None, STUDIO, part="generator"),
    "pct_cls": Published(2.88, None, None, PCT),
    "pct_naive_cls": Published(1.36, None, None, PCT),
}
