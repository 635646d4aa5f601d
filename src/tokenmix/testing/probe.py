"""`tokenmix.probe`: measure a mixer's abilities on synthetic tasks, and explain failures from one layer."""

import inspect
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError, as_user_error, unknown_name
from tokenmix.files import to_html, to_json
from tokenmix.layers.base import Mixer
from tokenmix.layers.table import MixerSpec, build_on_grid, build_stack, get_spec, spec_of
from tokenmix.registry import import_object
from tokenmix.testing.harness import Builder, awake
from tokenmix.testing.probe_tasks import TASKS, ProbeTask, guess_of
from tokenmix.testing.properties.tokens import influence
from tokenmix.trust import from_caller

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HARDLY = 1e-3
"""Below this fraction of influence by other tokens, a layer hardly mixes."""
_FEW = f"the other tokens make up less than {HARDLY:.1%} of what changes an output"
NARROW = 0.5
"""Below this fraction of the numbers in half of the tokens, little passes to the other half."""


@dataclass(frozen=True)
class Structure:
    """Dependence of one layer's outputs on random tokens."""

    tokens: int  # number of tokens in the measurement
    reach: int  # largest distance at which one token changes another token's output; 0 without mixing
    others: float  # fraction of an output's changes caused by other tokens
    passed: int  # rank of the derivative of the first half of the outputs by the second half of the tokens
    held: int  # numbers in half of the tokens
    # `"content"` if influence moves with permuted tokens, else `"place"`; None without mixing.
    follows: Literal["place", "content"] | None
    slots: bool  # the layer declares attention to slots
    leaks: bool  # in evaluation mode, a sample's output changes with the other samples of the batch

    def sentence(self) -> str:
        """The layer's limits in a sentence; empty if each token can see all others."""
        if self.leaks:
            return "leaks across samples: an output changes with the other samples of the batch"
        if self.reach == 0:
            return "mixes nothing: each output depends on its own token alone"
        if self.others < HARDLY:
            return f"hardly mixes: {_FEW}"
        if self.reach < self.tokens - 1:
            return f"sees only neighbours: one layer reaches {self.reach} of {self.tokens - 1} tokens"
        return ""

    def reason(self, distance: int, needs: str, depth: int) -> str:
        """Why `depth` layers fail at a task with this `distance` and `needs`; empty if no measurement explains it."""
        if self.reach == 0:
            return "each output depends on its own token alone"
        if self.others < HARDLY:
            return _FEW
        if self.reach < self.tokens - 1 and self.reach * depth < distance:
            return f"{depth} layers reach {self.reach * depth} tokens far, and {distance} are asked for"
        if needs == "content" and self.passed < NARROW * self.held:
            memory = "its memory is the same for every sample" if self.slots else "its passage is narrow"
            return f"{memory} ({self.passed} of {self.held} numbers pass from one half of the tokens to the other)"
        if needs == "content" and self.follows == "place":
            return "which tokens an output listens to depends on their places"
        if needs == "place" and self.follows == "content":
            return "which tokens an output listens to depends on what they hold, not on their places"
        return ""


Target = str | Callable[..., nn.Module]
"""A name of the table, "module:Class", or a class of layers."""
BASELINES = ("self", "identity")
SOLVED = 0.95
"""From this fraction between guessing and perfect accuracy, a task is solved."""
NOTHING = 0.1
"""Below this fraction, a mixer has learned nothing."""
SEEDS = (0, 1, 2, 3, 4)
T_QUANTILE = 2.776
"""Student's t at 97.5 % with four degrees of freedom."""
DIM, DEPTH, HEADS, BATCH, LR = 64, 2, 4, 64, 3e-3
EVAL = 1024


class ProbeNet(nn.Module):
    """Token and positional embeddings, pre-norm blocks of a mixer and an MLP, a linear head per position.

        x <- x + mixer(norm(x)),   x <- x + mlp(norm(x)),   logits = head(norm(x))

    The table of positions has twice the training length. Training starts at a random offset, so all positions are
    trained.

    Shape: tokens (B, N) int64 to logits (B, N, classes).
    """

    def __init__(self, mixers: Sequence[nn.Module], task: ProbeTask, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.vocab, dim)
        self.positions = nn.Parameter(0.5 * torch.randn(2 * task.grid[0] * task.grid[1], dim))
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * len(mixers)))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in mixers
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, task.classes)

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """Logits (B, N, classes) of tokens (B, N) or (B, N, 2) at positions from `offset`."""
        embedded = self.embed(tokens) if tokens.dim() == 2 else self.embed(tokens).sum(2)
        x, carry = embedded + self.positions[offset : offset + tokens.shape[1]], None
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            normed = self.norms[2 * i](x)
            if isinstance(mixer, Mixer):
                out, carry = mixer.mix(normed, carry)
            else:
                out = mixer(normed)
            x = x + out
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norm(x))


