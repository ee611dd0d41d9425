"""What people write around a private module: as the float64 loop over samples, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from tests.privacy.common import NUM_CLASSES, NUM_FEATURES, attach, data
from unison.errors import UnisonError

LossOf = Callable[..., Tensor]  # (module, x, y) -> the mean over rows, of one row as of many
NORM = 3.0


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)).double()


def rows() -> DataLoader[Any]:
    x, y = data()
    return DataLoader(TensorDataset(x.double(), y), batch_size=12)


def clipped_sum(module: nn.Module, loss_of: LossOf, x: Tensor, y: Tensor) -> Tensor:
    """By one row at a time."""
    total = torch.zeros(sum(each.numel() for each in module.parameters()), dtype=torch.float64)
    for i in range(len(x)):
        own = copy.deepcopy(module)
        loss_of(own, x[i : i + 1], y[i : i + 1]).backward()
        own_parameters = own.parameters()
        row = [torch.zeros_like(p) if p.grad is None else p.grad for p in own_parameters]
        flat = torch.cat([each.flatten() for each in row])
        total += flat * min(1.0, NORM / float(flat.norm()))
    return total


def assert_exact(loss_of: LossOf, module: nn.Module | None = None, steps: int = 2) -> None:
    module = make_model() if module is None else module
    engine, module, optimizer, private = attach(
        module, data_loader=rows(), noise_multiplier=0.0, max_grad_norm=NORM
    )
    taken = []
    for x, y in private:
        plain = copy.deepcopy(module)
        optimizer.zero_grad()
        loss_of(module, x, y).backward()
        found = torch.cat([each.grad.flatten() for each in module.parameters()])
        taken.append((plain, x.clone(), y.clone(), found * 12))
        optimizer.step()
        if len(taken) == steps:
            break
    engine.detach()  # nobody follows what the loop over rows does
    for plain, x, y, found in taken:
        expected = clipped_sum(plain, loss_of, x, y)
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def assert_refused(
    loss_of: LossOf, match: str, module: nn.Module | None = None, **settings: Any
) -> None:
    settings = {"data_loader": rows()} | settings
    module = make_model() if module is None else module
    engine, module, _, private = attach(module, **settings)
    with pytest.raises(UnisonError, match=match):  # noqa: PT012
        for batch in private:
            loss_of(module, *batch).backward()
    assert engine.ledger.num_intents == 0, "budget was spent"
    engine.detach()


def mean_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


# ---- adversarial rows ----------------------------------------------------------------------------


def by_grad(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    module.eval()
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(module(x), y), x)
    module.train()
    return mean_loss(module, (x + 0.1 * gradient.sign()).detach(), y)


def by_steps(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    attacked = copy.deepcopy(module).eval()
    shift = torch.zeros_like(x)
    for _ in range(3):
        shift.requires_grad = True
        loss = F.cross_entropy(attacked(x + shift), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, shift)
        shift = (shift + 0.05 * gradient.sign()).clamp(-0.1, 0.1).detach()
    return mean_loss(module, x + shift, y)


@pytest.mark.parametrize("attack", [by_grad, by_steps])
def test_training_on_adversarial_rows_is_exact(attack):
    assert_exact(attack)


def test_adversarial_rows_that_know_of_others_are_refused():
    def scaled(module, x, y):
        module.eval()
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(module(x), y), x)
        module.train()
        return mean_loss(module, (x + 0.1 * gradient / gradient.norm()).detach(), y)

    assert_refused(scaled, "what the module is given for one row depends on other rows")


def test_an_attack_on_the_module_in_training_names_the_remedy():
    def attack(module, x, y):
        x = x.clone().requires_grad_()
        F.cross_entropy(module(x), y).backward()
        return mean_loss(module, (x + 0.1 * x.grad.sign()).detach(), y)

    assert_refused(attack, r"torch\.autograd\.grad\(loss, x\) between module\.eval\(\)")

    def in_evaluation(module, x, y):
        module.eval()
        loss = attack(module, x, y)
        module.train()
        return loss

    assert_refused(in_evaluation, r"gradients of rows by torch\.autograd\.grad\(loss, rows\)")


# ---- parameters in forward -----------------------------------------------------------------------


class WithPrior(nn.Module):
    """Hands a learned row out to every sample."""

    def __init__(self, hand_out: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self._hand_out = nn.Linear(NUM_FEATURES, 4).double(), hand_out
        self.prior = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self._hand_out(self.prior, len(x))


HAND_OUT = {
    "expand": lambda prior, size: prior.expand(size, -1),
    "repeat": lambda prior, size: prior[None].repeat(size, 1),
    "of an expression": lambda prior, size: prior.exp().expand(size, 4),
    "a penalty": lambda prior, size: prior.square().sum().expand(size),
}


def distance(module: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    h, prior = module(x)
    return (h - prior.reshape(len(x), -1)).square().sum(1).mean()


@pytest.mark.parametrize("how", HAND_OUT)
def test_a_learned_prior_that_is_returned_for_every_sample_is_exact(how):
    assert_exact(distance, WithPrior(HAND_OUT[how]))


def test_a_learned_prior_that_is_returned_as_it_is_names_the_remedy():
    module = WithPrior(lambda prior, _: prior)
    assert_refused(distance, r"the module returns 'prior'.*scale\.expand\(len\(x\), -1\)", module)


class Takes(nn.Module):
    """Takes the parameters of its layer in some way."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(NUM_FEATURES, NUM_CLASSES).double()
        self.scale = nn.Parameter(torch.full((NUM_CLASSES, 1), 0.5, dtype=torch.float64))
        self.tied, self._run = nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), run
        self.tied.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def by_isinstance(self: Any, x: Tensor) -> Tensor:
    weight = self.inner.weight
    return x @ (weight if isinstance(weight, nn.Parameter) else 3 * weight).t()


