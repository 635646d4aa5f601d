"""External attention with its tokens over two and three processes: what one process gives, and how little it sends."""

from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from processes import FORKS
from tokenmix.errors import UserError
from tokenmix.ops.external import external_attention, sharded_external_attention

CASES: list[dict[str, Any]] = [
    {"heads": 1},
    {"heads": 3, "bias": True},
    {"heads": 2, "masked": True, "bias": True},
    {"heads": 2, "masked": True, "chunk_size": 2},
    {"heads": 2, "masked": True, "num_steps": 3},
    {"heads": 1, "chunk_size": 3, "num_steps": 2, "bias": True},
    {"heads": 2, "last_is_empty": True},
]


def problem(heads: int, num_tokens: int, bias: bool) -> list[Tensor | None]:
    """Query, memories, biases, and what weighs the output in the loss."""
    gen = torch.Generator().manual_seed(0)
    shapes = [(2, heads, num_tokens, 4), (5, 4), (5, 3), (5,), (3,)]
    tensors: list[Tensor | None] = [3 * torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    return tensors if bias else [*tensors[:3], None, None]


def shards(num_tokens: int, world: int, last_is_empty: bool) -> list[slice]:
    """Uneven parts of the tokens."""
    cuts = [0, *(2 + 4 * r for r in range(world - 1)), num_tokens]
    if last_is_empty:
        cuts[-2] = num_tokens
    return [slice(a, b) for a, b in pairwise(cuts)]


def gradients(fn: Any, tensors: list[Tensor | None], weight: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
    query, key_memory, value_memory, key_bias, value_bias = leaves
    out = fn(query, key_memory, value_memory, key_bias=key_bias, value_bias=value_bias, **options)
    given = [t for t in leaves if t is not None]
    return out, list(torch.autograd.grad((out * weight).sum(), given))


def check_case(rank: int, world: int, group: dist.ProcessGroup | None, case: dict[str, Any]) -> None:
    num_tokens = 13
    tensors = problem(case["heads"], num_tokens, case.get("bias", False))
    weight = torch.randn(2, case["heads"], num_tokens, 3, generator=torch.Generator().manual_seed(1)).double()
    mask = None
    if case.get("masked"):  # The second sample has nothing at all, the first nothing on rank 0.
        mask = torch.zeros(2, num_tokens, dtype=torch.bool)
        mask[0, [3, 4, 8, 9, 12]] = True
    steps = case.get("num_steps", 1)
    expected, whole = gradients(external_attention, tensors, weight, mask=mask, num_steps=steps)
    part = shards(num_tokens, world, case.get("last_is_empty", False))[rank]
    query = tensors[0]
    assert query is not None
    local: list[Tensor | None] = [query[..., part, :], *tensors[1:]]
    out, ours = gradients(
        sharded_external_attention,
        local,
        weight[..., part, :],
        mask=None if mask is None else mask[:, part],
        num_steps=steps,
        chunk_size=case.get("chunk_size"),
        group=group,
    )
    torch.testing.assert_close(out, expected[..., part, :], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours[0], whole[0][..., part, :], rtol=1e-10, atol=1e-11)
    for one, other in zip(ours[1:], whole[1:], strict=True):
        dist.all_reduce(one, group=group)
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def check_traffic() -> None:
    """Three numbers for each sample, head and slot, for any number of tokens."""
    sent: list[int] = []
    wrapped = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_to_all", "broadcast")}

    def counting(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.numel() * tensor.element_size())
            return wrapped[name](tensor, *args, **kwargs)

        return call

    for name in wrapped:
        setattr(dist, name, counting(name))
    for dtype, size in ((torch.float32, 4), (torch.float64, 8)):
        for num_tokens in (7, 300):
            sent.clear()
            query = torch.randn(2, 3, num_tokens, 4, dtype=dtype, requires_grad=True)
            memories = [torch.randn(5, 4, dtype=dtype, requires_grad=True) for _ in range(2)]
            out = sharded_external_attention(query, *memories, chunk_size=64)
            assert sum(sent) == 2 * (2 * 3 * 5) * size
            out.square().sum().backward()
            assert sum(sent) == 3 * (2 * 3 * 5) * size
    for name, original in wrapped.items():
        setattr(dist, name, original)


def worker(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        part: Any = dist.new_group([0, 1])
        for case in CASES:
            check_case(rank, world, None, case)
            if world == 3 and rank < 2:
                check_case(rank, 2, part, case)
        check_traffic()
    finally:
        dist.destroy_process_group()


@pytest.mark.one_fast
@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_give_what_one_does(tmp_path: Path, world: int) -> None:
    mp.start_processes(worker, (str(tmp_path / "store"), world), nprocs=world, start_method=FORKS.get_start_method())


def test_without_a_group_the_remedy_is_named() -> None:
    with pytest.raises(UserError, match=r"no process group.*torchrun.*external_attention in a single process"):
        sharded_external_attention(torch.randn(1, 1, 4, 3), torch.randn(5, 3), torch.randn(5, 3))


def test_shapes_and_options_are_checked_first() -> None:
    with pytest.raises(UserError, match="of one width d"):
        sharded_external_attention(torch.randn(1, 1, 4, 2), torch.randn(5, 3), torch.randn(5, 3))
    with pytest.raises(UserError, match="value_memory must be"):
        sharded_external_attention(torch.randn(1, 1, 4, 3), torch.randn(5, 3), torch.randn(6, 3))
    tensors = torch.randn(1, 1, 4, 3), torch.randn(5, 3), torch.randn(5, 3)
    for name in ("key_bias", "value_bias"):
        with pytest.raises(UserError, match=f"{name} must be"):
            sharded_external_attention(*tensors, **{name: torch.randn(7)})
    with pytest.raises(UserError, match="chunk_size must be at least 1"):
        sharded_external_attention(torch.randn(1, 1, 4, 3), torch.randn(5, 3), torch.randn(5, 3), chunk_size=0)
