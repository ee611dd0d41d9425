"""Attention, recurrent networks, and single operations in every spelling that torch has."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.common import (
    TOKENS,
    VOCAB,
    WIDTH,
    Case,
    floats,
    ids,
    squares,
    squares_time_major,
)
from unison.kernels.cross_entropy import linear_cross_entropy
from unison.ops import RULES

HEADS = 2

# ---- attention -----------------------------------------------------------------------------------


class Attends(nn.Module):
    """`nn.MultiheadAttention` with itself, with one other tensor, or with two."""

    def __init__(
        self, mode: str = "self", *, masks: str = "", weights: bool = True, **options: Any
    ):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.mode, self.masks, self.weights = mode, masks, weights
        if options.get("add_bias_kv"):
            nn.init.normal_(self.attention.bias_k)

    def forward(self, x: Tensor) -> Tensor:
        first = 0 if self.attention.batch_first else 1
        key = value = x
        if self.mode != "self":
            key = value = x.narrow(1 - first, 0, 4).sin()
        if self.mode == "three":
            value = key.cos()
        if self.attention.kdim != WIDTH:
            key = key[..., : self.attention.kdim]
        if self.attention.vdim != WIDTH:
            value = value[..., : self.attention.vdim]
        tokens, keys, batch = x.shape[1 - first], key.shape[1 - first], x.shape[first]
        masks: dict[str, Any] = {}
        if "padding" in self.masks:
            padding = torch.arange(keys).expand(batch, -1) >= keys - 1
            masks["key_padding_mask"] = (
                -2 * padding.to(x.dtype) if "each" in self.masks else padding
            )
        if "causal" in self.masks:
            masks["attn_mask"] = torch.ones(tokens, keys, dtype=torch.bool).triu(1)
        if "hint" in self.masks:
            masks["is_causal"] = True
        if "each" in self.masks:
            shape = (batch * HEADS, tokens, keys)
            masks["attn_mask"] = torch.arange(keys, dtype=x.dtype).expand(shape) / 3
        y, shares = self.attention(x, key, value, need_weights=self.weights, **masks)
        if shares is None:
            return y
        factor = 1 + shares.square().sum(dim=(1, 2))  # [batch]
        return y * factor.unsqueeze(1 - first).unsqueeze(-1)


class Biased(nn.Module):
    """Attention with a learned bias per head, as Swin and T5 have."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)


def _attention(*args: Any, **options: Any) -> Case:
    loss = squares if options.get("batch_first") else squares_time_major
    return Case(lambda: Attends(*args, **options), floats(TOKENS, WIDTH), loss)


def cubes(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    """For outputs of a norm, whose squares are always as many."""
    inputs = (
        (batch, batch[:, :4].sin()) if isinstance(model, nn.TransformerDecoderLayer) else (batch,)
    )
    return model(*inputs).pow(3).flatten(1).sum(1)


ATTENTION: dict[str, Case] = {
    "attention": _attention(),
    "attention batch first": _attention(batch_first=True, bias=False),
    "attention without weights": _attention(batch_first=True, weights=False),
    "attention to another": _attention("other", batch_first=True),
    "attention to two others": _attention("three", weights=False),
    "attention of other sizes": _attention("three", kdim=4, vdim=5, batch_first=True),
    "attention with bias_k": _attention("other", add_bias_kv=True),
    "attention with zeros": _attention(add_zero_attn=True, add_bias_kv=True, weights=False),
    "attention causal": _attention(masks="causal", batch_first=True),
    "attention causal by hint": _attention(masks="causal hint", weights=False),
    "attention padded": _attention("other", masks="padding", add_zero_attn=True),
    "attention padded and causal": _attention(
        masks="padding causal", add_bias_kv=True, weights=False
    ),
    "attention mask each": _attention(masks="each padding", batch_first=True),
    "attention bias": Case(Biased, floats(TOKENS, WIDTH), squares),
    "encoder layer": Case(
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 9, dropout=0.0, batch_first=True),
        floats(TOKENS, WIDTH),
        cubes,
    ),
    "encoder layer evaluated": Case(
        lambda: nn.TransformerEncoderLayer(
            WIDTH, HEADS, 9, batch_first=True, norm_first=True
        ).eval(),
        floats(TOKENS, WIDTH),
        squares,
    ),
    "decoder layer": Case(
        lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, 9, dropout=0.0, batch_first=True),
        floats(TOKENS, WIDTH),
        cubes,
    ),
}

# ---- recurrent -----------------------------------------------------------------------------------