TAKEN = {
    "functional_call": lambda self, x: functional_call(
        self.inner, {"weight": self.inner.weight * self.scale}, x
    ),
    "functional_call of tied layers": lambda self, x: functional_call(
        nn.Sequential(self.inner, nn.Identity(), nn.Softplus()),
        {"0.weight": 2 * self.tied.weight},
        x,
    ),
    "get_parameter": lambda self, x: x @ self.get_parameter("inner.weight").t(),
    "isinstance": by_isinstance,
}


@pytest.mark.parametrize("how", TAKEN)
def test_parameters_may_be_taken_in_forward(how):
    assert_exact(mean_loss, Takes(TAKEN[how]))


def past_the_module(self: Any, x: Tensor) -> Tensor:
    return x @ (2 * dict(self.named_parameters())["inner.weight"]).t()


def as_an_attribute(self: Any, x: Tensor) -> Tensor:
    self.other = self.inner.weight
    return x @ self.other.t()


def test_parameters_that_are_taken_past_the_module_name_the_remedy():
    assert_refused(
        mean_loss,
        r"'inner\.weight'.*took the parameter from parameters\(\)",
        Takes(past_the_module),
    )
    module = Takes(as_an_attribute)
    assert_refused(mean_loss, r"'inner\.weight' to the attribute 'other' of Takes", module)
    assert "other" not in module._parameters


def test_outputs_that_are_no_tensors_are_named():
    module = Takes(lambda self, x: torch.distributions.Normal(self.inner(x), 1.0))
    assert_refused(
        lambda m, x, y: -m(x).log_prob(y[:, None]).mean(), "output .Normal. .*outside", module
    )


# ---- batches that are not made of tensors alone --------------------------------------------------


def collated(x: Any, y: Any) -> DataLoader[Any]:
    """A loader whose `collate_fn` makes two columns, each in its own way."""

    def collate(records: list[Any]) -> tuple[Any, Any]:
        own, labels = zip(*records, strict=True)
        return x(list(own)), y(list(labels))

    return DataLoader(rows().dataset, batch_size=12, collate_fn=collate)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        (list, r"tensors in a list at batch\[0\].*torch\.stack\(rows\)"),
        (lambda own: [{"x": each} for each in own], r"tensors in a list at batch\[0\]"),
        (lambda own: torch.stack(own).numpy(), r"a NumPy array at batch\[0\].*torch\.from_numpy"),
    ],
)
def test_rows_that_lie_in_no_tensor_are_refused(part, match):
    assert_refused(mean_loss, match, data_loader=collated(part, torch.stack))


