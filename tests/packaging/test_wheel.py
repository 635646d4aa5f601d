"""The wheel and the sdist, built and installed where nothing but what an extra declares can be imported.

A clean environment has no pip and no network: its site-packages holds links to exactly those installed distributions
that the extra requires, by their own metadata, and the wheel.
"""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from distributions import ROOT, installed, missing, requirements, top_levels

from tokenmix import errors

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def environment(folder: Path, wheel: Path, *extras: str) -> tuple[Path, Run]:
    """Site-packages of a new environment with the core, these extras and the wheel; and what runs a command there."""
    lines = requirements(*extras)
    if (absent := missing(lines)) is not None:
        pytest.skip(f"{absent} is not installed here")
    found = installed(lines)
    venv.create(folder / "venv", with_pip=False)
    site = folder / "venv" / "lib" / PYTHON / "site-packages"
    for one in found.values():
        for name in top_levels([one]):
            target = Path(str(one.locate_file(name))).absolute()
            if target.exists() and not (site / name).exists():
                (site / name).symlink_to(target)
    here = folder / "elsewhere"
    here.mkdir()
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(here), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        program = [str(folder / "venv" / "bin" / command[0]), *command[1:]]
        return subprocess.run(program, cwd=here, env=clean, capture_output=True, text=True, check=False)

    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, env={**os.environ, **clean})
    return site, run


def wheel_of(built: Path) -> Path:
    return next(built.glob("*.whl"))


RECIPE = ROOT / "recipes" / "classification" / "eamlp_384.toml"
SMOKE: dict[str, str] = {
    "": """
from tokenmix.layers import ExternalAttention
assert ExternalAttention(16)(torch.randn(2, 5, 16)).shape == (2, 5, 16)
from tokenmix.profiling import cost_table
assert cost_table(["external"], [8], 16, repeats=1).rows
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
assert tokenmix.swap_attention(encoder, "external", example_inputs=(torch.zeros(1, 5, 16),)).rows
from tokenmix.testing.doctor import doctor
""",
    "vision": """
model = tokenmix.create_model("vit_nano").eval()
images = torch.randn(1, model.in_chans, *model.img_size)
assert model(images).shape == (1, 10)
tokenmix.optimize(model, images)
assert tokenmix.swap_attention(tokenmix.create_model("vit_tiny_patch16_224"), "external").rows
""",
    "train": """
from pathlib import Path
from tokenmix.lab.train import make_config, train, evaluate
train(make_config("image-classification", data="digits", limit=256, limit_eval=32, epochs=1, out="run"))
evaluate(Path("run"))
""",
    "text": """
import tokenmix.text
from tokenmix.lab.tasks.text.tokenizer import train_tokenizer
model = tokenmix.create_model("gmlp_text_nano")
assert model(torch.zeros(1, 8, dtype=torch.long)).logits.shape[:2] == (1, 8)
""",
    "points": """
assert tokenmix.create_model("pct_cls_nano", num_classes=3).eval()(torch.randn(1, 128, 3)).shape == (1, 3)
from tokenmix.lab.tasks.points.files import read_points
from tokenmix.lab.tasks.points.ply import write_ply
tokenmix.lab.registry.get_task("point-classification")
""",
    "detection": """
from tokenmix.lab.tasks.detection.metrics import object_metrics
object_metrics("masks", ["a", "b"])
""",
    "pandas": """
assert len(tokenmix.cost("external", [8], dim=16, repeats=1).to_pandas()) == 2
""",
    "lightning": """
from tokenmix.lab.train.lightning import LightningTask
import lightning
assert issubclass(LightningTask, lightning.LightningModule)
""",
    "onnx": """
from pathlib import Path
from tokenmix.lab.train import make_config, train
from tokenmix.lab.train.export import export
train(make_config("image-classification", data="digits", limit=256, limit_eval=32, epochs=1, out="run"))
export(Path("run"), "onnx", None)
""",
    "streaming": """
import fsspec
from tokenmix.lab.data import lookup
assert all(fsspec.get_filesystem_class(name) for name in ("s3", "gs", "https", "hf"))
""",
    "tensorboard": """
from pathlib import Path
from tokenmix.lab.train import make_config, train
small = dict(limit=256, limit_eval=32, epochs=1)
train(make_config("image-classification", data="digits", logger="tensorboard", out=Path("shown"), **small))
assert any(Path("shown/tensorboard").iterdir())
""",
    "wandb": """
import os
from pathlib import Path
from tokenmix.lab.train import make_config, train
os.environ["WANDB_MODE"] = "offline"
small = dict(limit=256, limit_eval=32, epochs=1)
train(make_config("image-classification", data="digits", logger="wandb", out=Path("logged"), **small))
""",
    "mlflow": """
import os
from pathlib import Path
from tokenmix.lab.train import make_config, train
os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_TRACKING_URI="file:mlruns")
small = dict(limit=256, limit_eval=32, epochs=1)
train(make_config("image-classification", data="digits", logger="mlflow", out=Path("tracked"), **small))
""",
    "ray": "import ray, tokenmix.lab.grid",
    "slurm": "import submitit, tokenmix.lab.grid",
    "fid": """
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from tokenmix.lab.tasks.generation.features import frechet_distance
""",
}


