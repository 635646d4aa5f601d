"""Layers as others write them, without `capabilities`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gated(nn.Module):
    """A plain module of forward(x): features times their mean over the tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.norm(x).mean(1, keepdim=True)
        return self.out(F.gelu(self.inner(x)) * pooled)


class Wrapped(nn.Module):
    """PyTorch's attention of tokens to themselves."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class DependsOnNumbers(nn.Module):
    """Right, with Python that looks at the numbers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        if scores.detach().abs().amax().item() > 50:
            scores = scores - scores.amax(-1, keepdim=True)
        return self.out(scores.softmax(-1) @ value)


class TwoStreams(nn.Module):
    """Not a mixer: it needs a second input of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.out(x + context)


class Prints(Gated):
    """It says what it does."""

    def forward(self, x: Tensor) -> Tensor:
        print("forward", torch.Size(x.shape))
        return super().forward(x)


class RunningMean(nn.Module):
    """Statistics of its own: the mean over the batches of training."""

    mean: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return self.out(x - self.mean)


class Recurrent(nn.Module):
    """A GRU cell over the tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        return torch.stack(states, 1)
