"""Private training under torch's own FSDP2: the results of one process, at FSDP2's own cost."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World, ranks, run_on_ranks
from tests.privacy.common import attach
from tests.privacy.sharded import CONFIG, losses, private_run, relative, rows
from tests.shard.fsdp2.common import Collectives, fsdp2
from tests.shard.fsdp2.test_attach import state_of
from tests.shard.fsdp2.test_bits import every_part, nothing
from tests.shard.test_ordered import checkpoint_inside, checkpoint_outside
from unison.capture.capture import PLACING
from unison.clip import MODES
from unison.errors import BadInput, UnsupportedOperation
from unison.models import build
from unison.privacy import Poisson
from unison.shard import auto_shard, find_blocks, full_parameters
from unison.shard.fsdp2.checks import param_groups_of
from unison.shard.fsdp2.model import ordered_model_of

# Draws of 1, 1, 3, 4, 0, 0, ... samples: ranks without any, and whole batches too.
SHORT = {"rate": 0.06, "steps": 6}
LONG = {"rate": 0.06, "steps": 20}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def run(world: World, case: dict) -> dict:
    return private_run(world, **case)


@functools.cache
def alone(mode: str, granule: int | None, steps: int) -> dict:
    case = {"how": "none", "mode": mode, "granule": granule, "rate": 0.06, "steps": steps}
    return run_on_ranks(1, run, case)[0]


def check_fast(size: int, mode: str, length: dict = SHORT) -> None:
    expected = alone("auto", None, length["steps"])  # all modes give the same gradients
    assert expected["sizes"].count(0) >= 2
    for found in run_on_ranks(size, run, {**length, "how": "fsdp2", "mode": mode}):
        assert found["sizes"] == expected["sizes"]
        assert relative(found, expected) <= 1e-6
        for norms, wanted in zip(found["norms"], expected["norms"], strict=True):
            assert norms == pytest.approx(wanted, rel=1e-5)


def check_bits(size: int, mode: str, length: dict = SHORT) -> None:
    expected = alone(mode, 2, length["steps"])
    for found in run_on_ranks(size, run, {**length, "how": "fsdp2", "mode": mode, "granule": 2}):
        for each in ("losses", "norms", "digest"):
            assert found[each] == expected[each], each


@pytest.mark.parametrize(("size", "mode"), [(1, "auto"), (2, "ghost"), (4, "auto")])
def test_fast_is_one_process(size, mode):
    check_fast(size, mode)


@pytest.mark.parametrize(("size", "mode"), [(1, "ghost"), (2, "auto"), (2, "ghost"), (4, "auto")])
def test_ordered_has_the_bits_of_one_process(size, mode):
    check_bits(size, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_every_mode(mode):
    for size in (1, 2, 3, 4):
        check_fast(size, mode, LONG)
        check_bits(size, mode, LONG)


# --- other models, other ways to shard them -------------------------------------------------------


def data(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows()), batch_size=batch_size)


def step_by_step(model: nn.Module, optimizer: Any, private: Any, steps: int) -> list[float]:
    """The loop that users write; returns the losses of logical batches."""
    found, share = [], 0.0
    while len(found) < steps:
        for (ids,) in private:
            optimizer.zero_grad()
            loss = unison.batch_mean(losses(model, ids))
            loss.backward()
            share += loss.item()
            if private.current.is_last:
                found, share = [*found, share], 0.0
            optimizer.step()
            if len(found) == steps:
                break
    return found


def shard(model: Any, world: World, how: str, parts: Callable, options: dict[str, Any]) -> None:
    match how:
        case "none":
            return
        case "units":
            auto_shard(model, reducer="ordered", gradient_divisor=1, **options)
            return
        case "hybrid":
            names, shape = ("copies", "parts"), (2, world.size // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        case _:
            mesh = init_device_mesh("cpu", (world.size,))
    for part in parts(model):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if how == "ordered before":
        unison.use_ordered_reduction(model)


def whole(model: nn.Module, how: str) -> dict[str, list]:
    if how != "hybrid":
        return {name: value.double().tolist() for name, value in full_parameters(model)}
    return {name: each.full_tensor().double().tolist() for name, each in model.named_parameters()}


def trained(
    world: World,
    *,
    how: str = "fsdp2",
    config: Any = CONFIG,
    change: Callable[[nn.Module], None] | None = None,
    parts: Callable[[Any], list[nn.Module]] = find_blocks,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    model: Any = build(config, seed=3)
    if change is not None:
        change(model)
    shard(model, world, how, parts, options or {})
    trainable = [each for each in model.parameters() if each.requires_grad]
    engine, model, optimizer, private = attach(
        model,
        seed=5,
        optimizer=torch.optim.AdamW(trainable, lr=1e-2),
        data_loader=data(),
        sampling=Poisson(rate=0.15),
        expected_batch_size=4,
        **{"noise_multiplier": 0.5, "max_grad_norm": 0.2, **settings},
    )
    found = {
        "losses": step_by_step(model, optimizer, private, steps=3),
        "norms": engine.per_sample_norms().tolist(),
        "parameters": whole(model, how),
    }
    engine.detach()
    assert (ordered_model_of(model) is not None) == (how == "ordered before")
    return found


def trained_as(world: World, case: dict) -> dict:
    return trained(world, **case)


VARIANTS: dict[str, dict[str, Any]] = {
    "kept after forward": {"options": {"reshard_after_forward": False}},
    "everything at the root": {"parts": nothing},
    "every part by itself": {
        "parts": every_part,
        "config": replace(CONFIG, family="decoder", tie_head=False),
    },
    "checkpointed blocks": {"change": checkpoint_inside},
    "checkpointed from outside": {"change": checkpoint_outside, "clipping": "ghost"},
    "several passes": {"max_physical_batch_size": 2},
    "ordered before": {"how": "ordered before"},
}
OF_SHARDING = {"options", "parts"}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.full
def test_the_same_bits_with(name):
    case = {"granule": 2, **VARIANTS[name]}
    plain = {key: value for key, value in case.items() if key not in OF_SHARDING}
    expected = run_on_ranks(1, trained_as, {**plain, "how": "none"})[0]
    for found in run_on_ranks(2, trained_as, case):
        if name == "several passes":  # each tells its share of the loss: a sum rounds otherwise
            assert found.pop("losses") == pytest.approx(expected["losses"], rel=1e-6)
        assert found == {key: expected[key] for key in found}


@pytest.mark.full
def test_kept_in_smaller_shards_after_forward():
    expected = run_on_ranks(1, trained_as, {"how": "none", "granule": 2})[0]
    case = {"granule": 2, "options": {"reshard_after_forward": 2}}
    assert run_on_ranks(4, trained_as, case) == [expected] * 4


def test_copies_of_shards():
    for granule in (None, 2):
        expected = run_on_ranks(1, trained_as, {"granule": granule, "how": "none"})[0]
        for found in run_on_ranks(4, trained_as, {"granule": granule, "how": "hybrid"}):
            assert relative(found, expected) <= (1e-6 if granule is None else 0)


def checkpoint_reentrant(model: Any) -> None:
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=True)


def freeze(model: Any) -> None:
    """A frozen parameter beside trained ones, a whole frozen module, and one that is never used."""
    model.layers[0].ln1.weight.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.unused = nn.Linear(3, 5)


def blocks_together(model: Any) -> list[nn.Module]:
    return [list(model.layers)]  # type: ignore[list-item]


FAST_VARIANTS: dict[str, dict[str, Any]] = {
    "reentrant checkpointing": {"change": checkpoint_reentrant},
    "frozen and unused": {"change": freeze, "parts": lambda m: [*m.layers, m.unused]},
    "blocks in one group": {"parts": blocks_together},
}


def fast_variant(world: World, name: str, how: str) -> dict:
    return trained(world, how=how, **FAST_VARIANTS[name])


@pytest.mark.parametrize("name", FAST_VARIANTS)
@pytest.mark.full
def test_one_process_with(name):
    expected = run_on_ranks(1, fast_variant, name, "none")[0]
    for found in run_on_ranks(2, fast_variant, name, "fsdp2"):
        assert relative(found, expected) <= 1e-6


def test_bf16():
    case = {"options": {"mp_policy": BF16}}
    expected = run_on_ranks(1, trained_as, {"how": "none"})[0]
    found = run_on_ranks(2, trained_as, case)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-2)
    assert found["norms"] == pytest.approx(expected["norms"], rel=3e-2)
    assert relative(found, expected) <= 5e-3
    policy = unison.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    units = {"how": "units", "options": {"mp_policy": policy}, "granule": 2}
    ordered = run_on_ranks(1, trained_as, units)[0]
    for size in (1, 2):
        assert run_on_ranks(size, trained_as, {**case, "granule": 2})[0] == ordered


# --- what it costs --------------------------------------------------------------------------------


class Traffic(Collectives):
    """Counts the elements that reduce-scatters take in too."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "reduce_scatter" in func._schema.name:
            self.reduced.append(args[1].numel() * args[1].element_size())
        return super().__torch_dispatch__(func, types, args, kwargs)


