"""Steps: averages, schedules, grafting, the KL clip, and which optimizers may follow."""

import copy

import pytest
import torch
from torch import nn

import unison
from tests.kfac.common import CLASSES, Transformer, flat_gradient, loss, relative, settings
from unison.errors import BadInput
from unison.kfac import KFACConfig, NotInvertible
from unison.kfac.precondition import Graft


def batches(count: int) -> list:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, 11, (4, 5), generator=generator),
            torch.randint(0, CLASSES, (4, 5), generator=generator),
        )
        for _ in range(count)
    ]


def train(model, kfac, optimizer, data) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        logits = model(x)
        if kfac.wants_statistics:
            kfac.sample(logits).backward(retain_graph=True)
        value = loss(logits, y)
        value.backward()
        kfac.step()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_averages_are_exact_with_bias_correction():
    model = Transformer().double()
    kfac = unison.KFAC(model, settings(decay=0.9, fisher="exact"))
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for x, _ in batches(5):
        alone = unison.KFAC(model, settings(fisher="exact"))
        logits = model(x)
        alone.sample(logits).backward()
        loss(logits).backward()
        alone.step()
        seen.append(alone.factors()["f1.weight"])
        alone.detach()
    train(model, kfac, still, batches(5))
    weights = [0.9 ** (4 - index) for index in range(5)]
    for side in ("a", "g"):
        mean = sum(w * each[side] for w, each in zip(weights, seen, strict=True)) / sum(weights)
        assert relative(kfac.factors()["f1.weight"][side], mean) <= 1e-12


