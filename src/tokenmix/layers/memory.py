"""The two learned memories that every layer of external attention reads."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tokenmix.ops.checks import check_choice, check_whole
from tokenmix.ops.external.api import (
    Backend,
    Normalization,
    check_backend,
    check_chunks,
    check_normalization,
    check_whole_map,
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("tie", tie, get_args(Tie))
        check_whole(dim=dim, num_slots=num_slots)
        check_normalization(normalization, num_steps)
        check_whole_map(normalization, backend, chunk_size)
        self.tie, self.num_steps, self.chunk_size = tie, num_steps, chunk_size
        self.normalization: Normalization = normalization
        self.backend: Backend | None = backend
        self.check_dropout(0.0)
        factory = {"device": device, "dtype": dtype}
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
        """Raise `UserError` if chunks or the backend exclude this dropout of the map, or each other."""
        check_chunks(self.chunk_size, dropout)
        check_backend(self.backend, self.chunk_size, dropout)

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
        options: Any = {"normalization": self.normalization, "num_steps": self.num_steps}
        return external_attention_map(query, self.key_memory, key_bias=self.key_bias, mask=mask, **options)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one head: both products. Not counted: chunks compute the logits num_steps times more."""
        return 2 * num_tokens * self.key_memory.numel()

    def extra_repr(self) -> str:
        slots, width = self.key_memory.shape
        return f"num_slots={slots}, width={width}, tie={self.tie!r}, normalization={self.normalization!r}"
