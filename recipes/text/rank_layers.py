"""Whether the layers that `rank_layers` puts first are better to replace than the first, the last, or random ones.

    python -m recipes.text.rank_layers [--seeds 0,1,2,3,4] [--only digits]

Half of the layers become external attention and are distilled for a short time: a small ViT trained on the digits, and
all-MiniLM-L6-v2 on WordNet's glosses, cut at 32 tokens. Writes dev/rank_layers.json after each seed, so the same
command goes on where it stopped.
"""

import copy
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.datasets.text.wordnet import read_wordnet
from recipes.program import run_program
from recipes.text.convert_minilm import fetch_original
from tokenmix.distillation import distill, rank_layers
from tokenmix.environment import environment
from tokenmix.files import read_json, write_json
from tokenmix.lab.data.fetch import log
from tokenmix.lab.swapping import TextBatches, is_no_embedding, open_folder, split_texts
from tokenmix.lab.train.config import Names, Numbers
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import finish_run
from tokenmix.lab.train.sources import make_config
from tokenmix.swap import swap_attention

RESULTS = Path(__file__).parents[2] / "dev" / "rank_layers.json"
MIXER = "external"


@dataclass(frozen=True)
class Args:
    """Rank, distill each choice of layers, and write the table."""

    seeds: Numbers = (0, 1, 2, 3, 4)
    """Seeds of new weights, of orders and of the random choice, separated by commas."""
    only: Names = ("digits", "minilm")
    """Teachers, separated by commas."""
    out: Path = Path("runs/rank")
    """Folder of the teachers."""


@dataclass(frozen=True)
class Subject:
    """A teacher and its data: what ranks, what is distilled, and for how long."""

    teacher: nn.Module
    train: Iterable[Any]
    held_out: Sequence[Any]
    names: Sequence[str]
    shared: dict[str, Any]
    ranking_steps: int
    steps: int
    swap: dict[str, Any]


def digits(out: Path) -> Subject:
    """Six blocks of 64 channels on 8 x 8 digits; distilled by logits."""
    run = out / "digits"
    finish_run(
        make_config(
            model="vit_nano", model_kwargs={"depth": 6}, data="digits", epochs=40, threads=1, device="cpu", out=run
        ),
        quiet=True,
    )
    task = load_task(run)
    data = type(task).load_data(task.config, like=task.data)
    return Subject(
        teacher=task.model,
        train=[batch["image"] for batch in data.train_batches(batch_size=32, epoch=0, start=0)],
        held_out=[batch["image"] for batch in data.test_batches(batch_size=100)],
        names=[f"blocks.{i}.mixer" for i in range(6)],
        shared={"loss": "kl"},
        ranking_steps=100,
        steps=150,
        swap={"example_inputs": task.swap_example()},
    )


def minilm(out: Path) -> Subject:
    """The six layers of all-MiniLM-L6-v2; distilled by sentence embeddings."""
    original = out / "minilm"
    if not original.exists():
        fetch_original(original)
    teacher, tokenizer = open_folder(original)
    glosses = list(dict.fromkeys(synset.gloss for synset in read_wordnet()[0]))
    learned, kept = split_texts(glosses, 200, seed=0)
    return Subject(
        teacher=teacher,
        train=TextBatches(tokenizer, learned, 32, 32),
        held_out=TextBatches(tokenizer, kept, 50, 32).in_order(),
        names=[f"encoder.layer.{i}.attention" for i in range(6)],
        shared={"output": "mean", "precision": "bf16"},
        ranking_steps=40,
        steps=60,
        swap={"example_inputs": (torch.zeros(1, 32, dtype=torch.long),)},
    )


def one_seed(subject: Subject, seed: int) -> dict[str, Any]:
    """The ranking of a seed, and the fidelity of each half of the layers after distillation."""
    torch.manual_seed(seed)
    began = time.process_time()
    ranking = rank_layers(
        subject.teacher,
        MIXER,
        subject.train,
        held_out=subject.held_out,
        steps=subject.ranking_steps,
        seed=seed,
        **subject.swap,
        **subject.shared,
    )
    for line in (f"seed {seed}", *str(ranking).splitlines()):
        log(line)
    half = len(subject.names) // 2
    halves = {
        "ranked": ranking.best(half),
        "first": list(subject.names[:half]),
        "last": list(subject.names[half:]),
        "random": sorted(random.Random(seed).sample(list(subject.names), half)),
    }
    found: dict[str, Any] = {
        "order": [layer.name for layer in ranking.layers],
        "alone": {layer.name: asdict(layer.fidelity) for layer in ranking.layers},
        "frontier": [{"macs": p.macs, **asdict(p.fidelity)} for p in ranking.frontier],
        "halves": {},
    }
    done: dict[tuple[str, ...], Any] = {}
    for name, layers in halves.items():
        if tuple(layers) not in done:
            student = copy.deepcopy(subject.teacher)
            torch.manual_seed(seed)
            swap_attention(student, MIXER, layers, **subject.swap)
            report = distill(
                subject.teacher,
                student,
                subject.train,
                steps=subject.steps,
                held_out=subject.held_out,
                train_only=is_no_embedding(student),
                seed=seed,
                report_every=subject.steps,
                **subject.shared,
            )
            assert report.after is not None
            done[tuple(layers)] = asdict(report.after)
        found["halves"][name] = {"layers": layers, **done[tuple(layers)]}
    return {**found, "cpu_seconds": time.process_time() - began}


def main(args: Args) -> None:
    """All seeds of all teachers that are not yet there."""
    torch.set_num_threads(1)
    found: dict[str, Any] = read_json(RESULTS) if RESULTS.exists() else {}
    for name in args.only:
        rows: dict[str, Any] = found.get(name, {}).get("seeds", {})
        missing = [seed for seed in args.seeds if str(seed) not in rows]
        subject = {"digits": digits, "minilm": minilm}[name](args.out) if missing else None
        for seed in missing:
            assert subject is not None
            rows[str(seed)] = one_seed(subject, seed)
            log(", ".join(f"{half} {row['cosine']:.4f}" for half, row in rows[str(seed)]["halves"].items()))
            found[name] = {"environment": environment(), "table": table(rows), "seeds": rows}
            write_json(RESULTS, found)


def table(rows: dict[str, Any]) -> dict[str, Any]:
    """Mean and spread over the seeds of each choice of layers; one seed has no deviation."""
    found: dict[str, Any] = {}
    for half in ("ranked", "first", "last", "random"):
        found[half] = {}
        for measure in ("cosine", "agreement", "neighbours"):
            runs = [row["halves"][half][measure] for row in rows.values()]
            deviation = statistics.stdev(runs) if len(runs) > 1 else None
            found[half][measure] = {"mean": statistics.mean(runs), "deviation": deviation, "runs": runs}
    return found


if __name__ == "__main__":
    run_program(main, Args)
