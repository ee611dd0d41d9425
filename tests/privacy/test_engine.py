"""The engine in the user's own loop: what ends up in `.grad`, and what is refused."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.harness.oracle import clipped_sum, per_sample_norms
from tests.privacy.common import (
    NUM_FEATURES,
    NUM_RECORDS,
    attach,
    data,
    loader,
    losses,
    make_model,
    train,
)
from unison.clip import MODES, clipped_gradients
from unison.errors import BadInput, UnsupportedOperation
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


def gradients_of_one_batch(mode: str, reduction: str = "mean", **settings) -> None:
    """Every logical batch's gradient, without noise, is that of the functional core."""
    engine, module, optimizer, private = attach(
        clipping=mode, noise_multiplier=0.0, loss_reduction=reduction, **settings
    )
    divisor = 12 if reduction == "mean" else 1
    plain = make_model()
    ids: list[Tensor] = []
    num_checked = 0
    for x, y in private:
        optimizer.zero_grad()
        cross_entropy(module(x), y, reduction=reduction).backward()
        ids.append(private.current.record_ids)
        if private.current.is_last:
            records, ids = torch.cat(ids), []
            plain.load_state_dict(module.state_dict())
            batch = (X[records], Y[records])
            expected = clipped_gradients(plain, losses, batch, max_norm=0.5)
            for name, parameter in module.named_parameters():
                wanted = expected.sums[name] / divisor
                error = (parameter.grad - wanted).norm() / wanted.norm()
                assert error <= 1e-6, (name, float(error))
            torch.testing.assert_close(engine.per_sample_norms(), expected.norms)
            num_checked += 1
        else:
            assert all(parameter.grad is None for parameter in module.parameters())
        optimizer.step()
    assert num_checked == len(private)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("physical", [None, 5])
def test_gradient_of_a_logical_batch(mode, physical):
    gradients_of_one_batch(mode, max_physical_batch_size=physical)


def test_gradient_of_summed_losses():
    gradients_of_one_batch("auto", reduction="sum", max_physical_batch_size=7)


def test_against_the_loop_over_samples():
    engine, module, _, private = attach(make_model(), noise_multiplier=0.0)
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    plain = make_model()
    norms = per_sample_norms(plain, losses, (x, y))
    torch.testing.assert_close(engine.per_sample_norms(), norms, rtol=1e-6, atol=0.0)
    for name, value in clipped_sum(plain, losses, (x, y), 0.5).items():
        error = (module.get_parameter(name).grad.double() * 12 - value).norm() / value.norm()
        assert error <= 1e-6


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_several_forward_passes_before_one_backward_pass():
    _, module, _, private = attach(Siamese(), noise_multiplier=0.0, clipping="ghost_bk")
    x, _ = next(iter(private))
    (module(x).square().sum(1) + module(2 * x).sin().sum(1)).mean().backward()

    def both(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1) + model(2 * x).sin().sum(1)

    plain = Siamese()
    plain.load_state_dict(module.state_dict())
    expected = clipped_gradients(plain, both, x, max_norm=0.5).sums
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad * 12, expected[name], rtol=1e-5, atol=1e-6)


def test_two_passes_and_several_forward_passes_are_refused():
    _, module, _, private = attach(Siamese(), clipping="ghost")
    x, _ = next(iter(private))
    with pytest.raises(UnsupportedOperation, match="'ghost' takes two backward passes"):
        (module(x).sum(1) + module(2 * x).sum(1)).mean().backward()


def test_gradients_of_the_batch_itself_come_once():
    for mode in ("ghost", "auto"):
        _, module, _, private = attach(clipping=mode)
        x, y = next(iter(private))
        wanted = x.clone().requires_grad_()
        cross_entropy(make_model()(wanted), y).backward()
        x.requires_grad_()
        cross_entropy(module(x), y).backward()
        torch.testing.assert_close(x.grad, wanted.grad)


# ---- a backward too many, or none ----------------------------------------------------------------


