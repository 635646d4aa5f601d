"""Every registered model is what its name promises: its size and its mixer."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import timm

import tokenmix
from tokenmix import UserError, list_models
from tokenmix.lab.registry import TASKS
from tokenmix.models import GMLP
from tokenmix.models.registry import create_on_meta
from tokenmix.registry import MODELS
from tokenmix.text import create_config, describe

DOCS = Path(__file__).parents[2] / "docs"
CLASSIFIERS = list_models(task="image-classification")
TEXT = list_models(task="masked-lm")
POINTS = [*list_models(task="point-classification"), *list_models(task="point-segmentation")]

EXPECTED: dict[str, tuple[str, int]] = {
    "mixer_nano": ("self", 128_938),
    "mixer_small": ("self", 1_161_930),
    "vit_nano": ("self", 141_898),
    "amlp_nano": ("gating-attention", 163_530),
    "amlp_small": ("gating-attention", 22_400_576),
    "amlp_tiny": ("gating-attention", 7_359_168),
    "gmlp_base": ("gating", 73_075_392),
    "gmlp_nano": ("gating", 121_674),
    "gmlp_small": ("gating", 19_422_656),
    "gmlp_tiny": ("gating", 5_867_328),
    "eamlp_7": ("multihead-external", 6_096_206),
    "eamlp_7_bn": ("multihead-external", 6_096_206),
    "eamlp_14": ("multihead-external", 29_801_422),
    "eamlp_19": ("multihead-external", 54_470_798),
    "eamlp_nano": ("multihead-external", 272_640),
    "mlp_mixer_s16": ("token-mlp", 18_528_264),
    "mlp_mixer_b16": ("token-mlp", 59_880_472),
    "t2t_vit_7": ("self", 4_255_694),
    "t2t_vit_14": ("self", 21_465_806),
    "t2t_vit_19": ("self", 39_085_070),
    "t2t_vit_nano": ("self", 188_928),
    "lavit_base": ("less", 40_162_075),
    "lavit_nano": ("less", 638_719),
    "lavit_small": ("less", 22_644_707),
    "lavit_tiny": ("less", 10_900_149),
    "eanet_nano": ("external-2d", 381_898),
    "eanet_resnet50": ("external-2d", 34_213_928),
    "eanet_resnet101": ("external-2d", 53_206_056),
    "eanet_seg_resnet50": ("external", 34_846_933),
    "eanet_seg_resnet101": ("external", 53_839_061),
    "eanet_seg_nano": ("external", 468_053),
    "fpn_seg_resnet50": ("none", 26_118_613),
    "fpn_seg_lavit_tiny": ("less", 12_302_722),
    "fpn_seg_lavit_small": ("less", 23_924_880),
    "fpn_seg_lavit_base": ("less", 41_442_248),
    "fpn_seg_nano": ("none", 623_893),
    "retinanet_resnet50": ("external-2d", 42_496_820),
    "faster_rcnn_resnet50": ("external-2d", 50_414_052),
    "mask_rcnn_resnet50": ("external-2d", 53_057_589),
    "retinanet_lavit_tiny": ("less", 27_640_113),
    "retinanet_lavit_small": ("less", 41_708_039),
    "mask_rcnn_lavit_tiny": ("less", 38_147_730),
    "mask_rcnn_lavit_small": ("less", 52_219_784),
    "retinanet_nano": ("external-2d", 861_940),
    "faster_rcnn_nano": ("external-2d", 782_148),
    "mask_rcnn_nano": ("external-2d", 836_949),
    "mask_rcnn_lavit_nano": ("less", 1_242_978),
    "pct_cls": ("offset", 2_876_136),
    "pct_naive_cls": ("offset", 1_360_552),
    "pct_part": ("offset", 2_446_130),
    "eapct_cls": ("external", 2_941_672),
    "eapct_part": ("external", 2_495_282),
    "pct_cls_nano": ("offset", 190_088),
    "pct_naive_cls_nano": ("offset", 152_488),
    "pct_part_nano": ("offset", 261_330),
    "eapct_cls_nano": ("external", 218_760),
    "eapct_part_nano": ("external", 290_002),
    "sagan": ("sagan", 5_461_894),
    "eagan": ("external-2d", 5_573_636),
    "resnet_gan": ("none", 5_359_492),
    "sagan_nano": ("sagan", 630_502),
    "eagan_nano": ("external-2d", 640_420),
    "resnet_gan_nano": ("none", 627_940),
    "gmlp_text_base": ("gating-toeplitz", 130_106_576),
    "gmlp_text_large": ("gating-toeplitz", 365_308_064),
    "gmlp_text_xlarge": ("gating-toeplitz", 940_616_816),
    "amlp_text_base": ("gating-attention", 108_824_540),
    "amlp_text_large": ("gating-attention", 315_661_496),
    "gmlp_text_nano": ("gating-toeplitz", 1_931_066),
    "amlp_text_nano": ("gating-attention", 1_931_847),
    "bert_text_nano": ("self", 1_931_420),
}
"""The mixer of the model as its name alone builds it, and its parameters."""


@functools.cache
def counted(name: str) -> Any:
    """The model, without memory."""
    return create_on_meta(name)


described = functools.cache(describe)


def test_every_model_is_here_and_is_trained_by_tasks_that_exist() -> None:
    assert set(list_models()) == set(EXPECTED)
    for entry in MODELS:
        assert entry.about
        assert entry.tasks
        assert all(task in TASKS for task in entry.tasks)


# Spectral norm makes a GAN slow to build; tests/tasks/generation counts its parameters too.
SLOW = {name for name in EXPECTED if "gan" in name} - {"sagan_nano"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EXPECTED if n not in TEXT]
)
def test_size_and_mixer(name: str) -> None:
    model = counted(name)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert (model.mixer_name, sum(p.numel() for p in model.parameters())) == EXPECTED[name]
    assert all(hasattr(model, part) for part in ("macs", "cost_table", "warnings", "num_tokens")) or name in POINTS


@pytest.mark.parametrize("name", TEXT)
def test_a_text_model_says_its_mixer(name: str) -> None:
    assert (described(name)["mixer"], described(name)["parameters"]) == EXPECTED[name]


@pytest.mark.parametrize("name", [n for n in CLASSIFIERS if not n.endswith("_nano")])
def test_counts_in_a_presets_docstring_are_the_models_own(name) -> None:
    """Those of a paper have "paper" before them."""
    model, text = counted(name), timm.models.model_entrypoint(name).__doc__ or ""
    counts = {"M parameters": sum(p.numel() for p in model.parameters()) / 1e6, "GMAC": model.macs() / 1e9}
    for unit, count in counts.items():
        for written in re.findall(rf"(?<!paper )(?<![\d.])([\d.]+) {unit}", text):
            assert written == f"{count:.{len(written.partition('.')[2])}f}"


def test_model_table_is_counted() -> None:
    """One row for each model, with our own count of parameters and multiply-adds."""
    page = (DOCS / "models" / "index.md").read_text()
    rows = {
        m[1]: m for m in re.finditer(r"^\| `(\w+)` \|[^|]*\| (\d+) \| ([\d.]+) M \| ([\d.]+) \|", page, re.MULTILINE)
    }
    assert set(rows) | {"eamlp_7_bn"} == set(CLASSIFIERS)
    for name, row in rows.items():
        model = counted(name)
        million = sum(p.numel() for p in model.parameters()) / 1e6
        assert (int(row[2]), row[3]) == (model.img_size[0], f"{million:.2f}")
        digits = len(row[4].partition(".")[2])
        assert row[4] == f"{model.macs() / 1e9:.{digits}f}"


def test_the_documented_table_is_counted() -> None:
    page = (DOCS / "guides/text.md").read_text()
    rows = {m[1]: m[0].split("|")[2:-1] for m in re.finditer(r"^\| `(\w+)` .*$", page, re.MULTILINE)}
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows.items() if name in TEXT}
    assert set(rows) == set(TEXT)
    for name, (depth, width, tiny, parameters, paper, flops, published) in rows.items():
        summary, config = described(name), create_config(name)
        assert (depth, width) == (str(config.num_hidden_layers), str(config.hidden_size))
        assert tiny == str(config.tiny_attention_dim or "")
        digits = len(parameters.partition(".")[2]) - 2
        assert parameters == f"{summary['parameters'] / 1e6:.{digits}f} M"
        if paper:
            assert paper == f"{summary['published parameters, millions']} M"
            ours = summary["preset's GFLOPs"]
            assert (flops, published) == (f"{ours:.1f}", f"{summary['published GFLOPs']:.1f}")


def test_the_class_and_both_factories_take_the_same_arguments() -> None:
    given: dict[str, Any] = {"depth": 2, "embed_dim": 16, "img_size": 32, "num_classes": 3, "device": "meta"}
    direct = GMLP(**given)
    shapes = {key: value.shape for key, value in direct.state_dict().items()}
    for create in (tokenmix.create_model, timm.create_model):
        named = create("gmlp_tiny", **given)
        assert {key: value.shape for key, value in named.state_dict().items()} == shapes


def test_an_unknown_argument_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"has no argument 'wide'; it takes attention_dim, .*depth, .*num_classes"):
        tokenmix.create_model("gmlp_tiny", wide=1)
