"""A new mechanism touches four files: added to a copy of the tree, it keeps the contract and the rules of the docs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "pyproject.toml", "mkdocs.yml", "README.md", "README.zh.md", "CHANGELOG.md")
NAMED = ("recipes", "benchmarks", "dev")
"""Folders that pages name, and that no mechanism touches."""
LAYER = '''"""The mean of all tokens, through one linear map."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Mixer, masked_output
from tokenmix.ops.checks import check_whole


class MeanMixing(Mixer):
    """Each token becomes the same map of the mean of all tokens that take part.

        out_i = W (1/N) sum_j x_j

    Args:
        dim: width D.

    Shape:
        x (B, N, D) to (B, N, D).

    Raises:
        UserError: x or mask of a wrong shape or type.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map=None)

    def __init__(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_whole(dim=dim)
        self.dim = dim
        self.proj = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix tokens (B, N, dim)."""
        x, mask = self.checked(x, mask)
        count = x.shape[1] if mask is None else mask.sum(1, keepdim=True).clamp_min(1).unsqueeze(-1)
        mean = self.proj(x.sum(1, keepdim=True) / count)
        return masked_output(mean.expand_as(x).clone(), mask)

    def macs(self, num_tokens: int) -> int:
        """D^2."""
        check_whole(num_tokens=num_tokens)
        return self.dim**2
'''
TEST = '''"""The mean against a loop."""

import torch

from tokenmix.layers import MeanMixing


def test_equals_the_loop() -> None:
    torch.manual_seed(0)
    layer, x = MeanMixing(3).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True], [True] * 4])
    out = layer(x, mask)
    for s in range(2):
        there = [x[s, j] for j in range(4) if mask[s, j]]
        mean = layer.proj.weight @ (sum(there) / len(there))
        for i in range(4):
            torch.testing.assert_close(out[s, i], mean if mask[s, i] else torch.zeros_like(mean))
'''
PAGE = """# Mean

`tokenmix.layers.MeanMixing` (`mean`) gives each token a map of the mean of all tokens.

```python
import torch
from tokenmix.layers import MeanMixing

tokens = torch.randn(2, 196, 64)
assert MeanMixing(64)(tokens).shape == tokens.shape
```

## Equation

<div class="equation"><b>out</b><sub>i</sub> = W (1/N) Σ<sub>j</sub> <b>x</b><sub>j</sub></div>

## Cost

D² multiply-adds.

## Options

| paper | argument | meaning |
|---|---|---|
| | `dim` | width D |

## When not to use it

Where one token must find another.

## Differences from the paper

There is no paper on the mean alone.

## Reference

W. Yu et al., *MetaFormer Is Actually What You Need for Vision*, 2022, arXiv:2111.11418.
"""


@pytest.mark.slow
def test_a_mechanism_is_four_files(tmp_path: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for name in NAMED:
        (tmp_path / name).symlink_to(ROOT / name)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    (tmp_path / "src/tokenmix/layers/mean_mixing.py").write_text(LAYER)
    (tmp_path / "tests/layers/test_mean_mixing.py").write_text(TEST)
    (tmp_path / "docs/mechanisms/mean_mixing.md").write_text(PAGE)
    table = tmp_path / "src/tokenmix/layers/__init__.py"
    text = table.read_text()
    for before_line, line in (
        ("from tokenmix.layers.offset_attention", "from tokenmix.layers.mean_mixing import MeanMixing\n"),
        ('    "Mixer",', '    "MeanMixing",\n'),
        ('        "identity": MixerSpec', '        "mean": MixerSpec(MeanMixing, "the mean of all tokens"),\n'),
    ):
        assert text.count(before_line) == 1
        text = text.replace(before_line, line + before_line)
    table.write_text(text)
    after = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert len([file for file in after if before.get(file) != file.read_bytes()]) == 4
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{tmp_path / 'tests'}"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-m", "not slow"),
            *("-k", "mean or mechanism or reference or names or order or circle"),
            *("tests/layers/test_mean_mixing.py", "tests/testing/test_contract.py", "tests/test_docs.py"),
            "tests/docs/test_pages_run.py",
            *("tests/test_public_names.py", "tests/test_imports.py", "tests/test_registry.py"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    # The contract, which is one test for each property, ran on it.
    contract = [line for line in done.stdout.splitlines() if "test_contract.py::test_keeps[mean-" in line]
    assert len(contract) >= 15, contract
