"""Embeddings and blocks of the text models: a norm and a shortcut around the layers that the image models have."""

from typing import cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tokenmix.errors import UserError
from tokenmix.layers.gating import GatedMLP, GateKind
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.ops.gating import GateVariant
from tokenmix.text.config import GMLPConfig
from tokenmix.text.positions import RelativePositions, rotate, rotate_back

# What a block returns with its maps: tokens, the attention map in the given positions, and the gate's matrix. Each
# row of the tokens is turned so that the token at `start` is the first; the map is turned back before it is used, since
# what a model returns must be what its result was made of: else no gradient reaches it.
WithMaps = tuple[Tensor, Tensor | None, Tensor | None]
# The dimensions of a map (B, H, N, N) that are rotated as the tokens are.
MAP_DIMS = (2, 3)


class GMLPLayer(GradientCheckpointingLayer):
    """x + GatedMLP(LayerNorm(x)): a block of gMLP or aMLP."""

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = GatedMLP(
            config.hidden_size,
            config.max_position_embeddings,
            # The layer takes the whole part of dim * expansion; half more than wanted survives any rounding.
            expansion=(config.intermediate_size + 0.5) / config.hidden_size,
            variant=cast(GateVariant, config.gate_variant),
            gate=cast(GateKind, config.gate),
            causal=config.causal,
            attention_dim=config.tiny_attention_dim,
            dropout=config.hidden_dropout_prob,
        )

    def forward(
        self, hidden_states: Tensor, mask: Tensor | None = None, start: Tensor | None = None, *, want_maps: bool = False
    ) -> Tensor | WithMaps:
        """Tokens (B, N, D) to tokens; mask (B, N) is True for those that take part.

        With `want_maps` also tiny attention's map (B, 1, N, N), if there is one, and W (N, N).
        """
        x = self.norm(hidden_states)
        if not want_maps:
            return hidden_states + self.mixer(x, mask)
        attention = weights = None
        if self.mixer.tiny_attention is not None:
            attention = rotate_back(self.mixer.tiny_attention_map(x, mask), start, MAP_DIMS)
            weights = rotate(attention, start, MAP_DIMS)
        out = hidden_states + self.mixer(x, mask, attention=weights)
        return out, attention, self.mixer.attention_map(x, mask)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one sample."""
        return self.mixer.macs(num_tokens)


class SelfAttentionLayer(GradientCheckpointingLayer):
    """x + SelfAttention(LayerNorm(x)), then x + MLP(LayerNorm(x)): the block of the self-attention variant."""

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__()
        dim, hidden = config.hidden_size, config.intermediate_size
        heads = cast(int, config.num_attention_heads)
        self.norm = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mixer = SelfAttention(dim, num_heads=heads, causal=config.causal, dropout=config.hidden_dropout_prob)
        relative = config.positions == "relative"
        self.relative = RelativePositions(heads, config.max_position_embeddings) if relative else None
        self.mlp_norm = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim), nn.Dropout(config.hidden_dropout_prob)
        )
        self.hidden = hidden

    def forward(
        self, hidden_states: Tensor, mask: Tensor | None = None, start: Tensor | None = None, *, want_maps: bool = False
    ) -> Tensor | WithMaps:
        """Tokens (B, N, D) to tokens; mask (B, N) is True for those that take part.

        With `want_maps` also the map (B, H, N, N), and no gate.
        """
        x = self.norm(hidden_states)
        attention = weights = None
        if isinstance(self.mixer, SelfAttention):
            bias = None if self.relative is None else self.relative(x.shape[1]).to(x.dtype)
            if want_maps:
                attention = rotate_back(self.mixer.mix_map(x, None, mask, residual=bias), start, MAP_DIMS)
                weights = rotate(attention, start, MAP_DIMS)
            mixed = self.mixer.mix(x, None, mask, residual=bias, weights=weights)[0]
        elif want_maps:
            raise UserError(
                f"output_attentions=True, and {type(self.mixer).__name__} replaced the attention; call its "
                "attention_map"
            )
        else:
            # Another mixer was swapped in, which takes no bias of positions.
            mixed = self.mixer(x, mask)
        hidden_states = hidden_states + mixed
        out = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return (out, attention, None) if want_maps else out

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one sample."""
        return self.mixer.macs(num_tokens) + 2 * num_tokens * self.mixer.dim * self.hidden


class GMLPEmbeddings(nn.Module):
    """E[word] + T[segment] + P[position], the last two if the config has them; dropout.

    Segments and positions are BERT's: a segment that is not given is 0, positions count from 0. There is no norm here,
    since each block begins with one.
    """

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, dim, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, dim) if config.type_vocab_size else None
        learned = config.positions == "learned"
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, dim) if learned else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        start: Tensor | None,
    ) -> Tensor:
        """(B, N, D), each row rotated so that the token at `start` (B,) is the first.

        Words come as ids (B, N) or as vectors (B, N, D).
        """
        if inputs_embeds is None:
            x = self.word_embeddings(rotate(cast(Tensor, input_ids), start))
        else:
            x = rotate(inputs_embeds, start)
        if self.token_type_embeddings is not None:
            table = self.token_type_embeddings
            x = x + (table.weight[0] if token_type_ids is None else table(rotate(token_type_ids, start)))
        elif token_type_ids is not None:
            raise UserError(
                "token_type_ids for a model without segments (type_vocab_size=0); leave them out, with a tokenizer of "
                "model_input_names=['input_ids', 'attention_mask']"
            )
        if self.position_embeddings is not None:
            table = self.position_embeddings
            if position_ids is None:
                x = x + table.weight[: x.shape[1]]
            else:  # transformers gives one row (1, N) for all samples, or one for each.
                x = x + table(rotate(position_ids.expand(x.shape[:2]), start))
        elif position_ids is not None:
            raise UserError(
                "position_ids for a model without position embeddings: a gate's positions are those of the sequence; "
                "leave them out, or build the model with positions='learned'"
            )
        return self.dropout(x)
