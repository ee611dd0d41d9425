"""What accelerate prepares, before or after make_private; and a Trainer that is not ours."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("accelerate")

from accelerate import skip_first_batches
from accelerate.utils import DataLoaderConfiguration

import unison
from tests.harness import oracle
from tests.harness.ranks import ranks
from tests.hf.common import accelerator, arguments
from tests.privacy.common import attach, loader, losses, make_model
from unison.privacy.arguments import unprepared

ORDERS = {
    "all before": ("module optimizer loader", ""),
    "module before": ("module", "optimizer"),
    "optimizer before": ("optimizer", "module loader"),
    "loader before": ("loader", "module optimizer"),
    "all after": ("", "module optimizer loader"),
}


def steps(order, rank=0, size=1, num_steps=3):
    """Train with parts prepared before and after; return the module and its ledger's counts."""
    first, then = (each.split() for each in ORDERS[order])
    module = make_model()
    parts: dict[str, Any] = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }
    # A loader that is prepared has the batch size of one process.
    parts["loader"] = loader(12 // size if "loader" in first else 12)
    with accelerator(rank, size) as accelerate:
        parts |= zip(first, as_list(accelerate, [parts[name] for name in first]), strict=True)
        engine, *made = attach(
            parts["module"],
            optimizer=parts["optimizer"],
            data_loader=parts["loader"],
            max_physical_batch_size=4,
        )
        parts = dict(zip(parts, made, strict=True))
        parts |= zip(then, as_list(accelerate, [parts[name] for name in then]), strict=True)
        for x, y in parts["loader"]:
            parts["optimizer"].zero_grad()
            accelerate.backward(cross_entropy(parts["module"](x), y))
            parts["optimizer"].step()
            if made[2].next_step == num_steps and made[2].current.is_last:
                break
        assert accelerate.unwrap_model(parts["module"]) is module
        counts = engine.ledger.num_intents, engine.ledger.num_commits
        engine.detach()
    return module, counts


def as_list(accelerate, objects):
    found = accelerate.prepare(*objects) if objects else []
    return list(found) if len(objects) > 1 else [found] * len(objects)


def without_accelerate():
    engine, module, optimizer, private = attach(max_physical_batch_size=4)
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        if private.next_step == 3 and private.current.is_last:
            break
    engine.detach()
    return module


QUICK = ("all before", "all after")
LONG = [pytest.param(order, marks=pytest.mark.full) for order in ORDERS if order not in QUICK]


def test_records_are_not_skipped():
    *_, private = attach()
    with pytest.raises(AttributeError, match=r"none may be skipped .*load the engine"):
        skip_first_batches(private, 2)


@pytest.mark.parametrize("order", [*QUICK, *LONG])
def test_one_process_trains_as_without_accelerate(order):
    module, counts = steps(order)
    assert counts == (3, 3)
    for mine, plain in zip(module.parameters(), without_accelerate().parameters(), strict=True):
        assert torch.equal(mine, plain)


@pytest.fixture
def plain():
    return [each.detach() for each in without_accelerate().parameters()]


@pytest.mark.full
@ranks(2)
def test_two_processes_train_as_one_does(world, plain):
    for order in ORDERS:
        module, counts = steps(order, world.rank, world.size)
        assert counts[0] == 3
        torch.testing.assert_close(list(module.parameters()), plain, rtol=1e-5, atol=1e-6)


def test_the_first_step_is_the_clipped_sum_of_single_rows():
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with accelerator(mixed_precision="no") as accelerate:
        parts = accelerate.prepare(module, optimizer, loader(12))
        engine, model, _, private = attach(
            parts[0], optimizer=parts[1], data_loader=parts[2], noise_multiplier=0.0
        )
        x, y = next(iter(private))
        expected = oracle.clipped_sum(make_model(), losses, (x, y), 0.5)
        accelerate.backward(cross_entropy(model(x), y))
        for name, each in module.named_parameters():
            torch.testing.assert_close(
                each.grad.double() * 12, expected[name], rtol=1e-6, atol=1e-7
            )
        engine.detach()


def test_a_loader_whose_batches_are_dispatched_has_the_size_of_all_processes():
    with accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)) as each:
        prepared = each.prepare(loader(12))
        assert unprepared(prepared).batch_size == 12


def test_accumulation_is_refused_with_the_remedy():
    with accelerator(gradient_accumulation_steps=2):
        engine, *_, private = attach()
        with pytest.raises(unison.BadInput, match="a batch size 2 times as large"):
            next(iter(private))
        assert engine.ledger.num_intents == 0
        engine.detach()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x, labels):
        return {"loss": cross_entropy(self.inner(x), labels)}


@pytest.mark.parametrize("case", ["max_physical_batch_size", "gradient_accumulation_steps"])
def test_a_trainer_that_would_miscount_steps_is_refused_at_its_first(case, tmp_path):
    from transformers import Trainer

    class Plain(Trainer):
        def get_train_dataloader(self):
            return private

    data = [{"x": x, "labels": y} for x, y in loader().dataset]
    model = Classifier()
    is_limit = case == "max_physical_batch_size"
    engine, model, optimizer, private = attach(
        model,
        data_loader=torch.utils.data.DataLoader(data, batch_size=12),
        max_physical_batch_size=4 if is_limit else None,
    )
    args = arguments(tmp_path, gradient_accumulation_steps=1 if is_limit else 2)
    trainer = Plain(model=model, args=args, optimizers=(optimizer, None))
    with pytest.raises(unison.BadInput, match=f"{case}=.*PrivateTrainer"):
        trainer.train()
    assert engine.ledger.num_intents == 0
    engine.detach()


def trained_by_trainer(model, data, folder):
    from transformers import Trainer

    args = arguments(folder, optim="sgd", lr_scheduler_type="constant", learning_rate=0.1)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = len(data), 1
    Trainer(model=model, args=args, train_dataset=data).train()


def trained_by_loop(accelerate, model, data, num_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(data, batch_size=len(data) // accelerate.num_processes)
    optimizer, batches = accelerate.prepare(optimizer, batches)
    for _ in range(num_steps):
        for batch in batches:
            accelerate.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.full  # ranks import transformers' Trainer; its parts are in tests/shard/test_api.py
@ranks(1, 2)
def test_a_sharded_model_trains_without_privacy(world, tmp_path):
    data = [{"x": x, "labels": y} for x, y in list(loader().dataset)[:8]]
    expected = Classifier().double()
    inputs = {name: torch.stack([each[name] for each in data]) for name in data[0]}
    for _ in range(3):
        loss = expected(inputs["x"].double(), inputs["labels"])["loss"]
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for each, gradient in zip(expected.parameters(), gradients, strict=True):
                each -= 0.1 * gradient

    with accelerator(world.rank, world.size, is_launched=True) as accelerate:
        model = unison.fully_shard(Classifier())
        if world.size == 1:  # where DDP has nothing to sum
            trained_by_trainer(model, data, tmp_path)
        else:
            with pytest.raises(unison.NeedsWhole, match=r"leave it out .*PrivateTrainer"):
                trained_by_trainer(model, data, tmp_path)
            trained_by_loop(accelerate, model, data, num_steps=3)
    for name, each in unison.full_state_dict(model).items():
        torch.testing.assert_close(each.double(), expected.state_dict()[name], rtol=1e-5, atol=1e-6)
