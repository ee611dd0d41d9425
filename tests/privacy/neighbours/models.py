"""Models that look at the whole batch: statistics, routing, buffers, dropout, caches."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unison
from tests.privacy.neighbours.data import CLASSES, FEATURES, SIZE, TOKENS, VOCAB, case
from tests.privacy.neighbours.harness import Batch, Case, Records
from tests.privacy.neighbours.losses import autocast

HIDDEN = 6


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


class Before(nn.Module):
    """A function of the inputs, then a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


class Between(nn.Module):
    """Two layers with a function of the hidden states between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.function, self.dropout = function, nn.Dropout(dropout)
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.function(self.up(x).tanh())))


class After(nn.Module):
    """A layer, then a function of the outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def before(function: Callable[[Tensor], Tensor], **options: Any) -> Case:
    return case(classify, model=lambda: Before(function), **options)


def between(function: Callable[[Tensor], Tensor], **options: Any) -> Case:
    return case(classify, model=lambda: Between(function), **options)


def after(function: Callable[[Tensor], Tensor], **options: Any) -> Case:
    return case(classify, model=lambda: After(function), **options)


# ---- statistics over the batch -------------------------------------------------------------------


def quantised(x: Tensor) -> Tensor:
    """Eight bits with one scale for the whole tensor."""
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def centred_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        centre = x.mean(0)
    return x - centre


def attended(x: Tensor) -> Tensor:
    """Attention whose tokens are the rows of the batch."""
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def by_a_number(x: Tensor) -> Tensor:
    return x / x.abs().max().item()


def by_numpy(x: Tensor) -> Tensor:
    return x / float(x.detach().numpy().std())


def branch(x: Tensor) -> Tensor:
    return x * 0.1 if bool((x.abs() > 10).any()) else x


def rank_of_rows(x: Tensor) -> Tensor:
    return x * x[:, :1].argsort(0).argsort(0)


def sorted_rows(x: Tensor) -> Tensor:
    return x.sort(0).values


def flipped_half(x: Tensor) -> Tensor:
    return x + 0.5 * x.flip(0)


def frozen_norm(dropout: float = 0.0, **options: Any) -> nn.Module:
    """A frozen backbone with batch norm in training mode, and a head that is trained."""
    backbone = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16, **options), nn.ReLU()
    ).requires_grad_(False)
    return nn.Sequential(backbone, nn.Dropout(dropout), nn.Linear(16, CLASSES))


class RowAttention(nn.Module):
    """`nn.MultiheadAttention` that takes the batch for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x[None], x[None], x[None])[0][0])


class Recurrent(nn.Module):
    """A recurrent network that runs over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head = nn.GRU(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x)[0])


class FirstCall(nn.Module):
    """Scales by statistics of the first batch that it has seen, as data-dependent inits do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, CLASSES), None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().abs().max()
        return self.layer(x / self.scale)


class LaterOn(nn.Module):
    """Keeps rows apart, until a feature of any row is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 10:
            x = x / x.abs().max()
        return self.layer(x)


def later_far() -> Records:
    """Ordinary in the first step; in the others one record is far away."""
    usual, far = case(classify, "near class").records, case(classify).records
    return Records(lambda step: (far if step else usual).at(step), empty=usual.empty)


