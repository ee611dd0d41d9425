"""Small models whose rows lie where values put them, with batches of any size for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, VOCAB = 4, 6, 11


def squares(model: nn.Module, batch: Any) -> Tensor:  # [batch]
    output = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    return output.square().flatten(1).sum(1)


def generator(size: int) -> torch.Generator:
    return torch.Generator().manual_seed(size)


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape, generator=generator(size), dtype=torch.float64)


def lengths(size: int, least: int = 1) -> Tensor:
    return torch.randint(least, TOKENS + 1, (size,), generator=generator(size + 50))


def padded(size: int) -> tuple[Tensor, Tensor]:
    return floats(TOKENS, WIDTH)(size), lengths(size)


def words(size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (size, TOKENS), generator=generator(size))
    return ids, lengths(size, least=0)  # a sample may have none


class MaskedExperts(nn.Module):
    """Each token goes to the expert that its first number names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        chosen = (h[:, 0] > -0.5).long() + (h[:, 0] > 0.5).long()
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            out[mask] = expert(h[mask]).tanh()
        return self.head(self.norm(out + h).view_as(x))


class IndexedExperts(nn.Module):
    """One weight for all experts, chosen by a number that is a tensor, and tokens by `where`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, 5, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(3, 5))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        weights, chosen = self.router(h).softmax(-1).topk(2, dim=-1)
        hit = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = h.new_zeros(len(h), 5)
        for expert in hit.sum((-1, -2)).nonzero():
            rank, token = torch.where(hit[expert[0]])
            made = F.linear(h[token], self.up[expert[0]], self.bias[expert[0]]).tanh()
            out.index_add_(0, token, made * weights[token, rank, None])
        return self.head(out).view(*x.shape[:2], 2)


class SortedExperts(nn.Module):
    """Tokens sorted by expert, a bias of the expert of each, then back in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        chosen, order = (h[:, 0] * 2).long().abs().clamp(max=2).sort()
        parts = h[order].split(torch.bincount(chosen, minlength=3).tolist())
        made = torch.cat([F.linear(part, self.weight[i]) for i, part in enumerate(parts)])
        made = (made + self.bias[chosen]).tanh()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return made[back].view_as(x)


