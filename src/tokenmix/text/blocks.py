"""Embeddings, blocks and positions of the text models; rows are rotated so that padding comes last."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tokenmix.errors import UserError
from tokenmix.layers.base import replace_parameter
from tokenmix.layers.gating import GatedMLP, GateKind
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.ops.gating import GateVariant
from tokenmix.text.config import GMLPConfig

PlaceRule = Literal["extend", "interpolate"]


class RelativePositions(nn.Module):
    """Relative positional bias B_hij = w_h,i-j, added to the scores of query i and key j in head h.

    The bias starts as -2^-h |i - j|, like ALiBi (Press et al., arXiv 2108.12409) with steeper slopes. From zero,
    attention over a whole sequence needs thousands of steps to find its neighbours. The gMLP paper compares with BERT
    and a relative bias, without an initialisation.

    Shape: weight (H, 2n-1), with distance 0 in the middle; N tokens give (1, H, N, N).

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, table 3.
    """

    def __init__(self, num_heads: int, num_tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, 2 * num_tokens - 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Favour nearer keys, over a different range in each head."""
        heads, n = self.weight.shape[0], (self.weight.shape[1] + 1) // 2
        distance = torch.arange(1 - n, n, device=self.weight.device).abs()
        slopes = 0.5 ** torch.arange(heads, device=self.weight.device)
        self.weight.copy_(-slopes[:, None] * distance)

    def forward(self, num_tokens: int) -> Tensor:
        """The bias (1, H, N, N)."""
        place = torch.arange(num_tokens, device=self.weight.device)
        middle = self.weight.shape[1] // 2
        return self.weight[:, place[:, None] - place + middle].unsqueeze(0)

    @torch.no_grad()
    def resize(self, num_tokens: int, how: PlaceRule) -> None:
        """Resize to another maximum length; new distances get the bias of the longest old distance."""
        replace_parameter(self, "weight", resized_bias(self.weight, 2 * num_tokens - 1, how))


def resized_bias(weight: Tensor, width: int, how: PlaceRule) -> Tensor:
    """(H, 2m-1) as (H, width): cut or continued on both sides, or interpolated."""
    if how == "interpolate":
        return F.interpolate(weight[None], size=width, mode="linear", align_corners=True)[0]
    more = (width - weight.shape[1]) // 2
    if more <= 0:
        return weight[:, -more : weight.shape[1] + more].clone()
    return F.pad(weight[None], (more, more), mode="replicate")[0]