def make_mixers(target: Target, grid: tuple[int, int], dim: int, depth: int) -> list[nn.Module]:
    """One mixer per block; `UserError` if the name is unknown or the mixer cannot be built."""
    if hybrid := parts_of(target):
        return [m for part, run in groupby(hybrid) for m in make_mixers(part, grid, dim, len(list(run)))]
    label, spec = _spec_of(target)
    if spec is not None:
        return [*build_stack(label, spec, dim, grid, depth, num_heads=HEADS)]
    build: Any = target
    given = {"num_tokens": grid[0] * grid[1]} if "num_tokens" in inspect.signature(build).parameters else {}
    with as_user_error(f"{target} cannot be built with the width {dim}: ", "; give a class that takes it alone"):
        return [build(dim, **given) for _ in range(depth)]


def parts_of(target: Target) -> list[str]:
    """The mixers of a hybrid such as "external+self", one per block; empty for a single mixer."""
    return target.split("+") if isinstance(target, str) and "+" in target else []


def _spec_of(target: Target) -> tuple[str, MixerSpec | None]:
    """Name and table entry of a mixer; None for other classes and functions, which are called with the width."""
    if isinstance(target, str):
        return target, get_spec(target)
    name = getattr(target, "__name__", str(target))
    return name, spec_of(name, target) if isinstance(target, type) and issubclass(target, Mixer) else None


def look_at(label: str, target: Target) -> Structure:
    """Measure which outputs of a new layer change with one token, the order of the tokens, or another sample.

    `UserError` if the layer cannot be built or run, or changes the shape.
    """
    hybrid, num_tokens = parts_of(target), 16
    name, spec = (label, None) if hybrid else _spec_of(target)
    grid = 1, num_tokens

    def build() -> nn.Module:
        if hybrid:
            return nn.Sequential(*make_mixers(target, grid, DIM, len(hybrid)))
        if spec is None:
            return make_mixers(target, grid, DIM, 1)[0]
        return build_on_grid(spec.layer, f"mixer {name!r}", DIM, grid, {"num_heads": HEADS}, spec.fixed)

    with as_user_error(f"{label} fails on tokens {(*grid, DIM)}: ", "; tokenmix doctor says more"):
        layer = awake(Builder(build)).double().requires_grad_(False)
        x, other, third = torch.randn(3, 1, num_tokens, DIM, generator=torch.Generator().manual_seed(0)).double()
        if (found := layer(x)).shape != x.shape:
            raise UserError(f"{label} gives {tuple(found.shape)} for tokens {tuple(x.shape)}; a mixer keeps the shape")
        if not found.isfinite().all():
            raise UserError(f"{label} gives NaN or infinity for random tokens; tokenmix doctor says more")
        if not torch.equal(layer(x), found):
            raise UserError(f"{label} is not deterministic: in evaluation mode it gives other numbers for equal tokens")
        order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))
        seen, moved = influence(layer, x), influence(layer, x[:, order])
        distance = (torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)).abs()
        apart = distance > 0
        stays, goes = ((moved - seen) * apart).norm(), ((moved - seen[order][:, order]) * apart).norm()
        reach, half = int((distance * (seen > 0)).max()), num_tokens // 2
        passed = torch.autograd.functional.jacobian(
            lambda late: layer(torch.cat([x[:, :half], late], 1))[:, :half].flatten(), x[:, half:]
        )
        declared = getattr(layer, "capabilities", None)
        return Structure(
            tokens=num_tokens,
            reach=reach,
            others=float((seen * apart).sum() / seen.sum().clamp_min(1e-300)),
            passed=int(torch.linalg.matrix_rank(passed.flatten(1), atol=1e-12 * seen.max(), rtol=1e-9)) if reach else 0,
            held=half * DIM,
            follows=None if reach == 0 else "content" if goes < stays / 4 else "place",
            slots=getattr(declared, "map", None) == "slots",
            leaks=not torch.allclose(layer(torch.cat([x, other]))[0], layer(torch.cat([x, third]))[0], atol=1e-9),
        )


