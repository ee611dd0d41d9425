"""Empty batches, unused parameters, schedules, samplings and budgets in the user's own loop."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.privacy.common import (
    NUM_FEATURES,
    NUM_RECORDS,
    attach,
    data,
    loader,
    make_model,
    train,
)
from unison.clip import MODES
from unison.errors import BadInput
from unison.privacy import (
    AdaptiveClipping,
    Budget,
    BudgetSpent,
    Poisson,
    PrivacyEngine,
    TruncatedPoisson,
)

ALL_MODES = [*MODES, "auto"]
X, Y = data()

# ---- empty batches, unused parameters, bad samples -----------------------------------------------


def test_empty_batches_are_steps_like_any_other():
    engine, module, optimizer, private = attach(
        sampling=Poisson(rate=0.004), expected_batch_size=4, noise_multiplier=1.0
    )
    num_empty, before = 0, copy.deepcopy(module.state_dict())
    for index, (x, y) in enumerate(private):
        optimizer.zero_grad()
        loss = cross_entropy(module(x), y)
        assert loss.isfinite()  # one row of zeros stands for no records, and counts for nothing
        loss.backward()
        num_empty += private.current.num_samples == 0
        for parameter in module.parameters():
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any()  # noise: an empty batch cannot be told from another
        optimizer.step()
        if index == 20:
            break
    assert num_empty > 3
    assert engine.diagnostics().num_samples == private.current.num_samples
    assert engine.ledger.num_commits == 21
    assert not torch.equal(before["0.weight"], module[0].weight)


@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 3}])
@pytest.mark.parametrize("clip_rule", ["flat", "per_layer"])
def test_padding_counts_for_nothing(clip_rule, settings):
    """An empty batch is a row of zeros, whose biases have a gradient like any row's."""
    _, module, optimizer, private = attach(
        sampling=Poisson(rate=0.004),
        expected_batch_size=4,
        noise_multiplier=0.0,
        clip_rule=clip_rule,
        **settings,
    )
    found = []
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        found.append((private.current.num_samples, [each.grad for each in module.parameters()]))
        optimizer.step()
        if len(found) == 12:
            break
    empty = [gradients for num_samples, gradients in found if num_samples == 0]
    assert 0 < len(empty) < len(found)
    for num_samples, gradients in found:
        assert any(bool(each.any()) for each in gradients) == (num_samples > 0)


