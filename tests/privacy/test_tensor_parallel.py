"""Private training of modules that torch's `parallelize_module` has cut: the oracle's result."""

import functools
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
    EXPECTED_BATCH_SIZE,
    KINDS,
    PLANS,
    Model,
    attach,
    cut,
    full,
    losses,
    mesh_for,
    plan_for,
    private_run,
    records,
)
from unison.clip import AUTO, MODES
from unison.errors import BadInput, UnsupportedOperation
from unison.ops import Dense, Lookup, Product, part_of, per_sample


def run(world: World, case: dict) -> dict:
    return private_run(world, **case)


@functools.cache
def alone(**case: Any) -> dict:
    return private_run(None, **case)


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of a parameter, relative to the whole."""
    scale = sum(float(each.double().square().sum()) for each in expected.values()) ** 0.5
    errors = [float((found[name].double() - expected[name].double()).norm()) for name in expected]
    return max(errors) / scale


@functools.cache
def oracle_norms(kind: str) -> Tensor:
    """Of all records."""
    return oracle.per_sample_norms(Model(kind), losses, records())


def without_noise(kind: str) -> dict[str, Any]:
    """A step whose result the oracle knows, in which half of all records are clipped."""
    clip_norm = float(oracle_norms(kind).median())
    return {"kind": kind, "steps": 1, "noise_multiplier": 0.0, "max_grad_norm": clip_norm}


def check_oracle(found: dict, case: dict) -> None:
    """Norms, coefficients and sums of the first step, without noise."""
    clip_norm, ids = case["max_grad_norm"], found["records"][0]
    norms = oracle_norms(case["kind"])[ids]
    assert norms.min() < clip_norm < norms.max()
    assert torch.allclose(found["norms"][0], norms, rtol=1e-6, atol=0.0)
    sums = oracle.clipped_sum(Model(case["kind"]), losses, records()[ids], clip_norm)
    gradients = {n: g * EXPECTED_BATCH_SIZE for n, g in found["gradients"][0].items()}
    assert relative(gradients, sums) < 1e-6


@pytest.mark.parametrize("mode", [*MODES, AUTO])
def test_every_mode_is_the_oracle(mode):
    case = without_noise("attention")
    for found in run_on_ranks(2, run, {**case, "clipping": mode}):
        check_oracle(found, case)


SHORT = ("usual", "tables by columns", "norms distributed", "sequence")


@pytest.mark.parametrize(
    "plan", [p if p in SHORT else pytest.param(p, marks=pytest.mark.full) for p in PLANS]
)
@pytest.mark.full
def test_every_plan_is_the_oracle(plan):
    case = without_noise("attention")
    for found in run_on_ranks(2, run, {**case, "plan": plan}):
        check_oracle(found, case)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_kind_of_model_is_the_oracle(kind):
    case = without_noise(kind)
    for found in run_on_ranks(2, run, case):
        check_oracle(found, case)


@ranks(2)
def test_logits_that_stay_cut(world):
    """A module that returns a distributed tensor, and torch's loss over a cut vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    case = without_noise("attention")
    model = cut(Model("attention"), mesh_for(world, 2), "logits cut")
    settings = {name: case[name] for name in ("noise_multiplier", "max_grad_norm")}
    engine, model, _, loader = attach(model, **settings)
    (ids,) = next(iter(loader))
    with loss_parallel():
        logits = model(ids[:, :-1])  # [batch, tokens, vocabulary]
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = {"norms": [engine.per_sample_norms()], "records": [loader._draws.records(0)]}
    gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    check_oracle(found | {"gradients": [gradients]}, case)


# --- several steps, with noise --------------------------------------------------------------------


def check_same_run(found: dict, expected: dict) -> None:
    assert list(map(Tensor.tolist, found["records"])) == list(
        map(Tensor.tolist, expected["records"])
    )
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for norms, wanted in zip(found["norms"], expected["norms"], strict=True):
        assert torch.allclose(norms, wanted, rtol=1e-5, atol=0.0)
    for name, wanted in expected["parameters"].items():
        assert (found["parameters"][name] - wanted).norm() < 1e-5 * wanted.norm(), name


@pytest.mark.parametrize("plan", ["usual", "sequence"])
@pytest.mark.full
def test_noise_does_not_depend_on_the_cuts(plan):
    for found in run_on_ranks(2, run, {"plan": plan}):
        check_same_run(found, alone())


SETTINGS = {
    "passes": {"max_physical_batch_size": 2},
    "layers": {"clip_rule": "per_layer"},
    "automatic": {"clip_rule": "automatic"},
    "sum": {"loss_reduction": "sum"},
}


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_do_what_they_do_on_one_process(settings):
    case = {"kind": "mlp", **SETTINGS[settings]}
    for found in run_on_ranks(2, run, case):
        check_same_run(found, alone(**case))


@pytest.mark.full
@pytest.mark.parametrize("plan", ["usual", "tables by columns", "norms distributed"])
def test_four_parts(plan):
    """Heads, columns and rows in four parts; of the table's rows the last is the smallest."""
    for found in run_on_ranks(4, run, {"plan": plan}):
        check_same_run(found, alone())


# --- beside a data axis ---------------------------------------------------------------------------


def test_sums_run_over_the_data_axis_and_squares_do_not():
    case = without_noise("attention")
    for found in run_on_ranks(4, run, {**case, "degree": 2}):
        check_oracle(found, case)


def test_noise_is_drawn_once_per_element_on_both_axes():
    for found in run_on_ranks(4, run, {"degree": 2}):
        check_same_run(found, alone())


def check_same_bits(found: dict, expected: dict) -> None:
    assert found["losses"] == expected["losses"]
    for norms, wanted in zip(found["norms"], expected["norms"], strict=True):
        assert torch.equal(norms, wanted)
    for name, wanted in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], wanted), name


def test_granules_are_the_same_bits_at_any_size_of_the_data_axis():
    case = {"granule": 2, "degree": 2}
    one = run_on_ranks(2, run, case)
    two = run_on_ranks(4, run, case)
    assert {len(ids) % 2 for ids in one[0]["records"]} == {0, 1}  # with padding, and without
    for rank, found in enumerate(two):
        check_same_bits(found, one[rank % 2])
    check_same_run(one[0], alone(granule=2))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ghost", "recompute_bk"])
@pytest.mark.parametrize("kind", ["tied", "checkpointed"])
def test_granules_in_modes_of_two_passes(kind, mode):
    case = {"kind": kind, "clipping": mode, "granule": 2, "degree": 2}
    one = run_on_ranks(2, run, case)[0]
    two = run_on_ranks(4, run, {**case, "max_physical_batch_size": 2})[3]
    check_same_bits(two, one | {"losses": two["losses"]})  # those of passes are added by the test
    check_same_run(one, alone(granule=2, kind=kind))


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
    owner: Any = engine._attached._owner
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
    return engine.get_epsilon(1e-3)


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
    with pytest.raises(UnsupportedOperation, match="is compiled"):
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
        start, size = 1, record.shape[dim] - 1
        part = part_of(record, dim, start, size)
        wanted = per_sample(record).narrow(1 + dim, start, size)
        assert part.shape == wanted.shape[1:]
        assert torch.allclose(per_sample(part), wanted, atol=1e-6)
