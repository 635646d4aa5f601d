"""Token parallelism as a style for `torch.distributed.tensor.parallel.parallelize_module`."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tokenmix.layers.base import Mixer
from tokenmix.layers.splitting import split_mixer, splittable
from tokenmix.ops.token_shard import TokenShard

__all__ = ["TokenParallel"]


class TokenParallel(ParallelStyle):
    """Split the tokens of each image over the processes of a one-dimensional mesh.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tokens"))
        parallelize_module(model, mesh["tokens"], TokenParallel())

    A *model* then takes whole images, the same in every process of the mesh, and processes its own rows of patches. A
    classifier returns the logits of the images, equal in every process; a segmenter those of its own rows. A *mixer*
    takes and returns its own tokens, with their mask. External attention exchanges 12 B H S bytes a layer in float32;
    any other mixer gathers the tokens, and reports once what that costs.

    Parameters stay whole and keep their names. Their gradients must be averaged over **all** processes, those of the
    mesh included, by `DistributedDataParallel` or `fully_shard`: the result is the gradient of the mean of the losses.

    Raises:
        UserError: a model that cannot be split by rows, or an option of a mixer that has no token-parallel form.
    """

    def __init__(self) -> None:
        self.shards: dict[DeviceMesh, TokenShard] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh not in self.shards:
            self.shards[device_mesh] = TokenShard(_own_group(device_mesh))
        split: Any = split_mixer if isinstance(module, Mixer) else type(splittable(module)).split_tokens
        split(module, self.shards[device_mesh])
        return module


def _own_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The mesh's processes, in a group that gradients do not use: they are averaged while layers go backward."""
    group: Any = mesh.get_group()
    return dist.new_group() if group is dist.group.WORLD else group  # pyrefly: ignore[bad-return]
