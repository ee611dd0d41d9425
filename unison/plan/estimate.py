"""From what a step uses to whether it fits, how long it takes, and what a private run costs."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unison import check, schema
from unison.errors import BadInput
from unison.plan.meter import PlannedCall, Usage
from unison.plan.program import Scenario
from unison.privacy import Poisson, epsilon_for, noise_multiplier_for
from unison.torch_internals import RESERVED_SHARE, RUNTIME_BYTES

GIB = 2**30

# Fitted to eager steps on one H200 (bench/plan_gpu.py; docs/scale.md says to which). Of the GPU:
# the shares of its peak arithmetic that products reach, and those whose rows begin at odd places (a
# vocabulary of 50,257, say); the share of its memory's speed; and the shortest kernel.
EFFICIENCY = 0.75
ODD_EFFICIENCY = 0.125
BANDWIDTH_SHARE = 0.65
KERNEL_SECONDS = 1.5e-6
# Of its host: a call of Python's in a forward pass (modules, hooks, modes) and elsewhere; an
# operation that launches a kernel; and the launch of one of Triton's.
FORWARD_PYTHON_SECONDS = 0.9e-6
PYTHON_SECONDS = 0.35e-6
LAUNCH_SECONDS = 25e-6
TRITON_SECONDS = 150e-6


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU and what connects it, as its vendor describes them.

    Attributes:
        name: What to call it.
        memory_gib: What a process can allocate.
        bf16_tflops: Dense products in bfloat16.
        fp32_tflops: The same in float32, without TF32.
        memory_gb_per_s: From and to its own memory.
        link_gb_per_s: To the GPUs of the same machine, one way.
        network_gb_per_s: To other machines, one way, the share of one GPU.
        host_gb_per_s: To the host's memory, one way.
        per_machine: GPUs in a machine.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    network_gb_per_s: float
    host_gb_per_s: float
    per_machine: int = 8

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise BadInput(f"the name of a GPU must be one line of text, found {self.name!r}")
        check.positive(**{key: value for key, value in asdict(self).items() if key != "name"})


GPUS = {
    each.name: each
    for each in (
        Gpu("h200", 139, 989, 67, 4800, 450, 50, 55),
        Gpu("h100", 79, 989, 67, 3350, 450, 50, 55),
        Gpu("a100-80", 79, 312, 19.5, 2000, 300, 25, 25),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, or as a YAML file describes one.

    Raises:
        BadInput: If there is no such GPU, or the file does not describe one.
    """
    if name in GPUS:
        return GPUS[name]
    if not name.endswith((".yaml", ".yml")):
        known = ", ".join(GPUS)
        raise BadInput(f"--gpu must be one of {known} or the path of a YAML file, found {name!r}")
    import yaml

    path = Path(name)
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadInput(f"--gpu {name} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"--gpu {name} is not YAML: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        found = {"name": path.stem} | found
    return schema.build(Gpu, found, f"--gpu {name}")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step takes on a kind of GPU.

    Attributes:
        peak_bytes: Of tensors.
        needed_bytes: With the safety margin.
        memory_bytes: What the GPU has.
        compute_seconds: All kernels, one after the other.
        host_seconds: Calling them, while the GPU works on earlier ones.
        network_seconds: Collectives; they run beside the arithmetic.
        update_seconds: What an offloaded optimizer adds.
        step_seconds: All together.
    """

    peak_bytes: int
    needed_bytes: int
    memory_bytes: int
    compute_seconds: float
    host_seconds: float
    network_seconds: float
    update_seconds: float
    step_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the GPU has what the step needs."""
        return self.needed_bytes <= self.memory_bytes


def estimate(usage: Usage, scenario: Scenario, gpu: Gpu, num_parameters: int) -> Estimate:
    """Say whether a step fits and how long it takes; `assumptions` says under which conditions."""
    peak = usage.peak.total
    compute, host, both = run_queue(usage, gpu)
    network = sum(
        num_bytes / (1e9 * (gpu.link_gb_per_s if is_inside(size, gpu) else gpu.network_gb_per_s))
        for (_, size), num_bytes in usage.bytes_sent.items()
        if size > 1
    )
    update = 0.0
    if scenario.offload:  # gradients to the host, parameters back; the host steps meanwhile
        update = num_parameters / scenario.world_size * 8 / (1e9 * gpu.host_gb_per_s)
    return Estimate(
        peak_bytes=peak,
        needed_bytes=peak + RUNTIME_BYTES + int(RESERVED_SHARE * peak),
        memory_bytes=int(gpu.memory_gib * GIB),
        compute_seconds=compute,
        host_seconds=host,
        network_seconds=network,
        update_seconds=update,
        step_seconds=max(both, network) + update,
    )


def run_queue(usage: Usage, gpu: Gpu) -> tuple[float, float, float]:
    """Let the host call a step's operations, and the GPU run them one after the other.

    A kernel begins when it has been launched and the one before it has ended. The host does not
    wait for it, except where it reads a value.

    Returns:
        What kernels take, what calling them takes, and when both are done, in seconds.
    """
    compute, host, at_host, at_gpu = 0.0, 0.0, 0.0, 0.0
    starts = []  # of passes, and of what comes after the last one
    for index, call in enumerate(usage.calls):
        if index in usage.passes:
            starts.append((compute, host, max(at_host, at_gpu)))
        of_python = FORWARD_PYTHON_SECONDS if call.phase == "forward" else PYTHON_SECONDS
        launch = TRITON_SECONDS if call.is_triton else LAUNCH_SECONDS if call.is_kernel else 0.0
        calling, running = call.python_calls * of_python + launch, kernel_seconds(call, gpu)
        host, at_host = host + calling, at_host + calling
        if running:
            compute, at_gpu = compute + running, max(at_gpu, at_host) + running
        if call.waits:
            at_host = max(at_host, at_gpu)
    found = compute, host, max(at_host, at_gpu)
    if usage.repeats:
        before, after = starts[-2:]
        found = tuple(
            each + usage.repeats * (last - first)
            for each, first, last in zip(found, before, after, strict=True)
        )
    return found


def kernel_seconds(call: PlannedCall, gpu: Gpu) -> float:
    """What the GPU takes to run it: products at its rate, all else at that of its memory."""
    if not call.is_kernel:
        return 0.0
    tflops = EFFICIENCY * (gpu.fp32_tflops if call.is_wide else gpu.bf16_tflops)
    if call.is_odd and not call.is_wide:
        tflops = ODD_EFFICIENCY * gpu.bf16_tflops
    computing = call.flops / (tflops * 1e12)
    moving = call.moved_bytes / (1e9 * gpu.memory_gb_per_s * BANDWIDTH_SHARE)
    return max(KERNEL_SECONDS, computing, moving)


def is_inside(group_size: int, gpu: Gpu) -> bool:
    """Whether ranks of a group are in one machine; a ring of more goes at the network's speed."""
    return group_size <= gpu.per_machine


def assumptions(scenario: Scenario, gpu: Gpu) -> list[str]:
    """What an estimate takes for granted, in sentences."""
    kind = scenario.precision
    lines = [
        f"margin: {RUNTIME_BYTES / GIB:g} GiB for CUDA, NCCL and cuBLAS, and {RESERVED_SHARE:.0%} "
        "of the peak that the allocator holds and cannot use; one H200 alone held 0.76 GiB and 1 "
        "to 11 %, of several nothing was measured",
        f"time of the GPU, fitted to one H200: products at {EFFICIENCY:.0%} of "
        f"{gpu.bf16_tflops:g} TFLOP/s in 16 bits ({ODD_EFFICIENCY:.1%} where rows do not begin at "
        f"multiples of 16 bytes) and {gpu.fp32_tflops:g} in 32, all else at "
        f"{BANDWIDTH_SHARE:.0%} of {gpu.memory_gb_per_s:g} GB/s, no kernel below "
        f"{KERNEL_SECONDS * 1e6:g} µs",
        f"time of its host, fitted likewise: {FORWARD_PYTHON_SECONDS * 1e6:g} µs for a call of "
        f"Python's in a forward pass and {PYTHON_SECONDS * 1e6:g} elsewhere, "
        f"{LAUNCH_SECONDS * 1e6:g} µs for an operation that launches a kernel, "
        f"{TRITON_SECONDS * 1e6:g} µs for one of Triton's; it runs ahead of the GPU until it reads "
        "a value; steps that were alike took that host 159 to 235 ms",
        f"not measured: collectives beside it, {gpu.link_gb_per_s:g} GB/s in a machine of "
        f"{gpu.per_machine} and {gpu.network_gb_per_s:g} GB/s between machines"
        + (f"; an offloaded optimizer, {gpu.host_gb_per_s:g} GB/s" if scenario.offload else ""),
        "blocks are compiled: pointwise operations are fused into what reads them; their kernels "
        "are taken to be launched as eager ones are, which was not measured"
        if scenario.compiled
        else "steps are eager",
        "attention is one kernel that keeps no scores, where CUDA has one for it",
    ]
    if kind == "bf16":
        lines.append("bf16: parameters are gathered and computed with in bfloat16, shards float32")
    if scenario.clipping is not None:
        lines.append("the checks of a first private step are not counted")
        lines.append("methods are chosen by rates (calibrate=False); one GPU alone times them")
    if scenario.offload:
        lines.append("the host's own optimizer step is taken to be no slower than the copies")
    return lines


# ---- private budgets -----------------------------------------------------------------------------


def budget(
    *,
    num_rows: int,
    batch_size: int,
    epochs: float,
    delta: float,
    scenario: Scenario,
    num_parameters: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
) -> dict[str, float]:
    """Find the noise that an ε allows, or the ε that a noise spends, by unison's own accounting.

    Args:
        num_rows: Rows of the data set.
        batch_size: Rows of a step, as expected: each is drawn with probability batch_size/num_rows.
        epochs: How often each row is drawn, as expected.
        delta: δ.
        scenario: How a rank takes a step.
        num_parameters: Trained elements, all of which get noise.
        epsilon: What the run may spend.
        noise_multiplier: σ, instead.

    Returns:
        `num_rows` and `batch_size` as given; `epochs`, how often each row is drawn; `steps` of the
        optimizer, each of so many `passes` on each rank; `noise_multiplier`; and `epsilon` of all
        steps together at `delta`.

    Raises:
        BadInput: If not exactly one of both is given, or numbers do not go together.
    """
    check.positive(num_rows=num_rows, batch_size=batch_size, epochs=epochs)
    if (epsilon is None) == (noise_multiplier is None):
        raise BadInput("a private budget needs one of --epsilon and --noise-multiplier")
    if batch_size > num_rows:
        raise BadInput(f"--logical-batch {batch_size} is more than the {num_rows} rows of --rows")
    sampling = Poisson(rate=batch_size / num_rows)
    steps = max(1, math.ceil(epochs * num_rows / batch_size))
    shared: dict[str, Any] = {
        "sampling": sampling,
        "steps": steps,
        "rounded_elements": num_parameters,
        "num_records": num_rows,
    }
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = noise_multiplier_for(
            target_epsilon=epsilon, target_delta=delta, **shared
        )
    spent = epsilon_for(noise_multiplier=noise_multiplier, delta=delta, **shared)
    return {
        "num_rows": num_rows,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": steps,
        "passes": math.ceil(batch_size / (scenario.world_size * scenario.rows)),
        "noise_multiplier": noise_multiplier,
        "epsilon": spent,
        "delta": delta,
    }