@torch.no_grad()
def extend_gate(weight: Tensor, bias: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A gate for n positions that agrees with the given gate on the old positions.

    A Toeplitz W keeps the weight of each distance, a dense W its leading block; new weights are 0. New positions get
    the bias of the last position.

    Shape: weight (2m-1,) or (m, m) and bias (m,) to (2n-1,) or (n, n) and (n,). n < m cuts.
    """
    more = n - len(bias)
    # Negative padding cuts on every listed side.
    weight = F.pad(weight, (more, more) if weight.dim() == 1 else (0, more, 0, more))
    return weight, torch.cat([bias[:n], bias[-1:].expand(max(more, 0))])


def resize_gated_mlp(layer: GatedMLP, n: int, how: PlaceRule) -> None:
    """Resize the layer's gate to n positions; parameters are new if n changes."""
    if how == "interpolate":
        layer.set_grid((layer.num_tokens,), (n,))
        return
    gating = layer.gating
    weight, bias = extend_gate(gating.weight, gating.bias, n)
    replace_parameter(gating, "weight", weight)
    replace_parameter(gating, "bias", bias)
    gating.num_tokens = layer.num_tokens = n


@torch.no_grad()
def resize_positions(table: nn.Embedding, n: int, how: PlaceRule, std: float) -> nn.Embedding:
    """A table of n learned positions: old ones kept and new ones drawn, or all interpolated linearly."""
    old = table.weight
    if how == "interpolate":
        new = F.interpolate(old.T[None], size=n, mode="linear", align_corners=False)[0].T.contiguous()
    else:
        new = torch.cat([old[:n], old.new_empty(max(n - len(old), 0), old.shape[1]).normal_(std=std)])
    return nn.Embedding.from_pretrained(new, freeze=not old.requires_grad)


def read_mask(attention_mask: Tensor | None, size: int, length: int) -> Tensor | None:
    """transformers' `attention_mask`, 1 for a token and 0 for padding, as boolean (B, N); None if nothing is masked.

    Raises `UserError` for another shape, such as a map of token pairs, and for a floating-point mask.
    """
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != (size, length):
        raise UserError(
            f"attention_mask must be (B, N) = {(size, length)}, got {tuple(attention_mask.shape)}; a gate cannot take "
            "masks of pairs of tokens, use config.causal for causal models"
        )
    if attention_mask.is_floating_point():
        raise UserError(
            f"attention_mask must hold 1 for tokens and 0 for padding as integers or booleans, got "
            f"{attention_mask.dtype}; use (attention_mask > 0.5)"
        )
    mask = attention_mask != 0
    # Only check for an all-True mask where this is cheap: not on a GPU, which would synchronize, and not in a graph,
    # whose later masks may differ. A training step of gmlp_text_nano takes 231 ms with such a mask and 180 ms without
    # (B 32, N 128, 2 CPU cores).
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return None if not in_graph and mask.device.type == "cpu" and bool(mask.all()) else mask


def largest_id(ids: Tensor | None) -> int:
    """The largest id; -1 in a graph, and on a GPU, which would synchronize and checks itself."""
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return -1 if ids is None or in_graph or ids.device.type != "cpu" or not ids.numel() else int(ids.max())


def check_segments(token_type_ids: Tensor | None, count: int) -> None:
    """Raise `UserError` for a segment that a model of `count` segments does not have."""
    if (largest := largest_id(token_type_ids)) >= count:
        raise UserError(
            f"segment {largest} for a model of {count} segments; correct the type_id in the post_processor of its "
            "tokenizer.json"
        )


def rotate(x: Tensor, shifts: Tensor | None, dims: Sequence[int] = (1,)) -> Tensor:
    """x with row b rotated along each of `dims` so that element `shifts[b]` comes first; x itself for None.

        out[b, .., i, ..] = x[b, .., (i + shifts[b]) mod N, ..]

    Shape: x (B, ...), shifts (B,) to the shape of x.
    """
    if shifts is None:
        return x
    for dim in dims:
        n = x.shape[dim]
        index = (torch.arange(n, device=x.device) + shifts[:, None]) % n
        shape = [1] * x.dim()
        shape[0], shape[dim] = x.shape[0], n
        x = x.gather(dim, index.view(shape).expand_as(x))
    return x


def rotate_back(x: Tensor, shifts: Tensor | None, dims: Sequence[int] = (1,)) -> Tensor:
    return rotate(x, None if shifts is None else -shifts, dims)


# Output of a block with maps: tokens, attention map in the original positions, gate matrix. Each row of tokens is
# rotated so that the token at `start` comes first. The map is rotated back before use, because a gradient only reaches
# a returned map that the output depends on.
WithMaps = tuple[Tensor, Tensor | None, Tensor | None]
# The dimensions of a map (B, H, N, N) that rotate with the tokens.
MAP_DIMS = (2, 3)


class GMLPLayer(GradientCheckpointingLayer):
    """x + GatedMLP(LayerNorm(x)): a block of gMLP or aMLP."""

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = GatedMLP(
            config.hidden_size,
            config.max_position_embeddings,
            # The layer truncates dim * expansion; the extra half guards against rounding.
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
        """Tokens (B, N, D) to tokens; with `want_maps` also tiny attention's map (B, 1, N, N) or None, and W (N, N)."""
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
        """Tokens (B, N, D) to tokens; with `want_maps` also the map (B, H, N, N), and None for the gate."""
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
            # A swapped mixer does not accept a positional bias.
            mixed = self.mixer(x, mask)
        hidden_states = hidden_states + mixed
        out = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return (out, attention, None) if want_maps else out

    def macs(self, num_tokens: int) -> int:
        return self.mixer.macs(num_tokens) + 2 * num_tokens * self.mixer.dim * self.hidden


class GMLPEmbeddings(nn.Module):
    """E[word] + T[segment] + P[position], the last two if configured; then dropout. Segments default to 0."""

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
        """Embeddings (B, N, D) of ids (B, N) or vectors (B, N, D), rotated so that `start` (B,) comes first."""
        if inputs_embeds is None:
            x = self.word_embeddings(rotate(cast(Tensor, input_ids), start))
        else:
            x = rotate(inputs_embeds, start)
        if self.token_type_embeddings is not None:
            table = self.token_type_embeddings
            check_segments(token_type_ids, table.num_embeddings)
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
            else:  # transformers passes one row (1, N) for all samples, or one per sample
                x = x + table(rotate(position_ids.expand(x.shape[:2]), start))
        elif position_ids is not None:
            raise UserError(
                "position_ids for a model without position embeddings: a gate's positions are those of the sequence; "
                "leave them out, or build the model with positions='learned'"
            )
        return self.dropout(x)