def test_factors_and_inverses_have_schedules_of_their_own():
    model = Transformer().double()
    config = settings(update_every=lambda step: 1 if step < 2 else 3, invert_every=4)
    kfac = unison.KFAC(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    updates, inverses = [], []
    for data in batches(9):
        factors = {k: v["a"].clone() for k, v in kfac.factors().items() if v.get("a") is not None}
        inverse = {i: id(s.inverse) for i, s in kfac._states.items()}
        train(model, kfac, optimizer, [data])
        now = kfac.factors()["f1.weight"]["a"]
        updates.append("f1.weight" not in factors or not torch.equal(factors["f1.weight"], now))
        inverses.append(inverse != {i: id(s.inverse) for i, s in kfac._states.items()})
    assert [step for step, was in enumerate(updates) if was] == [0, 1, 4, 7]
    assert [step for step, was in enumerate(inverses) if was] == [0, 4, 8]


def test_updates_come_more_often_at_the_beginning():
    model = nn.Linear(3, CLASSES)
    kfac = unison.KFAC(model, settings(update_every=10, burn_in=20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    updates = []
    for step in range(45):
        if kfac.wants_statistics:
            updates.append(step)
        train(model, kfac, optimizer, [(torch.randn(4, 3), torch.randint(0, CLASSES, (4,)))])
    assert updates == [0, 1, 2, 3, 5, 9, 17, 27, 37]
    assert kfac._last_inverse == 37


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("empty", [0, 3])
def test_an_update_without_labels_is_none(has_rows, empty):
    """The next step is due, and what layers are held as is told by rows that were there."""
    kinds = {}
    for is_left_out in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 300)).double()
        kfac = unison.KFAC(model, settings(update_every=3, decay=0.9, policy="auto", graft="sgd"))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        generator, updates = torch.Generator().manual_seed(1), []
        for step in range(7):
            x = torch.randn(4, 6, generator=generator).double()
            if step == empty and is_left_out:
                continue
            is_counted = torch.full((4,), step != empty)
            if step == empty and not has_rows:
                x, is_counted = x[:0], is_counted[:0]
            optimizer.zero_grad()
            logits = model(x)
            updates.append(kfac.wants_statistics)
            if updates[-1]:
                kfac.sample(logits, is_counted).backward(retain_graph=True)
            (logits * is_counted[:, None]).square().sum().backward()
            kfac.step()
            optimizer.step()
        kinds[is_left_out] = [(each.name, each.a_form, each.g_form) for each in kfac.layers]
        due = [empty, empty + 1, empty + 4] if empty == 0 else [0, 3, 4]
        assert [n for n, was in enumerate(updates) if was] == ([0, 3] if is_left_out else due)
    assert kinds[False] == kinds[True]


@pytest.mark.parametrize("graft", ["adam", "sgd"])
def test_without_curvature_the_grafted_optimizer_steps_to_the_bit(graft):
    model = Transformer()
    twin = copy.deepcopy(model)
    config = KFACConfig(policy="identity", graft=graft)
    kfac = unison.KFAC(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)
    assert not kfac.wants_statistics
    train(model, kfac, optimizer, batches(6))
    behind = torch.optim.SGD(twin.parameters(), lr=1e-2, weight_decay=0.1)
    grafted = Graft(config)
    for x, y in batches(6):
        behind.zero_grad()
        loss(twin(x), y).backward()
        if graft == "adam":
            steps, _, _ = grafted.step({n: p.grad for n, p in twin.named_parameters()})
            for name, parameter in twin.named_parameters():
                parameter.grad = (steps or {})[name]
        behind.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_grafted_adam_is_torchs():
    model = Transformer().double()
    twin = copy.deepcopy(model)
    kfac = unison.KFAC(model, KFACConfig(policy="identity", graft="adam"))
    train(model, kfac, torch.optim.SGD(model.parameters(), lr=1e-2), batches(20))
    adam = torch.optim.Adam(twin.parameters(), lr=1e-2)
    for x, y in batches(20):
        adam.zero_grad()
        loss(twin(x), y).backward()
        adam.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative(a.detach(), b.detach()) <= 1e-12


def test_identity_factors_with_sgd_grafted_are_sgd_to_the_bit():
    # Inverses that are the identity, put there by hand: everything else runs as ever.
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    kfac = unison.KFAC(model, settings(graft="sgd"))
    x, y = torch.randn(9, 6), torch.randint(0, CLASSES, (9,))
    logits = model(x)
    kfac.sample(logits).backward()
    loss(logits, y).backward()
    kfac.step()
    for state in kfac._states.values():
        m, n = state.layer.d_in, state.layer.d_out
        held = {"a": torch.eye(m), "g": torch.eye(n)}
        state.inverse = held
    kfac._last_update = kfac._last_inverse = 10**6  # no more statistics
    model.zero_grad()
    loss(model(x), y).backward()
    gradient = flat_gradient(model)
    kfac.step()
    assert torch.equal(flat_gradient(model), gradient)


@pytest.mark.parametrize("graft", ["adam", "sgd"])
def test_a_grafted_step_has_the_length_of_the_other(graft):
    model = Transformer().double()
    kfac = unison.KFAC(model, settings(graft=graft, betas=(0.0, 0.999)))
    (x, y), *_ = batches(1)
    logits = model(x)
    kfac.sample(logits).backward()
    loss(logits, y).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    kfac.step()
    for layer in kfac.layers:
        own = torch.cat([gradients[name].flatten() for name in layer.parameters])
        if graft == "adam":
            own = own / (own.abs() + 1e-8)
        parameters = dict(model.named_parameters())
        step = torch.cat([parameters[name].grad.flatten() for name in layer.parameters])
        assert float(step.norm()) == pytest.approx(float(own.norm()), rel=1e-10)


def test_the_kl_clip_bounds_the_predicted_change():
    model = Transformer().double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kfac = unison.KFAC(model, settings(graft="none", kl_clip=1e-4), optimizer)
    free = unison.KFAC(twin, settings(graft="none"))
    (x, y), *_ = batches(1)
    for each, own in ((model, kfac), (twin, free)):
        logits = each(x)
        own.sample(logits).backward()
        loss(logits, y).backward()
    gradient = flat_gradient(model)
    kfac.step()
    free.step()
    change = 0.25 * float(flat_gradient(twin) @ gradient)
    assert change > 1e-4
    assert 0.25 * float(flat_gradient(model) @ gradient) == pytest.approx(
        (1e-4 * change) ** 0.5, rel=1e-9
    )
    shrunk = flat_gradient(twin) * (1e-4 / change) ** 0.5
    assert relative(flat_gradient(model), shrunk) <= 1e-12
    with pytest.raises(BadInput, match="reads the learning rate"):
        unison.KFAC(model, settings(kl_clip=1e-3))


def test_an_adaptive_optimizer_is_refused():
    model = nn.Linear(3, CLASSES)
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(BadInput, match="AdamW would scale every element of it again"):
        unison.KFAC(model, KFACConfig(), adam)
    kfac = unison.KFAC(model, KFACConfig())
    model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(BadInput, match=r"use torch\.optim\.SGD"):
        adam.step()
    other = nn.Linear(3, 3)
    other(torch.randn(2, 3)).sum().backward()
    torch.optim.AdamW(other.parameters()).step()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1).step()
    kfac.detach()
    adam.step()
    unison.KFAC(model, KFACConfig(graft="none"), adam)