@dataclass(frozen=True)
class Score:
    """One mixer on one task."""

    task: str  # name of the task; with "x2" at the end, for twice the training length
    mixer: str  # name of the mixer
    values: tuple[float, ...]  # accuracy per seed, over the queried positions
    guess: float  # accuracy without mixing

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half-width of the 95 % confidence interval over five seeds; None for a single seed."""
        if len(self.values) < len(SEEDS):
            return None
        return T_QUANTILE * statistics.stdev(self.values) / math.sqrt(len(self.values))

    @property
    def level(self) -> float:
        """0 for guessing, 1 for perfect accuracy."""
        return max(0.0, (self.mean - self.guess) / (1 - self.guess))


@dataclass(frozen=True)
class ProbeReport:
    """Results of all mixers on all tasks.

    Attributes:
        scores: one per task and mixer.
        structures: `Structure` of one layer, by mixer.
        seconds: training time by mixer.
        seeds: number of seeds.
    """

    scores: tuple[Score, ...]
    structures: dict[str, Structure]
    seconds: dict[str, float]
    seeds: int

    @property
    def mixers(self) -> list[str]:
        return list(self.structures)

    def score(self, task: str, mixer: str) -> Score | None:
        """The score of a mixer on a task; None if the mixer does not accept the task's number of tokens."""
        return next((one for one in self.scores if (one.task, one.mixer) == (task, mixer)), None)

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(score.task for score in self.scores))

    def sentences(self, mixer: str) -> list[str]:
        structure = self.structures[mixer].sentence()
        lines = [f"{mixer} {structure}."] if structure else []
        for score in (one for one in self.scores if one.mixer == mixer):
            task, longer = TASKS[score.task.removesuffix(" x2")], score.task.endswith(" x2")
            verb = "can" if score.level >= SOLVED else "cannot" if score.level < NOTHING else "can partly"
            reason = self.structures[mixer].reason(task.distance, task.needs, DEPTH) if verb != "can" else ""
            teacher = self.score(score.task, "self")
            beside = "" if teacher is None or mixer == "self" else f", self-attention {teacher.mean:.2f}"
            lines.append(
                f"{mixer} {verb} {task.ability}{' at twice the trained length' * longer}{': ' * bool(reason)}{reason}. "
                f"{score.mean:.2f} right, guessing {score.guess:.2f}{beside}."
            )
        return lines

    @classmethod
    def from_json(cls, text: str) -> "ProbeReport":
        told = json.loads(text)
        scores = (Score(one["task"], one["mixer"], tuple(one["values"]), one["guess"]) for one in told["scores"])
        structures = {name: Structure(**one) for name, one in told["structures"].items()}
        return cls(tuple(scores), structures, told["seconds"], told["seeds"])

    def to_json(self) -> str:
        rows = [{**asdict(score), "mean": score.mean, "half_width": score.half_width} for score in self.scores]
        structures = {name: asdict(structure) for name, structure in self.structures.items()}
        sentences = {name: self.sentences(name) for name in self.mixers}
        document = {"seeds": self.seeds, "seconds": self.seconds, "structures": structures}
        return to_json({**document, "scores": rows, "sentences": sentences})

    def rows(self) -> list[list[str]]:
        """Cells of the table: a header, then one row per mixer. `*` marks solved tasks."""
        guesses = {score.task: score.guess for score in self.scores}
        table = [["mixer", *self.tasks], ["guessing", *(f"{guesses[task]:.2f}" for task in self.tasks)]]
        for mixer in self.mixers:
            cells = [mixer]
            for task in self.tasks:
                score = self.score(task, mixer)
                if score is None:
                    cells.append("-")
                    continue
                spread = "" if score.half_width is None else f" ± {score.half_width:.2f}"
                cells.append(f"{score.mean:.2f}{spread}{'*' * (score.level >= SOLVED)}")
            table.append(cells)
        return table

    def markdown(self) -> str:
        head, *body = self.rows()
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
        return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "* solved", "", *(line for m in self.mixers for line in self.sentences(m))])

    def _repr_html_(self) -> str:
        return to_html(self.rows(), " ".join(line for mixer in self.mixers for line in self.sentences(mixer)))

    def plot(self) -> "Figure":
        """A matplotlib figure with bars for each task and a line at the accuracy of guessing."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.2 + 0.75 * len(self.mixers), 1.25 * len(self.tasks)), layout="constrained")
        axes = figure.subplots(len(self.tasks), 1, sharex=True, squeeze=False)[:, 0]
        for ax, task in zip(axes, self.tasks):
            found = [self.score(task, mixer) for mixer in self.mixers]
            heights = [math.nan if score is None else score.mean for score in found]
            errors = [0.0 if score is None else score.half_width or 0.0 for score in found]
            colours = ["C7" if mixer in BASELINES else "C0" for mixer in self.mixers]
            ax.bar(self.mixers, heights, yerr=errors if any(errors) else None, color=colours)
            guess = next(score.guess for score in found if score is not None)
            ax.axhline(guess, color="C3", linestyle="--", linewidth=1, label="guessing")
            ax.set(ylim=(0, 1.05), ylabel=task)
            for i, score in enumerate(found):
                if score is None:
                    ax.text(i, 0.05, "fixed\nlength", ha="center", fontsize=7)
        axes[0].legend(loc="upper right", fontsize=7)
        axes[-1].set_xticks(range(len(self.mixers)), self.mixers, rotation=30, ha="right")
        figure.suptitle("accuracy at the positions asked for", fontsize=10)
        return figure


STEPS: dict[str, int] = {
    "recall": 600,
    "copy": 600,
    "shift": 300,
    "count": 400,
    "majority": 200,
    "same": 500,
    "path": 400,
}
"""Training steps of a task, at which self-attention's learning curve is flat."""