@ranks(2)
def test_the_communication_of_fsdp2_itself(world):
    ids = rows()[:4]
    plain: Any = fsdp2(build(CONFIG, seed=3), world)
    with Traffic() as ordinary:
        losses(plain, ids).mean().backward()
    assert ordinary.counts["_allgather_base_"] == 5
    assert ordinary.counts["_reduce_scatter_base_"] == 3
    # Two backward passes: FSDP2 frees everything after the first one, the root's too.
    for mode, num_gathers in (("auto", 5), ("ghost", 8)):
        model: Any = fsdp2(build(CONFIG, seed=3), world)
        _, model, optimizer, private = attach(
            model, seed=5, data_loader=data(), sampling=Poisson(rate=0.2), clipping=mode
        )
        step_by_step(model, optimizer, private, 1)  # learns
        (batch,) = next(iter(private))
        with Traffic() as seen:
            losses(model, batch).mean().backward()
        assert seen.counts["_allgather_base_"] == num_gathers
        assert sorted(seen.reduced) == sorted(ordinary.reduced)
        assert seen.counts.keys() == ordinary.counts.keys()


# --- around the loop ------------------------------------------------------------------------------


@ranks(2)
def test_nothing_is_left_behind(world):
    model: Any = fsdp2(build(CONFIG, seed=3), world)
    ids = rows()[:, :-1]
    with torch.no_grad():
        expected = model(ids)  # FSDP2 leaves the root's parameters full
    model.reshard()
    parameters, before = list(model.parameters()), state_of(model)
    for granule in (None, 2):
        with torch.no_grad():
            model(ids)
        engine, _, optimizer, private = attach(
            model,
            seed=5,
            optimizer=torch.optim.SGD(parameters, lr=0.0),
            data_loader=data(),
            granule=granule,
            sampling=Poisson(rate=0.2),
        )
        with pytest.raises(BadInput, match="trained privately already"):
            attach(model, seed=5, data_loader=data())
        step_by_step(model, optimizer, private, 2)
        with torch.no_grad():
            assert torch.equal(model(ids), expected)
        step_by_step(model, optimizer, private, 1)
        assert all(group.is_sharded for group in groups_of(model))
        assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
        for parameter in parameters:
            assert parameter.grad.placements == parameter.placements
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.to_local().shape == parameter.to_local().shape
        assert unison.grad_norm(model) > 0
        optimizer.zero_grad()
        engine.detach()
        assert state_of(model) == before
    losses(model, rows()[:2]).mean().backward()  # FSDP2's own
    assert all(each.grad is not None for each in parameters)


