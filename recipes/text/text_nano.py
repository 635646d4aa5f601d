"""gMLP, aMLP and self-attention on real text: equal parameters, equal tokens, three seeds.

    python -m recipes.text.text_nano [--out runs/text] [--seeds 0,1,2]

Perplexity of masked words on held-out speeches and books, the four gates, how Toeplitz-like a free gate becomes, and
fine-tuning with and without tiny attention. Finished runs are kept, so the same command goes on where it stopped.
Writes recipes/text/text_nano.json and .md, and docs/images/text_toeplitz.png.
"""

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from recipes.over_seeds import commits, over_seeds, read_result, shown
from recipes.program import run_program
from recipes.small_pictures import save_small
from recipes.text.tfidf import tfidf_baseline
from tokenmix.environment import environment
from tokenmix.lab.inspect.gates import gate_numbers, toeplitz_share
from tokenmix.lab.inspect.maps import SIGNED
from tokenmix.lab.registry import TASKS, TaskEntry
from tokenmix.lab.tasks.text.data.labelled import load_labelled
from tokenmix.lab.tasks.text.masked_lm import MaskedLM
from tokenmix.lab.tasks.text.tokenizer import save_tokenizer, train_tokenizer
from tokenmix.lab.train.config import Names, Numbers, TrainConfig
from tokenmix.lab.train.finish import finish_run
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.sources import make_config

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "images" / "text_toeplitz.png"
TOKENS = 2000
SHARED: dict[str, Any] = {
    "opt_eps": 1e-6,
    "min_lr": 0.0,
    "schedule": "linear",
    "weight_decay": 0.01,
    "precision": "bf16-mixed",
    "threads": 1,
    "device": "cpu",
    "seq_len": 64,
    "log_every": 50,
    "checkpoint_every": 100_000,
    # Nothing is chosen by epoch, so nothing is held out; learning rates and budgets were chosen on the held-out texts.
    "validation": 0,
}
# 1 / sqrt(128); with 0.02, which is for wide models, all of them learn more slowly.
START = {"initializer_range": 0.08}
PRETRAINING: dict[str, Any] = {
    "task": "masked-lm",
    "data": "english",
    "batch_size": 32,
    "epochs": 100,
    "max_steps": 1200,
    "warmup_steps": 100,
    "limit_eval": 2000,
}
TUNING: dict[str, Any] = {
    "task": "text-classification",
    "batch_size": 32,
    "lr": 1e-3,
    "warmup_steps": 100,
}


@dataclass(frozen=True)
class Family:
    """A model, what is changed in it, and the rate that went best for it in 600 steps with seed 0."""

    model: str
    lr: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "gMLP": Family("gmlp_text_nano", 5e-3),
    "aMLP": Family("amlp_text_nano", 5e-3),
    # 611 channels make up for the parameters that a table of positions would have.
    "self-attention, relative": Family("bert_text_nano", 4e-3, {"positions": "relative", "intermediate_size": 611}),
    "self-attention, learned": Family("bert_text_nano", 1e-3),
}
# Fine-tuned: without and with tiny attention.
TUNED = ("gMLP", "aMLP")
# Without halves to multiply, 576 channels have the parameters that the split gate has with 768.
GATES: dict[str, dict[str, Any]] = {
    name: {"gate_variant": name, "intermediate_size": 576} for name in ("multiplicative", "additive", "linear")
}
SETS: dict[str, dict[str, Any]] = {
    "vader": {"epochs": 2},
    "wordnet-definitions": {"epochs": 1},
    "wordnet-pairs": {"epochs": 2},
}


@dataclass(frozen=True)
class Args:
    """Train what is not yet trained, then write the tables."""

    out: Path = Path("runs/text")
    """Folder of the run folders."""
    seeds: Numbers = (0, 1, 2)
    """Seeds, separated by commas."""
    only: Names = ()
    """Families whose rows are made again, separated by commas; the others stay as text_nano.json has them."""
    quick: bool = False
    """A few steps of everything, to see that it runs; nothing is written beside the runs."""


class WatchedLM(MaskedLM):
    """Masked-language modelling that notes with each step how far each gate is a function of distance."""

    @classmethod
    def check(cls, config: TrainConfig, batch_size: int) -> None:
        """The models are those of masked-lm."""
        super().check(replace(config, task="masked-lm"), batch_size)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The task's loss; `toeplitz_3` is the share of block 3."""
        loss, logs = super().loss(batch)
        layers: Any = self.model.base_model.layers  # type: ignore[union-attr]
        with torch.no_grad():
            shares = [toeplitz_share(layer.mixer.gating.weight) for layer in layers]
        return loss, {**logs, **{f"toeplitz_{i}": torch.tensor(share) for i, share in enumerate(shares)}}


