"""What is trained is what was made private: looked at in every step, and refused in time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.privacy.common import NUM_FEATURES, attach, data, make_model, train
from unison.errors import BadInput, UnsupportedOperation
from unison.shard.deal import current_plan


def freeze(module: Any) -> None:
    module[2].bias.requires_grad_(False)


def thaw(module: Any) -> None:
    module[0].requires_grad_(True)


def add_parameter(module: Any) -> None:
    module[0].register_parameter("scale", nn.Parameter(torch.ones(16)))


def add_module(module: Any) -> None:
    module.append(nn.Linear(3, 3))


def replace_module(module: Any) -> None:
    module[2] = nn.Sequential(nn.Linear(16, 3))


CHANGES = [
    (freeze, r"2\.bias", "frozen or thawed"),
    (thaw, r"0\.weight", "frozen or thawed"),
    (add_parameter, r"0\.scale", "added to the module"),
    (add_module, r"3\.weight", "added to the module"),
    (replace_module, r"2\.0\.weight", "added to the module"),
]


def half_frozen() -> nn.Sequential:
    module = make_model()
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize(("change", "name", "what"), CHANGES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_change_between_draw_and_forward_pass_is_refused(change, name, what, steps):
    engine, module, optimizer, private = attach(half_frozen())
    train(module, optimizer, private, steps)
    x, _ = next(iter(private))
    change(module)
    with pytest.raises(BadInput, match=f"{name} was {what} since"):
        module(x)
    with pytest.raises(BadInput, match=f"{name} was {what} since"):
        module(x)  # and again: nothing was learned from the first time
    assert engine.ledger.num_intents == steps
    assert not any(name in vars(each) for each in module.modules() for name in each._parameters)
    engine.detach()


@pytest.mark.parametrize(("change", "name", "what"), CHANGES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_change_between_steps_is_refused(change, name, what, steps):
    engine, module, optimizer, private = attach(half_frozen())
    train(module, optimizer, private, steps)
    change(module)
    with pytest.raises(BadInput, match=f"{name} was {what} since"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == steps


@pytest.mark.parametrize("change", [freeze, thaw])
def test_flags_are_refused_before_a_step_is_drawn(change):
    """So that nothing is lost: once they are as they were, training goes on."""
    engine, module, optimizer, private = attach(half_frozen())
    train(module, optimizer, private, 2)
    change(module)
    with pytest.raises(BadInput, match="was frozen or thawed"):
        next(iter(private))
    assert private.next_step == 2
    module[0].requires_grad_(False)
    module[2].requires_grad_(True)
    train(module, optimizer, private, 2)
    assert engine.ledger.num_commits == 4


def test_a_change_between_physical_batches_is_refused():
    _, module, _, private = attach(half_frozen(), max_physical_batch_size=4)
    batches = iter(private)
    x, y = next(batches)
    cross_entropy(module(x), y).backward()
    x, _ = next(batches)
    thaw(module)
    with pytest.raises(BadInput, match=r"0\.weight was frozen or thawed"):
        module(x)
    module[0].requires_grad_(False)
    private.abandon()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()


def test_the_check_before_training_refuses_too():
    engine, module, _, _ = attach(half_frozen())
    thaw(module)
    with pytest.raises(BadInput, match=r"0\.weight was frozen or thawed"):
        engine.check(torch.randn(4, NUM_FEATURES))


class ByName(nn.Module):
    """Takes a second tensor by either of two names, and does something else with each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(NUM_FEATURES, 3)

    def forward(
        self, x: Tensor, added: Tensor | None = None, scaled: Tensor | None = None
    ) -> Tensor:
        if scaled is not None:
            return self.weight((x * scaled).unsqueeze(1)).squeeze(1)
        return self.weight(x if added is None else x + added)


