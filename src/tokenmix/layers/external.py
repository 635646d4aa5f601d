"""External attention as published for tokens (Algorithm 1) and for maps (the EANet block), and its two memories."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, finish, zero_masked
from tokenmix.ops.checks import check_choice, check_flags, check_rates, check_whole
from tokenmix.ops.external.api import (
    Backend,
    Normalization,
    check_options,
    external_attention,
    external_attention_map,
)

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
        num_slots: int = 64,
        tie: Tie = "none",
        normalization: Normalization = "double",
        num_steps: int = 1,
        chunk_size: int | None = None,
        backend: Backend | None = None,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("tie", tie, get_args(Tie))
        check_whole(dim=dim, num_slots=num_slots)
        self.tie, self.num_steps, self.chunk_size = tie, num_steps, chunk_size
        self.normalization: Normalization = normalization
        self.backend: Backend | None = backend
        self.check_dropout(0.0)
        factory: Factory = {"device": device, "dtype": dtype}
        self.key_memory = nn.Parameter(torch.empty(num_slots, dim, **factory))
        self.value_memory = None if tie == "hard" else nn.Parameter(torch.empty(num_slots, dim, **factory))
        self.key_bias = nn.Parameter(torch.empty(num_slots, **factory)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(dim, **factory)) if bias else None
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

    def check_dropout(self, dropout: float) -> None:
        """Raise `UserError` for options that exclude each other, or this dropout of the map."""
        check_options(self.normalization, self.num_steps, self.chunk_size, dropout, self.backend)

    def forward(self, query: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """query (B, H, N, d) to (B, H, N, d); masked tokens are 0 in the output."""
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
        """Multiply-adds of one head: both products. Not counted: chunks compute the logits num_steps times more."""
        return 2 * num_tokens * self.key_memory.numel()

    def extra_repr(self) -> str:
        slots, width = self.key_memory.shape
        return f"num_slots={slots}, width={width}, tie={self.tie!r}, normalization={self.normalization!r}"


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
        query_projection: has W_q.
        output_projection: has W_o.
        dropout: of the output.
        num_slots: S, rows of each memory.
        tie: `"none"`, two memories; `"init"`, equal at the start and trained apart; `"hard"`, one memory for both.
        normalization: `"double"`; `"sigmoid"`, `"l2"` and `"entmax15"`, see `tokenmix.ops.external_attention`; or
            `"softmax"` over the slots, the ablation, in which tokens do not mix at all.
        num_steps: Sinkhorn steps of the double normalisation.
        chunk_size: tokens worked on at a time, see `tokenmix.ops.external_attention`; None does all at once.
        backend: implementation of the mixing, see `tokenmix.ops.external_attention`.

    Raises:
        UserError: an unknown option, or input that does not fit. There is no causal form: double normalisation sums
            each slot over all tokens, those to come included.
    """

    capabilities = Capabilities(linear=True, map="slots")

    def __init__(
        self,
        dim: int,
        *,
        query_projection: bool = True,
        output_projection: bool = True,
        dropout: float = 0.0,
        num_slots: int = 64,
        tie: Tie = "none",
        normalization: Normalization = "double",
        num_steps: int = 1,
        chunk_size: int | None = None,
        backend: Backend | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim)
        check_flags(query_projection=query_projection, output_projection=output_projection)
        check_rates(dropout=dropout)
        self.dim = dim
        self.query = nn.Linear(dim, dim, device=device, dtype=dtype) if query_projection else nn.Identity()
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
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype) if output_projection else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, dim) to (B, N, dim)."""
        x, mask = self.checked(x, mask, weight=self.memory.key_memory)
        mixed = self.memory(self.query(x), mask)
        if isinstance(self.proj, nn.Identity):  # no view, and masked tokens are 0 in it
            return self.dropout(mixed)
        return finish(self.dropout(self.proj(mixed)), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, 1, N, num_slots)."""
        x, mask = self.checked(x, mask, weight=self.memory.key_memory)
        return self.memory.attention_map(self.query(x).unsqueeze(1), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 D S + D^2 for each projection)."""
        check_whole(num_tokens=num_tokens)
        projections = sum(isinstance(layer, nn.Linear) for layer in (self.query, self.proj))
        return num_tokens * projections * self.dim**2 + self.memory.macs(num_tokens)


class ExternalAttention2d(Mixer):
    """The EANet block on maps.

        F   = conv1(X)                                  1 x 1, with bias
        out = relu(X + BN(conv2(Norm(F M_k^T) M_v)))    1 x 1, without bias

    Paper: Guo et al., arXiv 2105.02358, and its released segmentation network, in which this block is by itself
    between the backbone and the classifier. Residual and ReLU are inside the block.

    In training, BatchNorm sees all samples and all pixels of the batch, masked ones as 0; so samples depend on each
    other (`capabilities.independent` is False), and only `eval()` gives a padded map the result of the cropped one.

    Shapes: x (B, dim, H, W), any H and W; mask (B, H * W) bool, row by row; map (B, 1, H * W, num_slots).

    Args:
        dim: channels.
        num_slots, tie, normalization, num_steps, chunk_size, backend: as in `ExternalAttention`.

    The released network has 64 slots and amounts to `tie="init"` on a GPU, the paper's parameter count to `tie="hard"`.

    Raises:
        UserError: an unknown option, or input that does not fit. There is no causal form.
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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim)
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
        x, mask = self.checked(x, mask)
        mixed = self.memory(self._pixels(x), mask).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return zero_masked(F.relu(x + self.norm(self.conv2(mixed))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, 1, H * W, num_slots)."""
        x, mask = self.checked(x, mask)
        return self.memory.attention_map(self._pixels(x), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 D^2 + 2 D S) for N = H * W pixels."""
        check_whole(num_tokens=num_tokens)
        return 2 * num_tokens * self.dim**2 + self.memory.macs(num_tokens)

    def _pixels(self, x: Tensor) -> Tensor:
        """F as (B, 1, H * W, dim)."""
        return self.conv1(x).flatten(2).transpose(1, 2).unsqueeze(1)
