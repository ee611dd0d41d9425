"""Small models that use parameters in every way, and what was captured of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.oracle import PerSampleLoss
from unison.capture import AxisTable, Capture, batch_size_of, learn_axes
from unison.ops import Record, per_sample

BATCH, TOKENS, WIDTH, VOCAB = 5, 7, 6, 11


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and one loss per sample."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: PerSampleLoss


def squares(model: nn.Module, batch: Any) -> Tensor:  # [batch]
    output = model(batch)
    output = output[0] if isinstance(output, tuple) else output
    return output.square().flatten(1).sum(1)


def squares_time_major(model: nn.Module, batch: Tensor) -> Tensor:  # [batch]
    output = model(batch.transpose(0, 1))
    output = output[0] if isinstance(output, tuple) else output
    return output.square().sum(dim=(0, 2))


def floats(*shape: int) -> Callable[[int], Tensor]:
    def make(size: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(size, *shape, generator=generator, dtype=torch.float64)

    return make


def ids(size: int, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCAB, (size, tokens), generator=generator)


class Tied(nn.Module):
    """A table that is looked up and multiplied with, and used a third time by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.table(x)).tanh()
        h = self.middle(h)
        return self.head(h)


class Positions(nn.Module):
    """Positions looked up without a batch dimension, in three spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(20, WIDTH)
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        match self.spelling:
            case "[T]":
                found = self.positions(places)
            case "[1, T]":
                found = self.positions(places[None])
            case "[B, T]":
                found = self.positions(places[None].expand(x.shape[0], -1))
            case _:
                found = self.positions.weight[: x.shape[1]]
        return (self.tokens(x) + found).tanh()


def _evaluated_batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4).eval()
    nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return norm


class Bare(nn.Module):
    """Parameters without a module, used in expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.mix = nn.Parameter(torch.randn(WIDTH, 4))
        self.left = nn.Parameter(torch.randn(TOKENS + 1, TOKENS + 1))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
        x = x * (1.0 + self.gain.to(x.dtype)) - self.gain
        x = self.left @ x
        x = x @ self.mix / self.temperature
        return x @ self.mix.t() + torch.einsum("btd,de->bte", x @ self.mix.T, self.mix @ self.mix.T)


class RMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Flattened(nn.Module):
    """Samples and tokens in one dimension, then changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.up(x.reshape(-1, WIDTH))
        flat = F.relu_(flat)
        return self.down(flat).view_as(x)


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 3)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + checkpoint(self.block, h, use_reentrant=self.is_reentrant)
        h = h + checkpoint(self.block, h, use_reentrant=self.is_reentrant)
        return self.head(h)


class Frozen(nn.Module):
    """Some parameters are not trained, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.first.weight.requires_grad_(False)
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def two_forwards(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model, batch) + squares(model, batch.flip(1))


def image(channels: int, *space: int) -> Callable[[int], Tensor]:
    return floats(channels, *space)


CASES: dict[str, Case] = {
    "linear 2-d": Case(lambda: nn.Linear(WIDTH, 3), floats(WIDTH), squares),
    "linear 3-d": Case(lambda: nn.Linear(WIDTH, 3, bias=False), floats(TOKENS, WIDTH), squares),
    "linear 5-d": Case(lambda: nn.Linear(WIDTH, 3), floats(2, 3, 2, WIDTH), squares),
    "one token": Case(lambda: nn.Linear(WIDTH, 3), floats(1, WIDTH), squares),
    "time major": Case(lambda: nn.Linear(WIDTH, 3), floats(TOKENS, WIDTH), squares_time_major),
    "flattened": Case(Flattened, floats(TOKENS, WIDTH), squares),
    "embedding": Case(lambda: nn.Embedding(VOCAB, WIDTH), ids, squares),
    "embedding with padding": Case(lambda: nn.Embedding(VOCAB, WIDTH, padding_idx=3), ids, squares),
    "strided ids": Case(
        lambda: nn.Embedding(VOCAB, WIDTH), lambda size: ids(size, 14)[:, ::2], squares
    ),
    "tied": Case(Tied, ids, squares),
    "layer norm": Case(lambda: nn.LayerNorm(WIDTH), floats(TOKENS, WIDTH), squares),
    "layer norm over two": Case(
        lambda: nn.LayerNorm([TOKENS, WIDTH], bias=False), floats(TOKENS, WIDTH), squares
    ),
    "rms norm": Case(lambda: nn.RMSNorm(WIDTH), floats(TOKENS, WIDTH), squares),
    "own rms norm": Case(RMSNorm, floats(TOKENS, WIDTH), squares),
    "group norm": Case(lambda: nn.GroupNorm(2, 4), image(4, 5, 3), squares),
    "instance norm": Case(lambda: nn.InstanceNorm1d(4, affine=True), image(4, 9), squares),
    "batch norm in eval mode": Case(_evaluated_batch_norm, image(4, 9), squares),
    "bare parameters": Case(Bare, floats(TOKENS, WIDTH), squares),
    "frozen": Case(Frozen, floats(TOKENS, WIDTH), squares),
    "two forwards": Case(Frozen, floats(TOKENS, WIDTH), two_forwards),
    "non-reentrant checkpoint": Case(lambda: Checkpointed(False), ids, squares),
    "reentrant checkpoint": Case(lambda: Checkpointed(True), ids, squares),
    **{
        f"positions {spelling}": Case(lambda spelling=spelling: Positions(spelling), ids, squares)
        for spelling in ("[T]", "[1, T]", "[B, T]", "slice")
    },
    "as many tokens as samples": Case(
        lambda: Positions("[T]"), lambda size: ids(size, BATCH), squares
    ),
    "conv1d": Case(
        lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), image(4, 11), squares
    ),
    "conv1d same": Case(
        lambda: nn.Conv1d(4, 6, 5, padding="same", dilation=2), image(4, 11), squares
    ),
    "conv2d": Case(
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1)), image(4, 7, 8), squares
    ),
    "conv2d groups": Case(lambda: nn.Conv2d(4, 6, 3, groups=2), image(4, 7, 8), squares),
    "conv2d circular": Case(
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), image(4, 7, 8), squares
    ),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2, dilation=2), image(2, 5, 4, 6), squares),
    "transposed conv": Case(lambda: nn.ConvTranspose1d(4, 3, 3), image(4, 9), squares),
    "bilinear": Case(lambda: _Twice(nn.Bilinear(WIDTH, WIDTH, 3)), floats(TOKENS, WIDTH), squares),
}


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def make(name: str, size: int = BATCH) -> tuple[nn.Module, Any, PerSampleLoss]:
    torch.manual_seed(0)
    case = CASES[name]
    return case.make().double(), case.batch(size), case.loss


def captured(
    model: nn.Module, loss: PerSampleLoss, batch: Any, axes: AxisTable | None = None
) -> dict[str, Tensor]:
    """Per-sample gradients as the records have them, [batch, *shape] by name."""
    size = batch_size_of(batch)
    found = {
        name: torch.zeros(size, *p.shape, dtype=p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }

    def add(name: str, record: Record) -> None:
        found[name] += per_sample(record)

    axes = axes or learn_axes(model, loss, batch)
    capture = Capture(model, size, axes=axes, on_record=add)
    with capture.installed():
        with capture.following(batch):
            losses = loss(model, batch)
        losses.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    return found