class Steps(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return torch.cat(state, dim=-1) if isinstance(state, tuple) else state


class Started(nn.Module):
    """A recurrent network with a learned first state, whose last state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(2, 1, 4))
        self.network = nn.GRU(WIDTH, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.network(x, self.start.expand(-1, x.shape[0], -1).contiguous())
        return y.sum(1) + last.prod(0)


def _network(kind: type[nn.Module], **options: Any) -> Case:
    loss = squares if options.get("batch_first") else squares_time_major
    return Case(lambda: kind(WIDTH, 4, **options), floats(TOKENS, WIDTH), loss)


def _cell(kind: type[nn.Module], **options: Any) -> Case:
    return Case(lambda: Steps(kind(WIDTH, 4, **options)), floats(TOKENS, WIDTH), squares)


RECURRENT: dict[str, Case] = {
    "rnn": _network(nn.RNN),
    "rnn relu": _network(nn.RNN, nonlinearity="relu", batch_first=True, bias=False),
    "lstm": _network(nn.LSTM),
    "lstm deep": _network(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
    "lstm projected": _network(nn.LSTM, proj_size=3, bias=False, bidirectional=True),
    "gru": _network(nn.GRU, batch_first=True),
    "gru deep": _network(nn.GRU, num_layers=3, bidirectional=True),
    "gru started": Case(Started, floats(TOKENS, WIDTH), squares),
    "rnn cell": _cell(nn.RNNCell),
    "rnn cell relu": _cell(nn.RNNCell, nonlinearity="relu", bias=False),
    "lstm cell": _cell(nn.LSTMCell),
    "gru cell": _cell(nn.GRUCell),
}

# ---- single operations ---------------------------------------------------------------------------


class Op(nn.Module):
    """One operation of an input and one parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) + 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.tanh() + 0.5, self.weight)


