"""A K-FAC and a privacy engine never share a parameter, whatever modules hold it."""

import copy

import pytest
import torch
from torch import nn

import unison
from tests.harness import World, run_on_ranks
from tests.kfac.common import loss, settings
from tests.privacy.common import NUM_FEATURES, attach, make_model
from unison.errors import UnsupportedOperation
from unison.parallel import find_shared

REFUSED = r"weight is trained privately, and curvature of the private batch"


def with_parameter(model: nn.Sequential, weight: nn.Parameter) -> nn.Sequential:
    """Another module object around another layer, whose weight is the one given."""
    own = nn.Linear(weight.shape[1], weight.shape[0])
    own.weight = weight
    return nn.Sequential(own, *copy.deepcopy(model)[1:])


WRAPPED = {
    "itself": lambda model: model,
    "a list of its layers": lambda model: nn.Sequential(*model),
    "one layer": lambda model: nn.Sequential(model[0], nn.Linear(model[0].out_features, 3)),
    "inside another": lambda model: nn.Sequential(nn.Identity(), model),
    "a tied weight": lambda model: with_parameter(model, model[0].weight),
    "its data": lambda model: with_parameter(model, nn.Parameter(model[0].weight.data)),
    "a part of it": lambda model: with_parameter(model, nn.Parameter(model[0].weight.data[3:])),
    "transposed": lambda model: with_parameter(model, nn.Parameter(model[0].weight.data.mT)),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_curvature_of_private_parameters_is_refused(how):
    model = make_model()
    engine, *_ = attach(model)
    with pytest.raises(UnsupportedOperation, match=REFUSED):
        unison.KFAC(WRAPPED[how](model), settings())
    engine.detach()
    unison.KFAC(WRAPPED[how](model), settings()).detach()


@pytest.mark.parametrize("how", WRAPPED)
def test_parameters_with_curvature_are_not_made_private(how):
    model = make_model()
    kfac = unison.KFAC(WRAPPED[how](model), settings())
    with pytest.raises(UnsupportedOperation, match=r"0\.weight is preconditioned by a KFAC"):
        attach(model)
    kfac.detach()
    engine, *_ = attach(model)
    with pytest.raises(UnsupportedOperation, match=REFUSED):
        kfac.step()  # what it knows is of batches, whoever saw them
    engine.detach()


def test_one_step_on_private_data_before_they_are_private():
    model = make_model()
    kfac = unison.KFAC(model, settings())
    logits = model(torch.randn(6, NUM_FEATURES))
    kfac.sample(logits).backward()
    loss(logits).backward()
    kfac.step()
    with pytest.raises(UnsupportedOperation, match="detach\\(\\) the KFAC first"):
        attach(model)
    kfac.detach()
    model.zero_grad()
    engine, module, _, loader = attach(model)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    before = module[0].weight.grad.clone()
    with pytest.raises(UnsupportedOperation, match=REFUSED):
        kfac.step()
    assert torch.equal(module[0].weight.grad, before)
    engine.detach()


def test_parameters_that_move_are_found_where_they_are():
    model = make_model()
    other = with_parameter(model, nn.Parameter(torch.zeros_like(model[0].weight)))
    kfac = unison.KFAC(other, settings())
    engine, *_ = attach(model)
    other[0].weight.data = model[0].weight.data
    with pytest.raises(UnsupportedOperation, match=REFUSED):
        kfac.step()
    engine.detach()


def test_others_are_left_alone():
    model = make_model()
    kfac = unison.KFAC(copy.deepcopy(model), settings())
    engine, *_ = attach(model)
    unison.KFAC(make_model(), settings()).detach()
    kfac.step  # noqa: B018 - it lives until here
    engine.detach()
    del kfac
    kept = unison.KFAC(model, settings())
    del kept  # nobody can step with it any more
    attach(model)[0].detach()


@pytest.mark.parametrize("takes", [torch.func.jacrev, torch.func.grad])
def test_parameters_inside_of_torch_func_are_known(takes):
    """A private model elsewhere disturbs nobody; wrapped or not, its own parameters are refused."""
    model, other, x = make_model(), make_model(), torch.randn(4, 6)
    kfac = unison.KFAC(other, settings())
    engine, *_ = attach(model)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(other, params, (x,)).sum()

    takes(loss)(dict(other.named_parameters()))
    with pytest.raises(UnsupportedOperation, match=REFUSED):
        takes(loss)(dict(model.named_parameters()))
    engine.detach()
    del kfac


def test_pieces_of_one_buffer_are_not_one_another():
    buffer = torch.zeros(10)
    first, last, odd = nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:]), nn.Parameter(buffer[3:5])
    empty = nn.Parameter(torch.zeros(0))

    class Trainer:
        trained = (first, empty)

    assert find_shared({"last": last, "empty": nn.Parameter(torch.zeros(0))}, [Trainer]) is None
    assert find_shared({"last": last, "odd": odd}, [Trainer]) == "odd"
    assert find_shared({"empty": empty}, [Trainer]) == "empty"
    assert find_shared({"meta": nn.Parameter(torch.zeros(3, device="meta"))}, [Trainer]) is None


def sharded_both_ways(world: World, how: str) -> list[str]:
    model = make_model()
    if how == "units":
        unison.fully_shard(model)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (world.size,))
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    said = []
    kfac = unison.KFAC(model, settings())
    for attempt in (lambda: attach(model), lambda: unison.KFAC(model, settings()).detach()):
        try:
            engine, *_ = attempt() or (None,)
            said.append("accepted")
        except UnsupportedOperation as error:
            said.append(str(error).split(",")[0])
        kfac.detach()
    engine, *_ = attach(model)
    for attempt in (kfac.step, lambda: unison.KFAC(nn.Sequential(*model), settings())):
        with pytest.raises(UnsupportedOperation, match=REFUSED):
            attempt()
    engine.detach()
    return said


@pytest.mark.parametrize("how", ["units", "fsdp2"])
def test_parameters_that_are_cut(how):
    for said in run_on_ranks(2, sharded_both_ways, how):
        assert said == ["0.weight is preconditioned by a KFAC", "accepted"]
