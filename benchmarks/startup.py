"""CPU time of commands, and of bare programs that do the same with the same packages: `benchmarks/startup.py --help`.

Each command and each program has a process of its own and one thread; they take turns. The difference is what tokenmix
adds: its imports, its checks, and files that a bare program does not read or write.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
MODEL = """import timm, torch
model = timm.models.VisionTransformer(96, 16, embed_dim=64, depth=4, num_heads=4, num_classes=2).eval()
x = torch.ones(1, 3, 96, 96)
"""
FIGURES = """
model(x)
from matplotlib.figure import Figure
for block in range(4):
    figure = Figure(figsize=(8.4, 7.4), layout='constrained')
    for axes in figure.subplots(3, 4).flat:
        axes.imshow(x[0, 0])
        axes.imshow(x[0, 0, ::16, ::16], extent=(-0.5, 95.5, 95.5, -0.5), alpha=0.7)
        axes.set(xticks=[], yticks=[], title='head 1', xlabel='0 to 1')
    figure.savefig('{folder}/' + str(block) + '.png', dpi=120)
"""
PROGRAM = """
torch.export.save(torch.export.export(model, (x,)), '{folder}/bare.pt2')
torch.export.load('{folder}/bare.pt2').module()(x)
"""
ONNX = """
import onnxruntime
torch.onnx.export(model, (x,), '{folder}/bare.onnx', dynamo=True)
onnxruntime.InferenceSession('{folder}/bare.onnx').run(None, {'x': x.numpy()})
"""
COST = """import time, torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(): torch.ones(1) + 1
a, b, c = torch.ones(3, 1536, 1536)
start = time.process_time()
while time.process_time() < start + 1.8: torch.mm(a, b, out=c)
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
"""Command and bare program. That of `cost` multiplies matrices for as long as `cost` measures with one thread."""


@dataclass(frozen=True)
class Row:
    """CPU seconds of the turns."""

    name: str
    ours: list[float]
    bare: list[float]


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
        places = {"data": str(data), "image": str(next(data.glob("train/*/*.png"))), "run": f"{folder}/0/new"}
        _seconds("train, one step", 0, {**places, "folder": f"{folder}/0"})
        for name in options.only:
            turns = range(1, options.repeats + 1)
            both = [_seconds(name, turn, {**places, "folder": f"{folder}/{len(rows) + 1}-{turn}"}) for turn in turns]
            rows.append(Row(name, *map(list, zip(*both, strict=True))))
            print(line_of(rows[-1]), flush=True)
    write_rows(options.out, rows, ("timm", "matplotlib", "onnxruntime"), others.warning(1))
    return 0


def _seconds(name: str, turn: int, places: dict[str, str]) -> tuple[float, float]:
    """CPU seconds of the command and of its bare program; the second is first in every other turn."""
    make_parents(Path(places["folder"]))
    command, code = COMMANDS[name]
    for place, path in places.items():
        command, code = (text.replace("{" + place + "}", path) for text in (command, code))
    both = [[sys.executable, "-m", "tokenmix", *command.split()], [sys.executable, "-c", code]]
    found = [round(program(words, {"OMP_NUM_THREADS": "1"}).cpu, 2) for words in both[:: -1 if turn % 2 else 1]]
    ours, bare = found[:: -1 if turn % 2 else 1]
    return ours, bare


def line_of(row: Row) -> str:
    ours, bare = (statistics.median(each) for each in (row.ours, row.bare))
    return f"{row.name:22} {ours:5.1f} CPU s   bare program {bare:5.1f}   added {ours - bare:5.1f}"


if __name__ == "__main__":
    sys.exit(main())
