"""The table "works with" of README: each row as it is written there, or the tests that hold it."""

import re
from pathlib import Path

import pytest
import timm
import torch
import torchvision

import tokenmix
from tokenmix.layers import ExternalAttention

TESTS = Path(__file__).parent
ROWS = {
    "ExternalAttention(256)": ["test_works_with.py::test_a_network_of_one_s_own"],
    'tokenmix.swap_attention(model, "external")': [
        "test_works_with.py::test_vits_of_timm_and_torchvision",
        "swap/test_swap_families.py::test_self_attention_with_its_weights_kept_gives_the_model_s_own_outputs",
        "swap/test_saving.py::test_a_vit_comes_back",
    ],
    'tokenmix.insert(model, after="layer3", mixer="external")': [
        "test_works_with.py::test_a_resnet_a_segmenter_and_a_detector",
        "swap/test_insert.py::test_models_of_other_libraries",
        "swap/test_insert.py::test_a_unet_of_monai_in_three_dimensions",
        "swap/test_insert.py::test_a_unet_of_segmentation_models_pytorch",
    ],
    "- [-1, 1, TokenMix, [ch, f, external]]": ["swap/test_ultralytics.py::test_widths_follow_the_scale"],
    "tokenmix distill DIR --to linear --text lines.txt --out DIR2": [
        "cli/test_distill_command.py::test_a_folder_becomes_a_folder"
    ],
    "tokenmix doctor my_layers:MyAttention": ["test_own_mixer.py::test_the_doctor_skips_the_map_that_it_does_not_have"],
}


def test_each_row_has_a_test() -> None:
    table = (TESTS.parent / "README.md").read_text().split("## Works with")[1].split("\n\n")[1]
    written = [re.findall(r"`([^`]+)`", line.split(" | ")[1])[0] for line in table.splitlines()[2:]]
    assert written == list(ROWS)
    for file, _, name in (test.partition("::") for tests in ROWS.values() for test in tests):
        assert f"def {name}(" in (TESTS / file).read_text(), name


def test_a_network_of_one_s_own() -> None:
    x = torch.randn(2, 9, 256)
    assert ExternalAttention(256)(x).shape == x.shape


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_vits_of_timm_and_torchvision(library: str) -> None:
    if library == "timm":
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    else:
        model = torchvision.models.VisionTransformer(32, 16, 2, 2, 32, 64)
    report = tokenmix.swap_attention(model, "external")
    assert [row.kept for row in report.rows] == [("query", "out")] * 2
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 1000)


@pytest.mark.parametrize("name", ["resnet18", "fcn_resnet50", "fasterrcnn_resnet50_fpn"])
@torch.no_grad()
def test_a_resnet_a_segmenter_and_a_detector(name: str) -> None:
    whole = name.startswith("resnet")
    weights = {"weights": None} if whole else {"weights": None, "weights_backbone": None}
    model = torchvision.models.get_model(name, **weights).eval()
    x = torch.rand(1, 3, 64, 64)
    after = {"resnet18": "layer3", "fcn_resnet50": "backbone.layer3"}.get(name, "backbone.body.layer3")
    before = model(x)
    tokenmix.insert(model, after=after, mixer="external", example_inputs=(x,))
    values = [list(out.values()) if isinstance(out, dict) else [out] for out in (before, model(x))]
    if name.startswith("faster"):
        values = [list(out[0].values()) for out in (before, model(x))]
    assert all(torch.equal(one, two) for one, two in zip(*values, strict=True))
