"""Synthetic tasks with known answers, one per ability of a mixer. Samples depend only on their seed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Tokens (B, N) int64, or (B, N, 2) for pairs; and classes (B, N) int64, -1 at positions without a question."""


@dataclass(frozen=True)
class ProbeTask:
    """One task."""

    name: str  # in tables and on the command line
    ability: str  # completes the sentence "it can ..." for a mixer that solves the task
    vocab: int  # number of tokens
    classes: int  # number of answers
    grid: tuple[int, int]  # (height, width) of the tokens in training; a sequence has height 1
    sample: Callable[[int, tuple[int, int], torch.Generator], Batch]  # batch size, grid and generator to a batch
    distance: int  # between tokens that must interact, in at least half of the questions
    needs: Literal["content", "place"]  # `"content"` if tokens must be found by content, `"place"` if by position
    double: tuple[int, int] | None = None  # grid of twice as many tokens, for longer test inputs; None for none
    # Grid to the accuracy of a better guess than `guess_of` finds.
    known_guess: Callable[[tuple[int, int]], float] | None = None

    def batch(self, size: int, seed: int, grid: tuple[int, int] | None = None) -> Batch:
        """The batch of a seed, equal on every machine."""
        return self.sample(size, grid or self.grid, torch.Generator().manual_seed(seed))


def _distinct(size: int, count: int, among: int, generator: torch.Generator) -> Tensor:
    """(size, count) different numbers below `among` per row, in random order."""
    return torch.rand(size, among, generator=generator).argsort(1)[:, :count]


KEYS = VALUES = 64