def test_the_ledger_counts_a_step_before_its_sums_go_over_ranks():
    """Else a rank could have noise, and gradients, that the ledger knows nothing of."""
    engine, module, _, private = attach(max_physical_batch_size=5)
    owner, intents = engine._training.owner, []
    add = owner.add

    def noted(*args):
        intents.append(engine.ledger.num_intents)
        return add(*args)

    owner.add = noted
    for x, y in private:
        cross_entropy(module(x), y).backward()
        assert intents[-1] == int(private.current.is_last)
        if private.current.is_last:
            break
    assert len(intents) > 1


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(NUM_FEATURES, 3), nn.Linear(40, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_unused_parameters_get_noise_too():
    _, module, _, private = attach(WithUnused(), max_grad_norm=2.0)
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    assert module.unused.weight.grad.std() * 12 == pytest.approx(2.0, rel=0.1)


def test_frozen_parameters_stay():
    module = make_model()
    module[0].requires_grad_(False)
    engine, module, optimizer, private = attach(module)
    train(module, optimizer, private, 3)
    assert module[0].weight.grad is None
    module[0].requires_grad_(True)
    with pytest.raises(BadInput, match=r"0\.weight was frozen or thawed"):
        train(module, optimizer, private, 1)
    del engine


def test_a_sample_that_is_not_finite_is_left_out():
    x, y = data()
    x[7] = torch.nan
    dataset = torch.utils.data.TensorDataset(x, y)
    engine, module, _, private = attach(
        data_loader=torch.utils.data.DataLoader(dataset, batch_size=NUM_RECORDS),
        sampling=Poisson(rate=1.0),
        noise_multiplier=0.0,
    )
    engine.check(X[:4])  # the check compares losses, which must be numbers
    bx, by = next(iter(private))
    cross_entropy(module(bx), by).backward()
    assert engine.diagnostics().num_dropped == 1
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


# ---- the mechanism as a whole --------------------------------------------------------------------


def test_the_divisor_is_a_public_constant():
    """A peer divides by a number that depends on the size of the private data set."""
    found = []
    for num_records in (NUM_RECORDS, NUM_RECORDS - 1):
        dataset = torch.utils.data.TensorDataset(X[:num_records], Y[:num_records])
        engine, *_ = attach(data_loader=torch.utils.data.DataLoader(dataset, batch_size=11))
        found.append(engine.mechanism.expected_batch_size)
        assert engine.mechanism.sampling.rate == 11 / num_records
    assert found == [11, 11]


def test_a_schedule_moves_clipping_and_noise_together():
    """A peer's clip scheduler moved the noise and not the clipping: σ was 0.1 where 1 was said."""
    schedule = lambda step: 0.5 * 0.1**step  # noqa: E731
    _, module, optimizer, private = attach(max_grad_norm=schedule, noise_multiplier=0.0)
    sizes = []
    for step, (x, y) in enumerate(private):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        grads = [parameter.grad for parameter in module.parameters()]
        size = float(torch.cat([grad.flatten() for grad in grads]).norm()) * 12
        assert size <= len(x) * schedule(step)
        sizes.append(size / schedule(step))
        optimizer.step()
        if step == 2:
            break
    assert min(sizes) > 1  # clipped at this step's norm, and not at a smaller one
    engine, module, optimizer, private = attach(WithUnused(), max_grad_norm=schedule)
    for step, (x, y) in enumerate(private):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        std = float(module.unused.weight.grad.std()) * 12
        assert std == pytest.approx(schedule(step), rel=0.1)
        optimizer.step()
        if step == 2:
            break
    del engine


def test_sigma_and_c_cannot_change_within_a_step():
    engine, module, optimizer, private = attach(max_physical_batch_size=4)
    x, y = next(iter(private))
    with pytest.raises(BadInput, match="between two steps"):
        engine.mechanism.max_grad_norm = 9.0
    cross_entropy(module(x), y).backward()
    with pytest.raises(BadInput, match="between two steps"):
        engine.mechanism.noise_multiplier = 0.1
    del optimizer


def test_adaptive_clipping_clips_every_sample_and_follows_the_quantile():
    """A peer's adaptive engine clipped nothing: 24.2 where the bound was 6.4."""
    adaptive = AdaptiveClipping(count_noise_multiplier=0.5, learning_rate=0.3)
    engine, module, optimizer, private = attach(
        max_grad_norm=20.0, noise_multiplier=0.01, adaptive_clipping=adaptive, batch_size=40
    )
    bounds = []
    while len(bounds) < 40:
        for x, y in private:
            optimizer.zero_grad()
            bound = engine.mechanism.current.max_grad_norm
            cross_entropy(module(x), y).backward()
            bounds.append(bound)
            grads = torch.cat([each.grad.flatten() for each in module.parameters()])
            assert float(grads.norm()) * 40 <= (len(x) + 1) * bound
    median = float(engine.per_sample_norms().median())
    assert bounds[0] == 20.0
    assert 0.4 * median < bounds[-1] < 2.5 * median
    counted = engine.mechanism.release(0).effective_noise_multiplier
    assert counted < 0.01  # the count is released too, and is paid for


def test_automatic_and_per_layer_rules():
    for rule in ("automatic", "per_layer"):
        _, module, _, private = attach(clip_rule=rule, noise_multiplier=0.0, max_grad_norm=0.3)
        x, y = next(iter(private))
        cross_entropy(module(x), y).backward()
        grads = {name: each.grad * 12 for name, each in module.named_parameters()}
        total = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        assert 0.05 * len(x) * 0.3 < total <= len(x) * 0.3
        if rule == "per_layer":
            assert all(grad.norm() <= len(x) * 0.15 for grad in grads.values())


def test_truncated_poisson_sampling():
    sampling = TruncatedPoisson(rate=0.2, capacity=14, num_records=NUM_RECORDS)
    engine, module, optimizer, private = attach(
        sampling=sampling, expected_batch_size=20, accountant="pld"
    )
    sizes = set()
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        sizes.add(len(x))
    assert max(sizes) <= 14
    assert 0 < engine.epsilon_if_secret(1e-3) < 100


def test_shuffled_batches_claim_no_amplification():
    data_loader = loader(shuffle=True)
    engine, module, optimizer, private = attach(
        data_loader=data_loader, poisson_sampling=False, noise_multiplier=2.0
    )
    train(module, optimizer, private, len(private))
    shuffled = engine.epsilon_if_secret(1e-3)
    engine, module, optimizer, private = attach(noise_multiplier=2.0)
    train(module, optimizer, private, len(private))
    assert engine.epsilon_if_secret(1e-3) < shuffled


# ---- budgets -------------------------------------------------------------------------------------


def test_target_epsilon_is_reached_from_below_and_never_passed():
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, private = engine.make_private_with_epsilon(
        module=module,
        optimizer=optimizer,
        data_loader=loader(),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
    )
    train(module, optimizer, private, 2 * len(private))
    assert 0.99 * 3.0 <= engine.get_epsilon(1e-3) <= 3.0
    spent = engine.ledger.num_intents
    with pytest.raises(BudgetSpent, match="would spend"):
        train(module, optimizer, private, len(private))
    assert engine.get_epsilon(1e-3) <= 3.0
    assert engine.ledger.num_intents - spent < len(private)


def test_the_budget_is_asked_before_a_batch_is_handed_out():
    budget = Budget(epsilon=0.5, delta=1e-3)
    engine, module, optimizer, private = attach(budget=budget, noise_multiplier=0.5)
    with pytest.raises(BudgetSpent):
        next(iter(private))
    assert engine.ledger.num_intents == 0
    del module, optimizer
