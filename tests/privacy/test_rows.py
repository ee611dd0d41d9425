"""Private training of models whose rows lie where values put them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.capture.routed import TOKENS, VOCAB, WIDTH, make, squares
from tests.harness.oracle import clipped_sum
from tests.privacy.common import attach
from unison.errors import UnsupportedOperation

NUM_RECORDS, CLIP_NORM = 24, 0.5


def records(*, of_words: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, TOKENS + 1, (NUM_RECORDS,), generator=generator)
    if of_words:
        return torch.randint(0, VOCAB, (NUM_RECORDS, TOKENS), generator=generator), sizes
    shape = (NUM_RECORDS, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64), sizes


def attached(module: nn.Module, tensors: tuple[Tensor, ...], **settings: Any) -> Any:
    data_loader = DataLoader(TensorDataset(*tensors), batch_size=4)
    return attach(
        module,
        data_loader=data_loader,
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        loss_reduction="sum",
        **settings,
    )


def check_steps(
    module: nn.Module, tensors: tuple[Tensor, ...], *, loss: Any, steps: int = 3, **settings: Any
) -> None:
    """Compare the gradients of some steps with the loop over samples."""
    kept = copy.deepcopy(module)
    _, module, optimizer, loader = attached(module, tensors, **settings)
    done, expected = 0, None
    while done < steps:
        for batch in loader:
            kept.load_state_dict(module.state_dict())
            real = tuple(each[: len(loader.current.record_ids)] for each in batch)
            optimizer.zero_grad()
            loss(module, batch).sum().backward()
            sums = clipped_sum(kept, loss, real, CLIP_NORM)
            expected = sums if expected is None else {k: expected[k] + v for k, v in sums.items()}
            if loader.current.is_last:
                total = sum(each.norm() ** 2 for each in expected.values()) ** 0.5
                for name, each in module.named_parameters():
                    assert (each.grad.double() - expected[name]).norm() <= 1e-6 * total, name
                expected, done = None, done + 1
            optimizer.step()
            if done == steps:
                break


def first_alone(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return squares(model, batch[0])


@pytest.mark.parametrize("clipping", ["auto", "ghost", "flash_fuse", "recompute_bk"])
def test_experts_by_mask(clipping):
    module = make("masked experts", 1)[0]
    check_steps(module, records()[:1], loss=first_alone, clipping=clipping)


def test_experts_by_mask_in_several_passes():
    module = make("masked experts", 1)[0]
    check_steps(module, records()[:1], loss=first_alone, max_physical_batch_size=2)


@pytest.mark.parametrize("name", ["packed lstm", "lengths read by python"])
def test_sequences_of_different_lengths(name):
    check_steps(make(name, 1)[0], records(), loss=squares)


def test_bags():
    check_steps(make("bags", 1)[0], records(of_words=True), loss=squares)


class SequenceFirst(nn.Module):
    """[time, samples, features] in, [samples, classes] out; as many classes as are probed."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)[0][-1])


def test_samples_in_another_dimension_of_the_output():
    torch.manual_seed(0)
    module = SequenceFirst().double()
    kept = copy.deepcopy(module)
    x = records()[0]
    data_loader = DataLoader(TensorDataset(x), batch_size=4, collate_fn=_time_first)
    _, module, optimizer, loader = attach(
        module,
        data_loader=data_loader,
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        loss_reduction="sum",
        batch_first=False,
    )
    (batch,) = next(iter(loader))
    num_real = len(loader.current.record_ids)
    real = batch.transpose(0, 1)[:num_real]
    expected = clipped_sum(kept, _samples_first, real, CLIP_NORM)
    optimizer.zero_grad()
    module(batch).square().sum().backward()
    total = sum(each.norm() ** 2 for each in expected.values()) ** 0.5
    for name, each in module.named_parameters():
        assert (each.grad.double() - expected[name]).norm() <= 1e-6 * total, name


def _time_first(rows: list[tuple[Tensor]]) -> tuple[Tensor]:
    return (torch.stack([x for (x,) in rows], dim=1),)


def _samples_first(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.transpose(0, 1)).square().sum(1)


class Dropping(nn.Module):
    """Leaves layers out at random, as transformers' LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.5:
                x = x + layer(x).tanh()
        return x


def test_layers_left_out_at_random_train_on():
    torch.manual_seed(0)
    engine, module, optimizer, loader = attached(Dropping().double(), records()[:1])
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    assert engine.ledger.num_commits == 12


def test_granules_are_refused_before_budget_is_spent():
    module = make("masked experts", 1)[0]
    engine, module, _, loader = attached(module, records()[:1], granule=2)
    (x,) = next(iter(loader))
    with pytest.raises(UnsupportedOperation, match="without granule="):
        module(x)
    assert engine.ledger.num_intents == 0
