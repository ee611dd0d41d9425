"""Layers and operators of torch that were exact once; `tests.capture` has the others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.capture.common import (
    BATCH,
    CASES,
    TOKENS,
    VOCAB,
    WIDTH,
    Case,
    floats,
    ids,
    squares,
)
from tests.capture.layers import LAYERS, Attends, Op


def cubes(model: nn.Module, batch: Any) -> Tensor:  # [batch]
    """For outputs of a norm, whose squares are always as many."""
    return model(batch).pow(3).flatten(1).sum(1)


def op(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Case:
    """One operation of an input [batch, tokens, width] and one parameter."""
    return Case(lambda: Op(function, *shape), floats(TOKENS, WIDTH), squares)


def layer(
    make: Callable[[], nn.Module], *shape: int, loss: Callable[..., Tensor] = squares
) -> Case:
    """A layer of inputs [batch, *shape]."""
    return Case(make, floats(*shape), loss)


class Through(nn.Module):
    """A module and a function of it and its input."""

    def __init__(self, inner: nn.Module, run: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.run = inner, run

    def forward(self, x: Any) -> Tensor:
        return self.run(self.inner, x)


def through(make: Callable[[], nn.Module], run: Callable[[Any, Any], Tensor], *shape: int) -> Case:
    return Case(lambda: Through(make(), run), floats(*(shape or (TOKENS, WIDTH))), squares)


class Translator(nn.Module):
    """`nn.Transformer` from a sequence to part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 2, 1, 1, 9, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x[:, :4].sin())


class Weighted(nn.Module):
    """A bag of embeddings with weights of its own for every word."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        weights = 1 + torch.arange(x.shape[1], dtype=torch.float64).expand(x.shape)
        return self.bag(x, per_sample_weights=weights.to(self.bag.weight.dtype))


class ClassToken(nn.Module):
    """A learned first token, by `expand` or by `repeat`."""

    def __init__(self, is_repeated: bool) -> None:
        super().__init__()
        self.token, self.is_repeated = nn.Parameter(torch.randn(1, 1, WIDTH)), is_repeated
        self.up = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        token = (
            self.token.repeat(size, 1, 1) if self.is_repeated else self.token.expand(size, 1, -1)
        )
        return self.up(torch.cat([token, x], 1))


class Affine(nn.Module):
    """One gain and one shift."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x + self.shift


class Sampled(nn.Module):
    """A grid moved by a learned map, and what an image has there."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[0.9, 0.1, 0.05], [-0.1, 0.8, 0.02]]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


class Adaptive(nn.Module):
    """`nn.AdaptiveLogSoftmaxWithLoss`, by its log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [3, 6], div_value=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.log_prob(x)


class Called(nn.Module):
    """A layer called with parameters of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,))


class Several(nn.Module):
    """A list of matrices, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.each:
            x = (x @ weight).tanh()
        return x


class Fused(nn.Module):
    """Queries, keys and values from one matrix, in two spellings."""

    def __init__(self, is_split: bool) -> None:
        super().__init__()
        self.qkv, self.is_split = nn.Linear(WIDTH, 3 * WIDTH), is_split

    def forward(self, x: Tensor) -> Tensor:
        if self.is_split:
            weights, biases = self.qkv.weight.split(WIDTH), self.qkv.bias.split(WIDTH)
            q, k, v = (F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        else:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, WIDTH).unbind(2)
        return F.scaled_dot_product_attention(q, k, v)


class Hypernet(nn.Module):
    """Weights that are made of the sample they are used on."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.make(x.mean(1)).view(len(x), 3, WIDTH)
        return torch.bmm(x, weights.mT)


class GatheredExperts(nn.Module):
    """Every token's expert by `gather` from a stack, added up by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)  # [batch, tokens, experts]
        gates, chosen = scores.max(-1)
        outputs = torch.einsum("btd,kde->btke", x, self.experts)
        own = outputs.gather(2, chosen[..., None, None].expand(*chosen.shape, 1, WIDTH))[:, :, 0]
        places = torch.arange(x.shape[1]).flip(0)
        return torch.zeros_like(x).index_add(1, places, gates[..., None] * own)


class OverTime(nn.Module):
    """A state that a layer moves from token to token."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.onto = nn.Linear(WIDTH, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for token in range(x.shape[1]):
            state = (self.into(x[:, token]) + self.onto(state)).tanh()
        return state


def penalised(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    """Each sample's loss has its part of a penalty on the weights."""
    return squares(model, batch) + model.weight.square().sum() / BATCH  # type: ignore[operator]


