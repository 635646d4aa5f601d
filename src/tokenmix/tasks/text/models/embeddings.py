"""Words, segments and places to tokens."""

from typing import cast

from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.tasks.text.models.config import GMLPConfig
from tokenmix.tasks.text.models.padding import from_start

__all__ = ["GMLPEmbeddings"]


class GMLPEmbeddings(nn.Module):
    """E[word] + T[segment] + P[place], the last two if the config has them; dropout.

    Segments and places are BERT's: a segment that is not given is 0, places count from 0. There is no norm here, since
    each block begins with one.
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
        """(B, N, D), each row turned so that the token at `start` (B,) is the first.

        Words come as ids (B, N) or as vectors (B, N, D).
        """
        self._check(token_type_ids, position_ids)
        if inputs_embeds is None:
            x = self.word_embeddings(from_start(cast(Tensor, input_ids), start))
        else:
            x = from_start(inputs_embeds, start)
        if self.token_type_embeddings is not None:
            table = self.token_type_embeddings
            x = x + (table.weight[0] if token_type_ids is None else table(from_start(token_type_ids, start)))
        if self.position_embeddings is not None:
            table = self.position_embeddings
            x = x + (table.weight[: x.shape[1]] if position_ids is None else table(_places(position_ids, x, start)))
        return self.dropout(x)

    def _check(self, token_type_ids: Tensor | None, position_ids: Tensor | None) -> None:
        if token_type_ids is not None and self.token_type_embeddings is None:
            raise UserError(
                "token_type_ids for a model without segments (type_vocab_size=0); leave them out, with a tokenizer of "
                "model_input_names=['input_ids', 'attention_mask']"
            )
        if position_ids is not None and self.position_embeddings is None:
            raise UserError(
                "position_ids for a model without position embeddings: a gate's places are those of the sequence; "
                "leave them out, or build the model with positions='learned'"
            )


def _places(position_ids: Tensor, x: Tensor, start: Tensor | None) -> Tensor:
    """transformers gives one row (1, N) for all samples, or one for each."""
    return from_start(position_ids.expand(x.shape[0], x.shape[1]), start)
