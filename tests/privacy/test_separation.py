"""The user's own loss is followed: right, or refused in one sentence before budget is spent."""

import gc
import json
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import unison
from tests.harness import run_on_ranks
from tests.privacy.common import NUM_CLASSES, attach, data, make_model
from unison.clip import clipped_gradients
from unison.errors import BadInput, UnisonError, UnsupportedOperation
from unison.privacy import loss_check, loss_program, loss_tape

STATE = r"earlier step|changes from step|left torch"


def modes() -> list:
    return torch.overrides._get_current_function_mode_stack()


def one_step(engine, module, optimizer, private, loss) -> Tensor:
    for x, y in private:
        optimizer.zero_grad()
        loss(module, x, y).backward()
        break
    return torch.cat([each.grad.flatten() for each in module.parameters()])


def refused(loss, match, **settings) -> None:
    engine, module, optimizer, private = attach(**settings)
    with pytest.raises(UnisonError, match=match):
        one_step(engine, module, optimizer, private, loss)
    assert engine.ledger.num_intents == 0, "budget was spent"
    assert all(each.grad is None for each in module.parameters())
    engine.detach()
    assert modes() == []


def centred(module, x, y):
    h = module(x)
    return (h - h.mean(0)).square().sum(1).mean()


# --- what is refused -----------------------------------------------------------------------------


def test_a_statistic_of_the_batch_names_the_operation_and_its_line():
    refused(centred, r"rows meet in sub \(test_separation.py:\d+\).*reduction='none'")


def test_class_weights_and_uneven_labels_name_the_remedy():
    weight = torch.tensor([0.1, 1.0, 1.0])
    refused(lambda m, x, y: F.cross_entropy(m(x), y, weight=weight), "class weights.*'none'")
    refused(
        lambda m, x, y: F.cross_entropy(m(x), torch.where(y == 0, -100, y)),
        "rows have different numbers of them.*per_sample_loss",
    )


def test_labels_that_count_unevenly_are_found_in_a_later_batch():
    engine, module, optimizer, private = attach()
    seen = 0
    with pytest.raises(UnsupportedOperation, match="different numbers"):  # noqa: PT012
        for x, y in private:
            labels = y if seen < 2 else torch.where(torch.arange(len(y)) == 0, -100, y)
            F.cross_entropy(module(x), labels).backward()
            optimizer.step()
            seen += 1
    assert seen == 2
    engine.detach()


def test_a_loss_that_nobody_followed_is_refused():
    refused_by = "was not followed"
    engine, module, _, private = attach()
    x, y = next(iter(private))
    with pytest.raises(BadInput, match=refused_by):
        torch.autograd.backward(F.cross_entropy(module(x), y))
    engine.detach()
    refused(lambda m, x, y: torch.func.vmap(F.cross_entropy)(m(x), y).mean(), "follow")


def test_a_number_read_from_the_batch_is_followed_into_the_loss():
    refused(lambda m, x, y: F.cross_entropy(m(x), y) / (y == 1).sum().item(), "couples rows")
    refused(lambda m, x, y: F.cross_entropy(m(x), y) / float((y == 1).sum()), "left torch")

    def by_truth(module, x, y):
        loss = F.cross_entropy(module(x), y)
        return loss * 2 if loss.item() > 1.0 else loss

    refused(by_truth, "goes one way or another")

    def by_float(module, x, y):
        loss = F.cross_entropy(module(x), y)
        if float(loss.detach()) > 1e9:
            loss = loss * 2
        return loss

    refused(by_float, r"__float__\(\).*conditions")


def read(loss: Tensor) -> float:
    return float(loss.detach())


def test_a_read_in_a_function_is_found_however_the_function_is_called():
    def called(module, x, y):
        loss = F.cross_entropy(module(x), y)
        value = read(loss)
        return loss * 2 if value > 1e9 else loss

    def unpacked(module, x, y):  # a call for which CPython leaves the frame at another offset
        loss = F.cross_entropy(module(x), y)
        value = read(*[loss])
        return loss * 2 if value > 1e9 else loss

    for each in (called, unpacked):
        refused(each, r"__float__\(\) \(test_separation.py.*conditions")


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_conditions_after_backward_stay_legal(is_unpacked):
    engine, module, optimizer, private = attach()
    for x, y in private:
        loss = F.cross_entropy(module(x), y)
        value = read(*[loss]) if is_unpacked else read(loss)
        loss.backward()
        if value > 0:
            optimizer.step()
        break
    assert engine.ledger.num_intents == 1
    engine.detach()