def train_one(target: Target, task: ProbeTask, seed: int, *, steps: int, device: str = "cpu") -> dict[str, Tensor]:
    """Train one network from scratch; return what it has `right` at the training length and at twice the length."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ProbeNet(make_mixers(target, task.grid, DIM, DEPTH), task, DIM).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.1)
        free = task.grid[0] * task.grid[1]  # offsets into the table of positions
        for step in range(steps):
            tokens, answers = task.batch(BATCH, seed * 1_000_003 + step)
            offset = 0 if task.double is None else (seed * 7919 + step * 104_729) % (free + 1)
            logits = net(tokens.to(device), offset)
            loss = F.cross_entropy(logits.flatten(0, 1), answers.to(device).flatten(), ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        found = {task.name: right(net, task, task.grid, device)}
        declared: list[Any] = [getattr(mixer, "capabilities", None) for mixer in net.mixers]
        any_length = all(known is not None and (known.length, known.layout) == ("any", "tokens") for known in declared)
        if task.double is not None and any_length:
            found[f"{task.name} x2"] = right(net, task, task.double, device)
        return found


@torch.no_grad()
def right(net: nn.Module, task: ProbeTask, grid: tuple[int, int], device: str) -> Tensor:
    """How many positions of each test sample are right, and how many were asked for: (2, samples) int64."""
    tokens, answers = task.batch(EVAL, 2**41, grid)
    net.eval()
    found = torch.cat([net(part.to(device)).argmax(2).cpu() for part in tokens.split(256)])
    net.train()
    return torch.stack([found == answers, answers >= 0]).sum(2)


def accuracy(counts: Tensor) -> float:
    """Accuracy over all positions of all samples, from `right`."""
    hits, asked = counts.double().sum(1)
    return float(hits / asked)


@from_caller
def probe(
    mixers: Target | Sequence[Target],
    *,
    tasks: Sequence[str] | None = None,
    full: bool = False,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> ProbeReport:
    """Train mixers on synthetic tasks with known answers, against self-attention and identity.

    Networks have two blocks of width 64, or one block per mixer of a hybrid. No disk or network access. The quick form
    has one seed and takes at most two minutes per mixer on two cores.

    Args:
        mixers: names of the table; "external+self" for a hybrid with one mixer per block; or module classes from (B, N,
            D) to (B, N, D), also as "module:Class". Classes are called with the width, and with `num_tokens` if they
            accept it.
        tasks: names of `TASKS`; all if None.
        full: five seeds, with 95 % confidence intervals.
        device: training device.
        progress: called with a line for each result.

    Raises:
        UserError: a mixer or task is unknown, a mixer cannot be built or trained, or the device does not exist.
    """
    chosen = list(TASKS) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    if not chosen:
        raise UserError(f"no task given; name one or more of {', '.join(TASKS)}")
    for name in chosen:
        if name not in TASKS:
            raise unknown_name("task of the probe", name, TASKS)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; leave device out")
    given = list(mixers) if isinstance(mixers, Sequence) and not isinstance(mixers, str) else [mixers]
    named: dict[str, Target] = {}
    for target in [*BASELINES, *given]:
        label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if isinstance(target, nn.Module) or not (isinstance(target, str) or callable(target)):
            raise UserError(f"a mixer must be a name of tokenmix.list_mixers() or a class, got {target!r}")
        named.setdefault(label, import_object(target) if isinstance(target, str) and ":" in target else target)
    structures = {label: look_at(label, target) for label, target in named.items()}
    scores: dict[str, dict[str, list[float]]] = {label: {} for label in named}
    seconds: dict[str, float] = {}
    # Requested mixers first, for users who stop early.
    for label in sorted(named, key=BASELINES.__contains__):
        start, target = time.perf_counter(), named[label]
        for name in chosen:
            for seed in SEEDS if full else SEEDS[:1]:
                with as_user_error(f"{label} fails in training on {name}: ", "; tokenmix doctor says more"):
                    found = train_one(target, TASKS[name], seed, steps=STEPS[name], device=device)
                for task, counts in found.items():
                    scores[label].setdefault(task, []).append(accuracy(counts))
            if progress is not None:
                progress(f"{label}, {name}: {statistics.fmean(scores[label][name]):.2f}")
        seconds[label] = round(time.perf_counter() - start, 1)
    rows = [
        Score(task, label, tuple(values), guess_of(task))
        for label, found in scores.items()
        for task, values in found.items()
    ]
    return ProbeReport(tuple(rows), structures, seconds, len(SEEDS) if full else 1)
