"""Time and peak memory of inputs that are large: `python benchmarks/large_inputs.py --help`.

Each row is a command in a process of its own, with an input and with one of a quarter or a tenth of its size. The
growth exponent is log(ratio of CPU times) / log(ratio of sizes), after the time of a small input is taken off: 1 is
linear. CPU time, since other programs change it less than wall time.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from loops.measure import Program, program
from PIL import Image

from suite.command import exit_code, write_rows
from tokenmix.errors import UserError
from tokenmix.files import make_folder
from tokenmix.lab.data.lookup import cache_root
from tokenmix.profiling.machine import OtherWork

SHORT = 12.0
"""CPU seconds."""
GROUPS = ("segmentation", "detection", "text", "points")
TRAIN = "--max-steps 2 --epochs 1 --validation 0 --device cpu --threads 1 --limit-eval 2"


@dataclass(frozen=True)
class Row:
    """A command on three inputs: as good as none, the smaller one, and the large one.

    Attributes:
        seconds, cpu, memory: of each input; memory in bytes, the largest resident set.
        growth: exponent between the last two sizes.
    """

    group: str
    name: str
    sizes: list[int]
    seconds: list[float]
    cpu: list[float]
    memory: list[int]
    growth: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write it as JSON. 2: a mistake on the command line; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of rows")
    parser.add_argument("--share", type=float, default=1.0, help="of the sizes, to try the program")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--tokenise", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return exit_code(lambda: _tokenise(*options.tokenise) if options.tokenise else _run(options))


def _run(options: argparse.Namespace) -> int:
    if not 0 < options.share <= 1:
        raise UserError("--share must be in (0, 1]")
    if options.out is not None:
        make_folder(options.out.parent)
    start, others, rows = time.perf_counter(), OtherWork(), []
    make = {"segmentation": _segmentation, "detection": _detection, "text": _text, "points": _points}
    with tempfile.TemporaryDirectory() as folder:
        for group in options.only:
            for row in make[group](Path(folder), options.share):
                rows.append(row)
                print(line_of(row), flush=True)
    print(f"{time.perf_counter() - start:.0f} seconds in all")
    write_rows(options.out, rows, ("datasets", "tokenizers", "pillow"), others.warning(1))
    return 0


def measured(group: str, name: str, sizes: Sequence[int], command: Callable[[int], list[str]]) -> Row:
    found = [_median(command(size)) for size in sizes]
    seconds, cpu = ([round(getattr(one, what), 2) for one in found] for what in ("seconds", "cpu"))
    ratio = (cpu[2] - cpu[0]) / max(cpu[1] - cpu[0], 1e-3)
    growth = math.log(max(ratio, 1e-3)) / math.log(sizes[2] / sizes[1])
    return Row(group, name, list(sizes), seconds, cpu, [one.memory for one in found], round(growth, 3))


def _median(command: list[str]) -> Program:
    """The program; if it takes less than `SHORT`, the median of three, since start-up differs by a tenth."""
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    runs = [program(command, alone)]
    while len(runs) < 3 and runs[0].cpu < SHORT:
        runs.append(program(command, alone))
    return sorted(runs, key=lambda run: run.cpu)[len(runs) // 2]


def _tokenmix(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "tokenmix", *map(str, words)]


def _picture(folder: Path, side: int) -> Path:
    """The Blue Marble, repeated until it fills a square of this side, as a PNG."""
    from recipes.datasets.images.blue_marble import fetch_blue_marble
    from tokenmix.lab.data.store import fetched

    file = folder / f"{side}.png"
    if not file.exists():
        whole = fetched("blue-marble", None, fetch_blue_marble)[0]["image"].permute(1, 2, 0).numpy()
        times = [-(-side // length) for length in whole.shape[:2]]
        Image.fromarray(np.tile(whole, (*times, 1))[:side, :side]).save(file, compress_level=1)
    return file


def _sides(share: float) -> list[int]:
    """Of pictures, in pixels: the last has four times the pixels of the one before."""
    return [256, round(10_000 * share), round(20_000 * share)]


def _of_pictures(group: str, name: str, folder: Path, run: Path, share: float) -> Row:
    def command(pixels: int) -> list[str]:
        picture = _picture(folder, math.isqrt(pixels))
        return _tokenmix("predict", run, picture, "--out", folder / f"{group}-{pixels}", "--json")

    return measured(group, name, [side**2 for side in _sides(share)], command)


def _segmentation(folder: Path, share: float) -> Iterator[Row]:
    for part in ("train", "val"):
        for number in range(4):
            rng = np.random.default_rng(number)
            levels = rng.integers(0, 255, (128, 128, 3), dtype=np.uint8)
            for kind, pixels in (("images", levels), ("masks", (levels[..., 0] > 127).astype(np.uint8))):
                place = folder / "masks" / part / kind
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(place / f"{number}.png")
    run = folder / "segmenter"
    words = f"train semantic-segmentation --model eanet_seg_nano --crop 64 --batch-size 2 {TRAIN}".split()
    program(_tokenmix(*words, "--data", f"masks:{folder / 'masks'}", "--out", run), {})
    yield _of_pictures("segmentation", "eanet_seg_nano, in tiles", folder, run, share)


def _detection(folder: Path, share: float) -> Iterator[Row]:
    from loops.others import Sizes, coco_folder

    data, run = coco_folder(cache_root() / "end-to-end", Sizes(8, 256)), folder / "detector"
    words = f"train detection --model retinanet_nano --img-size 256 --window 256 --batch-size 2 {TRAIN}".split()
    program(_tokenmix(*words, "--data", f"coco:{data}", "--out", run), {})
    yield _of_pictures("detection", "retinanet_nano, in windows of 256 px", folder, run, share)


def _points(folder: Path, share: float) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    for kind, count in (("train", 8), ("test", 2)):
        for label in ("a", "b"):
            (folder / "clouds" / kind / label).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                points = rng.normal(size=(512, 3)).astype(np.float32)
                parts = (points[:, 0] > 0).astype(np.int64)
                np.savez(folder / "clouds" / kind / label / f"{number}.npz", points=points, parts=parts)
    run = folder / "parts"
    words = f"train point-segmentation --model eapct_part_nano --num-points 256 --batch-size 4 {TRAIN}".split()
    program(_tokenmix(*words, "--data", f"clouds:{folder / 'clouds'}", "--out", run), {})

    def command(count: int) -> list[str]:
        file = folder / f"{count}.npy"
        np.save(file, rng.normal(size=(count, 3)).astype(np.float32))
        return _tokenmix("predict", run, file, "--out", folder / f"parts-{count}", "--json")

    sizes = [2048, round(1_000_000 * share), round(4_000_000 * share)]
    yield measured("points", "eapct_part_nano, a part for each point", sizes, command)


def _text(folder: Path, share: float) -> Iterator[Row]:
    from loops.others import glosses

    text, tokenizer = glosses(cache_root() / "end-to-end")
    lines = [line for line in text.read_text().split("\n\n") if line]

    def command(way: str, megabytes: int) -> list[str]:
        file = folder / f"{megabytes}.jsonl"
        if not file.exists():
            written, place = 0, 0
            with open(file, "w") as out:
                while written < 10**6 * megabytes:
                    # Documents of about 400 characters.
                    document = " ".join(lines[(place + i) % len(lines)] for i in range(6))
                    written, place = written + out.write(json.dumps({"text": document}) + "\n"), place + 5
        return [sys.executable, __file__, "--tokenise", way, str(file), str(tokenizer)]

    sizes = [1, max(2, round(25 * share)), max(3, round(100 * share))]
    for way, name in (("tokenmix", "JSONL in MB"), ("datasets", "JSONL in MB, datasets' map, same tokenizer")):
        yield measured("text", name, sizes, lambda size, way=way: command(way, size))


def _tokenise(way: str, file: str, tokenizer: str) -> int:
    """What a process of a text row does: the file's tokens, on disk."""
    from tokenmix.lab.tasks.text.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory() as cache:
        if way == "tokenmix":
            from tokenmix.lab.tasks.text.corpus import load_text, tokenized

            train, test = tokenized(load_text(f"jsonl:{file}#text"), loaded, Path(cache))
            return 0 if len(train) + len(test) else 1
        from datasets import load_dataset

        rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
        made = rows.map(
            lambda batch: {"input_ids": loaded(batch["text"])["input_ids"]}, batched=True, remove_columns=["text"]
        )
        return 0 if len(made) else 1


def line_of(row: Row) -> str:
    parts = [
        f"{size:,}: {seconds:.1f} s, {cpu:.1f} s of CPU, {memory / 2**20:,.0f} MiB"
        for size, seconds, cpu, memory in zip(row.sizes, row.seconds, row.cpu, row.memory)
    ]
    return f"{row.group}: {row.name}\n  " + "\n  ".join(parts) + f"\n  growth {row.growth:.2f}"


if __name__ == "__main__":
    sys.exit(main())
