"""One archive with what a GPU machine without a network needs: `make gpu-bundle`.

It holds the package, its tests and benchmarks, the pure-Python wheels that such a machine may lack, and Fashion-MNIST.
PyTorch, NumPy, torchvision and other compiled packages are those of the machine. There:

    tar xf tokenmix-gpu.tar.gz && bash tokenmix-gpu/run.sh [RESULTS]

installs the wheels into the unpacked folder, runs the kernel tests and the benchmarks in float32 and bfloat16, and
leaves logs, JSON files and tables in RESULTS (tokenmix-gpu/results if not given). Its exit code is 1 if a part failed.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tokenmix.lab.data.lookup import stored_path

ROOT = Path(__file__).parents[1]
TRACKED = ("src", "tests", "benchmarks", "recipes", "pyproject.toml", "README.md", "LICENSE")
WHEELS = (
    "timm",
    "transformers",
    "tyro",
    "docstring-parser",
    "typeguard",
    "lightning",
    "lightning-utilities",
    "torchmetrics",
    "pytest",
    "pytest-xdist",
    "execnet",
    "iniconfig",
    "pluggy",
    "einops",
    "einx",
    "frozendict",
    "loguru",
    "torch-einops-utils",
    "g-mlp-pytorch==0.1.5",
    "vit-pytorch",
    "x-transformers",
)
"""Pure Python, so that the same file serves any machine; compiled packages are those of the machine."""
SOURCES = ("fightingcv-attention==1.0.0",)
"""Pure Python too, and published as source alone."""
MOST = 60 * 2**20

RUN = """#!/usr/bin/env bash
# Kernel tests, then benchmarks in float32 and bfloat16; results and logs go to $1.
set -u
cd "$(dirname "$0")"
out=$(mkdir -p "${1:-results}" && cd "${1:-results}" && pwd)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target site wheels/*.whl || exit 1
export PYTHONPATH=$PWD/tree/src:$PWD/site TOKENMIX_DATA=$PWD/data
cd tree
failed=0
part() { name=$1; shift; echo "== $name"; "$@" >"$out/$name.log" 2>&1 || { failed=1; tail -n 5 "$out/$name.log"; }; }
part environment python3 -c 'from tokenmix.environment import environment; print(environment())'
part kernel-tests python3 -m pytest tests/kernels -m gpu -q -p no:cacheprovider
for dtype in float32 bfloat16; do
    part "benchmarks-$dtype" python3 benchmarks/run.py --device cuda --dtype $dtype --out "$out/$dtype/results"
done
echo "results in $out"
exit $failed
"""


def main() -> int:
    """Write the archive; 1 if it is larger than 60 MiB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "tokenmix-gpu.tar.gz", help="archive to write")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(out, "w:gz") as archive:
        wheels = Path(folder) / "wheels"
        _download(wheels)
        archive.add(wheels, "tokenmix-gpu/wheels")
        for name in _tracked():
            archive.add(ROOT / name, f"tokenmix-gpu/tree/{name}")
        run = Path(folder) / "run.sh"
        run.write_text(RUN)
        archive.add(run, "tokenmix-gpu/run.sh")
        data = stored_path("fashion-mnist")
        if data.exists():
            archive.add(data, f"tokenmix-gpu/data/{data.name}")
        else:
            print("Fashion-MNIST is left out: fetch it with `tokenmix data get fashion-mnist`", file=sys.stderr)
    size = out.stat().st_size
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > MOST:
        print(f"larger than {MOST // 2**20} MiB", file=sys.stderr)
        return 1
    return 0


def _download(folder: Path) -> None:
    pure = ["--no-deps", "--only-binary=:all:", "--platform", "any", "--implementation", "py", "--abi", "none"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *pure, "--python-version", "3.12"]
    subprocess.run([*command, "--dest", str(folder), *WHEELS], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *SOURCES]
    subprocess.run(build, check=True)


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *TRACKED], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


if __name__ == "__main__":
    sys.exit(main())
