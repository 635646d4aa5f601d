"""Token mixers in the YAML files of Ultralytics' YOLO. Ultralytics is under AGPL-3.0; only `register` imports it."""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

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
        UserError: the mixer is unknown, has a weight per position (YOLO runs at many sizes), or has spectral norm.
    """

    def __init__(
        self,
        widths: Sequence[int],
        source: int | None = None,
        mixer: str = "external",
        mixer_kwargs: Arguments | None = None,
    ) -> None:
        super().__init__()
        row = isinstance(widths, list | tuple) and isinstance(source, int) and isinstance(mixer, str)
        if not row or not isinstance(mixer_kwargs, dict | None):
            given = ", ".join(map(str, (widths, source, mixer, mixer_kwargs)))
            raise UserError(f"a row is - [-1, 1, TokenMix, [ch, f, external, {{num_slots: 64}}]]; got [{given}]")
        assert source is not None
        label, layer, fixed = resolve_mixer(mixer if ":" in mixer else mixer.replace("_", "-"))
        if layer.capabilities.length != "any":
            raise UserError(f"{label} has weights for one size of maps, and YOLO runs at many; take external or self")
        dim = widths[source]
        given = {**default_heads(layer, dim), **fixed, **(mixer_kwargs or {})}
        built = build_mixer(layer, f"mixer {label!r}", dim, None, given)
        if any(map(is_parametrized, built.modules())):
            raise UserError(
                f"{label} has spectral norm, which Ultralytics' .pt files cannot hold; give {{spectral_norm: false}}"
            )
        self.block = InsertedBlock(built, "channels-first")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def transfer_weights(model: Any, source: Any) -> int:
    """Load the weights of the same YOLO without `TokenMix` rows, whose later rows have other numbers.

    With a source of the same scale and classes the outputs are those of the source until the blocks are trained.
    Ultralytics trains such weights from a file: `model.save("mix.pt")`, then `YOLO("mix.pt").train(...)`.

    Args:
        model: `YOLO("mix.yaml")`, or its `.model`; changed in place.
        source: `YOLO("yolo11n.pt")`, its `.model`, or a state dict.

    Returns:
        How many tensors were loaded: all of the source, without some of the head if its classes differ.

    Raises:
        UserError: `model` has no `TokenMix` row, or no tensor fits.
    """
    net = _rows(model)
    given: Mapping[str, Tensor] = source if isinstance(source, Mapping) else _rows(source).state_dict()
    # A row with repeats is a sequence.
    own = [i for i, row in enumerate(net.model) if not any(isinstance(part, TokenMix) for part in row.modules())]
    if len(own) == len(net.model):
        raise UserError("the model has no TokenMix row, so that its own load takes the weights")
    state, found, unfit = net.state_dict(), dict[str, Tensor](), set[int]()
    for key, value in given.items():
        first, _, rest = key.partition(".")
        number, _, rest = rest.partition(".")
        if first == "model" and number.isdigit() and int(number) < len(own):
            name = f"model.{own[int(number)]}.{rest}"
            if name in state and state[name].shape == value.shape:
                found[name] = value
            else:
                unfit.add(own[int(number)])
    if not found:
        raise UserError("no tensor of the source fits the model; give the same YOLO at the same scale")
    net.load_state_dict(found, strict=False)
    # The last row, the head, may have other classes.
    if isinstance(source, Mapping) or _classes(net) != _classes(_rows(source)):
        unfit -= {own[-1]}
    if rows := ", ".join(map(str, sorted(unfit))):
        warnings.warn(
            f"{len(found)} of {len(given)} tensors were loaded; rows {rows} of the YAML do not fit the source: add 1 "
            "to source numbers, there or in the row before, for each TokenMix row before the wanted row",
            stacklevel=2,
        )
    return len(found)


def _rows(model: Any) -> Any:
    """The network whose `.model` is the sequence of rows."""
    inner = getattr(model, "model", None)
    return model if isinstance(inner, nn.Sequential) else inner


def _classes(net: Any) -> int | None:
    return getattr(net.model[-1], "nc", None)


def register() -> None:
    """Enable `TokenMix` in Ultralytics' YAML files; call this before `YOLO("file.yaml")` and in each new process."""
    try:
        tasks = importlib.import_module("ultralytics.nn.tasks")
    except ImportError:
        raise UserError("tokenmix.swap.ultralytics needs Ultralytics: pip install ultralytics") from None
    vars(tasks)["TokenMix"] = TokenMix
