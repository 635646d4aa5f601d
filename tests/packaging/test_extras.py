"""What the core imports, which extra brings each package, and what is said where one is missing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import EXTRAS, ROOT, STANDARD, installed, modules, requirements
from packaging.requirements import Requirement

from tokenmix import errors

# A finder that leaves out what is hidden, for `import` and `importlib.util.find_spec` alike.
HIDING = """
import sys, importlib.machinery
class Hiding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if hidden(fullname.partition(".")[0]) else super().find_spec(fullname, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hiding
"""
NAMES = {
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "torch-fidelity": "torch_fidelity",
}
"""Modules of distributions with another name."""


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_core_needs_torch_safetensors_and_numpy_only() -> None:
    """Layers, their tests, their cost and swaps run where no module of another distribution can be found."""
    there = sorted({*modules(installed(requirements()).values()), "tokenmix", "recipes"} | STANDARD)
    done = python(f"""
there = set({there!r})
hidden = lambda name: name not in there and not name.startswith("_sysconfigdata")
{HIDING}
import torch, tokenmix
from tokenmix.layers import ExternalAttention
# It takes as long to import as torch itself.
assert "torch._dynamo" not in sys.modules
layer = ExternalAttention(16, num_slots=4)
assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16)

from tokenmix.testing.doctor import examine
assert all(v.status != "FAIL" for v in examine(lambda: layer, torch.randn(2, 5, 16), only=["batch"]))

encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
report = tokenmix.swap_attention(encoder, "external", example_inputs=(torch.zeros(1, 5, 16),))
assert "whole model" in str(report)

from tokenmix.profiling import cost, cost_table
cost.SAMPLE = 0.0
table = cost_table(["external"], [8], 16, repeats=1)
assert table.row("external", 8).macs == table.row("external", 8).macs > 0
try:
    cost_table(["externl"], [8])
except ImportError as error:
    print(error)

assert len(tokenmix.list_mixers()) > 5
assert "vit_nano" in tokenmix.list_models()
assert "image-classification" in tokenmix.list_tasks()
assert "digits" in [info.name for info in tokenmix.lab.data.list_data()]
for name in ("checkpoints", "losses", "ops", "testing", "environment"):
    __import__("tokenmix." + name)
for statement in {list(LACKING)!r}:
    try:
        exec(statement)
    except tokenmix.errors.MissingExtra as error:
        print(error)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "unknown mixer 'externl'; did you mean external?; if it is a model: "
        "tokenmix.models needs timm: pip install 'tokenmix[vision]'",
        *LACKING.values(),
    ]


LACKING = {
    "import tokenmix.models": "tokenmix.models needs timm: pip install 'tokenmix[vision]'",
    "tokenmix.create_model": "tokenmix.models needs timm: pip install 'tokenmix[vision]'",
    "tokenmix.optimize": "tokenmix.models needs timm: pip install 'tokenmix[vision]'",
    "import tokenmix.lab.train": "tokenmix.lab.train needs tyro: pip install 'tokenmix[train]'",
    "tokenmix.lab.registry.get_task('image-classification')": (
        "tokenmix.lab.train needs tyro: pip install 'tokenmix[train]'"
    ),
    "import tokenmix.text": "tokenmix.text needs transformers: pip install 'tokenmix[text]'",
}
"""What is raised where a statement finds no module of any extra."""


def test_a_command_says_which_extra_it_lacks() -> None:
    extras = {module for names in errors.EXTRAS.values() for module in names}
    done = python(f"""
import sys, tokenmix.layers
assert not {extras!r} & {{name.partition(".")[0] for name in sys.modules}}
absent = set()
hidden = absent.__contains__
{HIDING}
import runpy
def lacking(module, argv, program="tokenmix"):
    absent.clear()
    absent.add(module)
    for name in [name for name in sys.modules if hidden(name.partition(".")[0])]:
        del sys.modules[name]
    sys.argv = ["tokenmix", *argv]
    try:
        runpy.run_module(program, run_name="__main__")
    except SystemExit as stop:
        print(stop.code)
lacking("tyro", [])
lacking("rich", ["list", "mixers"])
lacking("transformers", ["info", "gmlp_text_nano"])
lacking("PIL", [], "recipes.demo")  # the last, since it leaves a half-imported matplotlib
""")
    assert done.stdout.split() == ["2"] * 4
    assert done.stderr.splitlines() == [
        "tokenmix: the tokenmix command needs tyro: pip install 'tokenmix[train]'",
        "tokenmix: tokenmix list needs rich: pip install 'tokenmix[train]'",
        "tokenmix: tokenmix.text needs transformers: pip install 'tokenmix[text]'",
        "tokenmix: the demo needs PIL: pip install 'tokenmix[vision]'",
    ]


