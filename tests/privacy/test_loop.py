"""The loop that people write: what it does around the engine is right, or refused in a sentence."""

import copy
import gc
import io
import math
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.privacy.common import (
    NUM_CLASSES,
    NUM_FEATURES,
    attach,
    data,
    loader,
    make_model,
    step_of,
    train,
)
from unison.clip import plan_clipping
from unison.errors import BadInput, UnsupportedOperation
from unison.privacy import Poisson, PrivacyEngine, Shuffled
from unison.privacy.sampling import Dealing, rows_to_plan
from unison.shard.ranks import Ranks

# ---- what is on torch's stack of modes -----------------------------------------------------------


def test_a_loop_that_ends_with_the_program_ends_in_silence():
    code = """
from torch.nn.functional import cross_entropy
from tests.privacy.common import attach
engine, module, optimizer, private = attach()
rows = (batch for batch in private)  # which nobody closes while there is a torch
x, y = next(rows)
cross_entropy(module(x), y).backward()
"""
    root = Path(__file__).parents[2]
    program = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(program, cwd=root, capture_output=True, text=True, check=True)
    assert found.stderr == ""


class WatchedRows(TensorDataset):
    """Rows that look, whenever one is read, whether somebody follows what they do."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.num_modes: list[int] = []

    def __getitem__(self, index):
        self.num_modes.append(len(_get_current_function_mode_stack()))
        return super().__getitem__(index)


def test_rows_are_read_while_nobody_follows():
    """Between batches too, where the last one has gone backward and the optimizer has stepped."""
    rows = WatchedRows(torch.randn(24, NUM_FEATURES), torch.randint(NUM_CLASSES, (24,)))
    _, module, optimizer, private = attach(data_loader=DataLoader(rows, batch_size=8))
    train(module, optimizer, private, 3)
    assert rows.num_modes
    assert not any(rows.num_modes)


# ---- GradScaler ----------------------------------------------------------------------------------


def test_a_grad_scaler_is_refused_before_budget_is_spent():
    engine, module, optimizer, private = attach()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UnsupportedOperation, match=r"GradScaler scaled the loss.*bfloat16"):
        step_of(module, private, scaler.scale)
    assert not engine.ledger.spending.events
    assert all(each.grad is None for each in module.parameters())
    private.abandon()
    train(module, optimizer, private, 1)  # the same engine trains on without it
    assert engine.ledger.spending.events.total() == 1


def test_a_grad_scaler_that_is_switched_off_changes_nothing():
    _engine, module, optimizer, private = attach()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step_of(module, private, scaler.scale)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    _, twin, its_optimizer, its_private = attach()
    step_of(twin, its_private)
    its_optimizer.step()
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_grad_scaler_of_another_model_is_not_the_engines_business():
    engine, module, optimizer, private = attach()
    scaler, plain = torch.amp.GradScaler("cpu"), make_model()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in private:
        scaler.scale(cross_entropy(plain(x), y)).backward()
        scaler.step(other)
        scaler.update()
        cross_entropy(module(x), y).backward()
        optimizer.step()
        break
    engine.detach()
    gc.collect()  # of engines that earlier tests left behind
    assert torch.amp.GradScaler.scale.__qualname__ == "GradScaler.scale"


# ---- copies --------------------------------------------------------------------------------------


def saved_and_loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "swa": lambda module: AveragedModel(module).module,
    "ema": lambda module: AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)).module,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("seed", [3, None], ids=["seeded", "secret"])
def test_copies_of_the_module_are_plain(how, seed):
    _engine, module, optimizer, private = attach(seed=seed)
    names = list(module.state_dict())
    train(module, optimizer, private, 2)
    twin = COPIES[how](module)
    assert list(twin.state_dict()) == names
    before = {name: each.clone() for name, each in module.state_dict().items()}
    gradients = [each.grad.clone() for each in module.parameters()]
    # It trains on anything, in the plain way, and the original does not hear of it.
    trainer = torch.optim.SGD(twin.parameters(), lr=0.1)
    plain = make_model()
    plain.load_state_dict(twin.state_dict())
    x, y = torch.randn(5, NUM_FEATURES), torch.randint(0, NUM_CLASSES, (5,))
    trainer.zero_grad()
    cross_entropy(twin(x), y).backward()
    cross_entropy(plain(x), y).backward()
    for mine, its in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    trainer.step()
    for name, each in module.state_dict().items():
        assert torch.equal(each, before[name])
    for each, gradient in zip(module.parameters(), gradients, strict=True):
        assert torch.equal(each.grad, gradient)
    # The original is private still, and the copy can be made private, too.
    private.abandon()
    with pytest.raises(BadInput, match="not a batch of its loader"):
        module(x)
    train(module, optimizer, private, 1)
    _, twin, trainer, others = attach(twin)
    train(twin, trainer, others, 1)


def test_what_is_pickled_holds_nothing_of_unison_and_no_key():
    engine, module, optimizer, private = attach(seed=None)
    train(module, optimizer, private, 1)
    key = engine._attached._key._bytes
    for what in (module, optimizer, module.state_dict(), optimizer.state_dict()):
        data = pickle.dumps(what)
        assert b"unison" not in data
        assert key not in data
    for what in (engine, private):
        with pytest.raises(TypeError, match="Key cannot be copied, pickled or saved"):
            pickle.dumps(what)


def test_copies_of_the_optimizer_are_plain():
    engine, module, _, private = attach()
    engine.detach()
    optimizer = torch.optim.Adam(module.parameters())
    engine, module, optimizer, private = attach(module, optimizer=optimizer)
    train(module, optimizer, private, 1)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not twin._optimizer_step_pre_hooks
        assert twin.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        for group in twin.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)  # nobody's business
        twin.step()
    train(module, optimizer, private, 1)


def test_an_average_follows_private_training():
    _engine, module, optimizer, private = attach()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = None
    for _ in range(3):
        train(module, optimizer, private, 1)
        average.update_parameters(module)
        now = module[0].weight.detach()
        expected = now.clone() if expected is None else 0.5 * expected + 0.5 * now
    torch.testing.assert_close(average.module.get_parameter("0.weight"), expected)
    average(torch.randn(2, NUM_FEATURES)).sum().backward()


def test_a_copy_amid_a_pass_is_refused_in_a_sentence():
    _, module, _, private = attach()
    x, _ = next(iter(private))
    module(x)
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(BadInput, match=r"0\.weight\. Copy it after backward"):
            how(module)


# ---- forks ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_fork_cannot_train_with_the_noise_of_its_parent(tmp_path):
    path = tmp_path / "ledger.jsonl"
    _engine, module, optimizer, private = attach(seed=None, ledger=path)
    train(module, optimizer, private, 1)
    iteration = iter(private)
    x, y = next(iteration)
    loss = cross_entropy(module(x), y)
    before = path.read_bytes()

    def go_on() -> None:
        loss.backward()

    def begin() -> None:
        iteration.close()
        private.abandon()
        next(iter(private))

    for use in (go_on, begin):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()

        def run(use: Callable[[], None] = use, pipe: Any = theirs) -> None:
            torch.set_num_threads(1)  # threads of the parent's do not come along
            try:
                use()
                pipe.send("went on")
            except (BadInput, RuntimeError) as error:  # with a GPU, torch refuses the first of them
                pipe.send(str(error))

        process = context.Process(target=run)
        process.start()
        assert ours.poll(60)
        message = ours.recv()
        is_torchs = use is go_on and "fork-based multiprocessing" in message
        assert is_torchs or "a fork of it, which would draw the same noise" in message
        process.join()
        assert path.read_bytes() == before
    loss.backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_workers_that_are_forks_read_for_a_secret_key():
    data = loader(num_workers=2, multiprocessing_context="fork")
    _engine, module, optimizer, private = attach(seed=None, data_loader=data)
    train(module, optimizer, private, 3)


# ---- the divisor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_poisson", [True, False])
def test_expected_batch_size_only_divides(is_poisson):
    """The rate is the loader's; the sum of the same draw is divided by another number."""
    found = []
    for divisor in (None, 48.0):
        engine, module, _optimizer, private = attach(
            expected_batch_size=divisor,
            poisson_sampling=is_poisson,
            noise_multiplier=0.0,
            data_loader=loader(12, shuffle=True),
        )
        wanted = Poisson(rate=0.1) if is_poisson else Shuffled(batch_size=12, num_records=120)
        assert private.sampling == engine.mechanism.sampling == wanted
        assert engine.mechanism.expected_batch_size == (divisor or 12)
        step_of(module, private)
        found.append([each.grad for each in module.parameters()])
    for usual, divided in zip(*found, strict=True):
        torch.testing.assert_close(usual, 4 * divided)


