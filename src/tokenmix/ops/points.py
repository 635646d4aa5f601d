"""Point clouds as batched tensors: sorting, farthest-point sampling, nearest neighbours, grouping.

Ties between points are broken by coordinates, never by array position. A permuted or padded cloud gives the same
points.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_chunk_size, check_mask_type, check_tensor, check_whole
from tokenmix.ops.normalize import widen

# Default number of distances held at a time: 3 MB with their keys, which fits the caches. Measured for 8 x 512 queries
# among 1,024 points, one thread: 0.11 s, against 0.16 to 0.23 s with 2^21 to 2^24.
_HELD = 2**18


class Centres(NamedTuple):
    """Sampled points."""

    indices: Tensor  # (B, M) int64, in order of selection; any prefix is also a sample
    mask: Tensor  # (B, M) bool, False for entries that repeat a point because the cloud has fewer than M


def sort_points(points: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """An order of a cloud that does not depend on array positions: by x, then y, z and further channels.

    `gather_points(points, order)` is the same for every permutation of the cloud.

    Shape: points (B, N, C), mask (B, N) bool, True = the point takes part, others come last; order (B, N) int64.
    """
    _check_points(points, mask)
    order = torch.arange(points.shape[1], device=points.device).expand(points.shape[:2])
    # Least significant key first, as for any stable sort.
    keys = [*reversed(points.unbind(-1)), *([] if mask is None else [(~mask).to(points.dtype)])]
    for key in keys:
        order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
    return order


def farthest_points(points: Tensor, count: int, *, mask: Tensor | None = None) -> Centres:
    """Farthest-point sampling: each new point is the farthest from all earlier points.

        c_1 = argmax_i |p_i - mean p|,   c_m = argmax_i min_(l < m) |p_i - p_(c_l)|

    Published code starts at a random point and gives a different sample each time. Here the first point is the farthest
    from the centre, with ties broken by `sort_points`.

    If a cloud has fewer than M = `count` different points, the remaining entries repeat one and are masked.

    Shape: points (B, N, C), coordinates and further channels that break ties, mask (B, N) bool, True = takes part.

    Reference: Qi et al., PointNet++, arXiv 1706.02413, section 3.3.
    """
    check_whole(count=count)
    order = sort_points(points, mask=mask)
    cloud = gather_points(points, order)[..., :3].detach()
    taking = torch.ones_like(order, dtype=torch.bool) if mask is None else mask.gather(1, order)
    # Padding may hold any value, NaN included.
    cloud = cloud.masked_fill(~taking.unsqueeze(-1), 0.0)
    # In double precision, so that padding does not change the centre.
    middle = (cloud.double().sum(1, keepdim=True) / taking.sum(1).clamp(min=1)[:, None, None]).to(cloud.dtype)
    far = _squared(cloud, middle).squeeze(1).masked_fill(~taking, -1.0)
    nearest = torch.full_like(far, torch.inf).masked_fill(~taking, -1.0)
    chosen, kept = [], []
    for _ in range(count):
        # argmax returns the first of equal values.
        index = far.argmax(1, keepdim=True)
        kept.append(far.gather(1, index) > 0 if chosen else taking.gather(1, index))
        chosen.append(index)
        nearest = torch.minimum(nearest, _squared(cloud, gather_points(cloud, index)).squeeze(1))
        far = nearest
    return Centres(order.gather(1, torch.cat(chosen, 1)), torch.cat(kept, 1))


def nearest_neighbours(
    queries: Tensor, points: Tensor, count: int, *, mask: Tensor | None = None, chunk_size: int | None = None
) -> Tensor:
    """The `count` points nearest to each query, nearest first; ties go to the lower index.

    If a cloud has fewer points, the nearest one fills the rest, which does not change a maximum over neighbours. A
    chunk of queries needs chunk_size x N distances for each cloud (default: 3 MB of distances).

    Shape: queries (B, M, 3), points (B, N, 3), further channels ignored, mask (B, N) bool, True = the point may be a
    neighbour; returns (B, M, k = count) int64, indices into the N points.
    """
    _check_points(points, mask)
    check_whole(count=count)
    check_chunk_size(chunk_size)
    batch, num_points = points.shape[:2]
    if chunk_size is None:
        # One graph must serve batches of every size.
        whole = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        chunk_size = queries.shape[1] if whole else max(1, _HELD // max(1, batch * num_points))
    all_points, parts = points[..., :3].detach(), queries[..., :3].detach().split(chunk_size, dim=1)
    few = min(count, num_points)
    if len(parts) == 1:
        index = _nearest(parts[0], all_points, few, mask)
    else:
        # Preallocated, because small results between large temporary tensors would fragment memory.
        index = queries.new_empty(batch, queries.shape[1], few, dtype=torch.int64)
        for part, place in zip(parts, index.split(chunk_size, dim=1)):
            place.copy_(_nearest(part, all_points, few, mask))
    missing = count - index.shape[-1]
    return index if missing == 0 else torch.cat([index, index[..., :1].expand(*index.shape[:2], missing)], -1)


def gather_points(values: Tensor, index: Tensor) -> Tensor:
    """Values (B, N, C) at indices (B, ...), as (B, ..., C)."""
    # As rows of one table, which the backward pass sums as whole rows.
    batch, num_points = values.shape[:2]
    first = num_points * torch.arange(batch, device=index.device)
    return F.embedding(index + first.view(-1, *[1] * (index.dim() - 1)), values.flatten(0, 1))


def group_points(values: Tensor, centres: Tensor, neighbours: Tensor) -> Tensor:
    """Each neighbour relative to its centre, and the centre: [v_j - v_i, v_i].

    Shape: values v (B, N, C), centres i (B, M) and neighbours j (B, M, k), int64, to (B, M, k, 2 C).

    Reference: Guo et al., PCT: Point Cloud Transformer, arXiv 2012.09688, section 3.4 (neighbour embedding).
    """
    middle = gather_points(values, centres).unsqueeze(2).expand(-1, -1, neighbours.shape[2], -1)
    return torch.cat([gather_points(values, neighbours) - middle, middle], -1)


def _nearest(queries: Tensor, points: Tensor, count: int, mask: Tensor | None) -> Tensor:
    far = _squared(widen(points), widen(queries))  # Squares exceed the range of float16.
    if mask is not None:
        far = far.masked_fill(~mask.unsqueeze(1), torch.inf)
    # The bits of non-negative floats sort like the floats, so this sorts by distance, then by index. float64 bits would
    # leave no room for the index.
    keys = far.float().view(torch.int32).long() * 2**32 + torch.arange(points.shape[1], device=points.device)
    key, index = keys.topk(count, dim=-1, largest=False, sorted=True)
    if mask is None:
        return index
    unreached = key >= torch.tensor(torch.inf, device=points.device).view(torch.int32).long() * 2**32
    return torch.where(unreached, index[..., :1], index)


def _squared(points: Tensor, queries: Tensor) -> Tensor:
    """Squared distances (B, M, N), by differences, so that a point has distance 0 only from itself."""
    parts = [
        (query.unsqueeze(2) - point.unsqueeze(1)).square()
        for query, point in zip(queries.unbind(-1), points.unbind(-1))
    ]
    return parts[0] + parts[1] + parts[2]


def _check_points(points: Tensor, mask: Tensor | None) -> None:
    check_tensor("points", points)
    if points.dim() != 3 or points.shape[-1] < 3:
        raise UserError(f"point clouds are (B, N, 3) or wider, got {tuple(points.shape)}; coordinates come first")
    if not points.shape[1]:
        raise UserError(f"a cloud without points, got {tuple(points.shape)}; remove it")
    if mask is None:
        return
    check_mask_type(mask)
    if mask.shape != points.shape[:2]:
        raise UserError(
            f"mask must be (B, N) = {tuple(points.shape[:2])}, got {tuple(mask.shape)}; give one bool for each point"
        )
