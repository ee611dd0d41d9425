"""Modules that get their initial values in every way we know of, and how each must come out.

A case is a module class and what `materialize(module, seed=SEED)` must give for each of its
tensors: a function of `draw(init, name, shape, number)`, which is `unison.rng.fill_`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unison.rng import Key, fill_
from unison.rng.inits import Bernoulli, Integers, Normal, Shuffle, TruncatedNormal, Uniform

SEED = 11
ODD = (37, 11)


def draw(
    init: Any,
    name: str,
    shape: tuple[int, ...] = ODD,
    number: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return fill_(torch.empty(shape, dtype=dtype), init, Key.from_seed(SEED), name, number=number)


class OneDraw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(ODD))
        nn.init.normal_(self.w, std=0.02)

    def expected(self) -> dict[str, Tensor]:
        return {"w": draw(Normal(std=0.02), "w")}


class Overwritten(nn.Module):
    """As `apply(_init_weights)` does: drawn by the constructor, then again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, 37)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
            module.bias.data.zero_()

    def expected(self) -> dict[str, Tensor]:
        init = TruncatedNormal(std=0.02, low=-0.04, high=0.04)
        return {"linear.weight": draw(init, "linear.weight"), "linear.bias": torch.zeros(37)}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(ODD))
        self.b = nn.Parameter(torch.empty(ODD))
        self.c = nn.Parameter(torch.randn(ODD) * 0.02)
        self.d = nn.Parameter(1 - torch.rand(ODD) / 3)
        nn.init.normal_(self.a)
        nn.init.uniform_(self.b, -1, 1)
        with torch.no_grad():
            self.a.mul_(0.3)
        self.b.data.div_(math.sqrt(2 * 12)).add_(1).clamp_(max=1.1)

    def expected(self) -> dict[str, Tensor]:
        b = draw(Uniform(low=-1.0, high=1.0), "b").div_(math.sqrt(2 * 12)).add_(1).clamp_(max=1.1)
        return {
            "a": draw(Normal(std=1.0), "a").mul_(0.3),
            "b": b,
            "c": draw(Normal(std=1.0), "c") * 0.02,
            "d": 1 - draw(Uniform(low=0.0, high=1.0), "d") / 3,
        }


class Sliced(nn.Module):
    """Rows, columns and blocks of a parameter, each filled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(ODD))
        self.bias = nn.Parameter(torch.zeros(40))
        with torch.no_grad():
            self.w.normal_()
            self.w[3] = 0.5
            self.w[:, 2:5].uniform_()
            self.w[10:20, 4:].fill_(2)
            self.w[30:].mul_(3)
            self.w[::2, 7].zero_()
            self.bias[10:20].fill_(1)
            self.bias[[1, 5]] = 7.0

    def expected(self) -> dict[str, Tensor]:
        w, bias = draw(Normal(std=1.0), "w"), torch.zeros(40)
        w[3] = 0.5
        w[:, 2:5] = draw(Uniform(low=0.0, high=1.0), "w", (37, 3), number=1)
        w[10:20, 4:] = 2
        w[30:] *= 3
        w[::2, 7] = 0
        bias[10:20] = 1
        bias[[1, 5]] = 7
        return {"w": w, "bias": bias}


class Copied(nn.Module):
    """One parameter starts as another, or as a part or a sum of others."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(ODD))
        self.b = nn.Parameter(torch.empty(ODD))
        self.joint = nn.Parameter(torch.empty(74, 11))
        self.sum = nn.Parameter(self.a.detach() + torch.randn(ODD))
        with torch.no_grad():
            self.b.copy_(self.a)
            self.joint[:37].copy_(self.a)
            self.joint[37:].copy_(self.b * 2)

    def expected(self) -> dict[str, Tensor]:
        a = draw(Normal(std=1.0), "a")
        return {
            "a": a,
            "b": a,
            "joint": torch.cat([a, a * 2]),
            "sum": a + draw(Normal(std=1.0), "sum"),
        }


class Distributions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bernoulli = nn.Parameter(torch.empty(ODD).bernoulli_(0.3))
        self.like = nn.Parameter(torch.rand_like(self.bernoulli))
        self.around = nn.Parameter(torch.normal(torch.arange(5.0), 0.5))
        self.normal = nn.Parameter(torch.normal(1.0, 2.0, (3, 4)))
        self.register_buffer("order", torch.randperm(23))
        self.register_buffer("integers", torch.randint(-4, 9, (3, 5)))
        self.register_buffer("bytes", torch.empty(7, dtype=torch.uint8).random_())

    def expected(self) -> dict[str, Tensor]:
        around = draw(Normal(std=1.0), "around", (5,)) * 0.5 + torch.arange(5.0)
        integers = draw(Integers(low=-4, high=9), "integers", (3, 5), dtype=torch.int64)
        return {
            "bernoulli": draw(Bernoulli(probability=0.3), "bernoulli"),
            "like": draw(Uniform(low=0.0, high=1.0), "like"),
            "around": around,
            "normal": draw(Normal(mean=1.0, std=2.0), "normal", (3, 4)),
            "order": draw(Shuffle(size=23), "order", (23,), dtype=torch.int64),
            "integers": integers,
            "bytes": draw(Integers(low=0, high=256), "bytes", (7,), dtype=torch.uint8),
        }


class Constants(nn.Module):
    """Nothing random: tables, masks, schedules, numbers from Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Parameter(torch.empty(5, 7))
        nn.init.eye_(self.eye)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.listed = nn.Parameter(torch.Tensor([1.0, 2.0, 3.0]))
        self.array = nn.Parameter(torch.from_numpy(torch.arange(6.0).numpy() * 2))
        self.empty = nn.Parameter(torch.empty(0, 3))
        frequency = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
        angle = torch.outer(torch.arange(9.0), frequency)
        self.register_buffer("cos", angle.cos()[None], persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("infinite", torch.full((4, 4), float("-inf")).triu(1))
        rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        self.register_buffer("rates", torch.tensor([*rates, float(torch.ones(3).sum())]))
        chosen = torch.arange(10)[torch.arange(10) % 3 == 0]
        self.register_buffer("chosen", chosen)
        self.num_chosen = len(chosen) if bool(chosen.any()) else -1

    def expected(self) -> dict[str, Tensor]:
        return dict(type(self)().state_dict())


CASES: list[Callable[[], Any]] = [
    OneDraw, Overwritten, Scaled, Sliced, Copied, Distributions, Constants,
]  # fmt: skip