def test_noise_for_an_epsilon_does_not_depend_on_the_divisor():
    sigmas = []
    for divisor in (None, 48.0):
        engine, module = PrivacyEngine(accountant="rdp"), make_model()
        engine.make_private_with_epsilon(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=loader(12),
            target_epsilon=4.0,
            target_delta=1e-3,
            epochs=1,
            max_grad_norm=1.0,
            expected_batch_size=divisor,
        )
        sigmas.append(engine.mechanism.noise_multiplier)
    assert sigmas[0] == sigmas[1]


# ---- plans ---------------------------------------------------------------------------------------


def plans_of(steps: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[int], int]:
    """Rows that were planned for in some steps, and how many sizes the batches had."""
    planned: list[int] = []

    def counted(layers: Any, **others: Any) -> Any:
        planned.append(layers[0].batch)
        return plan_clipping(layers, **others)

    monkeypatch.setattr("unison.clip.functional.plan_clipping", counted)
    _, module, optimizer, private = attach(**settings)
    sizes = set()
    for _ in range(steps // len(private)):
        for x, y in private:
            sizes.add(len(x))
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
    return planned, len(sizes)


def test_poisson_sizes_do_not_plan_anew(monkeypatch):
    planned, num_sizes = plans_of(20, monkeypatch)
    assert num_sizes > 6
    assert planned == [26]  # 12 + 4·√(12·0.9), rounded up
    planned, num_sizes = plans_of(20, monkeypatch, max_physical_batch_size=8)
    assert num_sizes > 3
    assert planned == [8]


def test_a_shuffled_batch_is_planned_for_as_it_is(monkeypatch):
    data = loader(12, shuffle=True)
    planned, num_sizes = plans_of(10, monkeypatch, data_loader=data, poisson_sampling=False)
    assert (planned, num_sizes) == ([12], 1)


def test_larger_batches_than_usual_are_planned_for():
    """And a memory budget holds for them: a plan is of at least as many rows as it serves."""
    dealing = Dealing(Ranks(None), None, None, usual_size=10)
    assert [rows_to_plan(dealing, each) for each in (0, 1, 10, 11, 20, 21)] == [
        10,
        10,
        10,
        20,
        20,
        40,
    ]
    dealing = Dealing(Ranks(None), None, 25, usual_size=10)
    assert [rows_to_plan(dealing, each) for each in (1, 10, 11, 21, 25)] == [10, 10, 20, 25, 25]


def test_check_plans_what_steps_use():
    engine, module, optimizer, private = attach()
    plan = engine.check(torch.randn(5, NUM_FEATURES))
    train(module, optimizer, private, 3)
    assert engine.plan() is plan


# ---- several engines -----------------------------------------------------------------------------


def test_two_engines_on_one_module_are_refused_at_once():
    engine, module, optimizer, private = attach()
    with pytest.raises(
        BadInput, match=r"0\.weight is trained privately already, by another engine"
    ):
        attach(module)
    with pytest.raises(BadInput, match="by another engine"):
        attach(module, optimizer=optimizer)
    train(module, optimizer, private, 1)  # and the first one is as it was
    engine.detach()
    attach(module, optimizer=optimizer)


def test_two_engines_that_share_a_parameter_are_refused():
    _, module, _, _ = attach()
    other = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), module[2])
    with pytest.raises(BadInput, match=r"2\.weight is trained privately already"):
        attach(other)
    tied = make_model()
    tied[2].bias = module[2].bias
    with pytest.raises(BadInput, match=r"2\.bias is trained privately already"):
        attach(tied)


