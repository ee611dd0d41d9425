"""Gradients of single batches that the user takes past the engine reach neither model nor step."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

import unison
from tests.harness import oracle
from tests.privacy.common import NUM_CLASSES, NUM_FEATURES, attach, losses, make_model
from unison.errors import BadInput, UnsupportedOperation

Raw = Sequence[Tensor]


def of_a_copy(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    copied = copy.deepcopy(module)
    cross_entropy(copied(x), y).backward()
    return [each.grad for each in copied.parameters() if each.grad is not None]


def of_a_copy_by_function(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    copied = copy.deepcopy(module)
    torch.autograd.backward([cross_entropy(copied(x), y)])
    return [each.grad for each in copied.parameters() if each.grad is not None]


def of_autograd(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    copied = copy.deepcopy(module)
    return torch.autograd.grad(cross_entropy(copied(x), y), list(copied.parameters()))


def _functional(module: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    copied = copy.deepcopy(module)
    values = {name: each.detach() for name, each in copied.named_parameters()}

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(copied, values, (x,)), y)

    return values, loss_of


def of_func(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    values, loss_of = _functional(module)
    return list(grad(loss_of)(values, x, y).values())


def of_func_around_the_batch(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    values, loss_of = _functional(module)
    return list(grad(lambda values: loss_of(values, x, y))(values).values())


def of_samples(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    values, loss_of = _functional(module)
    found = vmap(grad(loss_of), in_dims=(None, 0, 0))(values, x[:, None], y[:, None])
    return [each.sum(0) for each in found.values()]


def of_jacobians(module: nn.Module, x: Tensor, y: Tensor) -> Raw:
    values, loss_of = _functional(module)
    return list(jacrev(lambda values: loss_of(values, x, y))(values).values())


TAKEN = {
    "copy": of_a_copy,
    "autograd.backward": of_a_copy_by_function,
    "autograd.grad": of_autograd,
    "func.grad": of_func,
    "func.grad, closed over": of_func_around_the_batch,
    "vmap": of_samples,
    "jacrev": of_jacobians,
}


def each(change: Callable[[nn.Parameter, Tensor], Any]) -> Callable[..., None]:
    def write(module: nn.Module, optimizer: Any, raw: Raw) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), raw, strict=True):
                change(parameter, gradient)

    return write


def gradients(module: nn.Module) -> list[Tensor]:
    return [each.grad for each in module.parameters() if each.grad is not None]


def scale(module: nn.Module, optimizer: Any, raw: Raw) -> None:
    norm = torch.stack([each.norm() for each in raw]).sum().item()
    torch._foreach_mul_(gradients(module), norm)


GRADIENT = r"neither clipped nor noised are written to 0.weight.grad, which the optimizer trains"
STATE = r"are written to the optimizer's momentum_buffer of 0.weight"
SAVED = r"values of training rows are written to '0.weight', which is saved with the model"
OTHER = r"0.weight.grad is not what the privacy engine put there"
WRITES: dict[str, tuple[Callable[..., None], str]] = {
    "copy_": (each(lambda parameter, raw: parameter.grad.copy_(raw)), GRADIENT),
    "add_": (each(lambda parameter, raw: parameter.grad.add_(raw)), GRADIENT),
    "product": (each(lambda parameter, raw: parameter.grad.add_(0.5 * raw.neg())), GRADIENT),
    "item": (each(lambda parameter, raw: parameter.grad.__setitem__(..., raw)), GRADIENT),
    "data": (each(lambda parameter, raw: setattr(parameter.grad, "data", raw)), GRADIENT),
    "out": (each(lambda p, raw: torch.add(p.grad, raw, out=p.grad)), GRADIENT),
    "aten": (each(lambda p, raw: torch.ops.aten.add_.Tensor(p.grad, raw)), GRADIENT),
    "foreach": (lambda m, _, raw: torch._foreach_add_(gradients(m), list(raw)), GRADIENT),
    "number": (scale, GRADIENT),
    "another": (each(lambda parameter, raw: setattr(parameter, "grad", raw)), OTHER),
    "momentum": (
        lambda m, optimizer, raw: optimizer.state[m[0].weight]["momentum_buffer"].add_(raw[0]),
        STATE,
    ),
    "by hand": (each(lambda parameter, raw: parameter.sub_(0.1 * raw)), SAVED),
    "by hand, data": (each(lambda parameter, raw: parameter.data.sub_(raw, alpha=0.1)), SAVED),
    "by hand, foreach": (
        lambda m, _, raw: torch._foreach_sub_([each.data for each in m.parameters()], list(raw)),
        SAVED,
    ),
    "vector": (
        lambda m, _, raw: vector_to_parameters(parameters_to_vector(raw), m.parameters()),
        SAVED,
    ),
}


def begin() -> tuple[Any, Any, Any, Any]:
    """An engine, a module with momentum after one step, an optimizer, and batches."""
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine, module, optimizer, private = attach(module, optimizer=optimizer)
    batches = iter(private)
    x, y = next(batches)
    cross_entropy(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine, module, optimizer, batches


CASES = [(taken, "product") for taken in TAKEN] + [("copy", how) for how in WRITES]
CASES += [(taken, "by hand") for taken in TAKEN if taken != "copy"]


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.full)])
@pytest.mark.parametrize(("taken", "how"), CASES)
def test_raw_gradients_are_refused_wherever_they_are_written(taken, how, when):
    engine, module, optimizer, batches = begin()
    write, message = WRITES[how]
    x, y = next(batches)
    raw = TAKEN[taken](module, x, y) if when == "before" else []
    cross_entropy(module(x), y).backward()
    raw = raw or TAKEN[taken](module, x, y)
    before = [each.detach().clone() for each in module.parameters()]

    def go_on() -> None:
        write(module, optimizer, raw)
        optimizer.step()

    with pytest.raises((UnsupportedOperation, BadInput), match=message):
        go_on()
    for mine, its in zip(module.parameters(), before, strict=True):
        assert torch.equal(mine, its)
    engine.detach()


def test_a_gradient_that_an_output_retains_is_followed():
    _, module, optimizer, batches = begin()
    x, y = next(batches)
    logits = module(x)
    logits.retain_grad()
    cross_entropy(logits, y).backward()
    optimizer.step()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedOperation, match=r"rows are written to '2.bias'"),
    ):
        module[2].bias.sub_(logits.grad.sum(0))


HOOKS = {
    "full": lambda module, keep: module.register_full_backward_hook(keep),
    "before": lambda module, keep: module.register_full_backward_pre_hook(keep),
    "old": lambda module, keep: module.register_backward_hook(keep),
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook", "ignore:Full backward hook is")
@pytest.mark.parametrize(
    ("kind", "place"), [("full", "0"), ("full", ""), ("before", "2"), ("before", ""), ("old", "0")]
)
def test_what_backward_hooks_keep_is_followed(kind, place):
    module, kept = make_model(), []
    alone = copy.deepcopy(module)
    HOOKS[kind](module.get_submodule(place), lambda _, *seen: kept.append(seen[-1][0]))
    engine, module, optimizer, private = attach(module, noise_multiplier=0.0, batch_size=4)
    for number, (x, y) in enumerate(private):
        optimizer.zero_grad()
        alone.load_state_dict(module.state_dict())
        expected = oracle.clipped_sum(alone, losses, (x, y), 0.5)
        cross_entropy(module(x), y).backward()
        for name, each in module.named_parameters():
            assert_close(each.grad.double() * 4, expected[name], rtol=1e-6, atol=1e-6)
        raw = kept[-1].sum() / 4
        with torch.no_grad(), pytest.raises(UnsupportedOperation, match=SAVED):
            module[0].weight.sub_(raw)
        with pytest.raises(UnsupportedOperation, match=GRADIENT):
            module[0].weight.grad.add_(raw)
        optimizer.step()
        if number == 1:
            break
    engine.detach()
    hooks = [each for part in module.modules() for each in part._backward_hooks.values()]
    assert len(hooks) == (kind != "before")


def test_a_teacher_that_learned_from_private_batches_teaches_nobody():
    """Its own optimizer's steps carry the batch on, whatever they are made of."""
    _, module, optimizer, batches = begin()
    teacher = copy.deepcopy(module)
    its = torch.optim.AdamW(teacher.parameters(), lr=0.1)
    x, y = next(batches)
    cross_entropy(module(x), y).backward()
    optimizer.step()
    cross_entropy(teacher(x), y).backward()
    its.step()
    x, y = next(batches)
    loss = cross_entropy(module(x), y) + (module(x) - teacher(x).detach()).square().mean()
    with pytest.raises(UnsupportedOperation, match=r"made of the batch into the loss"):
        loss.backward()


