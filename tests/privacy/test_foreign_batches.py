"""A private module trains on the rows that its own loader drew for the step, or refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.privacy.common import NUM_CLASSES, NUM_FEATURES, attach, loader, make_model
from unison.errors import BadInput, UnsupportedOperation

OTHER_ENGINE = r"is made of rows that another engine's loader handed out.*Train on the batches of"
EARLIER = r"the module is given is made of the rows of an earlier step"
PLAIN = r"neither what the module was given nor the loss is made of the batch"
MIXED = r"what the module is given is made of an earlier step's data, or of what torch.func"
HIDDEN = r"the module is given was made of the batch by torch.func.*rows may meet"


def shuffled(seed: int = 3) -> tuple[Any, Any, Any, Any]:
    """Batches of one size, so that no shape tells whose they are."""
    return attach(data_loader=loader(shuffle=True), poisson_sampling=False, seed=seed)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: 2 * x])
def test_batches_of_another_engine_are_refused(change):
    engine, module, _, private = shuffled()
    _, _, _, others = shuffled(4)
    for _, (x, _y) in zip(private, others, strict=True):
        with pytest.raises(BadInput, match=OTHER_ENGINE):
            module(change(x))
        break
    assert not engine.ledger.spending.events


def step(engine: tuple[Any, Any, Any, Any], batch: Any) -> None:
    _, module, optimizer, _ = engine
    cross_entropy(module(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_engines_train_side_by_side():
    together = [shuffled(3), shuffled(4)]
    for batches in zip(*(private for *_, private in together), strict=True):
        for engine, batch in zip(together, batches, strict=True):
            step(engine, batch)
    for seed, engine in zip((3, 4), together, strict=True):
        alone = shuffled(seed)
        for batch in alone[3]:
            step(alone, batch)
        for mine, its in zip(alone[1].parameters(), engine[1].parameters(), strict=True):
            assert torch.equal(mine, its)


def test_batches_of_a_plain_loader_are_refused():
    engine, module, _, private = shuffled()
    for _, (x, y) in zip(private, loader(shuffle=True), strict=True):
        with pytest.raises(UnsupportedOperation, match=PLAIN):
            cross_entropy(module(x), y).backward()
        break
    assert not engine.ledger.spending.events


@pytest.mark.parametrize(("change", "message"), [(None, EARLIER), (lambda x: x + 0, MIXED)])
def test_rows_of_an_earlier_step_are_refused(change, message):
    engine, module, optimizer, private = shuffled()
    batches = iter(private)
    before, y = next(batches)
    cross_entropy(module(before), y).backward()
    optimizer.step()
    _, y = next(batches)
    with pytest.raises((BadInput, UnsupportedOperation), match=message):
        cross_entropy(module(before if change is None else change(before)), y).backward()
    assert engine.ledger.num_intents == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1), HIDDEN),
        (lambda x: x - vmap(torch.mean, in_dims=1)(x), MIXED),
    ],
)
def test_rows_that_meet_before_the_module_out_of_sight_are_refused(change, message):
    engine, module, _, private = shuffled()
    for x, y in private:
        with pytest.raises(UnsupportedOperation, match=message):
            cross_entropy(module(change(x)), y).backward()
        break
    assert not engine.ledger.spending.events


def test_made_up_rows_beside_those_of_the_batch_are_trained_on():
    """A discriminator sees drawn samples; a decoder is given noise, and compared with the batch."""
    for pair in (True, False):
        engine, module, optimizer, private = shuffled()
        for x, y in private:
            loss = cross_entropy(module(torch.randn(len(x), NUM_FEATURES)), y)
            if pair:
                loss = loss + cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.ledger.num_intents == len(private)


def as_texts(rows: list[Any]) -> dict[str, Any]:
    x, y = zip(*rows, strict=True)
    return {"texts": [" ".join(map(str, each.tolist())) for each in x], "labels": torch.stack(y)}


def test_rows_that_are_made_of_texts_in_the_loop_are_trained_on():
    rows = loader().dataset
    texts = DataLoader(rows, batch_size=12, collate_fn=as_texts)
    engine, module, optimizer, private = attach(data_loader=texts)
    for batch in private:
        numbers = [[float(each) for each in text.split()] for text in batch["texts"]]
        x = torch.tensor(numbers).view(-1, NUM_FEATURES)
        if len(x) == len(batch["labels"]):
            logits = module(x)
            assert logits.shape[1] == NUM_CLASSES
            cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()
            break
    assert engine.ledger.spending.events.total() == 1


class Keeps(nn.Module):
    """Leaves a number of the batch at itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = make_model(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.kept = out.detach().square().mean()
        return out


READ = {
    "a number": lambda module, x: module.kept.item(),
    "a rounded number": lambda module, x: round(-module.kept.item(), 2),
    "a number of the batch": lambda module, x: x.square().mean().item(),
    "by float": lambda module, x: float(module.kept),
    "by text": lambda module, x: float(f"{module.kept:.9f}"),
    "a tensor": lambda module, x: module.kept,
    "a tensor of the batch": lambda module, x: x.square().mean(),
}
ENDS = r"another engine|earlier step made|left torch|couples rows|did not return|of a value read"


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("how", READ)
def test_values_of_one_of_two_engines_do_not_come_into_a_loss(how, whose, first):
    """By whichever recorder they are seen first."""
    engines = [attach(Keeps()) for _ in range(2)]
    order = (first, 1 - first)
    loops = [iter(engines[i][3]) for i in order]  # which go on
    (x, y), (own_x, own_y) = map(next, loops)
    _, other, *_ = engines[order[0]]
    engine, module, *_ = engines[order[1]]
    cross_entropy(other(x), y).backward()
    loss = cross_entropy(module(own_x), own_y)
    weight = READ[how](*((module, own_x) if whose == "its own" else (other, x)))
    with pytest.raises(UnsupportedOperation, match=ENDS):
        (loss * weight).backward()
    assert engine.ledger.num_intents == 0
    for each, *_ in engines:
        each.detach()
