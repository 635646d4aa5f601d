"""Writing into what a mixer returns gives the gradients of the same operation out of place, under FSDP2 as well."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cases import BATCH, CASES, DIM, GRID, NUM_TOKENS, VARIANTS, Case, builder, example
from tokenmix.layers import MultiHeadExternalAttention, create_mixer
from tokenmix.layers.base import GridMixer
from tokenmix.models.lavit import ReducedAttention
from tokenmix.testing.harness import awake, noise

BARE = {"query_projection": False, "output_projection": False, "num_slots": 10}
EVERY = {
    **CASES,
    **VARIANTS,
    **{
        f"external-bare-{backend}": Case("external", {**BARE, "backend": backend})
        for backend in ("eager", "tiled", "sdpa")
    },
    "multihead-external-wide": Case(MultiHeadExternalAttention, {"dim": DIM, "num_heads": 1, "expansion": 1}),
    "simplified-projected": Case("simplified", {"output_projection": True}),
    "gating-linear": Case("gating", {"variant": "linear"}),
    "on-a-grid": Case(lambda dim: GridMixer(create_mixer("sagan", dim), GRID), {"dim": DIM}),
    "reduced": Case(ReducedAttention, {"dim": DIM, "grid": GRID, "reduction": 2, "num_heads": 4}),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process: enough for FSDP2 to free the weights after the forward pass and to fetch them for the backward."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def gradients(layer: nn.Module, x: Tensor, *, in_place: bool) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out = out.mul_(2.0).add_(1.0) if in_place else out * 2.0 + 1.0
    out.square().mean().backward()
    found = {"the input": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items() if g is not None}


@pytest.mark.parametrize("name", [name for name in EVERY if name != "external-2d"])
def test_gradients(name: str, mesh: DeviceMesh) -> None:
    build = builder(EVERY[name])
    x = noise(BATCH, NUM_TOKENS, DIM) if name == "on-a-grid" else example(EVERY[name])
    expected = gradients(awake(build).train(), x, in_place=False)
    sharded = awake(build).train()
    fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
    with warnings.catch_warnings():
        # FSDP2 warns of a module that returns a view: writing into it drops the hook that fetches the weights.
        warnings.simplefilter("error")
        found = gradients(sharded, x, in_place=True)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_autograd_refuses_it_behind_the_relu_of_the_eanet_block() -> None:
    """ReLU keeps its result for the backward pass, as `torch.nn.ReLU` does: an error, never a wrong gradient."""
    case = EVERY["external-2d"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(awake(builder(case)).train(), example(case), in_place=True)