def test_a_gradient_of_the_batch_is_no_weight_in_the_loss():
    _, module, _, batches = begin()
    x, y = next(batches)
    raw = of_a_copy(module, x, y)
    with pytest.raises(UnsupportedOperation, match=r"made of the batch into the loss"):
        (cross_entropy(module(x), y) * raw[0].norm()).backward()


def test_what_is_public_may_be_added_to_gradients():
    _, module, optimizer, batches = begin()
    public = torch.randn(4, NUM_FEATURES), torch.randint(NUM_CLASSES, (4,))
    for number in range(3):
        x, y = next(batches)
        raw = of_a_copy(module, x, y)  # to be looked at
        cross_entropy(module(x), y).backward()
        for take in TAKEN.values():
            for parameter, gradient in zip(module.parameters(), take(module, *public), strict=True):
                before = parameter.grad.clone()
                parameter.grad.add_(gradient)
                assert torch.equal(parameter.grad, before + gradient), number
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        module[0].weight.grad.mul_(unison.public(raw[0].norm().item()))
        optimizer.step()
        optimizer.zero_grad()


def test_another_model_may_learn_from_the_same_batches():
    _, module, optimizer, batches = begin()
    plain = make_model()
    its = torch.optim.AdamW(plain.parameters(), lr=0.1)
    twin = copy.deepcopy(plain)
    for _ in range(3):
        x, y = next(batches)
        cross_entropy(plain(x), y).backward()
        first = plain.get_parameter("0.weight").grad  # for a log; Python warns of other numbers
        largest = first.abs().max()
        assert float(largest) >= int(largest)
        its.step()
        its.zero_grad()
        values, loss_of = _functional(plain)
        assert vmap(loss_of, in_dims=(None, 0, 0))(values, x[:, None], y[:, None]).isfinite().all()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(plain[0].weight, twin[0].weight)