def _op(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Case:
    return Case(lambda: Op(function, *shape), floats(TOKENS, WIDTH), squares)


def _written(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        function(y, w)
        return y * x

    return run


def _set(*index: Any) -> Callable[[Tensor, Tensor], None]:
    def run(x: Tensor, w: Tensor) -> None:
        x[index] = w

    return run


def _set_masked(x: Tensor, w: Tensor) -> None:
    x[x[..., 0] > 0.4] = w


def _added(x: Tensor, w: Tensor) -> None:
    x += w


_LINEAR = (F.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm)
_FLAT = (torch.mm, Tensor.mm, torch.addmm, Tensor.addmm)
_NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
_EITHER_ORDER = (
    *(torch.mul, torch.multiply, Tensor.mul),
    *(torch.add, Tensor.add),
    *(torch.sub, torch.subtract, Tensor.sub, Tensor.__rsub__),
)
_DIVISIONS = (torch.div, torch.true_divide, Tensor.div)
_EXPANDS = (Tensor.expand, torch.broadcast_to, Tensor.broadcast_to)
_REPEATS = (Tensor.repeat, torch.tile, Tensor.tile)


def _spelled(function: Callable[..., Any]) -> dict[str, Case]:
    """One case for a function with a rule, called as it is."""
    name = f"{getattr(function, '__qualname__', function)}"
    if function in _FLAT:
        bias = torch.arange(4.0, dtype=torch.float64)
        extra = (bias,) if "addmm" in name else ()

        def flat(x: Tensor, w: Tensor) -> Tensor:
            return function(*extra, x.reshape(-1, WIDTH), w).view(*x.shape[:-1], 4)

        return {name: _op(flat, WIDTH, 4)}
    if function in _LINEAR:
        return {name: _op(function, *((4, WIDTH) if function is F.linear else (WIDTH, 4)))}
    if function in _NORMS:
        return {name: _op(lambda x, w: function(x, [WIDTH], w, eps=1e-4), WIDTH)}
    if function in _EITHER_ORDER:
        return {
            name: _op(function, WIDTH),
            f"{name} reversed": _op(lambda x, w: function(w, x), TOKENS, 1),
        }
    if function in _DIVISIONS:
        return {name: _op(function, 1, WIDTH), f"{name} over": _op(lambda x, w: function(w, x), 1)}
    if function in _EXPANDS:
        return {name: _op(lambda x, w: function(w, x.shape) * x, 1, 1, WIDTH)}
    if function in _REPEATS:
        sizes: Any = lambda x: (len(x), 1, 1)  # noqa: E731
        return {name: _op(lambda x, w: function(w, sizes(x)) * x, 1, 1, WIDTH)}
    return {}


def _sizes_first(x: Tensor, w: Tensor) -> Tensor:
    """A parameter that is broadcast over everything but features that come first."""
    return (w.expand_as(x) + w.expand(*x.shape)) * x


OPERATIONS: dict[str, Case] = {
    **{name: case for function in RULES for name, case in _spelled(function).items()},
    "rmatmul": _op(lambda x, w: Tensor.__rmatmul__(w, x), WIDTH, 4),
    "expand": _op(_sizes_first, WIDTH),
    "group norm function": _op(lambda x, w: torch.group_norm(x.transpose(1, 2), 2, w), WIDTH),
    "where": _op(lambda x, w: torch.where(x > 0.4, w, x * 2), WIDTH),
    "where not": _op(lambda x, w: torch.where(x > 0.4, 3.0, w), 1, TOKENS, 1),
    "where method": _op(lambda x, w: (x * 2).where(x > 0.4, w), TOKENS, WIDTH),
    "add in place": _op(_written(_added), WIDTH),
    "add in place with alpha": _op(_written(lambda x, w: x.add_(w, alpha=3)), WIDTH),
    "sub in place": _op(_written(lambda x, w: x.sub_(w)), WIDTH),
    "mul in place": _op(_written(lambda x, w: x.mul_(w)), WIDTH),
    "div in place": _op(_written(lambda x, w: x.div_(w)), TOKENS, 1),
    "copy in place": _op(_written(lambda x, w: x[:, 1:3].copy_(w)), WIDTH),
    "set a slice": _op(_written(_set(slice(None), 0)), WIDTH),
    "set some": _op(_written(_set(..., slice(1, 3))), 1),
    "set masked": _op(_written(_set_masked), WIDTH),
    # einsum: a linear map and its transpose, heads, an outer product, and what falls back.
    "einsum": _op(lambda x, w: torch.einsum("btd,de->bte", x, w), WIDTH, 4),
    "einsum transposed": _op(
        lambda x, w: torch.einsum("ed, btd -> tbe", w, x).mT.mT.transpose(0, 1), 4, WIDTH
    ),
    "einsum to heads": _op(lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), WIDTH, 2, 3),
    "einsum from heads": _op(
        lambda x, w: torch.einsum("bthk,hkd->btd", x.unflatten(-1, (2, 3)), w), 2, 3, 5
    ),
    "einsum per head": _op(
        lambda x, w: torch.einsum("bthk,hkl->bthl", x.unflatten(-1, (2, 3)), w), 2, 3, 5
    ),
    "einsum mixed order": _op(lambda x, w: torch.einsum("btd,edf->btef", x, w), 2, WIDTH, 3),
    "einsum over tokens": _op(lambda x, w: torch.einsum("btd,st->bsd", x, w), 4, TOKENS),
    "einsum summed": _op(lambda x, w: torch.einsum("btd,d->b", x, w)[:, None], WIDTH),
    "einsum flattened": _op(
        lambda x, w: torch.einsum("nd,de->ne", x.reshape(-1, WIDTH), w).view(*x.shape[:2], -1),
        *(WIDTH, 4),
    ),
    "einsum with dots": _op(lambda x, w: torch.einsum("...d,de->...e", x, w), WIDTH, 4),
    "einsum of three": _op(lambda x, w: torch.einsum("btd,de,bsd->bts", x, w, x), WIDTH, 4),
    "left matmul": _op(lambda x, w: w @ x, 4, TOKENS),
    "left matmul 2-d": _op(lambda x, w: (w @ x[:, 0].T).T, 4, WIDTH),
    "left matmul 4-d": _op(lambda x, w: w @ x.unsqueeze(1), 4, TOKENS),
    "vector matmul": _op(lambda x, w: x @ w, WIDTH),
    # Without a rule.
    "left vector": _op(lambda x, w: w @ x, TOKENS),
    "matmul per head": _op(lambda x, w: x.unsqueeze(1) @ w, 3, WIDTH, 4),
    "bmm": _op(lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1)), WIDTH, 4),
    "baddbmm": _op(lambda x, w: torch.baddbmm(w, x, x.mT), TOKENS, TOKENS),
    "prelu": _op(lambda x, w: F.prelu(x - 0.5, w), TOKENS),
    "addcmul": _op(lambda x, w: torch.addcmul(x, x, w, value=2), WIDTH),
    "power": _op(lambda x, w: (x.square() + 1) ** w, WIDTH),
    "cat": _op(lambda x, w: torch.stack([x, x * w], 1).logsumexp(1) + F.softplus(w), WIDTH),
    # Of parameters alone.
    "rows of a matrix": _op(
        lambda x, w: F.linear(x, w[2:6]) + F.linear(x.sin(), w.chunk(3)[1]), 12, WIDTH
    ),
    "rows of a transposed": _op(lambda x, w: x @ w.narrow(0, 1, WIDTH), 9, 4),
    "rows of a table": _op(lambda x, w: x + w[3 : 3 + x.shape[1]], 12, WIDTH),
    "rows of a vector": _op(lambda x, w: x * w[3 : 3 + WIDTH] + w.split(4)[0].sum(), 12),
    "rows of a reshaped": _op(
        lambda x, w: F.linear(x, w.view(8, WIDTH)[1:5]) + F.linear(x, w.flatten(1)[:, 6:12]),
        *(4, 2, WIDTH),
    ),
    "each row": _op(lambda x, w: sum(x * row for row in w), 3, WIDTH),
    "columns of a matrix": _op(lambda x, w: F.linear(x, w[:, 1 : 1 + WIDTH]), 4, 9),
    "transposed rows": _op(
        lambda x, w: x @ w.t()[:WIDTH] + F.linear(x, w[1:7].T.T[:, 1:]).sum(-1, True), 8, 7
    ),
    "a linear map of a parameter": _op(lambda x, w: x @ (F.layer_norm(w, [6]) @ w), WIDTH, WIDTH),
    "normed alone": _op(lambda x, w: x @ F.rms_norm(F.linear(w, w), [6]), WIDTH, WIDTH),
    "looked up alone": _op(lambda x, w: x + w[torch.tensor([0, 2, 2, 1, 0, 0, -1])], 5, WIDTH),
    "looked up by index": _op(lambda x, w: w[(x[..., 0] > 0.4).long() - 1], 5, WIDTH),
    "looked up in a vector": _op(lambda x, w: w[(x > 0.4).long()], 5),
    "integers and facts": _op(
        lambda x, w: x * w[int(w.numel() > 3)] * w.shape[0] + w.dtype.itemsize, 5
    ),
    "without a gradient": _op(lambda x, w: x * w / _norm(w) + w.detach(), WIDTH),
}


