"""A mixer and an image classifier of somebody outside the package, without timm's interface."""

from typing import Any

import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.layers import Capabilities, Mixer, SelfAttention
from tokenmix.registry import MODELS, ModelEntry


class Roll(Mixer):
    """Half of the channels come from the token before."""

    capabilities = Capabilities(map=None, mask=False, equivariant=False, linear=True)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        half = self.dim // 2
        return torch.cat([x[..., :half], x[..., half:].roll(1, dims=1)], -1)

    def macs(self, num_tokens: int) -> int:
        return 0


class Unmixed(nn.Module):
    """No mixer at all."""


class ToyNet(nn.Module):
    """Patches of 4 px, one attention, the mean."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3, img_size: Any = 16) -> None:
        super().__init__()
        self.in_chans, self.img_size = in_chans, (img_size, img_size) if isinstance(img_size, int) else img_size
        self.stem, self.mixer = nn.Conv2d(in_chans, 16, 4, 4), SelfAttention(16, num_heads=2)
        self.head = nn.Linear(16, num_classes)

    def set_input_size(self, size: int) -> None:
        self.img_size = (size, size)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.mixer(self.stem(images).flatten(2).mT).mean(1))


tokenmix.register_mixer("toy-roll", Roll)
MODELS.register(
    ModelEntry(name="toy_net", tasks=("image-classification",), about="one attention", build="toy_net:ToyNet")
)
