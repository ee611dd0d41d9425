"""What is not finite on any rank changes nothing on all of them, and is counted and reported."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unison
from tests.harness import World, run_on_ranks
from tests.kfac.common import CLASSES, loss, observed, relative, settings
from tests.kfac.test_stacks import take_for_gpu
from unison.errors import BadInput
from unison.kfac import layers
from unison.shard.digest import full_parameters
from unison.shard.sharded_tensor import local_part

ROWS, FEATURES, NUM_STEPS = 6, 5, 8
KINDS = ("gradient", "input", "sum", "overflow", "square")
BAD_STEPS = (0, 5, 6)  # the first one, an update of the factors, and a step without one


def batch(step: int, world: World) -> tuple[Tensor, Tensor]:
    """This rank's rows; the second of three ranks has none."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    edges = [0, 4, 4, 6] if world.size == 3 else [0, 6]
    own = slice(edges[world.rank], edges[world.rank + 1])
    return x[own], y[own]


def make_model(how: str) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))
    match how:
        case "units":
            return unison.fully_shard(model, gradient_divisor=1)
        case "fsdp2":
            return torch.distributed.fsdp.fully_shard(model)
        case "ddp":
            return DistributedDataParallel(model)
    return model


def train(world: World, how: str, kind: str, bad: int, *, is_left_out: bool) -> dict[str, Any]:
    """Steps of which one is bad, or not there at all."""
    model = make_model(how)
    policy = "all" if how == "units" else "hybrid"  # G as columns, or that of the head alone
    most = 4 if how == "units" else 8192  # rows of a matrix: ranks share those of G
    changes = {"policy": policy, "max_factor_size": most}
    kfac = unison.KFAC(model, settings(update_every=5, decay=0.9, **changes))
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "overflow")
    for step in range(NUM_STEPS):
        is_bad = step == bad
        if is_bad and is_left_out:
            continue
        x, y = batch(step, world)
        if is_bad and world.rank == 0 and kind in ("input", "sum"):
            # A large one saturates: its gradient is 0, and its square is infinite.
            x[1, 2] = torch.inf if kind == "input" else 1e25
        optimizer.zero_grad()
        logits = model(x)
        if kfac.wants_statistics:
            kfac.sample(logits).backward()
        value = loss(logits, y) * len(x) / ROWS if len(x) else logits.sum()
        if is_bad and world.rank == 0 and kind == "overflow":
            value = value * 3e38
        scaler.scale(value).backward()
        if is_bad and kind in ("gradient", "square"):  # one element, on one rank
            part = local_part(next(model.parameters()).grad)
            sizes = [part.numel()] if world.size == 1 else world.gather(part.numel())
            if world.rank == max(rank for rank, size in enumerate(sizes) if size):
                part.view(-1)[-1:] = -torch.inf if kind == "gradient" else 1e25
        scaler.unscale_(optimizer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            kfac.step(grad_scaler=scaler)
        texts = [str(each.message) for each in said]
        assert len(texts) == is_bad, texts
        if is_bad:
            assert ("sums for the factors of" if kind == "sum" else "the gradient of") in texts[0]
            assert f"left step {step} out (1 in this run)" in texts[0]
        scaler.step(optimizer)
        scaler.update()
    assert kfac.skipped == (not is_left_out)
    state = kfac.state_dict()
    state.pop("skipped")
    return {"state": state, "parameters": {n: v.clone() for n, v in full_parameters(model)}}


def check_everything(world: World, how: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "BLOCK_ROWS", 2)
        check_kinds(world, how)


def check_kinds(world: World, how: str) -> None:
    """Every kind of a bad step at every place."""
    for kind, bad in itertools.product(KINDS, BAD_STEPS):
        if kind == "sum" and bad == 6:
            continue  # no sums are made there, and the gradient is finite
        found = train(world, how, kind, bad, is_left_out=False)
        expected = train(world, how, kind, bad, is_left_out=True)
        assert found["state"]["num_steps"] == expected["state"]["num_steps"] == NUM_STEPS - 1
        for a, b in zip(found["state"]["layers"], expected["state"]["layers"], strict=True):
            assert a["layer"] == b["layer"]
            assert a["tensors"].keys() == b["tensors"].keys()
            for key, value in b["tensors"].items():
                assert torch.equal(a["tensors"][key], value), (kind, bad, key)
        for name, value in expected["parameters"].items():
            assert torch.isfinite(value).all()
            assert torch.equal(found["parameters"][name], value), (kind, bad, name)


@pytest.mark.parametrize(("size", "how"), [(1, "none"), (3, "units")])
def test_later_steps_are_those_of_a_run_without_the_bad_one(size, how):
    run_on_ranks(size, check_everything, how)


def check_on_a_gpu(world: World) -> None:
    """Here on a CPU that is taken for one: the device leaves the step out, the host asks later."""
    with pytest.MonkeyPatch.context() as patch:
        take_for_gpu(patch, is_gpu=True)
        check_everything(world, "none")


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_gpu_is_not_waited_for(size):
    run_on_ranks(size, check_on_a_gpu)


@pytest.mark.full
@pytest.mark.parametrize(("size", "how"), [(1, "units"), (3, "ddp"), (3, "fsdp2")])
def test_and_everywhere_else(size, how):
    run_on_ranks(size, check_everything, how)


def gradients_of_loss(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = unison.KFAC(model, settings(fisher="empirical"))
    x, y = torch.randn(ROWS, FEATURES), torch.randint(0, CLASSES, (ROWS,))
    logits = model(x)
    kfac.sample(logits).backward()
    scaler.scale(loss(logits, y)).backward()
    if scaler.is_enabled():
        with pytest.raises(BadInput, match=r"call scaler\.unscale_\(optimizer\), then kfac\.step"):
            kfac.step(grad_scaler=scaler)
    scaler.unscale_(optimizer)
    kfac.step(grad_scaler=scaler)
    return {name: each["g"] for name, each in kfac.factors().items()}


def test_the_empirical_fisher_is_of_the_loss_without_its_scale():
    found = gradients_of_loss(torch.amp.GradScaler("cpu", init_scale=2.0**12))
    expected = gradients_of_loss(torch.amp.GradScaler("cpu", enabled=False))
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_it_is_counted_on(tmp_path):
    model = make_model("none")
    kfac = unison.KFAC(model, settings())
    for bad in (True, False):
        logits = model(torch.full((3, FEATURES), torch.nan if bad else 1.0))
        if kfac.wants_statistics:
            kfac.sample(logits).backward()
        loss(logits).backward()
        if bad:
            with pytest.warns(UserWarning, match=r"left step 0 out \(1 in this run\)"):
                kfac.step()
            assert all(each.grad is None for each in model.parameters())
            assert not kfac.layers
        else:
            kfac.step()
    kfac.save(tmp_path / "curvature")
    other = unison.KFAC(model, settings())
    other.load(tmp_path / "curvature")
    assert (other.num_steps, other.skipped) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_gradient_is_the_one_whose_square_is_finite(dtype):
    root = 2.0**64 if dtype == torch.float32 else 2.0**512
    model = nn.Linear(2, 3, bias=False).to(dtype)
    kfac = unison.KFAC(model, settings(policy="identity", graft="none"))
    least = torch.tensor(root, dtype=dtype)
    for value in (least, torch.nextafter(least, torch.zeros((), dtype=dtype))):
        model.weight.grad = torch.zeros(3, 2, dtype=dtype)
        model.weight.grad[1, 1] = -value
        if bool(value.square().isfinite()):
            kfac.step()
        else:
            with pytest.warns(UserWarning, match="the gradient of 'weight' .* is not finite"):
                kfac.step()
    assert (kfac.skipped, kfac.num_steps) == (1, 1)


def train_past(fisher: str, giving_up: str | None) -> list[Tensor]:
    """Parameters after three steps; before the second, the loop gives another batch up."""
    model = make_model("none").double()
    kfac = unison.KFAC(model, settings(fisher=fisher))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        x, y = (
            each.double() if each.is_floating_point() else each
            for each in batch(step, World(rank=0, size=1, seed=0))
        )
        if step == 1 and giving_up is not None:
            optimizer.zero_grad()
            logits = model(x * (torch.nan if giving_up == "nan" else 100.0))
            kfac.sample(logits).backward()
            if giving_up == "forget":  # as where the gradient's norm was not finite
                loss(logits, y).backward()
                kfac.forget()
        optimizer.zero_grad()
        logits = model(x)
        kfac.sample(logits).backward()
        loss(logits, y).backward()
        kfac.step()
        optimizer.step()
    assert (kfac.num_steps, kfac.skipped) == (3, 0)
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("value", ["finite", "nan"])
def test_a_sampled_pass_without_a_loss_does_not_count(fisher, value):
    with pytest.warns(UserWarning, match=r"step 1 .* without 1 of 2 .*Call kfac\.forget\(\)"):
        found = train_past(fisher, value)
    assert all(map(torch.equal, found, train_past(fisher, None)))


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_a_batch_that_is_forgotten_leaves_no_trace(fisher):
    """Its rows have no numbers either: later labels are those of a run without it."""
    assert all(map(torch.equal, train_past(fisher, "forget"), train_past(fisher, None)))


@pytest.mark.parametrize("how", ["one loss", "a loss each", "losses of other passes"])
def test_all_passes_of_a_step_count(how):
    torch.manual_seed(0)
    model, x = nn.Linear(FEATURES, CLASSES).double(), torch.randn(ROWS, FEATURES).double()
    kfac, whole = unison.KFAC(model, settings(fisher="exact")), settings(fisher="exact")
    values = []
    for rows in x.split(2):
        logits = model(rows)
        kfac.sample(logits).backward()
        values.append(loss(model(rows) if how == "losses of other passes" else logits))
        if how == "a loss each":
            values.pop().backward()
    if values:
        sum(values).backward()
    kfac.step()
    expected = observed(model, x, whole).factors()["weight"]
    for side, value in kfac.factors()["weight"].items():
        assert relative(value, expected[side]) < 1e-12


def test_sums_that_are_not_finite_may_be_of_a_batch_that_was_given_up():
    model = make_model("none")
    kfac, x = unison.KFAC(model, settings()), torch.ones(3, FEATURES)
    for scale in (torch.nan, 1.0):
        model.zero_grad()  # of the first one
        logits = model(x * scale)
        kfac.sample(logits).backward()
        loss(logits).backward()
    with pytest.warns(UserWarning, match=r"made of 2 sampled passes \(call kfac\.forget\(\)"):
        kfac.step()