def test_two_engines_may_share_what_is_frozen():
    backbone = nn.Linear(NUM_FEATURES, 5).requires_grad_(False)
    for _ in range(2):
        _, module, optimizer, private = attach(nn.Sequential(backbone, nn.Linear(5, NUM_CLASSES)))
        train(module, optimizer, private, 1)


def test_a_private_loader_of_another_engine_is_refused():
    _, _, _, private = attach()
    with pytest.raises(BadInput, match="private already"):
        attach(data_loader=private)


# ---- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"noise_multiplier": 2.0}, r"noise_multiplier 1\.0, and make_private was given 2\.0"),
        ({"max_grad_norm": 0.25}, r"max_grad_norm 0\.5, and make_private was given 0\.25"),
        ({"batch_size": 24}, r"sampling .*'rate': 0\.1.* was given .*'rate': 0\.2"),
        ({"expected_batch_size": 24}, r"expected_batch_size 12, and make_private was given 24"),
    ],
)
def test_a_state_of_another_mechanism_is_refused(other, words):
    engine, module, optimizer, private = attach()
    train(module, optimizer, private, 2)
    state = engine.state_dict()
    resumed, module, optimizer, private = attach(**other)
    with pytest.raises(BadInput, match=words):
        resumed.load_state_dict(state)
    assert private.next_step == 0
    train(module, optimizer, private, 1)