def test_training_and_comparing_need_no_lightning() -> None:
    done = python(f"""
hidden = {{"lightning", "pandas"}}.__contains__
{HIDING}
import tokenmix.lab.compare.compare, tokenmix.lab.train.run, tokenmix.lab.inspect, tokenmix.lab.grid
from tokenmix.lab.registry import get_task, list_tasks
for name in list_tasks():
    get_task(name)
""")
    assert done.returncode == 0, done.stderr


def test_a_package_inside_of_a_verb_is_one_line_too(monkeypatch, capsys) -> None:
    """Of verbs that import a package in a function of theirs without saying what for."""
    from tokenmix.lab.cli import command

    def train(argv):
        import trimesh  # noqa: F401

    monkeypatch.setitem(sys.modules, "trimesh", None)
    monkeypatch.setattr(command, "parse", train)
    assert command.run_command(["train"]) == 2
    assert capsys.readouterr().err == "tokenmix: tokenmix train needs trimesh: pip install 'tokenmix[points]'\n"


def test_a_missing_package_of_nobody_is_not_hidden(monkeypatch) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), errors.needs("this"):
        import no_such_package  # noqa: F401  # type: ignore[import-not-found]


def test_what_a_function_needs(monkeypatch) -> None:
    import torch

    from tokenmix.lab.tasks.detection.metrics import object_metrics
    from tokenmix.lab.tasks.generation.features import InceptionFeatures
    from tokenmix.lab.train.export import _write_onnx

    for module in ("pycocotools", "torch_fidelity.feature_extractor_inceptionv3", "onnxruntime"):
        monkeypatch.setitem(sys.modules, module, None)
    for extra, call in {
        "detection": lambda: object_metrics("boxes", ["a", "b"]),
        "fid": InceptionFeatures,
        "onnx": lambda: _write_onnx(torch.nn.Identity(), {}, {}, Path("model.onnx")),
    }.items():
        with pytest.raises(errors.UserError, match=rf"needs .*: pip install (--upgrade )?'tokenmix\[{extra}\]'"):
            call()


@pytest.mark.parametrize("extra", errors.EXTRAS)
def test_the_table_of_extras_is_that_of_pyproject(extra: str) -> None:
    declared = {Requirement(line).name for line in EXTRAS[extra]} - {"tokenmix"}
    assert {NAMES.get(name, name) for name in declared} == set(errors.EXTRAS[extra])


def test_all_holds_every_extra_of_the_library() -> None:
    parts = {line for extra in errors.EXTRAS for line in requirements(extra)}
    assert parts == set(requirements("all"))


def test_every_import_is_declared() -> None:
    core = {Requirement(line).name for line in requirements()}
    known = core | {module for names in errors.EXTRAS.values() for module in names} | STANDARD
    known |= {"tokenmix", "recipes"} | {file.stem for file in (ROOT / "recipes").rglob("*.py")}
    # Inside kernels/ only, which need a GPU: torch for CUDA brings it.
    known |= {"triton"}
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            undeclared = {name.partition(".")[0] for name in names} - known
            assert not undeclared, f"{file}:{node.lineno} imports {undeclared}; declare it in pyproject.toml"


def test_a_package_that_is_too_old_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "timm" / "layers").mkdir(parents=True)
    for package in (tmp_path / "timm", tmp_path / "timm" / "layers"):
        (package / "__init__.py").write_text("")
    done = python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from tokenmix.lab.cli.command import run_command
print(run_command(["list", "models"]), run_command(["info", "vit_nano"]))
""")
    assert done.stdout.split()[-1] == "2", done
    assert done.stderr.splitlines()[-1].endswith("pip install --upgrade 'tokenmix[vision]'"), done.stderr
    assert "needs a newer timm" in done.stderr
