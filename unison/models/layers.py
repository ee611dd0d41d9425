"""Layers that describe what their parameters start from, and losses that keep samples apart.

The arithmetic is torch's own (`F.linear`, `F.embedding`, `torch.rms_norm`, ...). What these
classes add is `inits`: one description per parameter, so that initial values can be drawn without
running a constructor again (see `initialize`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unison.kernels.available import takes
from unison.kernels.cross_entropy import IGNORE_INDEX, sample_means, statistics
from unison.rng.inits import Constant, Init, Normal, TruncatedNormal, Uniform


class Described(nn.Module):
    """A module that knows the initial distribution of each parameter it holds directly."""

    def __init__(self) -> None:
        super().__init__()
        self.inits: dict[str, Init] = {}

    def add_parameter(self, name: str, shape: tuple[int, ...], init: Init) -> None:
        """Register an empty parameter together with its description."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.inits[name] = init

    def reset_parameters(self) -> None:
        """Draw the module's own parameters from torch's global generator.

        This serves a module built by hand, as `nn.Linear` would do. Whole models are filled by
        `initialize`, whose values depend on the seed and the parameter's name only.
        """
        for name, init in self.inits.items():
            draw_with_torch_(self.get_parameter(name), init)


@torch.no_grad()
def draw_with_torch_(tensor: Tensor, init: Init) -> None:
    """Fill a tensor according to `init` from torch's global generator."""
    match init:
        case Constant():
            tensor.fill_(init.value)
        case Uniform():
            tensor.uniform_(init.low, init.high)
        case Normal():
            tensor.normal_(init.mean, init.std)
        case TruncatedNormal():
            nn.init.trunc_normal_(tensor, init.mean, init.std, init.low, init.high)
        case _:
            raise AssertionError(f"no rule for {init}")


def truncated_at_3_std(std: float) -> TruncatedNormal:
    """A centred normal cut at three standard deviations."""
    return TruncatedNormal(std=std, low=-3 * std, high=3 * std)


class Projection(Described):
    """`y = x Wᵀ + b`, the bias optional and starting at zero."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, d_in: int, d_out: int, *, init: Init | None = None, bias: bool) -> None:
        super().__init__()
        # Glorot's variance, truncated, is what the decoder family uses throughout.
        init = init or truncated_at_3_std(math.sqrt(2 / (d_in + d_out)))
        self.add_parameter("weight", (d_out, d_in), init)
        if bias:
            self.add_parameter("bias", (d_out,), Constant(value=0.0))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:  # [..., d_in] -> [..., d_out]
        """Apply the linear map to the last dimension."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Shapes for `print(model)`."""
        d_out, d_in = self.weight.shape
        return f"{d_in}, {d_out}, bias={self.bias is not None}"


class Embedding(Described):
    """A table of vectors, looked up by id."""

    weight: nn.Parameter

    def __init__(self, num_rows: int, d_model: int, *, init: Init) -> None:
        super().__init__()
        self.add_parameter("weight", (num_rows, d_model), init)
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., d_model]
        """Look the ids up."""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """Shapes for `print(model)`."""
        return ", ".join(str(size) for size in self.weight.shape)


class Norm(Described):
    """A normalisation of the last dimension with a gain."""

    weight: nn.Parameter

    def __init__(self, d_model: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._shape = (d_model,)
        self.add_parameter("weight", self._shape, Constant(value=1.0))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Shapes for `print(model)`."""
        return f"{self.weight.numel()}, eps={self.eps}"


class RMSNorm(Norm):
    """Root-mean-square normalisation with a gain."""

    def forward(self, x: Tensor) -> Tensor:  # [..., d_model]
        """Normalise the last dimension."""
        return torch.rms_norm(x, self._shape, self.weight, self.eps)


class LayerNorm(Norm):
    """Layer normalisation with gain and shift."""

    bias: nn.Parameter

    def __init__(self, d_model: int, *, eps: float) -> None:
        super().__init__(d_model, eps=eps)
        self.add_parameter("bias", self._shape, Constant(value=0.0))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:  # [..., d_model]
        """Normalise the last dimension."""
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the past and the present, and join the heads.

    Args:
        q: Queries [batch, heads, tokens, d_head].
        k: Keys, of the same shape.
        v: Values, of the same shape.

    Returns:
        [batch, tokens, heads * d_head].
    """
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[batch, tokens, heads * d_head] -> [batch, heads, tokens, d_head]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, num_heads, width // num_heads).transpose(1, 2)


# ---- losses that keep samples apart --------------------------------------------------------------


def per_sample_loss(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Mean cross-entropy of each sample over its own counted tokens, in nats.

    The usual mean over all tokens of a batch couples samples through its denominator: a long sample
    makes the others weigh less. Here a sample's loss depends on that sample alone, which per-sample
    clipping needs. A sample without counted tokens has loss 0.

    `unison.linear_cross_entropy(..., reduction="sample_mean")` is the same from hidden states,
    without the logits.
    """
    return sample_means(_token_losses(logits, labels, ignore_index), labels, ignore_index)


def token_loss_sums(
    logits: Tensor,  # [batch, tokens, vocab]
    labels: Tensor,  # [batch, tokens]
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:  # [batch]
    """Sum of the cross-entropy of each sample over its counted tokens, in nats."""
    return _token_losses(logits, labels, ignore_index).sum(dim=1)


def _token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    # A compiler makes one kernel of what is below. Without one, ours reads the logits once, where
    # torch would copy them to float32 and keep a copy of their logarithms besides.
    if not torch.compiler.is_compiling() and type(logits) is Tensor and takes(logits):
        return statistics(logits.flatten(0, 1), labels.flatten(), ignore_index)[1].view_as(labels)
    precise = torch.promote_types(logits.dtype, torch.float32)  # a sum of many: never in bf16
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(precise),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return losses.view(labels.shape)
