"""What a verb does not use it does not import: which packages are loaded in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

PACKAGES = {
    *("accelerate", "datasets", "lightning", "matplotlib", "onnx", "pandas", "scipy", "sklearn"),
    *("tensorboard", "timm", "torchmetrics", "transformers"),
}
LOADED = f"""
import sys
from tokenmix.lab.cli import main
code = main(sys.argv[1:])
print("loaded", *sorted({PACKAGES!r} & set(sys.modules)))
sys.exit(code)
"""


def loaded(cwd: Path, *words: object) -> set[str]:
    """The packages of the list that the command loads."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder with images and a run on them, and what training loaded."""
    root = tmp_path_factory.mktemp("startup")
    for part in ("train", "test"):
        for label, name in enumerate("ab"):
            (root / "data" / part / name).mkdir(parents=True)
            for i in range(4):
                pixels = torch.randint(0, 256, (32, 32), dtype=torch.uint8).numpy() // (1 + label)
                Image.fromarray(pixels).save(root / "data" / part / name / f"{i}.png")
    options = "--model vit_nano --img-size 32 --max-steps 1 --batch-size 4 --validation 0 --device cpu".split()  # noqa: SIM905
    return root, loaded(root, "train", "image-classification", "--data", "folder:data", *options, "--out", "run")


def test_training_on_images(images: tuple[Path, set[str]]) -> None:
    assert images[1] <= {"timm"}


@pytest.mark.parametrize(
    ("words", "used"),
    [
        ("info gmlp_small", {"timm"}),
        ("cost external --tokens 16 --dim 8", set()),
        ("eval run", {"timm"}),
        ("predict run data/test/a/0.png", {"timm"}),
        pytest.param("inspect run data/test/a/0.png --out maps", {"timm", "matplotlib"}, marks=pytest.mark.slow),
        pytest.param("export run --format torch-export", {"timm"}, marks=pytest.mark.slow),
    ],
)
def test_a_verb_loads_what_it_uses(images: tuple[Path, set[str]], words: str, used: set[str]) -> None:
    assert loaded(images[0], *words.split()) <= used


@pytest.mark.slow
def test_text_needs_no_timm_but_for_its_optimiser(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the dog saw the cat\n" * 400)
    options = "--seq-len 16 --vocab-size 300 --max-steps 1 --batch-size 4 --validation 0 --device cpu".split()  # noqa: SIM905
    loaded(tmp_path, "train", "masked-lm", "--data", "text:text.txt", *options, "--out", "run")
    for words in (["eval", "run"], ["predict", "run", "the [MASK] saw the cat"]):
        assert not loaded(tmp_path, *words) & {"timm", "torchmetrics", "lightning", "matplotlib", "tensorboard"}
