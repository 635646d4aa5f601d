"""A comparison in a model of torchvision's, and in one that a user's function builds."""

import json
from pathlib import Path

import pytest

from verbs import printed

BUDGET = ["--data", "digits", "--max-steps", "2", "--batch-size", "8", "--limit", "32", "--limit-eval", "16"]
VIT = """
from torchvision.models import VisionTransformer

def make(num_classes, img_size):
    return VisionTransformer(img_size, 4, 1, 2, 16, 32, num_classes=num_classes)
"""


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            ["torchvision:shufflenet_v2_x0_5", "--insert-after", "stage3", "--img-size", "32", "--mixers", "external"],
            ["none", "external", "identity"],
        ),
        (["their_vit:make", "--mixers", "external,gating"], ["original", "external", "gating", "identity"]),
    ],
)
@pytest.mark.usefixtures("few_tokens")
def test_compare(
    words: list[str],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "their_vit.py").write_text(VIT)
    monkeypatch.syspath_prepend(tmp_path)
    printed(capsys, "compare", "--model", *words, *BUDGET, "--jobs", "0", "--out", str(tmp_path / "out"))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in results["variants"]] == names
    macs = {row["name"]: row["macs"] for row in results["variants"]}
    assert macs[names[0]] != macs["external"], "counted in the model compared"
    assert all(run["status"] == "finished" for row in results["variants"] for run in row["runs"])