def test_a_state_whose_noise_was_changed_goes_on_with_it():
    engine, module, optimizer, private = attach(accountant="odometer")
    train(module, optimizer, private, 1)
    engine.mechanism.noise_multiplier = 3.0
    state = engine.state_dict()
    resumed, *_ = attach(accountant="odometer")
    resumed.load_state_dict(state)
    assert resumed.mechanism.noise_multiplier == 3.0
    assert resumed.ledger.spending.is_chosen
    assert resumed.epsilon_if_secret(1e-5) == engine.epsilon_if_secret(1e-5) < math.inf
    resumed, *_ = attach()
    with pytest.raises(BadInput, match="is_chosen True"):
        resumed.load_state_dict(state)


# ---- the optimizer at every step -----------------------------------------------------------------


def test_a_parameter_that_the_optimizer_gets_later_is_refused_at_the_next_step():
    engine, module, optimizer, private = attach()
    head = nn.Linear(NUM_CLASSES, 2)
    iteration = iter(private)
    x, _ = next(iteration)
    optimizer.add_param_group({"params": list(head.parameters())})
    module(x).sum(1).mean().backward()
    before = head.weight.detach().clone()
    with pytest.raises(BadInput, match=r"shape \[2, 3\] that make_private did not see"):
        optimizer.step()
    assert torch.equal(head.weight, before)
    spent = engine.ledger.spending.events.total()
    with pytest.raises(BadInput, match=r"shape \[2, 3\]"):
        next(iteration)
    assert engine.ledger.spending.events.total() == spent


def test_a_parameter_that_the_optimizer_loses_is_refused():
    _, module, optimizer, private = attach()
    lost = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(BadInput, match=r"lost 2\.bias since make_private"):
        next(iter(private))
    optimizer.param_groups[0]["params"].append(nn.Parameter(lost.detach().clone()))
    with pytest.raises(BadInput, match="did not see"):
        next(iter(private))
    optimizer.param_groups[0]["params"][-1] = lost
    train(module, optimizer, private, 1)


def test_a_frozen_parameter_of_the_optimizer_may_not_be_thawed():
    module = make_model()
    outside = nn.Parameter(torch.zeros(4), requires_grad=False)
    optimizer = torch.optim.SGD([*module.parameters(), outside], lr=0.1)
    _, module, optimizer, private = attach(module, optimizer=optimizer)
    train(module, optimizer, private, 1)
    outside.requires_grad_()
    with pytest.raises(BadInput, match=r"shape \[4\] that make_private did not see"):
        next(iter(private))


def test_groups_of_the_optimizer_may_be_cut_anew():
    _, module, optimizer, private = attach()
    train(module, optimizer, private, 1)
    group = optimizer.param_groups[0]
    rest = {**group, "params": group["params"][2:], "lr": 0.01}
    group["params"] = group["params"][:2]
    optimizer.param_groups.append(rest)
    train(module, optimizer, private, 2)


def test_a_second_optimizer_finds_private_gradients_or_none():
    """With virtual batches there is no gradient before the last pass, and then a noisy one."""
    _engine, module, optimizer, private = attach(max_physical_batch_size=4, noise_multiplier=50.0)
    second = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in private:
        optimizer.zero_grad()
        before = [each.detach().clone() for each in module.parameters()]
        cross_entropy(module(x), y).backward()
        gradients = [each.grad for each in module.parameters()]
        if not private.current.is_last:
            assert gradients == [None] * 4
            second.step()
            for each, its in zip(module.parameters(), before, strict=True):
                assert torch.equal(each, its)
            continue
        assert all(each.norm() > 1 for each in gradients)  # σ·C / B = 2 per element
        second.step()
        break


# ---- gradients of what comes before the module ---------------------------------------------------


