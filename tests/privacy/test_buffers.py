"""Buffers and other state of a module: what holds values of the batch is refused, unspent."""

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm

import unison
from tests.privacy.common import NUM_FEATURES, attach, data, train
from unison.errors import BadInput, UnsupportedOperation

X, _ = data()


class Written(nn.Module):
    """Writes to a buffer, in one of the ways there are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.calls = nn.Linear(NUM_FEATURES, 3), how, 0
        self.register_buffer("mu", torch.zeros(NUM_FEATURES))
        self.register_buffer("never", torch.ones(2))
        self.frozen = nn.Parameter(torch.zeros(NUM_FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        with torch.no_grad():
            match self.how:
                case "copy":
                    self.mu.copy_(x.detach().sum(0))
                case "data":
                    self.mu.data.copy_(x.detach().sum(0))
                case "replaced":
                    self.mu = x.detach().sum(0)
                case "registered":
                    self.register_buffer("late", x.detach().sum(0))
                case "one row":
                    self.mu.copy_(x[0])
                case "frozen parameter":
                    self.frozen.copy_(x.detach().sum(0))
                case "count of calls":
                    self.mu.add_(1)
                case "the same":
                    self.mu.fill_(0)
                case "size of the batch":
                    self.mu.fill_(float(x.shape[1]))
                case "later" if self.calls > 2:
                    self.mu.copy_(x.detach().sum(0))
        return self.layer(x)


WAYS = ["copy", "data", "replaced", "registered", "one row"]


@pytest.mark.parametrize("how", WAYS)
def test_buffers_that_hold_values_of_the_batch_are_refused(how):
    engine, module, optimizer, private = attach(Written(how))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    name = "late" if how == "registered" else "mu"
    with pytest.raises(UnsupportedOperation, match=rf"the buffer '{name}'.*public_buffers=\["):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0
    assert module.state_dict().keys() == before.keys()  # probing has left nothing
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("pattern", ["mu", "m*"])
@pytest.mark.parametrize("how", ["copy", "replaced"])
def test_public_buffers_may_be_written(how, pattern):
    _, module, optimizer, private = attach(Written(how), public_buffers=[pattern])
    train(module, optimizer, private, 2)
    assert module.mu.any()


class Centred(nn.Module):
    """Uses what the pass before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 3)
        self.register_buffer("mu", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        output = h - self.mu
        self.mu = 0.9 * self.mu + 0.1 * h.detach().mean(0)
        return output


def test_a_public_buffer_may_be_used_in_the_next_pass():
    engine, module, optimizer, private = attach(Centred())
    with pytest.raises(UnsupportedOperation, match="the buffer 'mu'"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0
    _, module, optimizer, private = attach(Centred(), public_buffers=["mu"])
    train(module, optimizer, private, 3)


def test_public_buffers_must_be_there():
    with pytest.raises(BadInput, match="the module has no buffer 'nu'; it has mu, never"):
        attach(Written("copy"), public_buffers=["nu"])
    with pytest.raises(BadInput, match="must be a list"):
        attach(Written("copy"), public_buffers="mu")


def test_a_frozen_parameter_is_no_place_for_data():
    engine, module, optimizer, private = attach(Written("frozen parameter"))
    with pytest.raises(UnsupportedOperation, match="the parameter 'frozen'"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0


@pytest.mark.parametrize("how", ["count of calls", "the same", "size of the batch"])
def test_buffers_that_do_not_depend_on_the_batch_may_be_written(how):
    engine, module, optimizer, private = attach(Written(how))
    engine.check(X[:8])
    assert not module.mu.any()  # probing has left nothing
    train(module, optimizer, private, 3)
    assert engine.ledger.num_intents == 3
    if how == "count of calls":
        assert module.mu[0] == 3


def test_a_buffer_that_is_written_later_is_refused_before_its_step_is_counted():
    engine, module, optimizer, private = attach(Written("later"), recheck=False)
    with pytest.raises(UnsupportedOperation, match="this pass wrote to the buffer 'mu'"):
        train(module, optimizer, private, 9)
    assert engine.ledger.num_intents == 2


def test_a_buffer_that_is_written_backward_is_refused_before_its_step_is_counted():
    class Hooked(Written):
        def forward(self, x):
            h = super().forward(x)
            if h.requires_grad and self.calls > 5:  # no pass of a check
                h.register_hook(lambda g: (self.mu.fill_(float(g.sum())), None)[1])
            return h

    engine, module, optimizer, private = attach(Hooked("nothing"), recheck=False)
    with pytest.raises(UnsupportedOperation, match="this pass wrote to the buffer 'mu'"):
        train(module, optimizer, private, 9)
    assert engine.ledger.num_intents == 5


def test_a_buffer_that_is_written_through_data_later_is_found_when_it_is_checked_again():
    class Late(Written):
        def forward(self, x):
            if self.calls > 2:
                self.mu.data.copy_(x.sum(0))
            return super().forward(x)

    engine, module, optimizer, private = attach(Late("nothing"))
    with pytest.raises(UnsupportedOperation, match="writes values of the batch to the buffer 'mu'"):
        train(module, optimizer, private, 9)
    assert engine.ledger.num_intents == 3


NORMS = {
    "batch norm": (lambda: nn.BatchNorm1d(8), "batch norm"),
    "frozen batch norm": (
        lambda: nn.BatchNorm1d(8).requires_grad_(False),
        r"\(here '1'\): use GroupNorm",
    ),
    "batch norm without parameters": (
        lambda: nn.BatchNorm1d(8, affine=False),
        r"\(here '1'\): use GroupNorm",
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 2)),
            nn.InstanceNorm1d(4, track_running_stats=True),
            nn.Flatten(),
        ),
        r"the buffer '1\.1\.running_mean'.*Use GroupNorm, or call \.eval\(\)",
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_norms_with_statistics_of_the_batch(name, dropout):
    make, message = NORMS[name]
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 8), make(), nn.Dropout(dropout), nn.Linear(8, 3))
    engine, module, optimizer, private = attach(module)
    with pytest.raises(UnsupportedOperation, match=message):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0
    module[1].eval()
    private.abandon()
    if "frozen" in name or "without" in name:
        train(module, optimizer, private, 2)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_spectral_norm_depends_on_parameters_alone(is_frozen):
    first = spectral_norm(nn.Linear(NUM_FEATURES, 8)).requires_grad_(not is_frozen)
    module = nn.Sequential(first, nn.Linear(8, 3))
    before = first.get_submodule("parametrizations.weight.0").get_buffer("_u").clone()
    engine, module, optimizer, private = attach(module)
    engine.check(X[:8])
    assert torch.equal(module[0].parametrizations.weight[0]._u, before)
    train(module, optimizer, private, 3)
    assert not torch.equal(module[0].parametrizations.weight[0]._u, before)


