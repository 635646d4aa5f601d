"""gMLP for text as a transformers model, without a head."""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from tokenmix.errors import UserError
from tokenmix.layers.gating import SpatialGatingUnit
from tokenmix.ops.checks import check_choice
from tokenmix.text.blocks import (
    GMLPEmbeddings,
    GMLPLayer,
    PlaceRule,
    RelativePositions,
    SelfAttentionLayer,
    largest_id,
    read_mask,
    resize_gated_mlp,
    resize_positions,
    rotate,
    rotate_back,
)
from tokenmix.text.config import GMLPConfig


@dataclass
class GMLPModelOutput(BaseModelOutputWithPooling):
    """transformers' `BaseModelOutputWithPooling` and the gates.

    Attributes:
        attentions: with `output_attentions=True`, the map of each block: tiny attention's (B, 1, N, N) in an aMLP,
            (B, H, N, N) in the self-attention variant, None in a gMLP.
        gates: with `output_attentions=True`, the matrix W (N, N) of each block's gate; None with self-attention. W is
            shared by all samples: row and column 0 are a sequence's first token, also after padding.
    """

    gates: tuple[Tensor, ...] | None = None


class GMLPPreTrainedModel(PreTrainedModel):
    """Base class of the text models: initialisation, and resizing to another maximum length."""

    config: GMLPConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    config_class = GMLPConfig
    base_model_prefix = "gmlp"
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["GMLPEmbeddings", "GMLPLayer", "SelfAttentionLayer"]  # noqa: RUF012
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Called for modules with their own parameters only. The functions of `init` skip loaded parameters.
        std: Any = getattr(module, "init_std", None)
        if isinstance(module, nn.Linear) and std is not None:
            init.normal_(module.weight, std=std)
            init.zeros_(module.bias)
        elif isinstance(module, (SpatialGatingUnit, RelativePositions)):
            fresh = copy.deepcopy(module)
            fresh.reset_parameters()
            for parameter, value in zip(module.parameters(recurse=False), fresh.parameters(recurse=False)):
                init.copy_(parameter, value)
        else:
            super()._init_weights(module)

    def resize_position_embeddings(self, new_num_position_embeddings: int, how: PlaceRule = "extend") -> None:
        """Resize to another maximum length. Parameters are new: create the optimiser afterwards.

        Args:
            new_num_position_embeddings: the new maximum length.
            how: `"extend"`: weights of old distances (Toeplitz) or position pairs (dense) stay, and new weights are 0.
                Outputs for sequences that fitted before do not change. `"interpolate"`: the gates are interpolated as
                for images (`tokenmix.ops.resize_gate`).

        Raises:
            UserError: the new number is below 1, or the rule is unknown.
        """
        if new_num_position_embeddings < 1:
            raise UserError(f"the longest sequence must be at least 1 token, got {new_num_position_embeddings}")
        check_choice("rule", how, ("extend", "interpolate"))
        model = cast(GMLPModel, self.base_model)
        for layer in model.blocks():
            if isinstance(layer, GMLPLayer):
                resize_gated_mlp(layer.mixer, new_num_position_embeddings, how)
            elif layer.relative is not None:
                layer.relative.resize(new_num_position_embeddings, how)
        table = model.embeddings.position_embeddings
        if table is not None:
            model.embeddings.position_embeddings = resize_positions(
                table, new_num_position_embeddings, how, self.config.initializer_range
            )
        self.config.max_position_embeddings = new_num_position_embeddings

    def get_position_embeddings(self) -> nn.Embedding:
        """The table of learned positions; `UserError` if the model has none."""
        table = cast(GMLPModel, self.base_model).embeddings.position_embeddings
        if table is None:
            raise UserError(
                "the model has no position embeddings, as its gates know positions; build it with positions='learned'"
            )
        return table


