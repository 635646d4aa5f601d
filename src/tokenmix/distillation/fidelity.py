"""How near a student's outputs are to its teacher's on samples that it did not learn from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.distillation.losses import rows_of
from tokenmix.distillation.reading import OutputReader, mask_of
from tokenmix.errors import UserError

NEIGHBOURS = 10
MOST_COMPARED = 5000


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """A student's outputs next to its teacher's, on held-out samples.

    Attributes:
        rows: vectors compared: samples, tokens or pixels.
        loss: the loss that is trained.
        cosine: mean of cos(s, t).
        mse: |s - t|^2 / |t|^2.
        agreement: share of rows whose largest entry is the same, which is the answer of a classifier.
        neighbours: of embeddings (B, D), the share of a sample's 10 nearest by cosine that are the teacher's; None for
            other outputs, and below 20 samples. It depends on their number; of more than 5,000 the first are taken.
    """

    rows: int
    loss: float
    cosine: float
    mse: float
    agreement: float
    neighbours: float | None


@dataclass(frozen=True)
class HeldOut:
    """Held-out batches, and the teacher's outputs on them."""

    batches: Sequence[Any]
    wanted: Sequence[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, teacher: nn.Module, batches: Iterable[Any], reader: OutputReader) -> "HeldOut":
        """Run the teacher once, in evaluation mode."""
        kept = [reader.moved(batch) for batch in batches]
        if not kept:
            raise UserError("held_out has no batch; give some, or leave it out")
        with evaluating(teacher):
            return cls(kept, [reader(teacher, batch) for batch in kept])

    @torch.no_grad()
    def fidelity(
        self, student: nn.Module, reader: OutputReader, loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    ) -> Fidelity:
        """That of a student, in evaluation mode."""
        losses, ours, theirs = [], [], []
        for batch, wanted in zip(self.batches, self.wanted, strict=True):
            with evaluating(student):
                given, mask = reader(student, batch), mask_of(batch)
            losses.append(loss(given, wanted, mask).float() * len(given))
            ours.append(rows_of(given, mask).float())
            theirs.append(rows_of(wanted, mask).float())
        given, wanted = torch.cat(ours), torch.cat(theirs)
        vectors = self.wanted[0].dim() == 2 and len(given) >= 2 * NEIGHBOURS
        return Fidelity(
            rows=len(given),
            loss=(torch.stack(losses).sum() / sum(map(len, self.wanted))).item(),
            cosine=F.cosine_similarity(given, wanted, dim=-1).mean().item(),
            mse=((given - wanted).square().sum() / wanted.square().sum().clamp_min(1e-12)).item(),
            agreement=(given.argmax(-1) == wanted.argmax(-1)).float().mean().item(),
            neighbours=neighbour_overlap(given[:MOST_COMPARED], wanted[:MOST_COMPARED]) if vectors else None,
        )


def neighbour_overlap(student: Tensor, teacher: Tensor, count: int = NEIGHBOURS) -> float:
    """The share of each row's nearest rows by cosine, itself left out, that both have in common; (n, D) each."""
    ours, theirs = (_nearest(F.normalize(rows, dim=-1), count) for rows in (student, teacher))
    return (ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2).float().mean().item()


def _nearest(rows: Tensor, count: int) -> Tensor:
    return (rows @ rows.T).fill_diagonal_(-2.0).topk(count).indices


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode, as it was before at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
