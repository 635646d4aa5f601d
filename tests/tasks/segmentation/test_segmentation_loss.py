"""Losses over pixels against loops written from their equations, in one process and in two."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from tokenmix.lab.tasks.segmentation.task import pixel_entropy, soft_iou_loss
from tokenmix.lab.train.task import TaskModule

IGNORE = 255


def pixels(batch: int = 3, *, classes: int = 4, missing: int = 2) -> tuple[Tensor, Tensor]:
    """Logits and classes of noise; class `missing` is of no pixel, and a third of the pixels of image 0 are ignored."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(batch, classes, 5, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, classes, (batch, 5, 6), generator=generator)
    labels[labels == missing] = (missing + 1) % classes
    labels[0, :, :2] = IGNORE
    return logits, labels


def overlap_by_loops(logits: Tensor, labels: Tensor) -> Tensor:
    shares = logits.softmax(1)
    losses = []
    for c in range(logits.shape[1]):
        both, either, found = 0.0, 0.0, False
        for b in range(len(labels)):
            for y in range(labels.shape[1]):
                for x in range(labels.shape[2]):
                    if labels[b, y, x] == IGNORE:
                        continue
                    p, t = shares[b, c, y, x], float(labels[b, y, x] == c)
                    both, either, found = both + p * t, either + p + t - p * t, found or t == 1
        if found:
            losses.append(1 - both / either)
    return torch.stack(losses).mean()  # type: ignore[arg-type]


def test_overlap_equals_the_loops_with_its_gradient():
    logits, labels = pixels()
    torch.testing.assert_close(soft_iou_loss(logits, labels, IGNORE), overlap_by_loops(logits, labels))
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: soft_iou_loss(x, labels, IGNORE), (logits,))


def test_overlap_of_certain_answers():
    _, labels = pixels()
    truth = F.one_hot(labels.where(labels != IGNORE, 0), 4).movedim(-1, 1).double()
    assert soft_iou_loss(1000 * truth, labels, IGNORE) == 0.0
    assert soft_iou_loss(-1000 * truth, labels, IGNORE) == 1.0
    # What is ignored may be answered in any way.
    torch.testing.assert_close(
        soft_iou_loss(truth, labels, IGNORE),
        soft_iou_loss(torch.where(labels[:, None] == IGNORE, 7.0, truth), labels, IGNORE),
    )


@pytest.mark.parametrize("loss", [pixel_entropy, soft_iou_loss])
def test_nothing_but_ignored_pixels(loss):
    logits, labels = pixels()
    logits.requires_grad_()
    value = loss(logits, torch.full_like(labels, IGNORE), IGNORE)
    value.backward()
    assert value == 0.0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_entropy_is_that_of_pytorch():
    logits, labels = pixels()
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE)
    torch.testing.assert_close(pixel_entropy(logits, labels, IGNORE), expected)


class Counted:
    """What `part_weights` asks of a task."""

    def count(self, labels: Tensor) -> int:
        return int((labels != IGNORE).sum())


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    logits, labels = pixels()
    # All three images by one process, or two by the first and one by the second.
    own = slice(0, 2) if rank == 0 else slice(2, 3)
    counts = [int((labels[part] != IGNORE).sum()) for part in (slice(0, 2), slice(2, 3))]
    for loss in (pixel_entropy, soft_iou_loss):
        whole = logits.clone().requires_grad_()
        expected = loss(whole, labels, IGNORE)
        expected.backward()
        dist.init_process_group("gloo", init_method=f"file://{store}-{loss.__name__}", rank=rank, world_size=2)
        try:
            part = logits[own].clone().requires_grad_()
            value = loss(part, labels[own], IGNORE)
            if loss is pixel_entropy:
                (weight,) = TaskModule.part_weights(Counted(), [labels[own]])  # type: ignore[arg-type]
                assert weight == pytest.approx(2 * counts[rank] / sum(counts))
                value = weight * value
            value.backward()
            mean = value.detach().clone()
            dist.all_reduce(mean)
        finally:
            dist.destroy_process_group()
        torch.testing.assert_close(mean / 2, expected.detach())
        assert part.grad is not None
        assert whole.grad is not None
        # Gradients are averaged over the processes.
        torch.testing.assert_close(part.grad / 2, whole.grad[own])


@pytest.mark.slow
def test_two_processes_have_the_loss_of_one(tmp_path: Path):
    mp.spawn(worker, (str(tmp_path / "store"),), nprocs=2)