OUR_LOOP = """
from contextlib import contextmanager

@contextmanager
def following(ids):
    if int(ids.min()) < 0:
        raise ValueError
    yield

def step(module, x, y, loss):
    with following(y):
        out = module(x)
    if int(y.max()) >= 0:
        loss(out, y).backward()
"""


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_what_a_loop_of_ours_reads_tells_the_user_nothing(is_unpacked):
    # As unison.train does; before, conditions of whoever called it were asked, or not, as Dynamo
    # had evaluated frames.
    ours = {}
    exec(compile(OUR_LOOP, loss_tape.OURS + "train/step.py", "exec"), ours)
    engine, module, _, private = attach()
    x, y = next(iter(private))
    arguments = (module, x, y, F.cross_entropy)
    ours["step"](*arguments) if is_unpacked else ours["step"](module, x, y, F.cross_entropy)
    assert all(each.grad is not None for each in module.parameters()) or not is_unpacked
    engine.detach()


def test_metrics_before_backward_stay_legal():
    printed = []

    def loss_of(module, x, y):
        out = module(x)
        loss = F.cross_entropy(out, y)
        value = loss.item()
        printed.append(f"{value:.3f} {float(loss.detach()):.2f} {loss} {value + 1:.1f}")
        printed.append((out.argmax(1) == y).float().mean().item())
        printed.append(out.detach().numpy().mean())
        return loss

    parts = attach(noise_multiplier=0.0)
    followed = one_step(*parts, loss_of)
    parts[0].detach()
    plain = attach(noise_multiplier=0.0)
    assert torch.equal(followed, one_step(*plain, lambda m, x, y: F.cross_entropy(m(x), y)))
    plain[0].detach()
    assert isinstance(printed[1], float)
    assert json.loads(json.dumps(printed[1])) == pickle.loads(pickle.dumps(printed[1]))
    assert type(pickle.loads(pickle.dumps(printed[1]))) is float


@pytest.mark.parametrize("after", [False, True], ids=["before backward", "after backward"])
@pytest.mark.parametrize("read", ["item", "tensor", "float"])
def test_what_one_step_made_of_its_data_does_not_enter_the_next(read, after):
    engine, module, optimizer, private = attach()
    average, steps = 1.0, 0

    def updated(loss):
        loss = loss.detach()
        value = {"item": loss.item, "tensor": lambda: loss, "float": lambda: float(loss)}
        return 0.9 * average + 0.1 * value[read]()

    with pytest.raises(UnsupportedOperation, match=STATE):  # noqa: PT012
        for x, y in private:
            loss = F.cross_entropy(module(x), y)
            scaled = loss / average
            if not after:
                average = updated(loss)
            scaled.backward()
            if after:
                average = updated(loss)
            optimizer.step()
            steps += 1
    assert steps <= 1
    engine.detach()


def test_what_one_step_made_of_its_data_is_not_sent_back_in_the_next():
    engine, module, optimizer, private = attach()
    factor, steps = torch.ones(()), 0
    with pytest.raises(UnsupportedOperation, match="backward brings what an earlier step made"):  # noqa: PT012
        for x, y in private:
            loss = F.cross_entropy(module(x), y)
            loss.backward(factor)
            factor = loss.detach()
            optimizer.step()
            steps += 1
    assert steps == 1
    engine.detach()


def test_a_public_number_may_change():
    engine, module, optimizer, private = attach()
    for step, (x, y) in enumerate(private):
        loss = F.cross_entropy(module(x), y)
        (loss * unison.public(1 + step / 10)).backward()
        optimizer.step()
        float(loss.detach())
    assert step == 9
    engine.detach()


def test_a_trainable_tensor_after_the_module_is_refused():
    head = nn.Linear(NUM_CLASSES, NUM_CLASSES)
    refused(
        lambda m, x, y: F.cross_entropy(head(m(x)), y),
        r"trainable tensor of shape \[3, 3\].*Use it inside",
    )


def test_a_parameter_that_meets_the_outputs_outside_of_the_module_is_refused():
    refused(lambda m, x, y: F.cross_entropy(m(x) @ m[2].weight @ m[2].weight.T, y), "trainable")


