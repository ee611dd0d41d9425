"""Layers that describe what their parameters start from.

The arithmetic is torch's own (`F.linear`, `F.embedding`, `torch.rms_norm`, ...). What these
classes add is `inits`: one description per parameter, so that initial values can be drawn without
running a constructor again (see `unison.models.initialize`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Linear(Described):
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


class RMSNorm(Described):
    """Root-mean-square normalisation with a gain."""

    weight: nn.Parameter

    def __init__(self, d_model: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._shape = (d_model,)
        self.add_parameter("weight", (d_model,), Constant(value=1.0))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:  # [..., d_model]
        """Normalise the last dimension."""
        return torch.rms_norm(x, self._shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Shapes for `print(model)`."""
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(Described):
    """Layer normalisation with gain and shift."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, d_model: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._shape = (d_model,)
        self.add_parameter("weight", (d_model,), Constant(value=1.0))
        self.add_parameter("bias", (d_model,), Constant(value=0.0))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:  # [..., d_model]
        """Normalise the last dimension."""
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Shapes for `print(model)`."""
        return f"{self.weight.numel()}, eps={self.eps}"


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the past and the present; all tensors are [batch, heads, tokens, d_head]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[batch, tokens, heads * d_head] -> [batch, heads, tokens, d_head]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, num_heads, width // num_heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, d_head] -> [batch, tokens, heads * d_head]."""
    batch, heads, tokens, d_head = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * d_head)