def recall(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """Key-value pairs, then every key again in another order: recall its value.

    All pairs are new in each sample, so memorisation does not help. A token is two numbers with added embeddings: the
    key, and the value or the mark "asked".
    """
    pairs = grid[0] * grid[1] // 2
    keys = _distinct(size, pairs, KEYS, generator)
    values = _distinct(size, pairs, VALUES, generator)
    order = _distinct(size, pairs, pairs, generator)
    asked = keys.gather(1, order)
    shown = torch.stack([keys, KEYS + values], 2)
    tokens = torch.cat([shown, torch.stack([asked, torch.full_like(asked, KEYS + VALUES)], 2)], 1)
    return tokens, torch.cat([torch.full_like(keys, -1), values.gather(1, order)], 1)


SYMBOLS = 8


def selective_copy(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """Four symbols at random positions among blanks, then four empty positions: copy the symbols in order."""
    length = grid[0] * grid[1]
    positions = _distinct(size, 4, length - 4, generator).sort(1).values
    symbols = torch.randint(SYMBOLS, (size, 4), generator=generator)
    tokens = torch.full((size, length), SYMBOLS)
    tokens.scatter_(1, positions, symbols)
    tokens[:, -4:] = SYMBOLS + 1
    answers = torch.full((size, length), -1)
    answers[:, -4:] = symbols
    return tokens, answers


SHIFT = 5


def shift(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """Each position asks for the token five positions earlier."""
    tokens = torch.randint(SYMBOLS, (size, grid[0] * grid[1]), generator=generator)
    answers = torch.full_like(tokens, -1)
    answers[:, SHIFT:] = tokens[:, :-SHIFT]
    return tokens, answers


def count(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """Each position asks how often its token occurs; the last class is 7 or more."""
    length = grid[0] * grid[1]
    # Few token types with unequal odds, so that counts vary.
    odds = torch.rand(size, SYMBOLS, generator=generator).square() + 0.02
    tokens = torch.multinomial(odds, length, replacement=True, generator=generator)
    counts = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).sum(2)
    return tokens, counts.clamp_max(8) - 1


def majority(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """Each position asks which of two tokens is more frequent; counts differ by one to three."""
    length = grid[0] * grid[1]
    margin = torch.randint(1, 4, (size, 1), generator=generator)
    answer = torch.randint(2, (size, 1), generator=generator)
    more = (length + margin + 1) // 2
    ones = torch.where(answer == 1, more, length - more)
    rank = torch.rand(size, length, generator=generator).argsort(1).argsort(1)
    return (rank < ones).long(), answer.expand(size, length).clone()


def same_or_different(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """Two symbols among blanks, far apart: the last position asks whether they are equal."""
    length = grid[0] * grid[1]
    first = torch.randint(length // 4, (size, 1), generator=generator)
    second = length - 2 - torch.randint(length // 4, (size, 1), generator=generator)
    symbol = torch.randint(SYMBOLS, (size, 1), generator=generator)
    other = (symbol + torch.randint(1, SYMBOLS, (size, 1), generator=generator)) % SYMBOLS
    same = torch.randint(2, (size, 1), generator=generator)
    tokens = torch.full((size, length), SYMBOLS)
    tokens.scatter_(1, first, symbol)
    tokens.scatter_(1, second, torch.where(same == 1, symbol, other))
    tokens[:, -1] = SYMBOLS + 1
    answers = torch.full((size, length), -1)
    answers[:, -1:] = same
    return tokens, answers


def connected(size: int, grid: tuple[int, int], generator: torch.Generator) -> Batch:
    """A maze with one marked floor cell: each floor cell asks whether it is reachable (about half are)."""
    height, width = grid
    wall = torch.rand(size, height, width, generator=generator) < 0.42
    start = torch.randint(height * width, (size, 1), generator=generator)
    wall.view(size, -1).scatter_(1, start, False)
    reached = torch.zeros(size, height * width, dtype=torch.bool).scatter_(1, start, True).view(size, height, width)
    for _ in range(height * width):
        wider = torch.nn.functional.pad(reached, (1, 1, 1, 1))
        around = wider[:, :-2, 1:-1] | wider[:, 2:, 1:-1] | wider[:, 1:-1, :-2] | wider[:, 1:-1, 2:]
        grown = (reached | around) & ~wall
        if torch.equal(grown, reached):
            break
        reached = grown
    tokens = wall.long().flatten(1)
    tokens.scatter_(1, start, 2)
    return tokens, torch.where(tokens == 0, reached.flatten(1).long(), -1)


TASKS: dict[str, ProbeTask] = {
    task.name: task
    for task in (
        ProbeTask(
            "recall",
            "recall in context what was paired with a token",
            KEYS + VALUES + 1,
            VALUES,
            (1, 32),
            recall,
            16,
            "content",
            double=(1, 64),
            known_guess=lambda grid: 2 / (grid[0] * grid[1]),  # one of the values shown
        ),
        ProbeTask(
            "copy",
            "pick marked tokens and keep their order",
            SYMBOLS + 2,
            SYMBOLS,
            (1, 24),
            selective_copy,
            12,
            "content",
        ),
        ProbeTask(
            "shift", "find a token by its distance", SYMBOLS, SYMBOLS, (1, 24), shift, SHIFT, "place", double=(1, 48)
        ),
        ProbeTask("count", "count", SYMBOLS, 8, (1, 24), count, 12, "content"),
        ProbeTask(
            "majority", "weigh all tokens against each other", 2, 2, (1, 24), majority, 12, "content", double=(1, 48)
        ),
        ProbeTask(
            "same",
            "compare two distant tokens",
            SYMBOLS + 2,
            2,
            (1, 24),
            same_or_different,
            12,
            "content",
            double=(1, 48),
        ),
        ProbeTask("path", "follow a path through a picture", 3, 2, (6, 6), connected, 5, "place"),
    )
}
"""The tasks by name."""


@cache
def guess_of(name: str) -> float:
    """Best accuracy from a position's own token, over 4,096 samples; with "x2" at the end, of twice as many tokens."""
    task = TASKS[name.removesuffix(" x2")]
    grid = task.double if name.endswith(" x2") and task.double is not None else task.grid
    if task.known_guess is not None:
        return task.known_guess(grid)
    tokens, answers = task.batch(4096, 2**40, grid)
    asked = answers >= 0
    pairs = tokens[asked] * task.classes + answers[asked]
    counts = torch.bincount(pairs, minlength=task.vocab * task.classes).view(task.vocab, task.classes)
    return float(counts.max(1).values.sum() / counts.sum())