def test_another_call_is_learned_anew():
    _, module, optimizer, private = attach(ByName())
    for given in ("added", "scaled", "added"):
        x, y = next(iter(private))
        optimizer.zero_grad()
        cross_entropy(module(x, **{given: torch.ones_like(x)}), y).backward()
        assert all(each.grad is not None for each in module.parameters())
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 3])
def test_another_parameter_of_the_same_name_is_refused(steps):
    """The optimizer holds the one before, and would be given its gradients."""
    engine, module, optimizer, private = attach()
    train(module, optimizer, private, steps)
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    with pytest.raises(BadInput, match=r"0\.weight is another parameter .*copy_"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == steps


def test_other_memory_of_the_same_parameter_is_trained():
    engine, module, optimizer, private = attach()
    train(module, optimizer, private, 2)
    module[0].weight.data = module[0].weight.data.clone()
    train(module, optimizer, private, 2)
    assert engine.ledger.num_commits == 4


def test_a_step_that_failed_in_the_forward_pass_is_given_up():
    """Its last physical batch was handed out, and nothing of it was counted."""
    engine, module, optimizer, private = attach(half_frozen())
    train(module, optimizer, private, 2)
    x, _ = next(iter(private))
    thaw(module)
    with pytest.raises(BadInput, match="was frozen or thawed"):
        module(x)
    module[0].requires_grad_(False)
    private.abandon()
    assert private.next_step == 2
    train(module, optimizer, private, 2)
    assert engine.ledger.num_intents == engine.ledger.num_commits == 4


class Failing(TensorDataset):
    """Cannot be read now and then, as a disk or a network."""

    fails = False

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        if self.fails:
            raise OSError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("limit", [None, 4])
def test_a_step_whose_records_could_not_be_read_is_drawn_again(limit):
    records = Failing(*data())
    loader = DataLoader(records, batch_size=12)
    engine, module, optimizer, private = attach(data_loader=loader, max_physical_batch_size=limit)
    done = 0
    with pytest.raises(OSError, match="no such file"):  # noqa: PT012
        for x, y in private:
            cross_entropy(module(x), y).backward()
            optimizer.step()
            done += private.current.is_last
            # Of a step in passes, the first one can be read.
            records.fails = done == 2 and (limit is None or not private.current.is_last)
    records.fails = False
    private.abandon()  # what errors tell users to do changes nothing
    train(module, optimizer, private, 2)
    assert engine.ledger.num_intents == engine.ledger.num_commits == 4
    engine.detach()


def test_a_step_that_is_over_is_not_given_up():
    engine, module, _, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    private.abandon()
    assert private.next_step == 1
    assert engine.ledger.num_intents == 1


def test_a_module_that_is_given_back_leaves_no_plan_behind():
    """Whoever trains next in this process, without `deal`, would be taken for its loader's user."""
    engine, module, optimizer, private = attach()
    train(module, optimizer, private, 1)
    assert current_plan() is not None
    engine.detach()
    assert current_plan() is None


def remove_layer(module: Any) -> None:
    module[2] = nn.Identity()


def tie_layers(module: Any) -> None:
    module[2].weight = module[0].weight


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("change", [remove_layer, tie_layers])
def test_a_parameter_that_leaves_the_module_is_refused(change, steps):
    """The optimizer would train it on noise alone."""
    torch.manual_seed(0)
    square = nn.Sequential(*(nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False) for _ in range(3)))
    engine, module, optimizer, private = attach(square)
    train(module, optimizer, private, steps)
    change(module)
    with pytest.raises(BadInput, match=r"2\.weight has left the module since make_private"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == steps


HOOKS = {
    "gradient": lambda parameter: parameter.register_hook(lambda gradient: gradient.clamp(-1, 1)),
    "accumulated": lambda parameter: parameter.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("settings", [{}, {"compile": {"backend": "aot_eager"}}])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_would_never_be_called_is_refused(kind, when, settings):
    module = make_model()
    if when == "before":
        handle = HOOKS[kind](module[2].bias)
    engine, module, optimizer, private = attach(module, **settings)
    if when == "after":
        handle = HOOKS[kind](module[2].bias)
    with pytest.raises(UnsupportedOperation, match=r"2\.bias has a hook of its gradient.*Remove"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0
    handle.remove()
    train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 1
