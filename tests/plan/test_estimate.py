"""Whether a step fits, how long it takes and what it spends, from what it uses."""

from collections import Counter
from typing import Any

import pytest

from unison.errors import BadInput
from unison.plan import (
    GPUS,
    Peak,
    PlannedCall,
    Scenario,
    Usage,
    assumptions,
    budget,
    estimate,
    find_gpu,
)
from unison.plan.estimate import (
    EFFICIENCY,
    GIB,
    ODD_EFFICIENCY,
    PYTHON_SECONDS,
    RESERVED_SHARE,
    RUNTIME_BYTES,
    kernel_seconds,
)
from unison.privacy import Poisson, epsilon_for

H100 = GPUS["h100"]


def usage(gib: float, **settings) -> Usage:
    return Usage(peaks=[Peak("backward", {"activations": int(gib * GIB)})], **settings)


def test_a_step_fits_with_its_margin_only():
    scenario = Scenario(world_size=8)
    most = (H100.memory_gib * GIB - RUNTIME_BYTES) / (1 + RESERVED_SHARE) / GIB
    assert estimate(usage(most - 0.01), scenario, H100, 10).fits
    assert not estimate(usage(most + 0.01), scenario, H100, 10).fits


def kernel(seconds: float, **settings: Any) -> PlannedCall:
    """A product that takes the GPU so long."""
    flops = round(seconds * H100.bf16_tflops * 1e12 * EFFICIENCY)
    return PlannedCall(
        "forward", **{"python_calls": 0, "is_kernel": True, "flops": flops} | settings
    )


def python(seconds: float) -> PlannedCall:
    """Something that takes the host so long."""
    return PlannedCall("backward", round(seconds / PYTHON_SECONDS), is_kernel=False)


def seconds_of(*calls: PlannedCall, **settings: Any) -> float:
    return estimate(usage(1, calls=list(calls), **settings), Scenario(), H100, 0).step_seconds


def test_time_is_the_longer_of_arithmetic_and_traffic():
    scenario = Scenario(world_size=16, precision="bf16")
    sent = Counter({("all-gather", 16): int(50e9), ("all-reduce", 8): int(450e9)})
    found = estimate(usage(1, calls=[kernel(1)], bytes_sent=sent), scenario, H100, 0)
    assert found.compute_seconds == pytest.approx(1)
    assert found.network_seconds == pytest.approx(2)  # one second on each link
    assert found.step_seconds == pytest.approx(2)


def test_float32_is_not_computed_at_the_speed_of_bfloat16():
    assert kernel_seconds(kernel(1, is_wide=True), H100) == pytest.approx(989 / 67)
    odd = EFFICIENCY / ODD_EFFICIENCY
    assert kernel_seconds(kernel(1, is_odd=True), H100) == pytest.approx(odd)


def test_the_host_runs_ahead_of_the_gpu_until_it_reads_a_value():
    near = pytest.approx
    assert seconds_of(kernel(3), python(2)) == near(3, abs=1e-3)  # the GPU computes meanwhile
    assert seconds_of(kernel(1), python(2), kernel(1)) == near(3, abs=1e-3)  # it has to wait
    assert seconds_of(python(2), kernel(1), python(2), kernel(1)) == near(5, abs=1e-3)
    assert seconds_of(kernel(3, waits=True), python(2)) == near(5, abs=1e-3)


def test_passes_that_were_not_run_take_as_long_as_the_last():
    calls = [python(1), kernel(2), python(1), kernel(3), kernel(1)]
    assert seconds_of(*calls, passes=[0, 2, 4]) == pytest.approx(7, abs=1e-3)
    assert seconds_of(*calls, passes=[0, 2, 4], repeats=4) == pytest.approx(19, abs=1e-3)
    assert Usage(calls=calls, passes=[0, 2, 4], repeats=4).flops == sum(
        each.flops for each in [*calls, *calls[2:4] * 4]
    )


def test_an_offloaded_optimizer_waits_for_the_host():
    hosted = Scenario(world_size=8, offload=frozenset({"optimizer"}))
    assert estimate(usage(1), hosted, H100, 10**9).update_seconds == pytest.approx(1 / 55)


def test_assumptions_say_that_they_are_not_measured():
    said = " ".join(assumptions(Scenario(clipping="auto"), H100))
    assert "not measured" in said
    assert "first private step" in said


GPU_NAMES = "memory_gib bf16_tflops fp32_tflops memory_gb_per_s link_gb_per_s network_gb_per_s"
GPU_FILE = "".join(f"{name}: 10\n" for name in [*GPU_NAMES.split(), "host_gb_per_s"])


def test_a_gpu_of_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GPU_FILE)
    found = find_gpu(str(path))
    assert (found.name, found.memory_gib, found.per_machine) == ("mine", 10, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory_gib: 3", "bf16_tflops is missing"),
        ("memory: 3", "has a field 'memory', unknown"),
        ("[1, 2]", r"must be an object, found \[1, 2\]"),
        ("{", "is not YAML"),
        (GPU_FILE + "per_machine: 2.5\n", "bad.yaml: per_machine must be a whole number"),
        (GPU_FILE + "name: [1]\n", "bad.yaml: name must be a text"),
        (GPU_FILE + 'name: "a\\nb"\n', "name of a GPU must be one line of text"),
        (GPU_FILE.replace("10", ".inf"), "must be finite"),
        (GPU_FILE.replace("10", "ten"), "must be a number, found 'ten'"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_of_a_gpu_is_refused(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=said):
        find_gpu(str(path))


def test_an_unknown_gpu_is_refused():
    with pytest.raises(BadInput, match="h200, h100, a100-80"):
        find_gpu("h300")


# Much noise, for which PLD is fast.
BUDGET = {"num_rows": 1000, "batch_size": 100, "epochs": 2.5, "delta": 1e-5}


def test_a_budget_goes_both_ways():
    scenario = Scenario(world_size=4, rows=7)
    there = budget(**BUDGET, epsilon=0.25, scenario=scenario, num_parameters=1000)
    assert (there["steps"], there["passes"]) == (25, 4)
    assert 0.99 * 0.25 <= there["epsilon"] <= 0.25
    back = budget(
        **BUDGET,
        noise_multiplier=there["noise_multiplier"],
        scenario=scenario,
        num_parameters=1000,
    )
    assert back["epsilon"] == pytest.approx(there["epsilon"])
    alone = epsilon_for(
        noise_multiplier=there["noise_multiplier"],
        delta=1e-5,
        sampling=Poisson(rate=0.1),
        steps=25,
        rounded_elements=1000,
    )
    assert alone == pytest.approx(there["epsilon"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "one of --epsilon and --noise-multiplier"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "one of --epsilon and --noise-multiplier"),
        ({"epsilon": 1.0, "batch_size": 1001}, "more than the 1000 rows"),
        ({"epsilon": 1.0, "epochs": 0}, "epochs"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(BadInput, match=said):
        budget(**{**BUDGET, **wrong}, scenario=Scenario(), num_parameters=10)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shard": "zero9"}, "shard"),
        ({"offload": frozenset({"params"})}, "needs optimizer too"),
        ({"offload": frozenset({"disk", "optimizer"})}, "offload"),
        ({"kfac": True, "clipping": "auto"}, "do not go together"),
        ({"shard": "hybrid", "world_size": 5, "replicas": 2}, "must divide"),
        ({"rows": 0}, "rows"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(BadInput, match=said):
        Scenario(**wrong)