class GMLPModel(GMLPPreTrainedModel):
    """Tokens to features: embeddings, blocks, a norm, and the first token pooled as in BERT.

        x = E[ids] + segments,    x = x + GatedMLP(LayerNorm(x)) in each block,    out = LayerNorm(x)

    Gate positions count from the first unmasked token, so padding may be on either side. The paper does not mask
    padding: `config.padding="unmasked"`.

    Shape: ids (B, N) with N up to `config.max_position_embeddings` to features (B, N, D).

    Raises:
        UserError: the sequence is too long; both or neither of ids and embeddings are given; the mask has another
            shape; the model has no embeddings for `position_ids` or `token_type_ids`; or a keyword is unknown.

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, sections 2 and 4.
    """

    def __init__(self, config: GMLPConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = GMLPEmbeddings(config)
        block = GMLPLayer if config.mixer == "gating" else SelfAttentionLayer
        self.layers = nn.ModuleList([block(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if add_pooling_layer else None
        self.post_init()

    def blocks(self) -> list[GMLPLayer | SelfAttentionLayer]:
        return [cast(GMLPLayer | SelfAttentionLayer, layer) for layer in self.layers]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: object,
    ) -> GMLPModelOutput:
        """Features of ids (B, N) or embeddings (B, N, D); `num_items_in_batch` is accepted for losses."""
        unknown = [name for name in kwargs if name != "num_items_in_batch"]
        if unknown:
            raise UserError(
                f"the model has no argument {unknown[0]!r}; leave it out, for it keeps no cache and has no decoder"
            )
        size, length = self._check_input(input_ids, inputs_embeds)
        mask = read_mask(attention_mask, size, length)
        if self.config.padding == "unmasked":
            mask = None
        start = None
        if mask is not None:
            # Position of each row's first token; 0 for a row without any.
            start = mask.int().argmax(dim=1)
            mask = rotate(mask, start)
        x = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, start)
        states, attentions, gates = [], [], []
        want_maps = self.config.output_attentions if output_attentions is None else output_attentions
        want_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        for layer in self.blocks():
            if want_states:
                # Continue from the returned state, rotated again, so that gradients reach it.
                states.append(rotate_back(x, start))
                x = rotate(states[-1], start)
            if want_maps:
                x, attention, gate = layer(x, mask, start, want_maps=True)
                attentions.append(attention)
                gates.append(gate)
            else:
                x = layer(x, mask)
        last, pooled = rotate_back(self.norm(x), start), None
        if self.pooler is not None:
            first = last[:, 0] if start is None else last[torch.arange(last.shape[0], device=last.device), start]
            pooled = torch.tanh(self.pooler(first))
        return GMLPModelOutput(
            last_hidden_state=last,
            pooler_output=pooled,
            hidden_states=(*states, last) if want_states else None,
            attentions=_all_or_none(attentions),
            gates=_all_or_none(gates),
        )

    def _check_input(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give input_ids or inputs_embeds, one of the two")
        given = cast(Tensor, inputs_embeds if input_ids is None else input_ids)
        if given.dim() != (2 if inputs_embeds is None else 3):
            raise UserError(f"input_ids must be (B, N) and inputs_embeds (B, N, D), got {tuple(given.shape)}")
        size, length = given.shape[:2]
        if length < 1:
            raise UserError("a text has at least one token, got none; remove empty texts")
        if length > self.config.max_position_embeddings:
            raise UserError(
                f"the model was built for up to {self.config.max_position_embeddings} tokens and got {length}; cut the "
                f"text, or call model.resize_position_embeddings({length}) and train the new positions"
            )
        if (largest := largest_id(input_ids)) >= self.config.vocab_size:
            raise UserError(
                f"token {largest} for a model with a vocabulary of {self.config.vocab_size}; load the tokenizer that "
                "belongs to the model, or call model.resize_token_embeddings(len(tokenizer)) and train the new words"
            )
        return size, length

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one sequence, from the equations; norms, biases and softmax are not counted."""
        pooler = 0 if self.pooler is None else self.config.hidden_size**2
        return sum(layer.macs(num_tokens) for layer in self.blocks()) + pooler


def _all_or_none(maps: list[Tensor | None]) -> tuple[Tensor, ...] | None:
    return tuple(found for found in maps if found is not None) or None
