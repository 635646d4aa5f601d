"""Multi-query associative recall of causal self-attention, the task of zoology, over width and number of pairs.

The task is that of Arora et al., Zoology, 2023, arXiv 2312.04927, written from its definition. Two blocks of one head
and no MLP, learned positions and tied embeddings, as in its Figure 2:
`python benchmarks/associative_recall.py`. With `--theirs FOLDER`, a checkout of HazyResearch/zoology, its own attention
and its own generator are trained in the same way. Prints one line of JSON a cell.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.layers import SelfAttention

VOCABULARY, POWER = 64, 0.01
WIDTHS, PAIRS, RATE = (16, 32, 64), (2, 4), 3e-3

Sample = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""Number of samples, of pairs, and seed to tokens (B, N) and answers (B, N), -100 where nothing is asked."""


def recall(size: int, pairs: int, seed: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Pairs of a key and a value, then each key once among zeros; at its second place the answer is its value.

    Keys are drawn from the lower half of the vocabulary, values from the upper, both without repetition. A key comes
    again an even number 2 g of places after the pairs, and g has odds proportional to g^(a - 1), counted from 1.
    """
    generator = torch.Generator().manual_seed(seed)
    length = 8 * pairs if length is None else length
    half, shown = VOCABULARY // 2, 2 * pairs
    keys = 1 + torch.rand(size, half - 1, generator=generator).argsort(1)[:, :pairs]
    values = half + torch.rand(size, half, generator=generator).argsort(1)[:, :pairs]
    odds = torch.arange(1, (length - shown) // 2 + 1) ** (POWER - 1)
    gaps = shown + 2 * torch.multinomial(odds.expand(size, -1), pairs, generator=generator)
    tokens = torch.zeros(size, length, dtype=torch.long)
    tokens[:, :shown] = torch.stack([keys, values], 2).flatten(1)
    tokens.scatter_(1, gaps, keys)
    return tokens, torch.full_like(tokens, -100).scatter_(1, gaps, values)


class Network(nn.Module):
    """Embeddings, x <- x + attention(norm(x)) twice, and logits by the same embeddings."""

    def __init__(self, dim: int, length: int, attention: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, dim), nn.Embedding(length, dim)
        for table in (self.embed, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.mixers = nn.ModuleList(attention(dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N) to logits (B, N, V)."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return F.linear(self.norms[2](x), self.embed.weight)


def solve(dim: int, pairs: int, steps: int, sample: Sample, attention: Callable[[int], nn.Module]) -> float:
    """Share of right answers on 500 new samples after training."""
    torch.manual_seed(0)
    net = Network(dim, 8 * pairs, attention)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        tokens, answers = sample(64, pairs, step)
        loss = F.cross_entropy(net(tokens).flatten(0, 1), answers.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    tokens, answers = sample(500, pairs, steps)
    with torch.no_grad():
        found = net(tokens).argmax(2)
    return float((found == answers)[answers >= 0].double().mean())


def causal(dim: int) -> nn.Module:
    """One head of our causal self-attention."""
    return SelfAttention(dim, num_heads=1, causal=True)


def load(folder: Path, name: str) -> ModuleType:
    """A module of a checkout of zoology."""
    spec = importlib.util.spec_from_file_location(name, folder / "zoology" / f"{name.replace('.', '/')}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def zoology(folder: Path) -> tuple[Sample, Callable[[int], nn.Module]]:
    """The generator and the attention of a checkout."""
    sys.path.insert(0, str(folder))
    generate, attention = load(folder, "data.multiquery_ar").multiquery_ar, load(folder, "mixers.attention").MHA

    def sample(size: int, pairs: int, seed: int) -> tuple[Tensor, Tensor]:
        sizes = {"num_examples": size, "input_seq_len": 8 * pairs, "num_kv_pairs": pairs}
        data = generate(VOCABULARY, **sizes, seed=seed, power_a=POWER, random_non_queries=False)
        return data.inputs, data.labels

    return sample, lambda dim: attention(dim, num_heads=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--theirs", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--pairs", type=int, nargs="+", default=PAIRS)
    given = parser.parse_args()
    sample, attention = (recall, causal) if given.theirs is None else zoology(given.theirs)
    for pairs in given.pairs:
        for dim in given.widths:
            start = time.process_time()
            row = {"pairs": pairs, "width": dim, "right": solve(dim, pairs, given.steps, sample, attention)}
            print(json.dumps({**row, "cpu_seconds": round(time.process_time() - start, 1)}), flush=True)