def groups_of(model: nn.Module) -> list[Any]:
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    return [group for each in modules for group in param_groups_of(each)]


class Scale(torch.autograd.Function):
    """Takes a parameter past torch functions."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Scaled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.weight = nn.Embedding(37, 6), nn.Parameter(torch.ones(6))
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        match self.how:
            case "custom function":
                return Scale.apply(x, self.weight)
            case "mixed":
                return (x - x.mean(0)) * self.weight
            case _:
                return x * self.weight


def attached(module: Any, **settings: Any) -> Any:
    return attach(module, seed=5, data_loader=data(), **settings)


@ranks(1)
def test_refused(world):
    for granule in (None, 2):
        model: Any = unison.use_ordered_reduction(fsdp2(build(CONFIG, seed=3), world))
        reason = r"make_private\(granule=\)" if granule is None else "leave poisson_sampling out"
        with pytest.raises(BadInput, match=reason):
            attached(model, granule=granule, sampling=Poisson(rate=1), poisson_sampling=False)
        assert PLACING not in model.__dict__
        assert ordered_model_of(model) is not None  # as before
    model = build(CONFIG, seed=3)
    for block in find_blocks(model):
        fully_shard(block)
    with pytest.raises(BadInput, match=r"'token_embeddings.weight' is trained and not sharded"):
        attached(model)
    model = fully_shard(nn.Linear(6, 6), shard_placement_fn=lambda _: Shard(0))
    model.bias = nn.Parameter(torch.zeros(6))
    with pytest.raises(BadInput, match="'bias' is trained and not sharded"):
        attached(model)
    model = nn.Linear(6, 6, bias=False)
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(UnsupportedOperation, match=r"'weight' has the placements \(Shard\(dim=1\)"):
        attached(model)
    model = build(CONFIG, seed=3)
    fully_shard(list(model.layers))
    with pytest.raises(UnsupportedOperation, match="several modules in one fully_shard call"):
        attached(fully_shard(model), granule=2)
    assert PLACING not in model.__dict__


@ranks(2)
def test_gradients_past_the_engine_are_refused(world):
    engine, model, *_ = attached(fsdp2(Scaled("custom function"), world, nothing))
    with pytest.raises(UnsupportedOperation, match="a gradient reached 'weight' itself"):
        engine.check(rows())
    engine.detach()
    model.how = "seen"  # and FSDP2 has forgotten the pass
    engine, *_ = attached(model)
    engine.check(rows())
    model.eval()
    with pytest.raises(UnsupportedOperation, match=r"a gradient reached 'embedding.weight' itself"):
        model(rows()).sum().backward()


@ranks(2)
def test_a_refused_model_can_go_on(world):
    model = fsdp2(Scaled("mixed"), world, nothing)
    with torch.no_grad():
        model(rows())  # FSDP2 makes some of its state in the first pass
    model.reshard()
    before = state_of(model)
    engine, *_ = attached(model)
    with pytest.raises(UnsupportedOperation, match="samples mix"):
        engine.check(rows())
    engine.detach()
    assert all(group.is_sharded for group in groups_of(model))
    assert state_of(model) == before
    model(rows()).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
