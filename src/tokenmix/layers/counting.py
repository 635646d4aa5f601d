"""Multiply-adds counted operation by operation: a check on equations, and the cost of networks of others."""

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

Answer = TypeVar("Answer")
Network = TypeVar("Network", bound=nn.Module)


@torch.no_grad()
def count_macs(run: Callable[..., Answer], *inputs: object) -> tuple[Answer, int]:
    """The output of a call, and the multiply-adds of its convolutions, linear maps and products of attention."""
    # Counters see nothing inside a fused attention kernel, so the plain products are asked for.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        answer = run(*inputs)
    return answer, counter.get_total_flops() // 2


def on_meta(network: Network) -> Network:
    """A copy with shapes only, in evaluation mode."""
    return copy.deepcopy(network).to("meta", torch.float32).eval()