class Capacity(nn.Module):
    """Experts that take a buffer each, with places that stay empty."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        gain, chosen = self.router(h).softmax(-1).max(-1)
        is_chosen = F.one_hot(chosen, 3)
        place = (is_chosen.cumsum(0) * is_chosen).sum(-1) - 1
        buffer = h.new_zeros(3, len(h), WIDTH)
        buffer[chosen, place] = h
        made = torch.stack([F.linear(buffer[i], self.experts[i]) for i in range(3)]).tanh()
        return self.head(made[chosen, place] * gain[:, None] + h).view(*x.shape[:2], 2)


class Rows(nn.Module):
    """Two layers on rows that were moved, and moved back."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 2)

    def run(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "flip":
                return self.run(x.flip(0)).flip(0)
            case "loop":
                return torch.stack([self.run(each) for each in x])
            case "time first":
                flat = self.run(x.transpose(0, 1).reshape(-1, WIDTH))
                return flat.view(x.shape[1], x.shape[0], 2).transpose(0, 1)
            case "twice":
                first, second = self.run(torch.cat([x, -x])).chunk(2)
                return first * second
            case "sorted":
                order = x[:, 0, 0].argsort()
                return self.run(x[order])[order.argsort()]
            case "random":
                order = torch.randperm(len(x))
                return self.run(x[order])[order.argsort()]
        raise AssertionError(self.way)


class ClassTokens(nn.Module):
    """Made without the batch, and then selected with it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        mask = x[:, :, 1] > self.token.detach().mean()
        out = x.new_zeros(*x.shape[:2], 2)
        out[mask] = self.second(self.first(x).tanh()[mask])
        return out.sum(1) + x[:, 0, :2]


class Packed(nn.Module):
    """A recurrent network on sequences of different lengths."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.net = kind(WIDTH, 5, batch_first=True, **options)
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, sizes.cpu(), batch_first=True, enforce_sorted=False)
        output, state = self.net(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        is_real = torch.arange(output.shape[1]) < sizes[:, None]
        last = state[0] if isinstance(state, tuple) else state
        return torch.cat([(self.head(output) * is_real[..., None]).sum(1), last[-1]], dim=1)


class Bags(nn.Module):
    """Words of all samples in one line, with offsets."""

    def __init__(self, *, is_weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, 4, **options)
        self.head, self.is_weighted = nn.Linear(4, 3), is_weighted

    def forward(self, ids: Tensor, sizes: Tensor) -> Tensor:
        flat = ids[torch.arange(ids.shape[1]) < sizes[:, None]]
        ends = F.pad(sizes.cumsum(0), (1, 0))
        weights = (flat / 7 + 0.3).to(self.head.weight.dtype) if self.is_weighted else None
        offsets = ends if self.bag.include_last_offset else ends[:-1]
        return self.head(self.bag(flat, offsets, per_sample_weights=weights))


class Ragged(nn.Module):
    """Lengths that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        counts = sizes.tolist()
        flat = torch.cat([x[i, :count] for i, count in enumerate(counts)])
        made = self.second(self.first(flat).tanh())
        return torch.stack([part.sum(0) for part in made.split(counts)])


class Images(nn.Module):
    """Convolutions, a norm and an einsum on some of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv1d(3, 4, 2), nn.Conv1d(4, 4, 1, groups=2)
        self.norm, self.mix = nn.GroupNorm(2, 4), nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:  # [batch, 4, 6]
        images = x.reshape(-1, 3, 4)
        mask = images[:, 0, 0] > 0
        made = self.norm(self.grouped(self.conv(images[mask]).tanh())).mean(-1)
        out = images.new_zeros(len(images), 5)
        out[mask] = torch.einsum("nc,cd->nd", made, self.mix).tanh()
        return out.view(len(x), -1)


class Checkpointed(nn.Module):
    """Experts that run again in the backward pass."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.experts, self.head = MaskedExperts(), nn.Linear(2, 3)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return self.head(checkpoint(self.experts, x, use_reentrant=self.is_reentrant))


class LayerDrop(nn.Module):
    """Layers that are left out, always the same ones for as many passes as the seed holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head, self.seed = nn.Linear(WIDTH, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.Generator().manual_seed(self.seed)
        for layer in self.layers:
            if torch.rand((), generator=drawn) > 0.5:
                x = x + layer(x).tanh()
        return self.head(x)


class Case(NamedTuple):
    """A model, and a batch for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]


_rows = floats(TOKENS, WIDTH)

CASES: dict[str, Case] = {
    "masked experts": Case(MaskedExperts, _rows),
    "indexed experts": Case(IndexedExperts, _rows),
    "sorted experts": Case(SortedExperts, _rows),
    "experts with a capacity": Case(Capacity, _rows),
    "packed lstm": Case(Packed, padded),
    "packed gru": Case(lambda: Packed(nn.GRU), padded),
    "packed rnn": Case(lambda: Packed(nn.RNN), padded),
    "packed, two layers, both ways": Case(lambda: Packed(num_layers=2, bidirectional=True), padded),
    "packed, projected": Case(lambda: Packed(proj_size=2), padded),
    "bags": Case(Bags, words),
    "bags of sums": Case(lambda: Bags(mode="sum"), words),
    "bags with a last offset": Case(lambda: Bags(include_last_offset=True), words),
    "bags with weights": Case(lambda: Bags(mode="sum", is_weighted=True), words),
    "bags with padding": Case(lambda: Bags(padding_idx=3), words),
    "lengths read by python": Case(Ragged, padded),
    "class tokens": Case(ClassTokens, _rows),
    "images": Case(Images, _rows),
    "checkpointed experts": Case(lambda: Checkpointed(is_reentrant=False), _rows),
    "left out layers": Case(LayerDrop, _rows),
    **{
        f"rows, {way}": Case(lambda way=way: Rows(way), _rows)
        for way in ("flip", "loop", "time first", "twice", "sorted", "random")
    },
}


def make(name: str, size: int) -> tuple[nn.Module, Any]:
    """Return a model in float64, the same every time, and a batch."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make().double()
    if any(isinstance(each, nn.LazyLinear) for each in model.modules()):
        squares(model, case.batch(2))
    return model, case.batch(size)
