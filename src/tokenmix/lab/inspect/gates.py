"""The gates of a text model: how far they depend on distance alone, as numbers and figures."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import make_folder, write_json
from tokenmix.lab.inspect.pictures import draw_matrices
from tokenmix.lab.tasks.text.task import TextTask, read_sentences


def toeplitz_share(matrix: Tensor) -> float:
    """Share of a square matrix's variance that its diagonals' means explain.

        1 - sum_ij (W_ij - mean of diagonal i - j)^2 / sum_ij (W_ij - mean of W)^2

    1 for a Toeplitz matrix that is not constant; 2 / (n + 1) in the mean for independent entries, since 2n - 1 means
    fit that much of noise. Of a constant matrix, which has no variance, nan.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise UserError(f"toeplitz_share needs a square matrix, got {tuple(matrix.shape)}")
    w = matrix.detach().double().cpu()
    n = len(w)
    place = torch.arange(n)
    shift = (place[:, None] - place + n - 1).flatten()
    sums = torch.zeros(2 * n - 1, dtype=w.dtype).index_add_(0, shift, w.flatten())
    means = sums / torch.bincount(shift, minlength=2 * n - 1)
    total = (w - w.mean()).square().sum()
    if not total > 0:
        return float("nan")
    return float(1 - (w.flatten() - means[shift]).square().sum() / total)


def gate_numbers(model: Any) -> list[dict[str, Any]]:
    """Of each block that has a gate: its kind, the share above, and the root mean square of W."""
    return [
        {"block": i, "gate": kind, "toeplitz_share": toeplitz_share(w), "rms": float(w.square().mean().sqrt())}
        for i, kind, w in _gates(model)
    ]


def _gates(model: Any) -> list[tuple[int, str, Tensor]]:
    """Number, kind of gate and W of each block that has a gate."""
    mixers = [(i, layer.mixer) for i, layer in enumerate(model.base_model.layers)]
    gatings = [(i, mixer.gating) for i, mixer in mixers if hasattr(mixer, "gating")]
    return [(i, gating.gate, gating.matrix(gating.num_tokens).detach().float()) for i, gating in gatings]


def inspect_text(task: TextTask, title: str, given: str | None, out: Path) -> Path:
    """Write gates.png, with a sentence attention.png, and numbers.json; returns `out`.

    Raises:
        UserError: a model of self-attention without a sentence, which its maps depend on.
    """
    model: Any = task.model.float().cpu().eval()
    numbers = gate_numbers(model)
    if not numbers and given is None:
        raise UserError(f"{title} has no gates, and its attention depends on the text: give a sentence")
    make_folder(out)
    if numbers:
        titles = [f"block {row['block']}: {row['toeplitz_share']:.3f}" for row in numbers]
        draw_matrices([w for _, _, w in _gates(model)], titles, f"{title}: gates", out / "gates.png")
    if given is not None:
        _draw_attention(task, model, given, title, out)
    told = {"target": title, "text": given, "blocks": numbers}
    write_json(out / "numbers.json", told)
    return out


@torch.no_grad()
def _draw_attention(task: TextTask, model: Any, given: str, title: str, out: Path) -> None:
    sentence = read_sentences([given])[0].text
    tokenizer = task.tokenizer()
    ids = tokenizer(sentence, truncation=True, max_length=int(task.data["seq_len"]), return_tensors="pt")["input_ids"]
    maps = model(input_ids=ids, output_attentions=True).attentions
    if maps is None:
        return
    titles = [f"block {i}" for i in range(len(maps))]
    draw_matrices([one[0].mean(0) for one in maps], titles, f"{title}: {sentence}", out / "attention.png")