def batch_last(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    """A layer whose samples lie in its last dimension."""
    return model(batch.permute(1, 2, 0)).square().sum(dim=(0, 1))


def normalised(make: Callable[[], nn.Module], function: Any, *shape: int) -> Case:
    return layer(lambda: function(make()), *shape)


def spectral() -> nn.Module:
    module = parametrizations.spectral_norm(nn.Linear(WIDTH, 3))
    return module.eval()


def words(size: int) -> Tensor:
    return ids(size)


def exponential(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.linalg.matrix_exp(0.1 * w)


def positions(x: Tensor) -> Tensor:
    return (x[..., 0] > 0.4).long() + 2 * (x[..., 1] > 0.4).long()  # [batch, tokens], 0 to 3


OPERATORS: dict[str, Case] = {
    # Recurrent networks and attention.
    "LSTM2 bi=False": layer(lambda: nn.LSTM(WIDTH, 4, 2, batch_first=True), TOKENS, WIDTH),
    "LSTM2 bi=True": LAYERS["lstm deep"],
    "LSTM proj": LAYERS["lstm projected"],
    "GRU": LAYERS["gru"],
    "RNN relu": LAYERS["rnn relu"],
    "LSTMCell": LAYERS["lstm cell"],
    "GRUCell": LAYERS["gru cell"],
    "MHA": LAYERS["attention batch first"],
    "MHA seqfirst": LAYERS["attention"],
    "MHA noweights": LAYERS["attention without weights"],
    "MHA kdim biaskv": layer(
        lambda: Attends("three", kdim=4, vdim=5, add_bias_kv=True, batch_first=True), TOKENS, WIDTH
    ),
    "MHA T==B": layer(lambda: Attends(batch_first=True), BATCH, WIDTH),
    "TransformerEncLayer": LAYERS["encoder layer"],
    "TransformerEncoder normfirst": layer(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        ),
        TOKENS,
        WIDTH,
    ),
    "Transformer full": layer(Translator, TOKENS, WIDTH, loss=cubes),
    # Convolutions.
    "Conv1d": CASES["conv1d"],
    "Conv1d same dil": CASES["conv1d same"],
    "Conv2d grp dil str": layer(
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), 4, 9, 8
    ),
    "Conv2d depthwise": layer(lambda: nn.Conv2d(4, 8, 3, groups=4), 4, 7, 6),
    "Conv2d reflect": layer(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), 4, 7, 6),
    "Conv3d": CASES["conv3d"],
    "ConvTranspose1d": CASES["transposed conv"],
    "ConvTranspose2d grp": layer(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), 4, 5, 4
    ),
    "ConvTranspose3d": layer(lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), 2, 3, 4, 2),
    # Tables and norms.
    "EmbeddingBag 2d mean": Case(lambda: nn.EmbeddingBag(VOCAB, WIDTH), words, squares),
    "EmbeddingBag sum": Case(lambda: nn.EmbeddingBag(VOCAB, WIDTH, mode="sum"), words, squares),
    "EmbeddingBag max": Case(lambda: nn.EmbeddingBag(VOCAB, WIDTH, mode="max"), words, squares),
    "EmbeddingBag weights": Case(Weighted, words, squares),
    "Embedding pad": CASES["embedding with padding"],
    "Embedding int32 tied": Case(
        CASES["tied"].make, lambda size: ids(size).int(), CASES["tied"].loss
    ),
    "EmbeddingBag int32": Case(
        lambda: nn.EmbeddingBag(VOCAB, WIDTH), lambda size: words(size).int(), squares
    ),
    "GroupNorm": CASES["group norm"],
    "LayerNorm2d": CASES["layer norm over two"],
    "RMSNorm": CASES["rms norm"],
    "InstanceNorm1d": CASES["instance norm"],
    "InstanceNorm2d": layer(lambda: nn.InstanceNorm2d(4, affine=True), 4, 5, 3, loss=cubes),
    "InstanceNorm3d": layer(lambda: nn.InstanceNorm3d(4, affine=True), 4, 3, 2, 5, loss=cubes),
    "Bilinear": CASES["bilinear"],
    "PReLU": layer(lambda: nn.PReLU(4), 4, 9),
    "PReLU1": layer(nn.PReLU, 4, 9),
    "LocalResponse+Lin": layer(
        lambda: nn.Sequential(nn.LocalResponseNorm(2), nn.Linear(WIDTH, 3)), 4, WIDTH
    ),
    "weight_norm par": LAYERS["weight norm"],
    "weight_norm conv": normalised(lambda: nn.Conv1d(4, 6, 3), parametrizations.weight_norm, 4, 9),
    "spectral_norm par(eval)": layer(spectral, TOKENS, WIDTH),
    "orthogonal par": normalised(
        lambda: nn.Linear(WIDTH, WIDTH), parametrizations.orthogonal, TOKENS, WIDTH
    ),
    # einsum and expressions.
    "einsum bti,oi": op(lambda x, w: torch.einsum("bti,oi->bto", x, w), 4, WIDTH),
    "einsum multihead": LAYERS["einsum to heads"],
    "einsum tri": LAYERS["einsum of three"],
    "einsum diag": op(lambda x, w: torch.einsum("btd,d->btd", x, w), WIDTH),
    "einsum ellipsis": LAYERS["einsum with dots"],
    "einsum batch last": op(
        lambda x, w: torch.einsum("dtb,de->etb", x.permute(2, 1, 0), w).permute(2, 1, 0), WIDTH, 4
    ),
    "a*x+b": layer(lambda: Affine(WIDTH), TOKENS, WIDTH),
    "a*x+b scalar": layer(Affine, TOKENS, WIDTH),
    "param twice": op(lambda x, w: (x @ w).tanh() @ w, WIDTH, WIDTH),
    "tied emb-head": CASES["tied"],
    "pos table T==B": CASES["as many tokens as samples"],
    "cls token expand": layer(lambda: ClassToken(False), TOKENS, WIDTH),
    "cls token repeat": layer(lambda: ClassToken(True), TOKENS, WIDTH),
    "F.softmax(param) mix": op(
        lambda x, w: torch.einsum("k,kbtd->btd", w.softmax(0), torch.stack([x, x.sin(), x**2])), 3
    ),
    "F.normalize(param)": op(lambda x, w: F.linear(x, F.normalize(w, dim=1)), 5, WIDTH),
    "param as conv kernel sum": op(
        lambda x, w: F.conv1d(x.mT, w, padding=1) + w.sum(), 4, WIDTH, 3
    ),
    "param outside: |w|^2/B reg": Case(
        lambda: nn.Linear(WIDTH, 3), floats(TOKENS, WIDTH), penalised
    ),
    "gather param": op(lambda x, w: w[positions(x)], 4, WIDTH),
    "index_select param": op(
        lambda x, w: w.index_select(0, positions(x).flatten()).view(*x.shape), 4, WIDTH
    ),
    "torch.gather param": op(
        lambda x, w: torch.gather(w.expand(len(x), -1, -1), 1, (x > 0.4).long()), 2, WIDTH
    ),
    "scatter_add": op(
        lambda x, w: torch.zeros_like(x).scatter_add(2, (x > 0.4).long(), x * w), WIDTH
    ),
    "where(param)": LAYERS["where"],
    "maximum(x,param)": op(lambda x, w: torch.maximum(x * 4, w), WIDTH),
    "cdist param": op(torch.cdist, 4, WIDTH),
    "baddbmm param": LAYERS["baddbmm"],
    "addmm": op(
        lambda x, w: torch.addmm(w[0], x.reshape(-1, WIDTH), w.mT @ w).view(*x.shape), 4, WIDTH
    ),
    "bmm expand": LAYERS["bmm"],
    "kron/outer": op(lambda x, w: x[:, 0, : WIDTH // 2, None] * torch.outer(w, w)[:3, :3], WIDTH),
    "matrix_exp": op(exponential, WIDTH, WIDTH),
    "pow param": LAYERS["power"],
    "GLU/ Swish beta": op(lambda x, w: F.glu(x * (w * x).sigmoid(), -1), WIDTH),
    "grid affine": layer(Sampled, 2, 5, 6),
    "func.functional_call": layer(Called, TOKENS, WIDTH),
    "ParameterList": layer(Several, TOKENS, WIDTH),
    "Flatten B*T view": CASES["flattened"],
    "seq-first linear": CASES["time major"],
    "batch in last dim": Case(
        lambda: Op(lambda x, w: torch.einsum("tdb,de->teb", x, w), WIDTH, 4),
        floats(TOKENS, WIDTH),
        batch_last,
    ),
    "loop over time": layer(OverTime, TOKENS, WIDTH),
    "AdaptiveLogSoftmax": layer(Adaptive, WIDTH),
    "chunked qkv view": layer(lambda: Fused(False), TOKENS, WIDTH),
    "qkv split weights": layer(lambda: Fused(True), TOKENS, WIDTH),
    "col slice of W": LAYERS["columns of a matrix"],
    "hypernet W(x) per sample": layer(Hypernet, TOKENS, WIDTH),
    "MoE gather/index_add": layer(GatheredExperts, TOKENS, WIDTH),
    "repeat_interleave x": through(
        lambda: nn.Linear(WIDTH, 3),
        lambda inner, x: inner(x.repeat_interleave(2, 0)).view(len(x), -1),
    ),
}
