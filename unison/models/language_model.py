"""What the model families share: their config, the tied head, the limit on a row's length."""

from torch import Tensor, nn

from unison.errors import BadInput
from unison.models.config import ModelConfig
from unison.models.layers import Embedding, Linear


class LanguageModel(nn.Module):
    """Base of the built-in models: token ids [batch, tokens] in, logits out."""

    token_embeddings: Embedding
    lm_head: Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def tie_head_if_asked(self) -> None:
        """Make the head's weight the embedding table itself, when the config says so."""
        if self.config.tie_head:
            self.lm_head.weight = self.token_embeddings.weight

    def reset_buffers(self) -> None:
        """Compute the buffers that follow from the config; the base has none."""

    def check_row_length(self, token_ids: Tensor) -> None:
        """Refuse a row that is longer than the positions the model knows."""
        if token_ids.ndim != 2:
            raise BadInput(f"token_ids must be [batch, tokens], found {list(token_ids.shape)}")
        if token_ids.shape[1] > self.config.context_length:
            raise BadInput(
                f"a row of {token_ids.shape[1]} tokens is longer than the model's context of "
                f"{self.config.context_length}; shorten the rows or raise context_length"
            )
