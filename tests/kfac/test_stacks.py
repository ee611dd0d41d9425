"""Layers of equal shape that go together take the steps that they take one by one."""

import copy
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import unison
from tests.kfac.common import CLASSES, loss, relative, settings
from unison.kernels import multi_tensor
from unison.kfac import KFACConfig, inverse, kfac, linalg, precondition
from unison.kfac.factors import observed
from unison.kfac.precondition import Preconditioner


def take_for_gpu(monkeypatch, is_gpu: bool) -> None:
    for module in (inverse, kfac, linalg, precondition):
        monkeypatch.setattr(module, "is_gpu", lambda value: is_gpu)


class Alike(nn.Module):
    """Many layers of few shapes: three of them equal, two without a bias, one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.equal = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.wide, self.narrow = nn.Linear(7, 9), nn.Linear(9, 7)
        self.plain = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(2))
        self.turned = nn.Parameter(torch.randn(7, 7) / 3)
        self.gain = nn.Parameter(torch.ones(7))
        self.conv = nn.ModuleList(nn.Conv1d(1, 2, 3) for _ in range(2))
        self.head = nn.Linear(20, CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):  # [batch, 7] -> [batch, CLASSES]
        for layer in (*self.equal, self.wide, self.narrow, *self.plain):
            x = torch.tanh(layer(x))
        x = (x @ self.turned) * self.gain
        return self.head(torch.cat([conv(x[:, None]).flatten(1) for conv in self.conv], dim=1))


def after_one_step(model, config):
    kfac = unison.KFAC(model, config)
    x = torch.randn(13, 7, generator=torch.Generator().manual_seed(3)).double()
    for _ in range(2):
        model.zero_grad()
        logits = model(x)
        if kfac.wants_statistics:
            kfac.sample(logits).backward()
        loss(logits).backward()
        kfac.step()
    return kfac


def gradients_of(model) -> dict:
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(parameter.shape, generator=generator).double()
        for name, parameter in model.named_parameters()
        if not name.startswith("unused")
    }


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"graft": "none"},
        {"graft": "sgd", "fisher": "forward"},
        {"damping_form": "joint"},
        {"fisher": "forward", "inverse": "eigen"},
    ],
)
def test_together_is_one_by_one(monkeypatch, changes, is_gpu):
    take_for_gpu(monkeypatch, is_gpu)
    model = Alike().double()
    kfac = after_one_step(model, settings(**changes))
    gradients = gradients_of(model)
    states = list(kfac._states.values())
    found = []
    for is_together in (True, False):
        graft = copy.deepcopy(kfac._graft)
        steps = Preconditioner(states, graft).steps(gradients, is_together=is_together)
        assert steps.keys() == gradients.keys()
        found.append(steps)
    for name, step in found[0].items():
        assert relative(step.reshape(-1), found[1][name].reshape(-1)) <= 1e-12
        matrix = gradients[name].reshape(step.shape)
        assert step.shape == matrix.shape


def test_equal_shapes_share_a_stack_and_its_memory():
    model = Alike().double()
    kfac = after_one_step(model, settings())
    states = list(kfac._states.values())
    before = kfac.memory_usage()
    plan = Preconditioner(states, kfac._graft)
    plan.plan(states, is_together=True)
    sizes = {layers[0].name: len(layers) for layers, _ in plan.stacks}
    assert sizes["equal.0.weight"] == 3
    assert sizes["plain.0.weight"] == 2
    assert sizes["turned"] == 1  # laid out the other way
    assert sizes["conv.0.weight"] == 2
    assert kfac.memory_usage() == before
    first, second = (
        next(each.inverse for each in states if each.layer.name == f"equal.{i}.weight")
        for i in (0, 1)
    )
    assert first is not None
    assert second is not None
    assert first["a"].untyped_storage().data_ptr() == second["a"].untyped_storage().data_ptr()
    stacks = plan.stacks
    plan.plan(states, is_together=True)
    assert plan.stacks is stacks
    plan.plan(states[1:], is_together=True)
    assert plan.stacks is not stacks
    plan.plan(states, is_together=False)
    assert {len(layers) for layers, _ in plan.stacks} == {1}


def test_inverses_that_lie_equally_far_apart_are_not_copied():
    whole = torch.randn(9, 5, 6)
    lying = [{"a": whole[i, :5, :5], "g": whole[i + 1, :2, :2]} for i in (0, 3, 6)]
    stacked = inverse.stack(lying)
    for key, own in stacked.items():
        assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert torch.equal(own, torch.stack([each[key] for each in lying]))
    others = [
        [whole[i] for i in (0, 3, 7)],
        [whole[i] for i in (3, 0)],
        [whole[0], whole[0]],
        [whole[0, :5, :5], whole[1, :5, :5].mT],
        [whole[0], whole.clone()[1]],
    ]
    for values in others:
        (own,) = inverse.stack(given := [{"a": each} for each in values]).values()
        assert torch.equal(own, torch.stack(values))
        assert own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        assert torch.equal(given[1]["a"], values[1])


def test_a_layer_without_a_gradient_is_left_out_of_its_stack():
    model = Alike().double()
    kfac = after_one_step(model, settings(graft="sgd"))
    gradients = gradients_of(model)
    states, graft = list(kfac._states.values()), kfac._graft
    whole = Preconditioner(states, graft).steps(gradients, is_together=True)
    some = {name: each for name, each in gradients.items() if not name.startswith("equal.1")}
    found = Preconditioner(states, graft).steps(some, is_together=True)
    assert found.keys() == some.keys()
    for name, step in found.items():
        assert relative(step, whole[name]) <= 1e-12


def test_what_is_not_finite_does_not_outlive_its_step(monkeypatch):
    take_for_gpu(monkeypatch, is_gpu=True)  # pads
    model = Alike().double()
    kfac = after_one_step(model, settings(graft="none"))
    gradients = gradients_of(model)
    steps = Preconditioner(list(kfac._states.values()), kfac._graft)
    expected = {k: v.clone() for k, v in steps.steps(gradients, is_together=True).items()}
    broken = {name: torch.full_like(each, torch.inf) for name, each in gradients.items()}
    steps.steps(broken, is_together=True)
    again = steps.steps(gradients, is_together=True)
    assert all(torch.equal(again[name], each) for name, each in expected.items())


def test_averages_lie_as_products_read_them(monkeypatch):
    take_for_gpu(monkeypatch, is_gpu=True)
    model = Alike().double()
    kfac = after_one_step(model, settings())
    gradients, graft = gradients_of(model), kfac._graft
    states = list(kfac._states.values())
    plain = copy.deepcopy(graft)
    for key, value in {**plain._m}.items():
        plain._m[key] = value.clone()  # as they are loaded
    plain._places.clear()
    found, apart = (Preconditioner(states, each) for each in (graft, plain))
    copied, cat = [], torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda *args, **kwargs: copied.append(1) or cat(*args, **kwargs)
    )
    for number in range(3):
        if number == 2:  # as after a step that was left out
            for each in (graft, plain):
                each._m.pop("equal.0.bias")
        steps = found.steps(gradients, is_together=True)
        num_copies = len(copied)
        monkeypatch.setattr(apart, "_lay_out_means", lambda gradients: None)
        expected = apart.steps(gradients, is_together=True)
        assert num_copies < len(copied)
        copied.clear()
        for name, step in steps.items():
            assert torch.equal(step, expected[name])
        whole, places = found._means[("equal.0.weight", "equal.1.weight", "equal.2.weight"), 8]
        assert whole.shape == (3, 7, 8)
        assert all(graft._m[name] is place for name, place in places.items())
    # Turned ones are copied together, as ever; other means are where they were.
    assert not any("turned" in places for _, places in found._means.values())


def test_going_on_goes_on_together():
    config = KFACConfig(update_every=10, burn_in=0, min_layer_size=0)
    model = Alike().double()
    kfac = after_one_step(model, config)
    assert not kfac._is_ordered
    other = unison.KFAC(model, config)
    other.load_state_dict(kfac.state_dict())
    assert not other._is_ordered


class PhaseCounts(TorchDispatchMode):
    """Counts the operations of every phase of a step that make something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()
        self._phases = ["other"]

    @contextmanager
    def phase(self, name):
        self._phases.append(name)
        yield
        self._phases.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[self._phases[-1]] += not func.is_view
        return func(*args, **(kwargs or {}))


def _uncounted(fn):
    def run(*args, **kwargs):
        with _disable_current_modes():
            return fn(*args, **kwargs)

    return run


def test_more_layers_of_a_shape_are_not_more_launches(monkeypatch):
    take_for_gpu(monkeypatch, is_gpu=True)
    for name in ("moments", "combine"):  # of many tensors, in one launch on a GPU
        monkeypatch.setattr(multi_tensor, name, _uncounted(getattr(multi_tensor, name)))
    counts = []
    for depth in (2, 5):
        layers = [nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(depth)]
        model = nn.Sequential(*layers, nn.Linear(7, CLASSES))
        kfac, found = unison.KFAC(model, settings(update_every=2)), []
        for _ in range(4):
            model.zero_grad()
            logits = model(torch.randn(13, 7))
            if kfac.wants_statistics:
                kfac.sample(logits).backward()
            loss(logits).backward()
            with PhaseCounts() as mode, observed(mode.phase):
                kfac.step()
            found.append(
                {k: n for k, n in mode.found.items() if k not in ("statistics", "products")}
            )
        assert found[2].keys() >= {"factors", "inverses", "apply"}
        assert "factors" not in found[3]
        counts.append(found[2:])
    assert counts[0] == counts[1]