TASKS.register(
    TaskEntry(
        name="watched-lm",
        about="masked-lm with a log of its gates",
        task=WatchedLM,
        options="tokenmix.lab.tasks.text.options:MaskingOptions",
    )
)


def one_run(args: Args, name: str, **settings: Any) -> dict[str, Any]:
    """The result of one run, trained now if need be."""
    folder = args.out / name
    if args.quick:
        settings |= {"max_steps": 5, "limit_eval": 64, "warmup_steps": 1, "log_every": 2}
    finish_run(make_config(out=folder, **{**SHARED, **settings}), quiet=True)
    result = read_result(folder)
    result["folder"] = str(folder)
    found = {key: round(value, 4) for key, value in result["final"].items() if isinstance(value, float)}
    print(name, found, f"{result['seconds']:.0f} s", flush=True)
    return result


def file_name(label: str) -> str:
    """A label as a part of a folder's name."""
    return label.lower().replace(", ", "-")


def pretrain(args: Args, label: str, family: Family) -> list[dict[str, Any]]:
    """One pretraining run for each seed."""
    task = {"task": "watched-lm"} if family.kwargs.get("gate") == "dense" else {}
    return [
        one_run(
            args,
            f"{file_name(label)}-{seed}",
            **{**PRETRAINING, **task},
            model=family.model,
            lr=family.lr,
            model_kwargs={**START, **family.kwargs},
            seed=seed,
            tokenizer=args.out / "tokenizer",
        )
        for seed in args.seeds
    ]


def finetune(args: Args, data: str, label: str) -> list[dict[str, Any]]:
    """One fine-tuning run for each seed, from the pretraining run of that seed."""
    family, name = FAMILIES[label], file_name(label)
    return [
        one_run(
            args,
            f"{data}-{name}-{seed}",
            **TUNING,
            **SETS[data],
            data=data,
            model=family.model,
            model_kwargs={**START, **family.kwargs},
            seed=seed,
            init_from=args.out / f"{name}-{seed}",
        )
        for seed in args.seeds
    ]


