"""Text models by name: the paper's sizes, and small ones with equal parameters for short runs."""

from dataclasses import dataclass
from typing import Any

from tokenmix.registry import MODELS, ModelEntry


@dataclass(frozen=True)
class Preset:
    """A configuration and what the paper prints for it.

    Attributes:
        fields: of `GMLPConfig`, where they are not the defaults.
        about: one line.
        parameters: millions, published; with a vocabulary of 32,000 and 512 tokens.
        flops: billions, published; two for each multiply-add.
    """

    fields: dict[str, Any]
    about: str
    parameters: float | None = None
    flops: float | None = None


LARGE = {"num_hidden_layers": 96, "hidden_size": 768}
NANO = {"vocab_size": 8000, "hidden_size": 128, "max_position_embeddings": 128}

PRESETS: dict[str, Preset] = {
    "gmlp_text_base": Preset({}, "gMLP-base: 48 blocks of width 512", 130, 158.0),
    "gmlp_text_large": Preset(LARGE, "gMLP-large: 96 blocks of width 768", 365, 430.1),
    "gmlp_text_xlarge": Preset(
        {"num_hidden_layers": 144, "hidden_size": 1024, "intermediate_size": 4096},
        "gMLP-xlarge: 144 blocks of width 1024",
        941,
        1091.3,
    ),
    "amlp_text_base": Preset(
        {"num_hidden_layers": 36, "tiny_attention_dim": 64},
        "aMLP-base: 36 blocks of width 512, tiny attention of width 64",
        109,
        128.9,
    ),
    "amlp_text_large": Preset(
        {"num_hidden_layers": 72, "hidden_size": 768, "tiny_attention_dim": 128},
        "aMLP-large: 72 blocks of width 768, tiny attention of width 128",
        316,
        370.3,
    ),
    "gmlp_text_nano": Preset(
        {**NANO, "num_hidden_layers": 6, "intermediate_size": 768}, "six blocks of width 128, up to 128 tokens"
    ),
    "amlp_text_nano": Preset(
        {**NANO, "num_hidden_layers": 5, "intermediate_size": 792, "tiny_attention_dim": 32},
        "gmlp_text_nano's parameters with tiny attention of width 32",
    ),
    "bert_text_nano": Preset(
        {**NANO, "num_hidden_layers": 4, "intermediate_size": 599, "mixer": "self", "num_attention_heads": 4},
        "gmlp_text_nano's parameters with self-attention and learned positions, blocks pre-norm",
    ),
}

MODELS.register(
    *(
        ModelEntry(
            name=name,
            tasks=("masked-lm", "text-classification", "question-answering"),
            about=preset.about,
            build="tokenmix.text.builder:create_text_model",
            arguments={"name": name},
        )
        for name, preset in PRESETS.items()
    )
)