@pytest.mark.parametrize("clipping", ["auto", "ghost"])
def test_a_batch_that_takes_gradients_is_refused(clipping):
    engine, module, optimizer, private = attach(clipping=clipping)
    iteration = iter(private)
    x, y = next(iteration)
    x.requires_grad_()
    with pytest.raises(UnsupportedOperation, match=r"argument 0 of the module.*x\.detach\(\)"):
        module(x)
    with pytest.raises(UnsupportedOperation, match="argument 'input' of the module"):
        module(input=x)
    with pytest.raises(UnsupportedOperation, match="argument 0 of the module"):
        engine.check(x)
    assert not engine.ledger.spending.events
    cross_entropy(module(x.detach()), y).backward()
    assert x.grad is None
    optimizer.step()


def test_a_layer_before_the_module_is_refused():
    _engine, module, _, private = attach()
    before = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    x, y = next(iter(private))
    with pytest.raises(UnsupportedOperation, match="put that into the module"):
        module(before(x))
    with torch.no_grad():
        features = before(x)
    cross_entropy(module(features), y).backward()
    with pytest.raises(BadInput, match="went backward already"):
        module(features)


def test_a_second_call_of_a_batch_may_not_take_gradients_either():
    _, module, _, private = attach()
    x, _ = next(iter(private))
    module(x)
    with pytest.raises(UnsupportedOperation, match="argument 0"):
        module((2 * x).requires_grad_())
    module.eval()  # attributions of a model that is not being trained are nobody's business
    module(x.clone().requires_grad_())


@pytest.mark.parametrize("made", [lambda loss: 0.1 * loss.item(), lambda loss: 0.1 * loss.detach()])
def test_a_learning_rate_made_of_the_loss_is_refused(made):
    _, module, optimizer, private = attach()
    for x, y in private:
        loss = cross_entropy(module(x), y)
        loss.backward()
        optimizer.param_groups[0]["lr"] = made(loss)
        with pytest.raises(BadInput, match="the optimizer's lr was made of numbers read from"):
            optimizer.step()
        break


# ---- gradients that are nothing but rounding -----------------------------------------------------


def _divergence(z: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:  # of each row
    return (reference.softmax(-1) * (reference.log_softmax(-1) - z.log_softmax(-1))).sum(-1)


AGAINST_A_COPY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "divergence": lambda z, t: kl_div(
        z.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean"
    ),
    "soft labels": lambda z, t: cross_entropy(z, t.softmax(-1)),
    "by hand": lambda z, t: _divergence(z, t).mean(),
    "squares": lambda z, t: (z - t).square().mean(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", AGAINST_A_COPY)
def test_a_module_may_be_compared_with_its_copy(name, dtype):
    """Before the first step the two are equal, and what is left of their gradients is rounding."""
    model = make_model().to(dtype)
    x, y = data()
    rows = DataLoader(TensorDataset(x.to(dtype), y), batch_size=12)
    reference = copy.deepcopy(model).requires_grad_(False)
    _, module, optimizer, private = attach(model, data_loader=rows)
    for x, _ in private:
        optimizer.zero_grad()
        AGAINST_A_COPY[name](module(x), reference(x)).backward()
        optimizer.step()


def test_rows_that_are_counted_are_seen_in_rounding_too():
    model = make_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    _, module, _, private = attach(model)
    x, _ = next(iter(private))
    each = _divergence(module(x), reference(x))
    with pytest.raises(UnsupportedOperation, match="changes by neither 1 nor"):
        (each.sum() / torch.ones_like(each).sum().sqrt()).backward()


READINGS = {
    "number": lambda loss: loss.item(),
    "tensor": lambda loss: loss.detach(),
    "mean": lambda loss: loss.item() / 2,
}


@pytest.mark.parametrize("how", READINGS)
def test_a_scheduler_that_asks_for_the_loss_is_refused(how):
    _, module, optimizer, private = attach()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    read, message = READINGS[how], r"ReduceLROnPlateau was given a number that was read from"
    found = 0.0
    for x, y in private:
        loss = cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(BadInput, match=message):
            scheduler.step(read(loss))
        found = found + read(loss)
    if how != "tensor":  # which is followed where a batch is in somebody's hands
        with pytest.raises(BadInput, match=message):
            scheduler.step(found)
    scheduler.step(unison.public(float(found)))
    scheduler.step(2.5)