def summarise(results: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Mean and spread over seeds of a metric after the last epoch, and what a run costs."""
    return {
        "metric": metric,
        **over_seeds([result["final"][metric] for result in results]),
        "parameters": results[0]["parameters"],
        "sequences": results[0].get("sequences", results[0].get("images")),
        "commits": commits(results),
    }


def prepare_tokenizer(args: Args) -> None:
    """The one tokenizer of all runs, trained on the training part of the text."""
    folder = args.out / "tokenizer"
    if not folder.is_dir():
        save_tokenizer(train_tokenizer("english", kind="wordpiece", vocab_size=TOKENS, lowercase="yes"), folder)


def toeplitz(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The share of each block of the free gate: at the end for each seed, and over the steps for the first."""
    ends = [[row["toeplitz_share"] for row in gate_numbers(load_run(Path(r["folder"]))[0])] for r in results]
    with (Path(results[0]["folder"]) / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train_loss"]]
    blocks = range(len(ends[0]))
    return {
        "by_chance": 2 / (SHARED["seq_len"] + 1),
        "end": ends,
        "steps": [int(row["step"]) for row in rows],
        "over_steps": [[float(row[f"train_toeplitz_{i}"]) for row in rows] for i in blocks],
    }


def draw(found: Mapping[str, Any], folder: Path, file: Path) -> None:
    """The shares over the steps, and the gates of the first run."""
    model: Any = load_run(folder)[0]
    gates = [layer.mixer.gating.weight.detach().float() for layer in model.base_model.layers]
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels: Any = figure.subfigures(1, 2, width_ratios=(1, 1.3))
    left, right = panels
    axis = left.subplots()
    for i, values in enumerate(found["over_steps"]):
        axis.plot(found["steps"], values, label=f"block {i}")
    axis.axhline(found["by_chance"], color="grey", linestyle=":", label="by chance")
    axis.set(xlabel="step", ylabel="share of the variance on diagonals", ylim=(0, 1))
    axis.legend(frameon=False, fontsize=8)
    for i, (axis, gate) in enumerate(zip(right.subplots(2, -(-len(gates) // 2)).ravel(), gates)):
        bound = float(gate.abs().max())
        axis.imshow(gate.numpy(), cmap=SIGNED, vmin=-bound, vmax=bound)
        axis.set(title=f"block {i}", xticks=[], yticks=[])
    save_small(figure, file, dpi=110, colors=256)


def run_all(args: Args) -> dict[str, Any]:
    """Every run, and what they show."""
    prepare_tokenizer(args)
    families = {label: pretrain(args, label, family) for label, family in FAMILIES.items()}
    tuned = {data: {label: finetune(args, data, label) for label in TUNED} for data in SETS}
    gmlp = FAMILIES["gMLP"]
    gates = {"split": families["gMLP"]}
    gates |= {name: pretrain(args, f"gate-{name}", Family(gmlp.model, gmlp.lr, kw)) for name, kw in GATES.items()}
    free = pretrain(args, "gate-dense", Family(gmlp.model, gmlp.lr, {"gate": "dense"}))
    found = toeplitz(free)
    draw(found, Path(free[0]["folder"]), args.out / "toeplitz.png")
    return {
        "families": {name: summarise(results, "perplexity") for name, results in families.items()},
        "gates": {name: summarise(results, "perplexity") for name, results in gates.items()},
        "free_gate": {**summarise(free, "perplexity"), **found},
        "tuned": {
            data: {
                "base": tfidf_baseline(load_labelled(data)),
                **{name: summarise(results, "accuracy") for name, results in rows.items()},
            }
            for data, rows in tuned.items()
        },
    }


def run_again(args: Args, kept: dict[str, Any]) -> dict[str, Any]:
    """The kept findings with the rows of some families made again."""
    prepare_tokenizer(args)
    for label in args.only:
        kept["families"][label] = summarise(pretrain(args, label, FAMILIES[label]), "perplexity")
        for data in SETS if label in TUNED else ():
            kept["tuned"][data][label] = summarise(finetune(args, data, label), "accuracy")
    kept.pop("note", None)
    return kept


def markdown(found: Mapping[str, Any], command: str) -> str:
    """The findings as tables."""
    sequences = found["families"]["gMLP"]["sequences"]
    lines = [
        f"Made by `{command}` on {environment()['cpu']}, one thread, bf16; after the last step, mean ± sample standard",
        f"deviation over the seeds. Pretraining: {sequences:,} sequences of {SHARED['seq_len']} tokens of `english`, a",
        f"WordPiece vocabulary of {TOKENS:,}, every model in the same order with the same masks.",
        "",
        # What was found out about the results afterwards; results made again have none.
        *([found["note"], ""] if "note" in found else []),
        "| model | perplexity, held out | parameters |",
        "|---|---:|---:|",
        *(_row(name, row) for name, row in found["families"].items()),
        "",
        "| gate of gMLP | perplexity, held out | parameters |",
        "|---|---:|---:|",
        *(_row(name, row) for name, row in found["gates"].items()),
        _row("split, free instead of Toeplitz", found["free_gate"]),
        "",
        "Share of a free gate's variance that lies on its diagonals at the end; by chance "
        f"{found['free_gate']['by_chance']:.3f}.",
        "",
        "| seed | " + " | ".join(f"block {i}" for i in range(len(found["free_gate"]["end"][0]))) + " |",
        "|---|" + "---:|" * len(found["free_gate"]["end"][0]),
        *(
            f"| {i} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
            for i, shares in enumerate(found["free_gate"]["end"])
        ),
        "",
        "| fine-tuned on | TF-IDF | " + " | ".join(TUNED) + " |",
        "|---|---:|" + "---:|" * len(TUNED),
        *(
            " | ".join([f"| {data}", f"{rows['base']['accuracy']:.4f}", *(shown(rows[name], 4) for name in TUNED)])
            + " |"
            for data, rows in found["tuned"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, row: Mapping[str, Any]) -> str:
    return f"| {name} | {shown(row, 2)} | {row['parameters']:,} |"


def main(args: Args) -> None:
    """Run, then write."""
    if args.only:
        kept = run_again(args, json.loads((HERE / "text_nano.json").read_text()))
        (HERE / "text_nano.json").write_text(json.dumps(kept, indent=1, default=str) + "\n")
        (HERE / "text_nano.md").write_text(markdown(kept, kept["command"]))
        return
    found = run_all(args)
    command = f"python -m recipes.text.text_nano --seeds {','.join(map(str, args.seeds))}"
    settings = {"shared": SHARED, "pretraining": PRETRAINING, "tuning": TUNING, "sets": SETS, "vocabulary": TOKENS}
    settings["families"] = {label: asdict(family) for label, family in FAMILIES.items()}
    kept = {"command": command, "environment": environment(), **settings, **found}
    print(markdown(found, command))
    if not args.quick:
        shutil.copyfile(args.out / "toeplitz.png", PICTURE)
        (HERE / "text_nano.json").write_text(json.dumps(kept, indent=1, default=str) + "\n")
        (HERE / "text_nano.md").write_text(markdown(found, command))


if __name__ == "__main__":
    run_program(main, Args)