def test_a_singular_layer_is_named():
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, CLASSES)).double()
    kfac = unison.KFAC(model, settings(damping=0.0))
    logits = model(torch.zeros(3, 6).double())
    kfac.sample(logits).backward()
    loss(logits).backward()
    with pytest.raises(NotInvertible, match=r"A of '0\.weight' .* smallest eigenvalue is 0"):
        kfac.step()


@pytest.mark.parametrize("fisher", ["mc", "empirical", "exact", "forward"])
def test_it_trains(fisher):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    x, y = torch.randn(40, 6), torch.randint(0, CLASSES, (40,))
    kfac = unison.KFAC(model, KFACConfig(fisher=fisher, update_every=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
    losses = train(model, kfac, optimizer, [(x, y)] * 60)
    assert losses[-1] < 0.5 * losses[0]


def test_a_parameter_without_a_gradient_stays_without():
    model = nn.ModuleDict({"used": nn.Linear(3, CLASSES), "other": nn.Linear(3, 3)})
    model.forward = model["used"].forward
    kfac = unison.KFAC(model, settings())
    logits = model(torch.randn(4, 3))
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    assert model["other"].weight.grad is None
    found = {layer.name: layer.why for layer in kfac.layers}
    assert found["other.weight"] == "not used"


def sampled_step(model, kfac, *, has_loss: bool = True) -> None:
    ((x, y),) = batches(1)
    logits = model(x)
    kfac.sample(logits).backward()
    if has_loss:
        loss(logits, y).backward()
    kfac.step()


@pytest.mark.parametrize("what", ["added", "replaced", "thawed"])
def test_what_came_to_be_trained_later_is_refused(what):
    """Its gradient would stay as it is, beside the steps of all others."""
    model = Transformer().double()
    model.f1.weight.requires_grad_(what != "thawed")
    kfac = unison.KFAC(model, settings())
    sampled_step(model, kfac)
    name = "f1.weight"
    if what == "added":
        name = "gain"
        model.gain = nn.Parameter(torch.ones(()))
    elif what == "replaced":
        model.f1.weight = nn.Parameter(model.f1.weight.detach().clone())
    model.f1.weight.requires_grad_()
    with pytest.raises(BadInput, match=rf"^{name} was added, replaced or thawed since KFAC"):
        sampled_step(model, kfac)


def test_what_is_frozen_later_stays_as_it_is():
    """And the rest has the steps of a model in which it always was."""
    models = [Transformer().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    kfacs = []
    for number, model in enumerate(models):
        if number == 0:
            kfacs.append(unison.KFAC(model, settings(graft="sgd")))
            sampled_step(model, kfacs[0])
        model.zero_grad()
        model.requires_grad_(requires_grad=False)
        model.f2.requires_grad_()
        if number == 1:
            kfacs.append(unison.KFAC(model, settings(graft="sgd")))
            kfacs[1].num_steps = 1  # it draws the same labels
        sampled_step(model, kfacs[number])
        found = [name for name, each in model.named_parameters() if each.grad is not None]
        assert found == ["f2.weight", "f2.bias"]
    assert relative(*(each.f2.weight.grad for each in models)) <= 1e-12


def test_a_step_before_the_loss_went_back_is_refused():
    model = Transformer().double()
    kfac = unison.KFAC(model, settings())
    with pytest.raises(BadInput, match=r"^no parameter has a gradient: call kfac.step\(\) after"):
        sampled_step(model, kfac, has_loss=False)


def test_a_copy_of_the_module_is_not_watched():
    model = nn.Linear(3, CLASSES)
    kfac = unison.KFAC(model, settings())
    other = copy.deepcopy(model)
    other(torch.randn(4, 3))
    assert kfac._recorder.current is None
    model(torch.randn(4, 3))
    assert kfac._recorder.current is not None


def test_it_shows_method_size_owner_and_bytes():
    model = Transformer()
    kfac = unison.KFAC(model, settings(max_factor_size=8, policy="small_only"))
    assert "found at the first step" in repr(kfac)
    train(model, kfac, torch.optim.SGD(model.parameters(), lr=0.1), batches(1))
    lines = {line.split()[0]: line for line in repr(kfac).splitlines()}
    assert "kronecker" in lines["q.weight"]
    assert "G 6 x A 7" in lines["q.weight"]
    assert "a side above 8" in lines["f1.weight"]
    assert "a table" in lines["embed.weight"]
    usage = kfac.memory_usage()
    assert usage["total"] == usage["factors"] + usage["inverses"] + usage["grafting"] > 0
