"""Masks of other libraries as masks of tokens."""

import torch
from torch import Tensor

from tokenmix.errors import UserError


def check_values(holds: Tensor, message: str) -> None:
    """Raise `UserError` unless `holds` is True everywhere; a compiled or exported graph asserts it when it runs.

    On the meta device there are no values to check.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(holds.all(), message)
    elif not holds.is_meta and not holds.all():
        raise UserError(message)


def from_added(mask: Tensor) -> Tensor:
    """A mask that is added to scores as a boolean one, True = the token takes part.

    Raises:
        UserError: a number other than 0 and about minus infinity, which weighs tokens instead of leaving them out.
    """
    taking_part = mask == 0
    check_values(
        taking_part | (mask < torch.finfo(mask.dtype).min / 4),
        "the mask is added to attention scores and has values other than 0 and -inf; a mixer can mask tokens, not "
        "weight them: give a boolean mask",
    )
    return taking_part


def shared_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A mask of tokens (B, N) or of pairs (B, 1, 1 or N, N) as one of the tokens of x (B, N).

    True = it takes part, as for SDPA; numbers are added to scores, except whole numbers (B, N), which are 1 or 0. Every
    query sees the same tokens. A query that sees none must be a token that no query sees: timm's NaFlex masks padding
    so.

    Raises:
        UserError: a mask whose queries see different tokens, which only a map of pairs can honour.
    """
    if mask is None:
        return None
    num_tokens = x.shape[1]
    message = (
        f"the attention mask {tuple(mask.shape)} masks pairs of tokens; a mixer can only mask tokens: "
        f"give (B, 1, 1, {num_tokens}), or (B, 1, {num_tokens}, {num_tokens}) with equal rows"
    )
    if mask.dim() == 2 and not mask.is_floating_point():
        mask = mask.bool()
    pairs = mask[(slice(None), *[None] * (4 - mask.dim()))] if mask.dim() in (2, 3) else mask
    if pairs.dim() != 4 or pairs.shape[1] != 1 or pairs.shape[2] not in (1, num_tokens) or pairs.shape[3] != num_tokens:
        raise UserError(message)
    pairs = (pairs if pairs.dtype == torch.bool else from_added(pairs))[:, 0]
    seen = pairs.any(1)
    if pairs.shape[1] > 1:
        padding = ~(seen.unsqueeze(2) | pairs.any(2, keepdim=True))
        check_values((pairs == seen.unsqueeze(1)) | padding, message)
    return seen.expand(x.shape[0], -1)
