"""Weights of another run, file or transformers folder as the start of a text model: the body, and a head that fits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.text.positions import extend_gate, resized_bias


def initial_text_weights(source: Path, model: Any) -> dict[str, Tensor]:
    """The weights in a safetensors file or a folder, fitted to the model's length and head.

    Gates and learned positions are cut to the model's longest sequence, or extended, so that a sequence which fitted
    both has the same output as before. A head that the source lacks, or has for other classes, starts fresh, and a line
    says so. Anything else that differs stays as it is, for `put_weights` to refuse.
    """
    given, own = read_weights(source), model.state_dict()
    body = f"{model.base_model_prefix}."
    weights = {key: value for key, value in given.items() if key.startswith(body)}
    if not weights:
        raise UserError(f"{source} holds no text model: none of its tensors begins with {body!r}")
    words = f"{body}embeddings.word_embeddings.weight"
    if words in weights and len(weights[words]) != len(own[words]):
        raise UserError(
            f"{source} was trained with a vocabulary of {len(weights[words]):,} tokens and this tokenizer has "
            f"{len(own[words]):,}; give its own by --tokenizer {source / 'tokenizer'}"
        )
    weights = _fitted(weights, own)
    fresh = []
    for key, value in own.items():
        tied = (getattr(model, "_tied_weights_keys", None) or {}).get(key)
        if tied in weights:
            weights[key] = weights[tied]
        elif not key.startswith(body) or key.startswith(f"{body}pooler."):
            fits = key in given and given[key].shape == value.shape
            weights[key] = given[key] if fits else value
            fresh += [] if fits else [key]
    # A classifier's body has a pooler, that of a masked-language model has none.
    weights = {key: value for key, value in weights.items() if key in own or not key.startswith(f"{body}pooler.")}
    if fresh and distributed_info().first:
        log(f"the body is that of {source}, the head starts fresh: {', '.join(fresh)}")
    return weights


def _fitted(weights: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    fitted = dict(weights)
    for key in weights:
        if key not in own or weights[key].shape == own[key].shape:
            continue
        stem, _, name = key.rpartition(".")
        if name == "weight" and stem.endswith("gating") and weights[key].dim() == own[key].dim():
            n = len(own[f"{stem}.bias"])
            fitted[key], fitted[f"{stem}.bias"] = extend_gate(weights[key], weights[f"{stem}.bias"], n)
        elif stem.endswith("position_embeddings") and weights[key].shape[1] == own[key].shape[1]:
            kept = weights[key][: len(own[key])]
            fitted[key] = torch.cat([kept, own[key][len(kept) :]])
        elif stem.endswith("relative") and len(weights[key]) == len(own[key]):
            fitted[key] = resized_bias(weights[key], own[key].shape[1], "extend")
    return fitted
