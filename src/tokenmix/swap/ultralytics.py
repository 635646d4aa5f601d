"""Token mixers in the YAML files of Ultralytics' YOLO. Ultralytics is under AGPL-3.0; only `register` imports it."""

import importlib
from collections.abc import Sequence

from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.table import build_mixer, resolve_mixer
from tokenmix.registry import Arguments
from tokenmix.swap.inserting import InsertedBlock, default_heads


class TokenMix(nn.Module):
    """A residual block with a token mixer, as a row of a YOLO model's YAML file.

        y = x + gamma * mixer(norm(x)),   gamma = 0 at the start

        - [-1, 1, TokenMix, [ch, f, external, {num_slots: 64}]]

    Ultralytics replaces the words `ch` and `f` by its lists of widths and sources. The block thus has the width of its
    input at every scale (n, s, m, l, x).

    Args:
        widths: of all previous layers; `ch` in the file.
        source: index of the input; `f` in the file.
        mixer: a name of `tokenmix.list_mixers()` for maps of any size, with _ for -: Ultralytics parses `depthwise-2d`
            as a subtraction and fails.
        mixer_kwargs: arguments of the mixer.

    Shape: x (B, C, H, W) to (B, C, H, W).

    Raises:
        UserError: the mixer is unknown, or has a weight per position: YOLO runs at many sizes.
    """

    def __init__(
        self,
        widths: Sequence[int],
        source: int,
        mixer: str = "external",
        mixer_kwargs: Arguments | None = None,
    ) -> None:
        super().__init__()
        label, layer, fixed = resolve_mixer(mixer if ":" in mixer else mixer.replace("_", "-"))
        if layer.capabilities.length != "any":
            raise UserError(f"{label} has weights for one size of maps, and YOLO runs at many; take external or self")
        dim = widths[source]
        heads = {} if "num_heads" in (mixer_kwargs or {}) else default_heads(layer, dim)
        built = build_mixer(layer, f"mixer {label!r}", dim, None, {**fixed, **heads, **(mixer_kwargs or {})})
        self.block = InsertedBlock(built, "channels-first")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def register() -> None:
    """Enable `TokenMix` in Ultralytics' YAML files; call this before `YOLO("file.yaml")` and in each new process."""
    try:
        tasks = importlib.import_module("ultralytics.nn.tasks")
    except ImportError:
        raise UserError("tokenmix.swap.ultralytics needs Ultralytics: pip install ultralytics") from None
    vars(tasks)["TokenMix"] = TokenMix
