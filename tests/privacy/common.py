"""A small data set, model and engine for tests of private training."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from unison.privacy import PrivacyEngine, PrivateLoader

NUM_RECORDS, NUM_FEATURES, NUM_CLASSES = 120, 6, 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_RECORDS, NUM_FEATURES, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (NUM_RECORDS,), generator=generator)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))


def loader(batch_size: int = 12, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=batch_size, **settings)


def attach(
    module: nn.Module | None = None, *, seed: int | None = 3, batch_size: int = 12, **settings: Any
) -> tuple[PrivacyEngine, Any, torch.optim.Optimizer, PrivateLoader]:
    """An engine on a model, with a seed (and no warning of it) unless told otherwise."""
    module = make_model() if module is None else module
    trainable = [each for each in module.parameters() if each.requires_grad]
    engine = PrivacyEngine(
        secure_noise=seed is None,
        ledger=settings.pop("ledger", None),
        accountant=settings.pop("accountant", "rdp"),  # PLD takes seconds
    )
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 0.5} | settings
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(trainable, lr=0.1)
    data_loader = settings.pop("data_loader", None) or loader(batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        parts = engine.make_private(
            module=module, optimizer=optimizer, data_loader=data_loader, seed=seed, **settings
        )
    return engine, *parts


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    private: PrivateLoader,
    steps: int,
    reduction: str = "mean",
) -> None:
    """The loop that users write, for some logical batches."""
    done = 0
    while done < steps:
        for x, y in private:
            optimizer.zero_grad()
            cross_entropy(module(x), y, reduction=reduction).backward()
            optimizer.step()
            done += private.current.is_last
            if done == steps:
                break


def step_of(module: nn.Module, private: Any, loss_of: Callable[[Tensor], Tensor] | None = None):
    """One forward and backward pass of a batch of the loader's."""
    x, y = next(iter(private))
    loss = cross_entropy(module(x), y)
    (loss if loss_of is None else loss_of(loss)).backward()
    return x, y
