"""What both networks are made of: spectral norm, orthogonal start, batch norm with a gain and shift for each class."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized

Layer = TypeVar("Layer", bound=nn.Module)

# Of power iteration, after which the estimate of a first weight's largest singular value is good to a few per cent.
STARTING_STEPS = 15


def spectral(layer: Layer) -> Layer:
    """The layer with its weight divided by its largest singular value; one step of power iteration a training pass."""
    parametrizations.spectral_norm(layer)
    return layer


@torch.no_grad()
def orthogonal_start(network: nn.Module) -> None:
    """Draw every convolution, projection and embedding orthogonal, biases 0, and let power iteration follow.

    Reading a weight in training mode takes a step of power iteration. Without, the vectors that spectral norm keeps
    would be those of the weight before, and its estimate far too small.
    """
    for layer in network.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding):
            continue
        normed = is_parametrized(layer, "weight")
        weight: Any = layer.parametrizations["weight"].original if normed else layer.weight  # type: ignore[index]
        if weight.is_meta:
            continue
        nn.init.orthogonal_(weight)
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        for _ in range(STARTING_STEPS if normed else 0):
            _ = layer.weight


class ConditionalBatchNorm2d(nn.Module):
    """Batch norm whose gain and shift are learned for each class.

        y = g_c (x - mean) / sqrt(var + eps) + s_c

    Paper: de Vries et al., Modulating early visual processing by language, arXiv 1707.00683; as in SAGAN, gains start
    at 1 and shifts at 0, in every class alike.

    Shapes: x (B, C, H, W) and labels (B,) int64 to (B, C, H, W).
    """

    def __init__(
        self, channels: int, num_classes: int, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.norm = nn.BatchNorm2d(channels, affine=False, **place)
        # Parameters and not embeddings: an orthogonal start is for what multiplies a signal.
        self.gain = nn.Parameter(torch.ones(num_classes, channels, **place))
        self.shift = nn.Parameter(torch.zeros(num_classes, channels, **place))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Normalise x, then scale and shift each sample as its class asks."""
        gain, shift = self.gain[labels], self.shift[labels]
        return torch.addcmul(shift[:, :, None, None], self.norm(x), gain[:, :, None, None])
