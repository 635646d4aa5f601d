"""CPU time of commands beside bare programs with the same packages: `python benchmarks/startup.py --help`.

Each command and each program has a process of its own and one thread; they take turns. The difference is what tokenmix
adds: its imports, its checks, its files, and in `train`, `eval`, `info` and `export --format hub` its work.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from loops.measure import program
from loops.pictures import make_folder

from suite.command import exit_code, write_rows
from tokenmix.errors import UserError
from tokenmix.files import make_folder as make_parents
from tokenmix.lab.data.lookup import cache_root
from tokenmix.profiling.machine import OtherWork

TIMM = "import timm"
MODEL = """import sys, timm, torch
model = timm.models.VisionTransformer(
    96, 6, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2, class_token=False, global_pool='avg', num_classes=2
).eval()
x = torch.ones(1, 3, 96, 96)
"""
FIGURES = """
model(x)
from matplotlib.figure import Figure
for block in range(4):
    figure = Figure(figsize=(8.4, 7.4), layout='constrained')
    for number, axes in enumerate(figure.subplots(3, 4).flat):
        axes.set(xticks=[], yticks=[], frame_on=False)
        if number > 8:
            continue
        axes.imshow(x[0, 0])
        if number:
            axes.imshow(x[0, 0, ::6, ::6], extent=(-0.5, 95.5, 95.5, -0.5), alpha=0.7)
        axes.set(title='head 1', xlabel='0 to 1')
    figure.savefig(f'{sys.argv[1]}/{block}.png', dpi=120)
figure = Figure(layout='constrained')
axes = figure.subplots()
for line in range(4):
    axes.plot([0, 1, 2, 3])
figure.savefig(f'{sys.argv[1]}/depth.png', dpi=120)
"""
DYNAMIC = "dynamic_shapes=({0: torch.export.Dim('batch', min=1, max=65536)},)"
PROGRAM = f"""
file = sys.argv[1] + '/bare.pt2'
torch.export.save(torch.export.export(model, (torch.cat([x, x]),), {DYNAMIC}), file)
torch.export.load(file).module()(x)
"""
ONNX = f"""
import onnxruntime
file = sys.argv[1] + '/bare.onnx'
torch.onnx.export(model, (torch.cat([x, x]),), file, dynamo=True, input_names=['image'], {DYNAMIC})
onnxruntime.InferenceSession(file).run(None, {{'image': x.numpy()}})
"""
COST = """import time, torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.ones(1) + 1
from tokenmix.profiling.machine import measure_ceilings
measure_ceilings(torch.device('cpu'), torch.float32)
x = torch.randn(1, 196, 256)
for layer in torch.nn.MultiheadAttention(256, 4, batch_first=True), torch.nn.Linear(256, 256):
    inputs = (x, x, x) if layer.__class__.__name__.startswith('Multi') else (x,)
    for backward in False, True:
        start = time.perf_counter()
        while time.perf_counter() < start + 0.2:
            out = layer(*inputs)
            if backward:
                (out if len(inputs) == 1 else out[0]).sum().backward()
"""
TRAIN = (
    "train image-classification --model vit_nano --data imagefolder:{data} --img-size 96 --validation 0 --max-steps 1 "
    "--epochs 1 --limit-eval 64 --device cpu --threads 1 --out {folder}/new"
)
COMMANDS = {
    "train, one step": (TRAIN, TIMM),
    "eval": ("eval {run}", TIMM),
    "info": ("info gmlp_small", TIMM),
    "predict": ("predict {run} {image}", MODEL + "model(x)"),
    "inspect": ("inspect {run} {image} --out {folder}/figures", MODEL + FIGURES),
    "export, hub": ("export {run} --format hub --out {folder}/hub", TIMM),
    "export, torch.export": ("export {run} --format torch-export --out {folder}/model.pt2", MODEL + PROGRAM),
    "export, ONNX": ("export {run} --format onnx --out {folder}/model.onnx", MODEL + ONNX),
    "cost of a layer": ("cost external --tokens 196", COST),
}
"""Command and bare program: timm's import alone, or the same work with timm's model of the same size. That of `cost`
measures the machine with our function, and a pass of a layer for as long."""


@dataclass(frozen=True)
class Row:
    """CPU seconds of the turns."""

    name: str
    ours: list[float]
    bare: list[float]
    added: tuple[float, float, float] = field(init=False)
    """Difference of a turn: median, lowest and highest."""

    def __post_init__(self) -> None:
        each = [a - b for a, b in zip(self.ours, self.bare, strict=True)]
        object.__setattr__(self, "added", tuple(round(f(each), 2) for f in (statistics.median, min, max)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write it as JSON. 2: a mistake on the command line; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="commands")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each command")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.repeats < 1:
        raise UserError("--repeats must be at least 1")
    if options.out is not None:
        make_parents(options.out.parent)
    others, rows = OtherWork(), []
    data = make_folder(cache_root() / "end-to-end", "png", 300, 300, 896)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"data": str(data), "image": str(next(data.glob("train/*/*.png"))), "run": f"{folder}/0/new"}
        _seconds("train, one step", 0, {**paths, "folder": f"{folder}/0"})
        for name in options.only:
            turns = range(1, options.repeats + 1)
            both = [_seconds(name, turn, {**paths, "folder": f"{folder}/{len(rows) + 1}-{turn}"}) for turn in turns]
            rows.append(Row(name, *map(list, zip(*both, strict=True))))
            print(line_of(rows[-1]), flush=True)
    write_rows(options.out, rows, ("timm", "matplotlib", "onnxruntime", "onnxscript"), others.warning(1))
    return 0


def _seconds(name: str, turn: int, paths: dict[str, str]) -> tuple[float, float]:
    """CPU seconds of the command and of its bare program; the second is first in every other turn."""
    make_parents(Path(paths["folder"]))
    command, code = COMMANDS[name]
    words = [word.format(**paths) for word in command.split()]
    both = [[sys.executable, "-m", "tokenmix", *words], [sys.executable, "-c", code, paths["folder"]]]
    order = slice(None, None, -1 if turn % 2 else 1)
    ours, bare = [round(program(each, {"OMP_NUM_THREADS": "1"}).cpu, 2) for each in both[order]][order]
    return ours, bare


def line_of(row: Row) -> str:
    ours, bare = (statistics.median(each) for each in (row.ours, row.bare))
    added, low, high = row.added
    return f"{row.name:22} {ours:5.1f} CPU s   bare {bare:5.1f}   added {added:5.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