def numbers(labels: list[Tensor]) -> list[int]:
    return [int(each) for each in labels]


def by_numbers(weigh: Callable[[Tensor, list[int]], Any]) -> LossOf:
    def loss(module: nn.Module, x: Tensor, y: list[int]) -> Tensor:
        losses = F.cross_entropy(module(x), torch.tensor(y), reduction="none")
        return (losses * weigh(x, y)).mean()

    return loss


WEIGHTS = [1.0, 2.0, 0.5]


def test_labels_that_are_numbers_of_pythons_are_trained_on():
    loader = collated(torch.stack, numbers)
    engine, module, optimizer, private = attach(make_model(), data_loader=loader)
    loss = by_numbers(lambda _, y: torch.tensor([WEIGHTS[each] for each in y]))
    for x, y in private:
        loss(module, x, y).backward()
        optimizer.step()
    assert engine.ledger.num_commits == len(private)


def test_numbers_of_pythons_that_know_of_other_rows_are_refused():
    settings = {"data_loader": collated(torch.stack, numbers)}
    mean = by_numbers(lambda _, y: torch.tensor(y).double().mean())
    assert_refused(mean, "rows meet in", **settings)
    total = by_numbers(lambda _, y: sum(y))
    assert_refused(total, "numbers of Python's.* brings a number into the loss", **settings)


def test_what_is_made_of_texts_is_followed():
    def texts(own: list[Tensor]) -> list[str]:
        return [" ".join(map(str, each.tolist())) for each in own]

    def centred(module: nn.Module, x: list[str], y: Tensor) -> Tensor:
        made = torch.tensor([list(map(float, each.split())) for each in x], dtype=torch.float64)
        return mean_loss(module, made - made.mean(0), y)

    match = "what the module is given for one row depends on other rows"
    assert_refused(centred, match, data_loader=collated(texts, torch.stack))


# ---- losses --------------------------------------------------------------------------------------


def evaluates_between(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mean_loss(module, x, y)
    module.eval()
    with torch.no_grad():
        module(x[:2] - x.mean(0))
    module.train()
    return loss


def test_an_evaluation_that_the_loss_does_not_use_is_nobodys_business():
    assert_exact(evaluates_between)


def test_outputs_in_evaluation_mode_of_rows_that_meet_are_refused():
    def against_itself(module, x, y):
        module.eval()
        with torch.no_grad():
            target = module(x - x.mean(0))
        module.train()
        return (module(x) - target).square().mean()

    assert_refused(against_itself, "what the module is given for one row depends on other rows")


def squares(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (module(x) - F.one_hot(y, NUM_CLASSES)).square().sum()


COUNTS = {
    "rows by classes": lambda loss, x: loss / (x.shape[0] * NUM_CLASSES),
    "elements": lambda loss, x: loss / x.numel(),
    "an inverse": lambda loss, x: loss * (1.0 / (5 * len(x))),
    "a float": lambda loss, x: loss / float(len(x)),
}


@pytest.mark.parametrize("how", COUNTS)
def test_a_sum_may_be_divided_by_what_is_made_of_the_number_of_rows(how):
    divide = COUNTS[how]
    assert_exact(lambda module, x, y: divide(squares(module, x, y), x), steps=4)


OTHERWISE = {
    "a square": lambda loss, x: loss / len(x) ** 2,
    "a mean": lambda loss, x: loss / len(x) / (len(x) * 3),
    "a constant": lambda loss, x: loss / TWENTY_SEVEN,
}
TWENTY_SEVEN = 27  # a multiple of the first batch's rows


@pytest.mark.parametrize("how", OTHERWISE)
def test_other_numbers_of_rows_show_what_was_no_mean(how):
    divide = OTHERWISE[how]
    engine, module, _, private = attach(make_model(), data_loader=rows())
    with pytest.raises(UnisonError, match=r"how many others there are|a sum over rows"):  # noqa: PT012
        for x, y in private:
            divide(squares(module, x, y), x).backward()
    assert engine.ledger.num_intents <= 1
    engine.detach()
