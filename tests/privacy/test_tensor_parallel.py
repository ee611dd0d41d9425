"""Private training of modules that torch's `parallelize_module` has cut: the oracle's result."""

import pytest
import torch
from torch import Tensor, nn

from tests.harness import ranks, run_on_ranks
from tests.privacy.loaders import records_of
from tests.privacy.parallel import (
    KINDS,
    PLANS,
    Model,
    attach,
    cut,
    full,
    mesh_for,
)
from tests.privacy.parallel_runs import alone, check_oracle, run, without_noise
from unison.clip import AUTO, MODES


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
    found = {"norms": [engine.per_sample_norms()], "records": [records_of(loader, 0)]}
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