def test_a_second_backward_pass_of_one_batch_is_refused():
    """A peer silently keeps only the last micro-batch (0.68 relative error)."""
    _, module, _, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    with pytest.raises(BadInput, match="went backward already"):
        module(x)
    _, module, _, private = attach()
    x, y = next(iter(private))
    loss = cross_entropy(module(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(BadInput, match="once per batch"):
        loss.backward()


def test_half_of_a_batch_is_refused():
    _, module, _, private = attach()
    x, _ = next(iter(private))
    with pytest.raises(BadInput, match=r"handed out \d+ samples(.|\n)*max_physical_batch_size"):
        module(x[: len(x) // 2])


def test_a_batch_that_never_went_backward_is_refused():
    *_, private = attach()
    batches = iter(private)
    next(batches)
    with pytest.raises(BadInput, match="step 0 never went backward"):
        next(batches)


def test_a_physical_batch_that_was_skipped_is_refused():
    _, module, _, private = attach(max_physical_batch_size=4)
    batches = iter(private)
    next(batches)
    x, y = next(batches)
    assert private.current.index == 1
    with pytest.raises(BadInput, match="physical batch 1 of step 0 went backward where batch 0"):
        cross_entropy(module(x), y).backward()


def test_a_forward_pass_without_a_batch_of_the_loader():
    _, module, _, _ = attach()
    with pytest.raises(BadInput, match="not a batch of its loader"):
        module(X[:12])
    module.eval()
    module(X[:12])
    module.train()
    with torch.no_grad():
        module(X[:7])


def test_gradients_past_the_capture_are_refused():
    _, module, _, _ = attach()
    module.eval()
    with pytest.raises(UnsupportedOperation, match=r"a gradient reached '\d\.\w+' itself"):
        cross_entropy(module(X[:12]), Y[:12]).backward()


def test_gradients_of_somebody_else_are_refused():
    _, module, optimizer, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    module[0].weight.grad = torch.ones_like(module[0].weight)
    with pytest.raises(BadInput, match=r"0\.weight\.grad is not what the privacy engine put"):
        optimizer.step()


def test_gradients_may_be_changed_in_place():
    _, module, optimizer, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    optimizer.step()


def test_gradients_add_up_over_logical_batches_as_in_torch():
    found = {}
    for is_added in (True, False):
        _, module, optimizer, private = attach()
        batches = iter(private)
        parts = []
        for _ in range(2):
            x, y = next(batches)
            if not is_added:
                optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            parts.append(module[0].weight.grad.clone())
        found[is_added] = parts
    torch.testing.assert_close(found[True][1], found[False][0] + found[False][1])


def test_a_closure_is_refused():
    _, module, optimizer, private = attach()
    x, y = next(iter(private))
    cross_entropy(module(x), y).backward()
    with pytest.raises(BadInput, match="closure"):
        optimizer.step(lambda: 0.0)


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
    assert 0 < engine.get_epsilon(1e-3) < 100


def test_shuffled_batches_claim_no_amplification():
    data_loader = loader(shuffle=True)
    engine, module, optimizer, private = attach(
        data_loader=data_loader, poisson_sampling=False, noise_multiplier=2.0
    )
    train(module, optimizer, private, len(private))
    shuffled = engine.get_epsilon(1e-3)
    engine, module, optimizer, private = attach(noise_multiplier=2.0)
    train(module, optimizer, private, len(private))
    assert engine.get_epsilon(1e-3) < shuffled


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


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipping": "gost"}, "did you mean 'ghost'"),
        ({"clip_rule": "flaat"}, "did you mean 'flat'"),
        ({"loss_reduction": "none"}, "loss_reduction must be one of 'mean', 'sum'"),
        ({"criterion": nn.MSELoss()}, "no argument 'criterion': the loss is the user's own"),
        ({"grad_sample_mode": "ghost"}, "no argument 'grad_sample_mode': use clipping="),
        ({"sigma": 1.0}, r"no argument 'sigma'; docs/from-opacus\.md"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be 0 or more"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"expected_batch_size": 0.0}, "expected_batch_size must be above 0"),
        (
            {"sampling": Poisson(rate=0.1), "poisson_sampling": False},
            "leave poisson_sampling out",
        ),
        (
            {
                "adaptive_clipping": AdaptiveClipping(count_noise_multiplier=1),
                "clip_rule": "automatic",
            },
            "clip_rule='flat'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_used(settings, message):
    with pytest.raises(BadInput, match=message):
        attach(**settings)


def test_seeds_and_secrets():
    with pytest.raises(BadInput, match="seed= makes noise and sampling predictable"):
        PrivacyEngine().make_private(
            module=(module := make_model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=1,
        )
    with pytest.raises(BadInput, match=r"needs make_private\(seed="):
        PrivacyEngine(secure_noise=False).make_private(
            module=(module := make_model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    with pytest.warns(UserWarning, match="Nothing that it gives is private"):
        PrivacyEngine(secure_noise=False).make_private(
            module=(module := make_model()),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=1,
        )


def test_the_optimizer_has_the_modules_parameters_and_no_others():
    module = make_model()
    with pytest.raises(BadInput, match=r"does not have 2\.weight, 2\.bias"):
        attach(module, optimizer=torch.optim.SGD(module[0].parameters(), lr=0.1))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(BadInput, match="2 parameters that are not the module's"):
        attach(module, optimizer=optimizer)


def test_an_engine_attaches_once():
    engine, module, optimizer, _ = attach()
    with pytest.raises(BadInput, match="attached already"):
        engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_detach_gives_the_module_back():
    module = make_model()
    before = set(vars(module[0]))
    engine, module, optimizer, private = attach(module)
    train(module, optimizer, private, 2)
    engine.detach()
    assert set(vars(module[0])) == before
    optimizer.zero_grad()
    cross_entropy(module(X[:9]), Y[:9]).backward()
    plain = make_model()
    plain.load_state_dict(module.state_dict())
    cross_entropy(plain(X[:9]), Y[:9]).backward()
    assert torch.equal(module[0].weight.grad, plain[0].weight.grad)
    optimizer.step()
    with pytest.raises(BadInput, match="not attached"):
        engine.get_epsilon(1e-3)


def test_check_names_what_mixes_samples():
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    engine, *_ = attach(module)
    with pytest.raises(UnsupportedOperation, match="batch norm"):
        engine.check(X[:8])
    engine, *_ = attach()
    assert {each.layer.name for each in engine.check(X[:8]).layers} == {
        *("0.weight", "0.bias", "2.weight", "2.bias")
    }


def test_what_mixes_samples_is_caught_before_anything_is_spent():
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(NUM_FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    engine, module, _, private = attach(Mixes())
    x, _ = next(iter(private))
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        module(x)
    assert engine.ledger.num_intents == 0


def test_a_scheduler_that_steps_too_often_is_warned_of():
    _, module, optimizer, private = attach(max_physical_batch_size=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with pytest.warns(UserWarning, match="a scheduler that steps once per loop"):
        train(module, optimizer, private, 2)


def test_time_major_inputs():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(NUM_FEATURES, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:  # [tokens, batch, features]
            return self.head(self.rnn(x)[0])  # [tokens, batch, 3]

    _, module, _, private = attach(Recurrent(), batch_first=False, noise_multiplier=0.0)
    x, _ = next(iter(private))
    tokens = torch.stack([x, 2 * x])  # [2, batch, features]
    module(tokens).square().sum((0, 2)).mean().backward()
    plain = Recurrent()
    plain.load_state_dict(module.state_dict())
    loss = lambda model, rows: model(rows.movedim(0, 1)).square().sum((0, 2))  # noqa: E731
    expected = clipped_gradients(plain, loss, tokens.movedim(0, 1), max_norm=0.5).sums
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad * 12, expected[name], rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_get_bfloat16_gradients_from_float32_sums():
    x, y = data()
    dataset = torch.utils.data.TensorDataset(x.bfloat16(), y)
    _, module, optimizer, private = attach(
        make_model().bfloat16(), data_loader=torch.utils.data.DataLoader(dataset, batch_size=12)
    )
    train(module, optimizer, private, 2)
    assert module[0].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_activation_checkpointing(mode, is_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=is_reentrant)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        _, module, _, private = attach(Checkpointed(), clipping=mode, noise_multiplier=0.0)
        x, y = next(iter(private))
        cross_entropy(module(x), y).backward()
    plain = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
    names = {"0": "first", "2": "second"}
    plain.load_state_dict(
        {
            f"{a}.{kind}": module.state_dict()[f"{b}.{kind}"]
            for a, b in names.items()
            for kind in ("weight", "bias")
        }
    )
    expected = clipped_gradients(plain, losses, (x, y), max_norm=0.5).sums
    for a, b in names.items():
        found = module.get_parameter(f"{b}.weight").grad * 12
        torch.testing.assert_close(found, expected[f"{a}.weight"], rtol=1e-5, atol=1e-6)
