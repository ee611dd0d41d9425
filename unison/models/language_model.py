"""What the model families share: their config, the head, the limit on a row's length."""

from torch import Tensor, nn

from unison.errors import BadInput
from unison.kernels.cross_entropy import linear_cross_entropy
from unison.models.config import ModelConfig
from unison.models.layers import Embedding, Linear


class Head(Linear):
    """The last layer: logits of every token, or with labels the loss of every sample.

    Both are this module's own forward, so that whoever watches or gathers the parameters of a
    module does so for either.
    """

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, tokens, vocab], or losses [batch] that never hold them.

        Args:
            x: Hidden states [batch, tokens, d_model].
            labels: The token after each position [batch, tokens], -100 where none counts.
        """
        if labels is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, labels, bias=self.bias, reduction="sample_mean")


class LanguageModel(nn.Module):
    """Base of the built-in models: token ids [batch, tokens] in, logits out."""

    token_embeddings: Embedding
    lm_head: Head

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def tie_head_if_asked(self) -> None:
        """Make the head's weight the embedding table itself, when the config says so."""
        if self.config.tie_head:
            self.lm_head.weight = self.token_embeddings.weight

    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Return what goes into the head: [batch, tokens] -> [batch, tokens, d_model]."""
        raise NotImplementedError

    def forward(self, token_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits of the token after each position, or the loss of each sample.

        Args:
            token_ids: [batch, tokens].
            labels: The token after each position [batch, tokens], -100 where none counts. They are
                compared as they are, and not shifted.

        Returns:
            Logits [batch, tokens, vocab]; with labels what `unison.per_sample_loss` makes of them,
            [batch], without logits of the whole batch in memory.
        """
        hidden = self.hidden_states(token_ids)
        # By name: plans of tensor parallelism put one tensor in the place of positional arguments.
        return self.lm_head(hidden) if labels is None else self.lm_head(hidden, labels=labels)

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