@pytest.mark.parametrize("extra", ["", *errors.EXTRAS], ids=lambda extra: extra or "core")
def test_each_extra_is_enough(extra: str, built: Path, tmp_path: Path) -> None:
    _, run = environment(tmp_path, wheel_of(built), *filter(None, [extra]))
    done = run("python", "-c", f"import torch, tokenmix\n{SMOKE[extra]}\nprint(tokenmix.__file__)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path) in done.stdout
    command = run("tokenmix", "list", "mixers")
    if extra in ("", "vision"):
        assert (command.returncode, command.stderr) == (
            2,
            "tokenmix: the tokenmix command needs tyro: pip install 'tokenmix[train]'\n",
        )
    else:
        assert command.returncode == 0, command.stderr


def test_all_works_and_writes_nothing_into_its_packages(built: Path, tmp_path: Path) -> None:
    """Every smoke test, a comparison with its report, and a recipe file; site-packages may be read-only."""
    site, run = environment(
        tmp_path,
        wheel_of(built),
        *[e for e in ("all",) if missing(requirements(e)) is None] or ["text", "points", "detection", "onnx"],
    )
    before = sorted(site.rglob("*"))
    for extra in set(SMOKE) - {"onnx", "fid"}:
        done = run("python", "-c", f"import torch, tokenmix\n{SMOKE[extra]}")
        assert done.returncode == 0, f"{extra}: {done.stdout + done.stderr}"
    words = "compare --mixers self,external --data digits --limit 256 --limit-eval 32 --epochs 1 --out report"
    for command in (words.split(), ["list", "data"], ["train", "--recipe", str(RECIPE), "--help"]):
        done = run("tokenmix", *command)
        assert done.returncode == 0, f"{command}: {done.stdout + done.stderr}"
    page = next((tmp_path / "elsewhere" / "report").glob("*.html")).read_text()
    assert "<style>" in page
    assert "<script" in page
    assert sorted(site.rglob("*")) == before


def test_what_the_archives_hold(built: Path) -> None:
    wheel = zipfile.ZipFile(wheel_of(built))
    names = wheel.namelist()
    page = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode().partition("\n\n")[2]
    # A package index shows the README without pictures, their captions and relative links.
    assert "One command measures cost and accuracy on your data.\n\n## Works with" in page.replace("\r", "")
    assert "](docs" not in page
    wanted = ["tokenmix/py.typed", *(f"tokenmix/lab/compare/report.{kind}" for kind in ("css", "js", "html"))]
    wanted += [f"tokenmix/lab/compare/{name}.html" for name in ("grid", "notebook", "table")]
    assert set(wanted) <= set(names)
    assert not [name for name in names if name.endswith((".toml", ".json", ".safetensors", ".md"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith("tokenmix") for name in names)
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "src/tokenmix/py.typed", "tests/conftest.py"} <= held
    assert not [name for name in held if name.startswith((".venv", "runs", "demo", "site"))]