# ---- state between passes, and faults that come later --------------------------------------------


class Remembers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.center, self.calls = nn.Linear(NUM_FEATURES, 3), how, None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        h = self.layer(x)
        if self.how == "moving mean" or self.calls > 3:
            mean = h.detach().mean(0)
            self.center = mean if self.center is None else 0.9 * self.center + 0.1 * mean
            return h - self.center
        if self.how == "branch" and float(x.max()) > 5:
            return h - h.mean(0)
        return h


def test_a_module_that_remembers_its_batches_is_refused():
    engine, module, optimizer, private = attach(Remembers("moving mean"))
    with pytest.raises(UnsupportedOperation, match=r"remembers the batch|samples mix"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0


def test_a_branch_that_the_first_batch_does_not_take_is_found():
    engine, module, optimizer, private = attach(Remembers("branch"))
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        train(module, optimizer, private, 1)
    assert engine.ledger.num_intents == 0


@pytest.mark.parametrize("recheck", [True, False])
def test_a_fault_that_comes_later_is_found_when_it_is_checked_again(recheck):
    engine, module, optimizer, private = attach(Remembers("later"), recheck=recheck)
    if not recheck:
        train(module, optimizer, private, 6)
        return
    with pytest.raises(UnsupportedOperation, match=r"remembers the batch|samples mix"):
        train(module, optimizer, private, 9)
    assert engine.ledger.num_intents == 3  # it is checked before the passes 1, 2, 4, 8, …


def test_a_refused_batch_can_be_tried_again():
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    module[1].requires_grad_(False)
    engine, module, optimizer, private = attach(module)
    x, y = next(iter(private))
    for _ in range(2):
        with pytest.raises(UnsupportedOperation, match="GroupNorm"):
            module(x)
    module[1].eval()
    cross_entropy(module(x), y).backward()
    optimizer.step()
    private.abandon()
    x, y = next(iter(private))
    module[1].train()  # one layer alone
    with pytest.raises(UnsupportedOperation, match="GroupNorm"):
        module(x)
    assert engine.ledger.num_intents == 1


def test_checks_leave_the_run_as_it_was():
    """Dropout draws what it would have drawn, and parameters are the same bits."""
    found = []
    for recheck in (True, False):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        _, module, optimizer, private = attach(module, recheck=recheck)
        torch.manual_seed(2)
        train(module, optimizer, private, 5)
        found.append([each.detach().clone() for each in module.parameters()])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


WRITES = {
    "copy": lambda module, x: module.mu.copy_(x.detach().sum(0)),
    "view": lambda module, x: module.mu[:2].add_(x.detach().sum(0)[:2]),
    "number": lambda module, x: operator.setitem(module.mu, 0, x.sum().item()),
    "data": lambda module, x: module.mu.data.lerp_(x.detach().mean(0), 0.1),
    "out": lambda module, x: torch.sum(x.detach(), 0, out=module.mu),
    "frozen parameter": lambda module, x: module.frozen.data.copy_(x.detach().sum(0)),
}


@pytest.mark.parametrize("when", ["before", "amid", "after"])
@pytest.mark.parametrize("how", WRITES)
def test_a_loop_that_writes_values_of_the_batch_to_a_buffer_is_refused(how, when):
    engine, module, optimizer, private = attach(Written("nothing"))
    batches = iter(private)
    x, y = next(batches)
    if when != "before":
        loss = cross_entropy(module(x), y)
    if when == "after":
        loss.backward()
        optimizer.step()
    with pytest.raises(UnsupportedOperation, match=r"'(mu|frozen)', which is saved with"):
        WRITES[how](module, x)
    assert float(module.mu.abs().sum() + module.frozen.abs().sum()) == 0
    assert engine.ledger.num_intents == (when == "after")


def test_a_loop_may_write_what_is_public_to_a_buffer():
    _, module, optimizer, private = attach(Written("nothing"), public_buffers=["never"])
    batches = iter(private)
    x, y = next(batches)
    cross_entropy(module(x), y).backward()
    optimizer.step()
    module.mu.add_(len(x)).add_(unison.public(x.sum().item())).add_(module.layer.weight.sum())
    module.never.copy_(x.sum(0)[:2])
    module.register_buffer("late", torch.zeros(NUM_FEATURES), persistent=False)
    module.late.copy_(x.sum(0))