STATISTICS: dict[str, Case] = {
    "mean of the inputs": before(lambda x: x - x.mean(0)),
    "largest of the inputs": before(lambda x: x / x.abs().max()),
    "one scale for the whole tensor": before(quantised),
    "variance of the inputs": before(lambda x: x / (x.var(0) + 1e-5).sqrt()),
    "softmax over the inputs": before(lambda x: 10 * x.softmax(0), max_grad_norm=0.1),
    "inputs by a number": before(by_a_number),
    "inputs by numpy": before(by_numpy),
    "branch on the inputs": before(branch),
    "frozen batch norm function": before(lambda x: F.batch_norm(x, None, None, training=True)),
    "mean of hidden states": between(lambda h: h - h.mean(0)),
    "detached mean": between(lambda h: h - h.mean(0).detach()),
    "mean under no_grad": between(centred_without_gradient),
    "quantile of hidden states": between(
        lambda h: h / (0.01 + h.detach().abs().flatten().quantile(0.99)), max_grad_norm=2.0
    ),
    "sorted hidden states": between(sorted_rows),
    "rows of others": between(flipped_half),
    "rank of a row": between(rank_of_rows, max_grad_norm=2.0),
    "attention over the batch": between(attended),
    "norm of all hidden states": between(lambda h: h / h.norm(), max_grad_norm=0.3),
    "softmax over the batch": after(lambda o: o.log_softmax(0), max_grad_norm=1.0),
    "centred outputs": after(lambda o: o - o.mean(0, keepdim=True)),
    "outputs over their largest": after(lambda o: o / o.detach().abs().max()),
    "cumulative outputs": after(lambda o: o.cumsum(0)),
    "multihead attention over the batch": case(classify, model=RowAttention),
    "recurrent over the batch": case(classify, model=Recurrent),
    "frozen batch norm": case(
        classify,
        model=lambda: frozen_norm(track_running_stats=False),
        max_grad_norm=0.1,
    ),
    # Float64 would not show these.
    "mean of hidden states in float32 alone": between(
        lambda h: h - h.mean(0) if h.dtype == torch.float32 else h
    ),
    "largest of what is not float64": between(
        lambda h: h if h.dtype == torch.float64 else h / h.detach().abs().max()
    ),
    "mean of hidden states in bfloat16 alone": case(
        autocast,
        model=lambda: Between(lambda h: h - h.mean(0) if h.dtype == torch.bfloat16 else h),
        at_one_shape=True,
    ),
    "scale of the first batch": case(classify, model=FirstCall, steps=2),
    "statistics from the second step on": Case(classify, LaterOn, later_far(), 0.3, steps=3),
}

DROPOUT: dict[str, Case] = {
    "frozen batch norm, dropout": case(
        classify,
        model=lambda: frozen_norm(0.1, track_running_stats=False),
        max_grad_norm=0.1,
        at_one_shape=True,
    ),
    "mean of hidden states, dropout": case(
        classify, model=lambda: Between(lambda h: h - h.mean(0), 0.1), at_one_shape=True
    ),
    "largest of the inputs, dropout": case(
        classify,
        model=lambda: nn.Sequential(nn.Dropout(0.2), Before(lambda x: x / x.abs().max())),
        at_one_shape=True,
    ),
    "dropout, then the centre of the batch": case(
        lambda m, b: (lambda h: (h - h.mean(0)).square().sum(1).mean())(m(b[0])),
        model=lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(FEATURES, CLASSES)),
        at_one_shape=True,
    ),
    "rows left out by one draw": case(
        classify,
        model=lambda: Before(lambda x: x * (torch.rand(1) < 0.5 + 0 * x.sum()) / x.abs().max()),
        at_one_shape=True,
    ),
}

# ---- where the record stands, and batches that come in parts -------------------------------------


def placed(inner: Case, place: int, **options: Any) -> Case:
    return dataclasses.replace(inner, records=inner.records.with_record_at(place), **options)


IN_PARTS = {"max_physical_batch_size": 5}
LAST = SIZE - 1