def test_hooks_on_outputs_must_not_couple_rows():
    def hooked(module, x, y):
        out = module(x)
        out.register_hook(lambda g: g / g.norm())
        return F.cross_entropy(out, y)

    refused(hooked, "could not be followed")


def test_nor_where_the_loop_draws_random_numbers():
    """They are drawn again as they were: other numbers excuse no difference."""

    def hooked(module, x, y):
        out = F.dropout(module(F.dropout(x, 0.2)), 0.1)
        out.register_hook(lambda g: g / g.norm())
        return F.cross_entropy(out, y)

    refused(hooked, "could not be followed")


def test_generators_of_the_users_go_on_as_they_are():
    engine, module, optimizer, private = attach(noise_multiplier=0.0)
    gen, alone = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for x, y in private:
        noise = torch.empty_like(x).normal_(generator=gen)
        assert torch.equal(noise, torch.empty_like(x).normal_(generator=alone))
        out = module(x + x.new_empty(x.shape).copy_(x).bernoulli_(0.5, generator=gen))
        torch.empty_like(x).bernoulli_(0.5, generator=alone)
        optimizer.zero_grad()
        F.cross_entropy(out, y).backward()
        optimizer.step()
    engine.detach()


def test_a_learning_rate_made_of_losses_is_refused():
    engine, module, optimizer, private = attach()
    batches = iter(private)
    x, y = next(batches)
    loss = F.cross_entropy(module(x), y)
    loss.backward()
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + loss.item())
    before = [each.detach().clone() for each in module.parameters()]
    with pytest.raises(BadInput, match="lr was made of numbers read from private batches"):
        optimizer.step()
    assert all(map(torch.equal, before, module.parameters()))
    engine.detach()


# --- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 5])
def test_a_term_of_parameters_alone_is_added_after_the_noise(physical):
    def loss_of(module, x, y):
        term = sum(each.square().sum() for each in module.parameters())
        return F.cross_entropy(module(x), y) + 0.05 * term

    settings = {"max_physical_batch_size": physical}
    grads = []
    for loss in (loss_of, lambda m, x, y: F.cross_entropy(m(x), y)):
        engine, module, _, private = attach(**settings)
        for x, y in private:
            loss(module, x, y).backward()
            if private.current.is_last:
                break
        grads.append([each.grad for each in module.parameters()])
        engine.detach()
    for with_term, without, each in zip(*grads, make_model().parameters(), strict=True):
        torch.testing.assert_close(with_term, without + 0.1 * each.detach())


def test_terms_of_parameters_are_clear_of_later_steps():
    engine, module, optimizer, private = attach(noise_multiplier=0.0)
    is_with_term = True
    for x, y in private:
        optimizer.zero_grad()
        before = [each.detach().clone() for each in module.parameters()]
        loss = F.cross_entropy(module(x), y)
        if is_with_term:
            loss = loss + module[0].weight.square().sum()
        loss.backward()
        sums = clipped_gradients(
            make_with(before),
            lambda m, rows: F.cross_entropy(m(rows[0]), rows[1], reduction="none"),
            (x, y),
            max_norm=0.5,
        ).sums
        expected = sums["0.weight"] / 12 + (2 * before[0] if is_with_term else 0)
        torch.testing.assert_close(module[0].weight.grad, expected, rtol=1e-5, atol=1e-6)
        is_with_term = not is_with_term
        if private.next_step == 4:
            break
    engine.detach()


def make_with(values: list[Tensor]) -> nn.Module:
    model = make_model()
    with torch.no_grad():
        for each, value in zip(model.parameters(), values, strict=True):
            each.copy_(value)
    return model


