"""External attention as published for tokens (Algorithm 1) and for maps (the EANet block)."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Capabilities, Mixer, check_map, check_mask, check_tokens, zero_masked
from tokenmix.layers.linear import Fresh, Linear
from tokenmix.ops.external.api import (
    Backend,
    Normalization,
    check_backend,
    check_chunks,
    check_normalization,
    external_attention,
    external_attention_map,
)

__all__ = ["ExternalAttention", "ExternalAttention2d", "Memory", "Tie", "check_options"]

Tie = Literal["none", "init", "hard"]


class Memory(nn.Module):
    """The two memories of external attention, M_k (S, d) and M_v (S, d).

        out = Norm(F M_k^T + b_k) M_v + b_v

    Both start normal with std sqrt(2 / d), which is what the released EANet code amounts to: logits have sqrt(2) times
    the std of the queries. (With std 0.001, as in one popular port, the map starts uniform.) Biases start at 0.

    `tie="hard"` holds one parameter, `key_memory`, and uses it for both: `value_memory` is None. `"init"` copies the
    numbers once. No two parameters ever share storage, so a copy, `.half()`, a move or a reload train as before.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_slots: int,
        tie: Tie = "none",
        bias: bool = False,
        normalization: Normalization = "double",
        num_steps: int = 1,
        chunk_size: int | None = None,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if tie not in ("none", "init", "hard"):
            raise unknown_name("tie", tie, ("none", "init", "hard"))
        if num_slots < 1:
            raise UserError(f"num_slots must be at least 1, got {num_slots}; the papers use 64")
        self.tie, self.num_steps, self.chunk_size = tie, num_steps, chunk_size
        self.normalization: Normalization = normalization
        self.backend: Backend | None = backend
        place = {"device": device, "dtype": dtype}
        self.key_memory = nn.Parameter(torch.empty(num_slots, dim, **place))
        self.value_memory = None if tie == "hard" else nn.Parameter(torch.empty(num_slots, dim, **place))
        self.key_bias = nn.Parameter(torch.empty(num_slots, **place)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(dim, **place)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the memories anew."""
        std = (2.0 / self.key_memory.shape[1]) ** 0.5
        self.key_memory.normal_(std=std)
        if self.tie == "init" and self.value_memory is not None:
            self.value_memory.copy_(self.key_memory)
        elif self.value_memory is not None:
            self.value_memory.normal_(std=std)
        for bias in (self.key_bias, self.value_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, query: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """query (B, H, N, d) to (B, H, N, d); masked tokens come out 0."""
        return external_attention(
            query,
            self.key_memory,
            self.key_memory if self.value_memory is None else self.value_memory,
            key_bias=self.key_bias,
            value_bias=self.value_bias,
            mask=mask,
            normalization=self.normalization,
            num_steps=self.num_steps,
            chunk_size=self.chunk_size,
            dropout=dropout,
            backend=self.backend,
        )

    def attention_map(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, H, N, S)."""
        return external_attention_map(
            query,
            self.key_memory,
            key_bias=self.key_bias,
            mask=mask,
            normalization=self.normalization,
            num_steps=self.num_steps,
        )

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one head: both products. Not counted: chunks make the logits num_steps times more."""
        return 2 * num_tokens * self.key_memory.numel()

    def extra_repr(self) -> str:
        slots, width = self.key_memory.shape
        return f"num_slots={slots}, width={width}, tie={self.tie!r}, normalization={self.normalization!r}"


def check_options(
    name: str,
    causal: bool,
    normalization: str,
    num_steps: int,
    chunk_size: int | None,
    backend: Backend | None,
    dropout: float = 0.0,
) -> None:
    """Raise `UserError` for options that a layer of external attention cannot have."""
    if causal:
        raise UserError(
            f"{name} cannot be causal, got causal=True: double normalisation sums each slot over all tokens, those to "
            "come included; the mixers 'gating' and 'self' have a causal form"
        )
    check_normalization(normalization, num_steps)
    check_chunks(chunk_size, dropout)
    check_backend(backend, chunk_size, dropout)


class ExternalAttention(Mixer):
    """Single-head external attention on tokens.

        F   = X W_q + b_q
        out = (Norm(F M_k^T) M_v) W_o + b_o

    Paper: Guo et al., Beyond Self-attention: External Attention using Two Linear Layers, arXiv 2105.02358,
    Algorithm 1. Algorithm 1 ends with M_v; the output projection is that of the released EAMLP stem, and
    `output_projection=False` gives the algorithm as printed. Double normalisation has no epsilon here.

    Shapes: x (B, N, dim), mask (B, N) bool; map (B, 1, N, num_slots). Any N.

    Args:
        dim: width D.
        num_slots: S, rows of each memory.
        tie: `"none"`, two memories; `"init"`, equal at the start and trained apart (the released code on a GPU);
            `"hard"`, one memory used for both.
        normalization: `"double"`, or `"softmax"` over the slots, the ablation, in which tokens do not mix at all.
        num_steps: Sinkhorn steps of `"double"`.
        query_projection: has W_q.
        output_projection: has W_o.
        chunk_size: tokens worked on at a time, see `tokenmix.ops.external_attention`; None does all at once.
        backend: who computes the mixing, see `tokenmix.ops.external_attention`.
        dropout: of the output.
        causal: only False is possible.

    Raises:
        UserError: causal=True, an unknown option, or input that does not fit.
    """

    capabilities = Capabilities(linear=True, map="slots")

    def __init__(
        self,
        dim: int,
        *,
        num_slots: int = 64,
        tie: Tie = "none",
        normalization: Normalization = "double",
        num_steps: int = 1,
        query_projection: bool = True,
        output_projection: bool = True,
        chunk_size: int | None = None,
        backend: Backend | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options("ExternalAttention", causal, normalization, num_steps, chunk_size, backend)
        self.dim = dim
        self.query = Linear(dim, dim, device=device, dtype=dtype) if query_projection else nn.Identity()
        self.memory = Memory(
            dim,
            num_slots=num_slots,
            tie=tie,
            normalization=normalization,
            num_steps=num_steps,
            chunk_size=chunk_size,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.out = Linear(dim, dim, device=device, dtype=dtype) if output_projection else Fresh()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, dim) to (B, N, dim)."""
        check_tokens(self, x)
        mask = check_mask(mask, x, x.shape[1])
        mixed = self.memory(self.query(x).unsqueeze(1), mask).squeeze(1)
        return zero_masked(self.dropout(self.out(mixed)), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, 1, N, num_slots)."""
        check_tokens(self, x)
        mask = check_mask(mask, x, x.shape[1])
        return self.memory.attention_map(self.query(x).unsqueeze(1), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 D S + D^2 for each projection)."""
        projections = sum(isinstance(layer, nn.Linear) for layer in (self.query, self.out))
        return num_tokens * projections * self.dim**2 + self.memory.macs(num_tokens)


class ExternalAttention2d(Mixer):
    """The EANet block on maps.

        F   = conv1(X)                                  1 x 1, with bias
        out = relu(X + BN(conv2(Norm(F M_k^T) M_v)))    1 x 1, without bias

    Paper: Guo et al., arXiv 2105.02358, and its released segmentation network, in which this block stands alone
    between the backbone and the classifier. The identity and the ReLU are inside, as there.

    In training, BatchNorm sees all samples and all pixels of the batch, masked ones as 0; so samples depend on each
    other (`capabilities.independent` is False), and only `eval()` gives a padded map the result of the cropped one.

    Shapes: x (B, dim, H, W), any H and W; mask (B, H * W) bool, row by row; map (B, 1, H * W, num_slots).

    Args:
        dim: channels.
        num_slots, tie, normalization, num_steps, chunk_size, backend, causal: as in `ExternalAttention`; the released
            network has 64 slots and amounts to `tie="init"` on a GPU, the paper's parameter count to `tie="hard"`.

    Raises:
        UserError: causal=True, an unknown option, or input that does not fit.
    """

    capabilities = Capabilities(layout="2d", linear=True, map="slots", independent=False)

    def __init__(
        self,
        dim: int,
        *,
        num_slots: int = 64,
        tie: Tie = "none",
        normalization: Normalization = "double",
        num_steps: int = 1,
        chunk_size: int | None = None,
        backend: Backend | None = None,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options("ExternalAttention2d", causal, normalization, num_steps, chunk_size, backend)
        self.dim = dim
        self.conv1 = nn.Conv2d(dim, dim, 1, device=device, dtype=dtype)
        self.memory = Memory(
            dim,
            num_slots=num_slots,
            tie=tie,
            normalization=normalization,
            num_steps=num_steps,
            chunk_size=chunk_size,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.conv2 = nn.Conv2d(dim, dim, 1, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, dim, H, W) to (B, dim, H, W)."""
        check_map(self, x)
        mask = check_mask(mask, x, x.shape[2] * x.shape[3])
        mixed = self.memory(self._pixels(x), mask).squeeze(1).mT.unflatten(2, x.shape[2:])
        out = F.relu(x + self.norm(self.conv2(mixed)))
        return out if mask is None else out.masked_fill(~mask.unflatten(1, x.shape[2:]).unsqueeze(1), 0.0)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, 1, H * W, num_slots)."""
        check_map(self, x)
        mask = check_mask(mask, x, x.shape[2] * x.shape[3])
        return self.memory.attention_map(self._pixels(x), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 D^2 + 2 D S) for N = H * W pixels."""
        return 2 * num_tokens * self.dim**2 + self.memory.macs(num_tokens)

    def _pixels(self, x: Tensor) -> Tensor:
        """F as (B, 1, H * W, dim)."""
        return self.conv1(x).flatten(2).mT.unsqueeze(1)