PLACES: dict[str, Case] = {
    **{
        f"{name}, record {place}": placed(inner, place)
        for name, inner in {
            "largest of the inputs": STATISTICS["largest of the inputs"],
            "outputs over their largest": STATISTICS["outputs over their largest"],
            "frozen batch norm, dropout": DROPOUT["frozen batch norm, dropout"],
        }.items()
        for place in (SIZE // 2, LAST)
    },
    "largest of the inputs, in parts": placed(
        STATISTICS["largest of the inputs"], LAST, settings=IN_PARTS
    ),
    "centre of the batch, in parts": placed(
        DROPOUT["dropout, then the centre of the batch"], 6, settings=IN_PARTS
    ),
}

# ---- buffers -------------------------------------------------------------------------------------


class Summed(nn.Module):
    """Keeps a sum of the private batch where `state_dict` finds it."""

    total: Tensor

    def __init__(self, is_persistent: bool = True, from_step: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("total", torch.zeros(FEATURES), persistent=is_persistent)
        self.from_step, self.step = from_step, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.step >= self.from_step:
            self.total.copy_(x.detach().sum(0))
        self.step += 1
        return self.layer(x)


class Replaced(nn.Module):
    """Sets a buffer anew instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("last", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().sum(0)
        return self.layer(x)


class Counted(nn.Module):
    """Counts rows of a kind, in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += (x.abs() > 10).any(1).sum()
        return self.layer(x)


class Centred(nn.Module):
    """Subtracts a running mean, which every step moves."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("centre", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x - self.centre)
        self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


def rows_of_images() -> Records:
    """Rows of four channels, as instance norm takes them."""
    records = case(classify).records
    x, y = records.at(0)
    images = x[:, :, None] * torch.tensor([1.0, -1.0, 0.5])
    return Records(lambda _step: (images, y), empty=(torch.zeros(FEATURES, 3), torch.tensor(2)))


def tracked_instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(FEATURES, track_running_stats=True)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * FEATURES, CLASSES))


BUFFERS: dict[str, Case] = {
    "a sum in a buffer": case(classify, model=Summed),
    "a sum in a buffer that is not saved": case(classify, model=lambda: Summed(False)),
    "a sum in a buffer from a later step on": case(
        classify, model=lambda: Summed(from_step=4), steps=6
    ),
    "a buffer that is replaced": case(classify, model=Replaced),
    "a count in a buffer": case(classify, model=Counted),
    "a running centre in a buffer": case(classify, model=Centred, steps=3),
    "running mean of a frozen batch norm": case(classify, model=frozen_norm),
    "running mean of batch norm without parameters": case(
        classify,
        model=lambda: nn.Sequential(
            nn.BatchNorm1d(FEATURES, affine=False), nn.Linear(FEATURES, CLASSES)
        ),
    ),
    "running statistics of instance norm": Case(
        classify, tracked_instance_norm, rows_of_images(), 0.3
    ),
}

# ---- routing -------------------------------------------------------------------------------------


class MaskedExperts(nn.Module):
    """Two experts; each takes the rows of a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            mask = (x[:, 1] > 0) == bool(number)
            y[mask] = expert(x[mask])
        return y


class TokenExperts(nn.Module):
    """Two experts; each takes the tokens of a boolean mask, of all rows in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, features]
        flat = x.flatten(0, 1)
        y = flat.new_zeros(len(flat), CLASSES)
        for number, expert in enumerate(self.experts):
            mask = (flat[:, 1] > 0) == bool(number)
            y[mask] = expert(flat[mask])
        return y.view(*x.shape[:2], CLASSES).sum(1)


class ExpertChoice(nn.Module):
    """Experts choose their rows: the best of the batch, as many as an expert can take."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)  # [batch, experts]
        y = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            gates, chosen = scores[:, number].topk(min(len(x), 4))
            y = y.index_add(0, chosen, gates[:, None] * expert(x[chosen]))
        return y


class Capacity(nn.Module):
    """Experts that take rows in order until they are full; the others pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        wants = x[:, 0] > 0.5
        fits = wants & (wants.cumsum(0) <= 5)
        return self.head(torch.where(fits[:, None], self.expert(x), -x))


class Sorted(nn.Module):
    """Sorts rows, takes the upper half through a layer, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        half = len(x) // 2
        parts = torch.cat([self.low(x[order[:half]]), self.high(x[order[half:]])])
        return torch.empty_like(parts).index_copy(0, order, parts)


def even_at_first(is_mixed: bool) -> Records:
    """As many rows of either kind in the first step, fewer of one later; mixed, or in blocks."""
    x, y = case(classify, "near class").records.at(0)
    places = torch.arange(SIZE)

    def at(step: int) -> Batch:
        first = SIZE // 2 if step == 0 else SIZE // 3
        is_first = places % (SIZE // first) == 0 if is_mixed else places < first
        routed = x.clone()
        routed[:, 1] = torch.where(is_first, 1.0, -1.0)
        return routed, y

    return Records(at, empty=(-torch.ones(FEATURES), torch.tensor(2)))


def tokens_even_at_first() -> Records:
    """Two tokens of each row for each expert in the first step; later two rows want one alone."""
    x, y = case(classify, "near class").records.at(0)
    wanted = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(SIZE, 1)
    uneven = wanted.clone()
    uneven[0], uneven[1] = 1.0, -1.0  # as many tokens for each as before

    def at(step: int) -> Batch:
        routed = x[:, None].repeat(1, 4, 1)
        routed[..., 1] = uneven if step else wanted
        return routed, y

    return Records(at, empty=(torch.ones(4, FEATURES), torch.tensor(2)))


ROUTING: dict[str, Case] = {
    "experts by mask, even at first": Case(
        classify, MaskedExperts, even_at_first(True), 0.3, steps=3
    ),
    "experts by mask, in blocks": Case(classify, MaskedExperts, even_at_first(False), 0.3, steps=2),
    "experts of tokens, even at first": Case(
        classify, TokenExperts, tokens_even_at_first(), 0.3, steps=3
    ),
    "experts choose their rows": case(classify, "near class", ExpertChoice),
    "experts with a capacity": case(classify, "near class", Capacity),
    "halves of sorted rows": case(classify, "near class", Sorted),
    "sorted by a feature": between(lambda h: h[h[:, 0].argsort()]),
    "best rows alone": case(
        lambda m, b: m(b[0]).logsumexp(1).mean(),
        "near class",
        lambda: After(lambda o: o[o[:, 0].topk(len(o) // 2).indices].repeat(2, 1)),
    ),
    "a row in the place of the best": between(lambda h: h[h[:, 0].argmax()].expand_as(h)),
}

# ---- caches --------------------------------------------------------------------------------------


def cached_llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)  # use_cache=True is transformers' default


def sharded_llama() -> nn.Module:
    """The same in units that run granule by granule, as on several ranks."""
    return unison.auto_shard(cached_llama(), reducer="ordered", gradient_divisor=1)


class KeptStates(nn.Module):
    """A layer that attends to what it has seen in earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.past = nn.Linear(FEATURES, CLASSES), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x if self.past is None else x + self.past)
        self.past = x.detach().mean(0)
        return y


class RowCache(nn.Module):
    """Remembers the rows of one call for the next one of the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(FEATURES, CLASSES), []

    def forward(self, x: Tensor) -> Tensor:
        self.memory = [*self.memory[-1:], x.detach().mean(0)]
        return self.layer(x - self.memory[0])


def by_granule(module: nn.Module, batch: Batch, **options: Any) -> Tensor:
    logits = module(batch[0], **options).logits
    return unison.batch_mean(unison.per_sample_loss(logits[:, :-1], batch[1][:, 1:]))


CACHES: dict[str, Case] = {
    **{
        f"transformers' cache, granules of {granule}": case(
            by_granule, "lm", sharded_llama, max_grad_norm=0.01, settings={"granule": granule}
        )
        for granule in (1, 3)
    },
    "states of earlier steps": case(classify, model=KeptStates, steps=3),
    "rows of an earlier call": case(classify, model=RowCache, steps=2),
}

# ---- legitimate ----------------------------------------------------------------------------------


class SoftExperts(nn.Module):
    """Every row goes to every expert, weighed by its own router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # [batch, experts, c]
        return (self.router(x).softmax(-1)[..., None] * outputs).sum(1)


class Constants(nn.Module):
    """A buffer that no pass writes: a table of constants."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


def evaluated_norm() -> nn.Module:
    """A frozen batch norm that takes the statistics it has."""

    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self[0].eval()
            return self

    norm = nn.BatchNorm1d(FEATURES).requires_grad_(False)
    return Frozen(norm, nn.Linear(FEATURES, CLASSES))


LEGITIMATE_MODELS: dict[str, Case] = {
    "a batch in parts": placed(case(classify, steps=2), 7, settings=IN_PARTS),
    "the last record": placed(between(lambda h: h), LAST),
    "dropout": case(
        classify,
        model=lambda: Between(lambda h: h, 0.2),
        at_one_shape=True,
        has_oracle=False,
        steps=2,
    ),
    "layer norm": between(lambda h: F.layer_norm(h, [HIDDEN])),
    "softmax over features": between(lambda h: h.softmax(1)),
    "largest of a row": before(lambda x: x / x.abs().amax(1, keepdim=True).clamp(min=0.01)),
    "quantised by row": before(
        lambda x: (x * 127 / x.abs().amax(1, keepdim=True).clamp(min=0.01)).round() / 127,
        has_oracle=False,
    ),
    "soft experts": case(classify, model=SoftExperts),
    "a buffer of constants": case(classify, model=Constants, steps=2),
    "batch norm in evaluation mode": case(classify, model=evaluated_norm, steps=2),
    "transformers' cache without granules": case(
        lambda m, b: unison.per_sample_loss(m(b[0]).logits[:, :-1], b[1][:, 1:]).mean(),
        "lm",
        cached_llama,
        steps=2,
    ),
    "granules without a shard": case(
        by_granule, "lm", cached_llama, settings={"granule": 1}, has_oracle=False
    ),
    "granules without a cache": case(
        functools.partial(by_granule, use_cache=False),
        "lm",
        sharded_llama,
        settings={"granule": 3},
        has_oracle=False,
    ),
}