def pairs(records: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Two rows of each record, one after the other: what was chosen and what was rejected."""
    x = torch.stack([each[0] for each in records])
    y = torch.stack([each[1] for each in records])
    return torch.stack([x, x.flip(1)], 1).flatten(0, 1), y.repeat_interleave(2)


def preference(out: Tensor) -> Tensor:
    return -F.logsigmoid(out[0::2].sum(1) - out[1::2].square().sum(1))


@pytest.mark.parametrize("clipping", ["auto", "ghost"])
def test_pairs_of_rows_are_one_unit(clipping):
    loader = DataLoader(TensorDataset(*data()), batch_size=12, collate_fn=pairs)
    settings = {"noise_multiplier": 0.0, "rows_per_sample": 2, "data_loader": loader}
    engine, module, _, private = attach(clipping=clipping, **settings)
    x, _ = next(iter(private))
    preference(module(x)).mean().backward()
    expected = clipped_gradients(
        make_model(),
        lambda m, rows: preference(m(rows.flatten(0, 1))),
        x.unflatten(0, (-1, 2)),
        max_norm=0.5,
    )
    for name, each in module.named_parameters():
        torch.testing.assert_close(each.grad * 12, expected.sums[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(engine.per_sample_norms(), expected.norms, rtol=1e-5, atol=1e-6)
    engine.detach()


def test_pairs_that_are_not_declared_are_refused():
    refused(lambda m, x, y: preference(m(x[: len(x) // 2 * 2])).mean(), "rows_per_sample|samples")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


doubled = Doubled.apply  # looked up before anybody records


class Coupled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


coupled = Coupled.apply


def test_custom_functions_are_followed_however_they_are_called():
    parts = attach()
    one_step(*parts, lambda m, x, y: F.cross_entropy(doubled(m(x)), y))
    parts[0].detach()
    refused(lambda m, x, y: F.cross_entropy(coupled(m(x)), y), "couples rows")


def test_compiled_criteria_are_followed():
    criterion = torch.compile(lambda out, y: F.cross_entropy(out * 2, y), backend="eager")
    parts = attach()
    one_step(*parts, lambda m, x, y: criterion(m(x), y))
    parts[0].detach()
    bad = torch.compile(lambda out, y: F.cross_entropy(out - out.mean(0), y), backend="eager")
    refused(lambda m, x, y: bad(m(x), y), "couples rows")


# --- granules and ranks --------------------------------------------------------------------------


def granular(module, x, y):
    losses = F.cross_entropy(module(x), y, reduction="none")
    return unison.batch_mean(losses)


def granular_centred(module, x, y):
    losses = F.cross_entropy(module(x), y, reduction="none")
    return unison.batch_mean(losses / losses.detach().mean())


def test_granules_are_followed():
    parts = attach(granule=4)
    one_step(*parts, granular)
    parts[0].detach()
    refused(granular_centred, "couples rows", granule=4)


def losses_on_ranks(world):
    parts = attach(granule=2, recheck=True)
    engine, module, optimizer, private = parts
    for step, (x, y) in enumerate(private):
        optimizer.zero_grad()
        granular(module, x, y).backward()
        optimizer.step()
        if step == 3:
            break
    try:
        one_step(*parts, granular_centred)
    except UnsupportedOperation as error:
        return str(error)
    finally:
        engine.detach()
    return "passed"


def test_ranks_check_without_collectives_of_their_own():
    for message in run_on_ranks(2, losses_on_ranks):
        assert "couples rows" in message


# --- the recorder --------------------------------------------------------------------------------


def test_nothing_stays_on_the_stack_of_modes():
    engine, module, optimizer, private = attach()
    for x, y in private:
        assert len(modes()) == 1
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert modes() == []
    for x, y in private:
        with torch.device("cpu"):
            F.cross_entropy(module(x), y).backward()
        optimizer.step()
        break
    assert modes() == []
    with torch.device("cpu"):  # it ends after the recorder has begun
        x, y = next(iter(private))
    assert [type(each) for each in modes()] == [loss_tape.LossRecorder]
    engine.detach()
    assert modes() == []


def test_torch_compiles_again_when_the_last_recorder_ends():
    """Whichever of several loops ends first."""
    import torch._dynamo.eval_frame as compiler  # a recorder looks whether it is there

    engines = []
    for _ in range(2):
        engine, _, _, private = attach()
        next(iter(private))
        engines.append(engine)
    assert compiler._stance.stance == "force_eager"
    engines[0].detach()
    assert compiler._stance.stance == "force_eager"
    engines[1].detach()
    assert compiler._stance.stance == "default"
    assert modes() == []


def test_results_are_not_kept_alive():
    engine, module, _, private = attach()
    x, y = next(iter(private))
    out = module(x)
    big = out * 3
    ref = weakref.ref(big)
    loss = F.cross_entropy(big, y)
    del big
    assert ref() is None  # of these operations, autograd keeps another result
    loss.backward()
    engine.detach()


def computed_tensors() -> dict[int, Tensor]:
    """The results of operations that are alive and have a history, by their numbers."""
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Tensor]
    return {id(each): each for each in alive if each.requires_grad and not each.is_leaf}


def test_checks_leave_no_tensors_behind():
    """A graph that holds its own output would never be freed."""
    before = computed_tensors()  # of other tests
    engine, module, optimizer, private = attach()
    for x, y in private:
        (module(x).log_softmax(1).gather(1, y[:, None]).mean() * -1).backward()
        optimizer.step()
    del x, y
    assert computed_tensors().keys() == before.keys()
    engine.detach()


def test_large_outputs_are_checked_in_a_part_of_their_rows(monkeypatch):
    monkeypatch.setattr(loss_check, "FEW_ELEMENTS", 40)
    parts = attach(batch_size=24)
    one_step(*parts, lambda m, x, y: F.cross_entropy(m(x).view(-1, NUM_CLASSES), y))
    parts[0].detach()
    refused(centred, "couples rows", batch_size=24)
    shaped = attach(batch_size=24)
    one_step(
        *shaped,
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").view(y.shape).sum() / len(x),
    )
    shaped[0].detach()
    fixed = attach(batch_size=24)
    one_step(*fixed, lambda m, x, y: (m(x) * torch.ones(len(x), 1)).square().sum(1).mean())
    fixed[0].detach()


def test_other_paths_are_checked_when_they_are_first_taken():
    engine, module, optimizer, private = attach()
    with pytest.raises(UnsupportedOperation, match="couples rows"):  # noqa: PT012
        for step, (x, y) in enumerate(private):
            loss = centred if step == 4 else lambda m, x, y: F.cross_entropy(m(x), y)
            loss(module, x, y).backward()
            optimizer.step()
    assert step == 4
    engine.detach()


def test_known_paths_are_checked_again_at_powers_of_two():
    for recheck, expected in ((True, 4), (False, 1)):
        engine, module, optimizer, private = attach(recheck=recheck)
        for x, y in private:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
        check = engine._attached._loss_check
        assert check.num_checks == expected, "passes 1, 2, 4 and 8 of 10"
        engine.detach()


def diffused(module, x, y):
    t, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return (module((1 - t) * x + t * noise) - (noise - x)[:, :NUM_CLASSES]).square().mean()


def masked(module, x, y):
    is_masked = torch.bernoulli(torch.full(x.shape, 0.3)).bool()
    target = F.one_hot(y, NUM_CLASSES) * torch.randn(x.shape)[:, :NUM_CLASSES]
    return (module(x.masked_fill(is_masked, 0)) - target).square().mean()


def dropped(module, x, y):
    return (F.dropout(module(F.dropout(x, 0.2)), 0.1) - x[:, :NUM_CLASSES]).square().mean()


@pytest.mark.parametrize("loss", [diffused, masked, dropped])
def test_random_numbers_of_the_loop_belong_to_their_rows(loss):
    """A batch of another size draws others: that alone is no dependence on the size."""
    engine, module, optimizer, private = attach(noise_multiplier=0.0)
    for x, y in private:
        optimizer.zero_grad()
        loss(module, x, y).backward()
        optimizer.step()
    assert engine.ledger.num_commits == 10
    engine.detach()
    refused(lambda m, x, y: loss(m, x, y) / len(x), "neither 1 nor .*, the factor of a mean")
    refused(lambda m, x, y: loss(m, x, y) * m(x).mean(), "rows meet in")


# How a mean is changed by the number of rows, and in how many passes that is found out at most.
OF_ROWS = {
    "a root": (lambda value, n, step: value / n**0.5, 3),
    "numpy's root": (lambda value, n, step: value * np.sqrt(n), 3),
    "a square": (lambda value, n, step: value * n / n**2, 3),
    "a logarithm": (lambda value, n, step: value / math.log(n + 1), 3),
    "one more": (lambda value, n, step: value * (1 + 1 / n), 8),
    "a table": (lambda value, n, step: value * (0.37, 1.3, 0.62, 2.1, 0.9)[n % 5], 20),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_number_that_the_number_of_rows_decides_is_refused(name):
    """Python tells nobody of `len(x)`, so that passes of several sizes are compared."""
    change, most = OF_ROWS[name]
    engine, module, optimizer, private = attach()
    step = 0
    with pytest.raises(UnsupportedOperation, match="gradient"):  # noqa: PT012
        for step, (x, y) in enumerate(batch for _ in range(2) for batch in private):
            change(F.cross_entropy(module(x), y), len(x), step).backward()
            optimizer.step()
    assert step < most
    engine.detach()


@pytest.mark.parametrize(
    "change",
    [
        lambda value, step: value * step / 100,
        lambda value, step: value * 0.5**step,
        lambda value, step: value * (1 + step % 2),
        lambda value, step: value * (0.3 if step < 7 else 0.1),
        lambda value, step: value * (1 + step),
        lambda value, step: value * math.cos(step),
        lambda value, step: value / (1 + step) ** 0.5,
    ],
)
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.full)])
def test_a_number_of_a_schedule_is_not(change, seed):
    engine, module, optimizer, private = attach(seed=seed, recheck=True)
    for step, (x, y) in enumerate(batch for _ in range(3) for batch in private):
        optimizer.zero_grad()
        change(F.cross_entropy(module(x), y), step).backward()
        optimizer.step()
    assert engine.ledger.num_commits == 30
    engine.detach()


def test_a_number_that_rows_decide_may_change_nothing():
    """Rows of padding that a loss leaves out are as many as it likes."""
    engine, module, optimizer, private = attach(recheck=True)
    for x, y in private:
        optimizer.zero_grad()
        whole = F.pad(module(x), (0, 0, 0, 40 - len(x)))
        F.cross_entropy(whole[: len(x)], y).backward()
        optimizer.step()
    assert engine.ledger.num_commits == 10
    engine.detach()


@pytest.mark.parametrize(
    ("sizes", "number", "expected"),
    [
        ([5, 7], lambda n, step: n**0.5, True),
        ([4, 9], lambda n, step: n**0.5, False),  # 2 and 3 may be chance
        ([4, 9, 16], lambda n, step: n**-0.5, True),
        ([5, 7], lambda n, step: 1.0, False),
        ([5, 5, 5], lambda n, step: n**0.5, False),
        ([2, 3, 4, 6], lambda n, step: 3.0 + n, True),
        ([2, 3, 4], lambda n, step: 0.5**step, False),
        ([2, 3, 2, 3, 2, 3], lambda n, step: step % 2, False),
        ([5, 7, 9, 5, 7, 9, 5], lambda n, step: math.sin(n), True),
        ([5, 7, 9, 5, 7, 9, 5], lambda n, step: math.sin(n) + step, False),
        ([0, 1], lambda n, step: n**0.5, False),
        ([], None, False),
    ],
)
def test_what_is_a_function_of_the_number_of_rows(sizes, number, expected):
    history = [(size, number(size, step)) for step, size in enumerate(sizes)]
    assert loss_program.is_function_of_size(history) is expected


def with_numbers(records):
    return *default_collate(records), [float(i + len(records)) for i, _ in enumerate(records)]


@pytest.mark.parametrize(
    ("make", "match"),
    [(torch.tensor, "rows meet in div"), (torch.FloatTensor, "out of sight.*torch.tensor")],
)
def test_weights_that_python_makes_of_several_records_are_refused(make, match):
    settings = {"batch_size": 12, "collate_fn": with_numbers}
    records = DataLoader(TensorDataset(*data()), **settings)
    engine, module, _, private = attach(data_loader=records)
    with pytest.raises(UnsupportedOperation, match=match):  # noqa: PT012
        for x, y, numbers in private:
            weights = make(numbers)
            losses = F.cross_entropy(module(x), y, reduction="none")
            (losses * weights / weights.mean()).mean().backward()
    engine.detach()


def test_every_torch_function_has_one_handling():
    assert loss_tape.handling_of(Tensor.shape.__get__)[0] is loss_tape.Handling.SIZE
    assert loss_tape.handling_of(torch.autograd.grad)[0] is loss_tape.Handling.OPERATION
    assert loss_tape.handling_of(Tensor.grad.__get__)[0] is loss_tape.Handling.QUESTION
    assert loss_tape.handling_of(Tensor.add_)[0] is loss_tape.Handling.WRITE
    assert loss_tape.handling_of(Tensor.__float__)[0] is loss_tape.Handling.READ