def _norm(w: Tensor) -> Tensor:
    with torch.no_grad():
        return w.norm() + w[0]


class Latents(nn.Module):
    """Learned queries that go through layers of their own before they meet the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.each = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"gain": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        queries = self.up(self.norm(self.latents)) * self.named["gain"]
        shares = torch.softmax(queries @ x.mT, dim=-1)
        return self.norm(shares @ x) * self.each[0] + self.each[1]


class Heads(nn.Module):
    """Losses from hidden states, in every way that a head can be used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, WIDTH))
        self.bias, self.frozen = nn.Parameter(torch.randn(11)), torch.randn(11, WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        labels = (5 * x[..., 0].detach().abs()).long().clamp(max=10)
        labels[:, 2] = -100
        h = x.tanh() @ self.mix @ self.mix.T
        losses = [
            linear_cross_entropy(h, self.table, labels, bias=self.bias, chunk=3),
            linear_cross_entropy(h.sin(), self.table, labels, chunk=9),
            linear_cross_entropy(h, self.frozen.to(h), labels, bias=self.bias),
            linear_cross_entropy(x, self.table[2:9].contiguous(), labels.clamp(max=6)),
            # Time-major, and flattened sample by sample.
            linear_cross_entropy(h.transpose(0, 1), self.table, labels.T, bias=self.bias).T,
            linear_cross_entropy(
                h.reshape(-1, 1, WIDTH), self.table, labels.reshape(-1, 1), chunk=2
            ).view_as(labels),
        ]
        means = linear_cross_entropy(h, self.table, labels, reduction="sample_mean")
        return torch.stack([*losses, means[:, None].expand_as(losses[0])], dim=1)


class Parametrized(nn.Module):
    """A weight made of others by torch's own parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


LAYERS: dict[str, Case] = {
    **ATTENTION,
    **RECURRENT,
    **OPERATIONS,
    "bags": Case(lambda: nn.EmbeddingBag(VOCAB, WIDTH, padding_idx=3), ids, squares),
    "bags of sums": Case(lambda: nn.EmbeddingBag(VOCAB, WIDTH, mode="sum"), ids, squares),
    "latents": Case(Latents, floats(TOKENS, WIDTH), squares),
    "linear cross-entropy": Case(Heads, floats(TOKENS, WIDTH), squares),
    "weight norm": Case(Parametrized, floats(TOKENS, WIDTH), squares),
    "depthwise conv": Case(
        lambda: nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=2, groups=WIDTH), floats(WIDTH, 9), squares
    ),
}
