"""Losses over pixels: of a batch, and of a batch in all its processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def pixel_entropy(logits: Tensor, classes: Tensor, ignore: int) -> Tensor:
    """Cross-entropy over the pixels of this process that are not ignored; 0 if there are none.

    Shape:
        logits (B, C, H, W), classes (B, H, W) to ().
    """
    count = (classes != ignore).sum().float()
    return F.cross_entropy(logits, classes, ignore_index=ignore, reduction="sum") / count.clamp_min(1)


def soft_iou_loss(logits: Tensor, classes: Tensor, ignore: int) -> Tensor:
    """One minus the mean over the classes of the soft intersection over union of prediction and truth.

        loss = 1 - mean_c [ sum_n p_nc t_nc / sum_n (p_nc + t_nc - p_nc t_nc) ],   p = softmax(logits)

    with t_nc = 1 where pixel n is of class c, over the pixels of all images of the step that are not ignored, and the
    classes that one of them has. Rare classes weigh as much as common ones, as in the mean IoU. 0 if every pixel is
    ignored.

    Paper: Rahman and Wang, Optimizing Intersection-Over-Union in Deep Neural Networks for Image Segmentation, 2016,
    there for one class.

    Shape:
        logits (B, C, H, W), classes (B, H, W) to ().
    """
    shares, counted = logits.softmax(1), classes != ignore
    labels = classes.where(counted, 0).flatten()
    right = shares.gather(1, labels.view_as(classes).unsqueeze(1)).squeeze(1) * counted
    nothing = shares.new_zeros(shares.shape[1])
    both = nothing.index_add(0, labels, right.flatten())
    answered = torch.einsum("bchw,bhw->c", shares, counted.to(shares.dtype))
    there = nothing.index_add(0, labels, counted.flatten().to(shares.dtype))
    both, answered, there = _of_all(torch.stack([both, answered, there]))
    present = there > 0
    overlap = both[present] / (answered + there - both)[present]
    return (1 - overlap).sum() / present.sum().clamp_min(1)


def _of_all(own: Tensor) -> Tensor:
    """The sum over the processes, whose gradients come out right once they are averaged over the processes."""
    if not dist.is_initialized():
        return own
    total = own.detach().clone()
    dist.all_reduce(total)
    return total + dist.get_world_size() * (own - own.detach())
