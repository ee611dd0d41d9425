"""Replicas and parts of cut modules: what is handed out, and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import unison
from tests.harness import World, oracle, ranks, run_on_ranks
from tests.privacy.parallel import (
    Model,
    attach,
    cut,
    losses,
    mesh_for,
    plan_for,
    records,
)
from tests.privacy.parallel_runs import run
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Dense, Lookup, Product, part_of, per_sample
from unison.ops.records import shape_of

# --- replicas -------------------------------------------------------------------------------------

WHOLE = ["positions.weight", "norm.weight", "blocks.0.norm.bias", "blocks.0.down.bias"]
CUT = ["tokens.weight", "blocks.0.q.weight", "blocks.0.q.bias", "blocks.0.o.weight", "head.weight"]


def test_replicas_stay_equal_with_noise_from_the_operating_system():
    found = [each["own"] for each in run_on_ranks(4, run, {"degree": 2, "seed": None})]
    for name in WHOLE:
        assert all(torch.equal(found[0][name], each[name]) for each in found[1:]), name
    for name in CUT:
        for rank in (0, 1):
            assert torch.equal(found[rank][name], found[rank + 2][name]), name
        assert not torch.equal(found[0][name][:2, ...], found[1][name][:2, ...]), name


@ranks(2)
def test_replicated_parameters_count_once(world):
    """What a sum of squares over all ranks and parameters gives, as in Opacus, is another norm."""
    model = cut(Model("attention"), mesh_for(world, 2), "usual")
    engine, model, _, loader = attach(model, noise_multiplier=0.0)
    owner: Any = engine._attached.owner
    whole_norms, seen = owner.whole_norms, []

    def watched(norms: Any) -> Any:
        seen.append({name: each.squared.clone() for name, each in norms.items()})
        return whole_norms(norms)

    owner.whole_norms = watched
    (ids,) = next(iter(loader))
    losses(model, ids).mean().backward()
    (mine,) = seen
    twice = sum(mine.values()) * len(ids) ** 2
    dist.all_reduce(twice)  # over the tensor axis, replicated parameters too
    norms = engine.per_sample_norms()
    once = oracle.per_sample_norms(Model("attention"), losses, ids)
    assert torch.allclose(norms, once, rtol=1e-6, atol=0.0)
    assert (twice.sqrt() > 1.01 * once).all()
    extra = sum(each for name, each in mine.items() if not owner._is_cut[name]) * len(ids) ** 2
    assert torch.allclose(twice - extra, once.square(), rtol=1e-6, atol=0.0)


@ranks(2)
def test_a_share_of_a_gradient_is_not_taken_for_a_replica(world):
    """Tokens are cut, and a norm was forgotten in the plan: its gradient is in two shares."""
    from torch.distributed.tensor.parallel import parallelize_module

    plan = plan_for("sequence")
    del plan["blocks.*.mlp_norm"]
    model = parallelize_module(Model("attention"), mesh_for(world, 2), plan)
    _, model, _, loader = attach(model)
    (ids,) = next(iter(loader))
    loss = losses(model, ids).mean()
    with pytest.raises(UnsupportedOperation, match=r"all of blocks\.0\.mlp_norm\.(weight|bias)"):
        loss.backward()


# --- what is handed out ---------------------------------------------------------------------------


@ranks(2)
def test_gradients_are_distributed_as_parameters_are(world):
    model = cut(Model("attention"), mesh_for(world, 2), "sequence")
    before = dict(model.__dict__)
    engine, model, optimizer, loader = attach(model, granule=2)
    for (ids,) in loader:
        unison.batch_mean(losses(model, ids)).backward()
        break
    for name, parameter in model.named_parameters():
        assert type(parameter.grad) is type(parameter.data), name
        assert parameter.grad.placements == parameter.placements  # type: ignore[union-attr]
        assert parameter.grad.shape == parameter.shape
    optimizer.step()
    engine.detach()
    assert model.__dict__.keys() == before.keys()
    model.zero_grad()
    losses(model, records()[:3]).mean().backward()  # as torch does it
    assert all(parameter.grad is not None for parameter in model.parameters())


def run_with_ledger(world: World, path: str) -> float:
    model = cut(Model("mlp"), mesh_for(world, 2), "usual")
    engine, model, optimizer, loader = attach(model, ledger=path)
    for (ids,) in loader:
        optimizer.zero_grad()
        unison.batch_mean(losses(model, ids)).backward()
        optimizer.step()
    return engine.epsilon_if_secret(1e-3)


@pytest.mark.full
def test_one_rank_writes_the_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    spent = run_on_ranks(4, run_with_ledger, str(path))
    assert len(set(spent)) == 1
    assert spent[0] > 0
    lines = path.read_text().splitlines()
    assert sum('"intent"' in line for line in lines) == 5  # steps of an epoch


# --- what is refused ------------------------------------------------------------------------------


def tensor_axis(names: tuple[str, ...]) -> Any:
    """The last axis of a mesh; its name must be new, since torch takes equal parts for one mesh."""
    shape = (*(1 for _ in names[1:]), 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)[names[-1]]


@ranks(2)
def test_meshes_that_are_not_known(world):
    for names, match in [
        (("data", "pipe", "third"), "one of 3"),
        (("cp", "second"), "'cp' beside the tensor axis is not a data axis"),
    ]:
        model = cut(Model("mlp"), tensor_axis(names), "usual")
        with pytest.raises(UnsupportedOperation, match=match):
            attach(model)


@ranks(2)
def test_parameters_that_are_not_known(world):
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = mesh_for(world, 2)
    model: Any = cut(Model("mlp"), mesh, "usual")
    model.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(12), mesh, [Partial()]))
    with pytest.raises(UnsupportedOperation, match=r"norm\.weight has the placements"):
        attach(model)
    thin = parallelize_module(nn.Linear(6, 1), mesh, ColwiseParallel())
    with pytest.raises(UnsupportedOperation, match="one of them is empty"):
        attach(thin)
    model = cut(Model("mlp"), mesh, "usual")
    with torch.no_grad():
        model.norm.weight.add_(world.rank)
    with pytest.raises(BadInput, match="along the tensor axis hold different values"):
        attach(model)


@ranks(2)
def test_modules_that_are_not_known(world):
    mesh = mesh_for(world, 2)
    model: Any = cut(Model("mlp"), mesh, "usual")
    model.norm = DistributedDataParallel(model.norm)
    with pytest.raises(UnsupportedOperation, match="DistributedDataParallel around"):
        attach(model)
    model = cut(Model("mlp"), mesh, "usual")
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="run uncompiled: what parallelize_module has cut"):
        attach(model)


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return nn.functional.linear(input, self.weight + 1.0, self.bias)


@ranks(2)
def test_what_all_samples_share_of_a_part(world):
    mesh, model = mesh_for(world, 2), Model("mlp")
    model.blocks[0].up = Shifted(12, 20)
    engine, *_ = attach(cut(model, mesh, "usual"))
    with pytest.raises(UnsupportedOperation, match=r"blocks\.0\.up\.weight lies in parts"):
        engine.check(records()[:3, :-1])


@ranks(4)
def test_a_mesh_of_some_ranks(world):
    mesh = DeviceMesh("cpu", [0, 1])
    if world.rank > 1:
        return
    with pytest.raises(BadInput, match="holds 2 of 4 ranks"):
        attach(cut(Model("mlp"), mesh, "usual"))


def state_of(world: World, granule: int | None) -> Any:
    engine, *_ = attach(cut(Model("mlp"), mesh_for(world, 2), "usual"), granule=granule)
    return engine.state_dict()


@pytest.mark.full
def test_a_run_in_granules_keeps_its_tensor_axis():
    engine, *_ = attach(Model("mlp"), granule=2)
    with pytest.raises(BadInput, match="cut into 2 along the tensor axis"):
        engine.load_state_dict(run_on_ranks(2, state_of, 2)[0])
    engine, *_ = attach(Model("mlp"))
    engine.load_state_dict(run_on_ranks(2, state_of, None)[0])  # rounds otherwise, and may


# --- records of parts, without ranks --------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_part_of_a_record(dim):
    a, g, ids = torch.randn(3, 5, 7), torch.randn(3, 5, 4), torch.randint(-1, 6, (3, 5))
    whole = [
        Product(a, g, is_transposed=False, shape=(4, 7)),
        Product(a, g, is_transposed=True, shape=(7, 4)),
        Product(a, g, is_transposed=False, shape=(2, 2, 7)),
        Lookup(ids, g, (6, 4)),
        Dense(torch.randn(3, 4, 7)),
    ]
    for record in whole:
        start, size = 1, shape_of(record)[dim] - 1
        part = part_of(record, dim, start, size)
        wanted = per_sample(record).narrow(1 + dim, start, size)
        assert shape_of(part) == wanted.shape[1:]
        assert torch.allclose(per_sample(part), wanted, atol=1e-6)
