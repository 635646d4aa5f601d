"""External attention with one head (Algorithm 1), with many heads (EAMLP), and on maps (the EANet block)."""

from typing import Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, masked_output, zero_masked
from tokenmix.ops.checks import check_choice, check_flags, check_heads, check_rates, check_whole
from tokenmix.ops.external import Backend, Options, check_options, external_attention, external_attention_map
from tokenmix.ops.external_blocks import Normalization

Tie = Literal["none", "init", "hard"]


class Memory(nn.Module):
    """The two memories of external attention, M_k (S, d) and M_v (S, d).

        out = Norm(F M_k^T + b_k) M_v + b_v

    Both start normal with std sqrt(2 / d), as in effect in the released EANet code; the logits then have sqrt(2) times
    the std of the queries. (Std 0.001, as in one popular port, starts with a uniform map.) Biases start at 0.
    `tie="hard"` uses `key_memory` for both, and `value_memory` is None. `"init"` copies the values once. Parameters
    never share storage, so copies, `.half()`, device moves and reloads train as before.
    """

    def __init__(
        self,
        dim: int,
        num_slots: int,
        tie: Tie,
        options: Options,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_choice("tie", tie, get_args(Tie))
        check_whole(dim=dim, num_slots=num_slots)
        check_options(**options, dropout=dropout)
        self.tie, self.options, self.dropout = tie, options, dropout
        self.key_memory = nn.Parameter(torch.empty(num_slots, dim, **factory))
        self.value_memory = None if tie == "hard" else nn.Parameter(torch.empty(num_slots, dim, **factory))
        self.key_bias = nn.Parameter(torch.empty(num_slots, **factory)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(dim, **factory)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        std = (2.0 / self.key_memory.shape[1]) ** 0.5
        self.key_memory.normal_(std=std)
        if self.tie == "init" and self.value_memory is not None:
            self.value_memory.copy_(self.key_memory)
        elif self.value_memory is not None:
            self.value_memory.normal_(std=std)
        for bias in (self.key_bias, self.value_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map query (B, H, N, d) to (B, H, N, d); masked tokens are 0."""
        return external_attention(
            query,
            self.key_memory,
            self.key_memory if self.value_memory is None else self.value_memory,
            key_bias=self.key_bias,
            value_bias=self.value_bias,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            **self.options,
        )

    def attention_map(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention map (B, H, N, S), before dropout."""
        kind, steps = self.options["normalization"], self.options["num_steps"]
        return external_attention_map(
            query, self.key_memory, key_bias=self.key_bias, mask=mask, normalization=kind, num_steps=steps
        )

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of both products for one head; the logits that chunks compute again are not counted."""
        return 2 * num_tokens * self.key_memory.numel()

    def extra_repr(self) -> str:
        slots, width = self.key_memory.shape
        kind, drop = self.options["normalization"], f", dropout={self.dropout}" if self.dropout else ""
        usual = {"normalization": kind, "num_steps": 1}
        other = "".join(f", {name}={value!r}" for name, value in self.options.items() if value != usual.get(name))
        return f"num_slots={slots}, width={width}, tie={self.tie!r}, normalization={kind!r}{other}{drop}"


class ExternalAttention(Mixer):
    """Single-head external attention on tokens.

        F   = X W_q + b_q
        out = (Norm(F M_k^T) M_v) W_o + b_o

    Algorithm 1 of the paper ends with M_v: `output_projection=False`. The output projection is from the released EAMLP
    stem. Double normalisation has no epsilon here. A causal form is impossible, because double normalisation sums each
    slot over all tokens, future tokens included.

    Args:
        dim: width D.
        query_projection: use W_q.
        output_projection: use W_o.
        dropout: rate on the output.
        num_slots: S, rows of each memory.
        tie: `"none"`, two memories; `"init"`, equal at the start and trained separately; `"hard"`, one memory for both.
        normalization, num_steps, chunk_size, backend: see `tokenmix.ops.external_attention`.

    Shape: x (B, N, dim), any N; mask (B, N) bool; map (B, 1, N, num_slots).

    Reference: Guo et al., Beyond Self-attention: External Attention using Two Linear Layers, arXiv 2105.02358,
    Algorithm 1.
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
        factory: Factory = {"device": device, "dtype": dtype}
        options = Options(normalization=normalization, num_steps=num_steps, chunk_size=chunk_size, backend=backend)
        self.dim = dim
        self.query = nn.Linear(dim, dim, **factory) if query_projection else nn.Identity()
        self.memory = Memory(dim, num_slots, tie, options, **factory)
        self.proj = nn.Linear(dim, dim, **factory) if output_projection else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask, weight=self.memory.key_memory)
        mixed = self.memory(self.query(x), mask)
        if isinstance(self.proj, nn.Identity):  # not a view, and already 0 at masked tokens
            return self.dropout(mixed)
        return masked_output(self.dropout(self.proj(mixed)), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask, weight=self.memory.key_memory)
        return self.memory.attention_map(self.query(x).unsqueeze(1), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 D S + D^2 per projection)."""
        check_whole(num_tokens=num_tokens)
        projections = sum(isinstance(layer, nn.Linear) for layer in (self.query, self.proj))
        return num_tokens * projections * self.dim**2 + self.memory.macs(num_tokens)


class MultiHeadExternalAttention(Mixer):
    """External attention with many heads that share both memories.

        F_h = (X W_q + b_q)_h                             D -> e D, cut into e H heads of width d = D / H
        out = concat_h (Norm(F_h M_k^T + b_k) M_v + b_v) W_o + b_o

    The expansion e = 4 and the memory biases are from the released EAMLP code. `expansion=1, memory_bias=False` is the
    algorithm as printed. Double normalisation has no epsilon here.

    Args:
        dim: width D.
        num_heads: H, heads before expansion; every head has width dim / num_heads (64 as published).
        expansion: e, factor on the inner width and on the number of heads.
        memory_bias: give the memories biases b_k (S,) and b_v (d,). Under double normalisation b_k cancels exactly.
        dropout: rate on the output.
        attention_dropout: rate on the attention map; not with chunk_size.
        num_slots, tie, normalization, num_steps, chunk_size, backend: as in `ExternalAttention`.

    Shape: x (B, N, dim), any N; mask (B, N) bool; map (B, expansion * num_heads, N, num_slots).

    Cost: 2 e D^2 + 2 e D S multiply-adds per token; 8 D^2 + 512 D as published. Multi-head self-attention costs
    4 D^2 + 2 N D, so external attention is cheaper only above N = 2 D + 256 tokens. At 224 px with patch 16 it costs
    nearly twice as much. The map has e H N S entries.

    Reference: Guo et al., Beyond Self-attention, arXiv 2105.02358, Algorithm 2.
    """

    capabilities = Capabilities(linear=True, map="slots")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 8,
        expansion: int = 4,
        memory_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
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
        width = check_heads(dim, num_heads)
        check_whole(expansion=expansion)
        check_flags(memory_bias=memory_bias)
        check_rates(dropout=dropout, attention_dropout=attention_dropout)
        factory: Factory = {"device": device, "dtype": dtype}
        options = Options(normalization=normalization, num_steps=num_steps, chunk_size=chunk_size, backend=backend)
        self.dim, self.num_heads, self.expansion = dim, num_heads, expansion
        self.query = nn.Linear(dim, expansion * dim, **factory)
        self.memory = Memory(width, num_slots, tie, options, dropout=attention_dropout, bias=memory_bias, **factory)
        self.proj = nn.Linear(expansion * dim, dim, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        mixed = self.memory(self._heads(x), mask)
        return masked_output(self.dropout(self.proj(mixed.transpose(1, 2).flatten(2))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        return self.memory.attention_map(self._heads(x), mask)

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        projections = 2 * num_tokens * self.query.in_features * self.query.out_features
        return projections + self.expansion * self.num_heads * self.memory.macs(num_tokens)

    def _heads(self, x: Tensor) -> Tensor:
        return self.query(x).unflatten(-1, (self.expansion * self.num_heads, -1)).transpose(1, 2)


class ExternalAttention2d(Mixer):
    """The EANet block on maps; residual and ReLU are inside the block.

        F   = conv1(X)                                  1 x 1, with bias
        out = relu(X + BN(conv2(Norm(F M_k^T) M_v)))    1 x 1, without bias

    In training, BatchNorm sees all samples and pixels of the batch, masked pixels as 0. Samples then affect each other
    (`capabilities.independent` is False). Only in `eval()` does a padded map give the result of the cropped map.

    The released network has 64 slots and behaves like `tie="init"` on a GPU. The paper's parameter count fits
    `tie="hard"`.

    Args:
        dim: channels.
        num_slots, tie, normalization, num_steps, chunk_size, backend: as in `ExternalAttention`.

    Shape: x (B, dim, H, W), any H and W; mask (B, H * W) bool, row by row; map (B, 1, H * W, num_slots).

    Reference: Guo et al., Beyond Self-attention, arXiv 2105.02358, and the released segmentation network, which has one
    such block between backbone and classifier.
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
        factory: Factory = {"device": device, "dtype": dtype}
        options = Options(normalization=normalization, num_steps=num_steps, chunk_size=chunk_size, backend=backend)
        self.dim = dim
        self.conv1 = nn.Conv2d(dim, dim, 1, **factory)
        self.memory = Memory(dim, num_slots, tie, options, **factory)
        self.conv2 = nn.Conv2d(dim, dim, 1, bias=False, **factory)
        self.norm = nn.BatchNorm2d(dim, **factory)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        mixed = self.memory(self._pixels(x), mask).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return zero_masked(F.relu(x + self.norm(self.conv2(mixed))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        return self.memory.attention_map(self._pixels(x), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 D^2 + 2 D S) for N = H * W pixels."""
        check_whole(num_tokens=num_tokens)
        return 2 * num_tokens * self.dim**2 + self.memory.macs(num_tokens)

    def _pixels(self, x: Tensor) -> Tensor:
        return self.conv1(x).flatten(2).transpose(1, 2).unsqueeze(1)
