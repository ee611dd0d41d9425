"""Precision and offload: what is cast, what is summed where, and what lives in host memory."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from tests.harness import World, ranks, run_on_ranks
from tests.shard.common import DECODER, GPT2, ordered_run, tokens
from unison.errors import BadInput
from unison.models import build
from unison.shard import (
    CPUOffload,
    GradScaler,
    MixedPrecision,
    auto_shard,
    batch_mean,
    deal,
    digest,
    find_blocks,
    full_parameters,
    fully_shard,
    units_of,
)
from unison.shard.sharded_tensor import local_part

BF16 = MixedPrecision(param=torch.bfloat16)
POLICIES = {
    "bf16": {"mp_policy": BF16},
    "bf16 sums": {"mp_policy": MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16)},
    "fp16, fp32 out": {
        "mp_policy": MixedPrecision(param=torch.float16, output=torch.float32),
        "config": DECODER,
    },
    "bf16, neighbours": {"mp_policy": BF16, "reshard_after_forward": 1},
    "offload": {"offload_policy": CPUOffload()},
    "bf16 and offload": {"mp_policy": BF16, "offload_policy": CPUOffload()},
    "resident parameters": {"mp_policy": BF16, "offload_policy": CPUOffload(parameters=False)},
    "late gradients": {"offload_policy": CPUOffload(gradients=False), "config": DECODER},
}


def run(world: World, options: dict) -> dict:
    options = dict(options)
    return ordered_run(world, options.pop("config", GPT2), options=options)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_the_bits(name):
    alone, two, three = (run_on_ranks(size, run, POLICIES[name])[0] for size in (1, 2, 3))
    assert alone == two == three


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("offload", [{}, {"parameters": False}, {"gradients": False}])
def test_offload_changes_no_bit(size, offload):
    options = {"mp_policy": BF16}
    expected = run_on_ranks(size, run, options)[0]
    found = run_on_ranks(size, run, {**options, "offload_policy": CPUOffload(**offload)})[0]
    assert found == expected


# ---- beside FSDP2 ------------------------------------------------------------------------------


def mixed_steps(world: World, engine: str) -> dict[str, Tensor]:
    """Three steps of bf16 computation with float32 shards and sums."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = build(GPT2, seed=3)
    if engine == "unison":
        auto_shard(model, mp_policy=policy)
    else:
        mesh = init_device_mesh("cpu", (world.size,))
        for block in find_blocks(model):
            fsdp2(block, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
        fsdp2(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        rows = tokens(4, GPT2, step).chunk(world.size)[world.rank]
        logits = model(rows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if engine == "unison":
        return dict(full_parameters(model))
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_equals_fsdp2(size):
    ours, theirs = (run_on_ranks(size, mixed_steps, name)[0] for name in ("unison", "fsdp2"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        # Two addends commute, so at two ranks the sums agree to the bit as well.
        assert torch.equal(ours[name], theirs[name]), name


# ---- what is where -----------------------------------------------------------------------------


class Recorder(nn.Module):
    """Notes what dtypes it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.seen = [x.dtype, ids.dtype, self.weight.dtype, self.table.dtype]
        return x @ self.weight


@ranks(1, 2)
def test_what_a_policy_casts(world):
    policy = MixedPrecision(param=torch.bfloat16, output=torch.float64)
    model = fully_shard(Recorder(), mp_policy=policy)
    output = model(torch.full((2, 3), float(world.rank)), ids=torch.zeros(2, dtype=torch.int64))
    assert model.seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.float32]
    assert output.dtype == torch.float64
    output.sum().backward()
    assert model.weight.dtype == torch.float32
    assert model.weight.grad.dtype == torch.float32


def test_inputs_and_buffers_only_as_asked():
    policy = MixedPrecision(buffers=torch.float16, cast_inputs=False)
    model = fully_shard(Recorder(), mp_policy=policy)
    model(torch.ones(2, 3), torch.zeros(2))
    assert model.seen[0] == model.seen[2] == torch.float32
    assert model.table.dtype == torch.float16
    assert model.count.dtype == torch.int64


def test_only_the_root_casts_outputs_under_auto_shard():
    policy = MixedPrecision(param=torch.bfloat16, output=torch.float32)
    model = auto_shard(build(GPT2, seed=0), mp_policy=policy)
    assert [unit.precision.output for unit in units_of(model)] == [torch.float32] + 3 * [None]


def test_short_shards_are_summed_in_float32():
    model = fully_shard(nn.Linear(3, 3).bfloat16())
    assert units_of(model)[0].groups[0].reduce_dtype == torch.float32
    model = fully_shard(nn.Linear(3, 3).double())
    assert units_of(model)[0].groups[0].reduce_dtype == torch.float64


def test_one_rank_without_a_policy_copies_nothing():
    group = units_of(fully_shard(nn.Linear(3, 3)))[0].groups[0]
    assert group.full.data_ptr() == group.shard.data_ptr()
    assert group.full_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_policy": "bf16"}, "mp_policy must be a unison.MixedPrecision"),
        ({"offload_policy": True}, "offload_policy must be a unison.CPUOffload"),
    ],
)
def test_bad_policies(options, message):
    with pytest.raises(BadInput, match=message):
        fully_shard(nn.Linear(2, 2), **options)


def test_bad_dtype():
    with pytest.raises(BadInput, match="reduce of MixedPrecision must be a floating dtype"):
        MixedPrecision(reduce=torch.int8)


def test_fsdp2s_offload_policies_are_taken():
    with_offload = fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert units_of(with_offload)[0].offload == CPUOffload(pin_memory=False)
    without = fully_shard(nn.Linear(2, 2), offload_policy=OffloadPolicy())
    assert units_of(without)[0].offload is None


# ---- GradScaler --------------------------------------------------------------------------------


def scaled_run(
    world: World, fused: bool, overflow_at: int | None, is_torchs: bool
) -> tuple[str, list[float]]:
    model = auto_shard(build(GPT2, seed=1), reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", **options) if is_torchs else GradScaler(model, **options)
    scales = []
    for step, rows in enumerate(deal([tokens(4, GPT2, step) for step in range(4)], granule=1)):
        logits = model(rows[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        scaler.scale(batch_mean(losses.view(rows.shape[0], -1).mean(dim=1))).backward()
        parts = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        parts = [part for part in parts if part.numel() > 0]
        if step == overflow_at and world.rank == world.size - 1:
            parts[-1].view(-1)[-1] = torch.inf  # in one rank's part only
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return digest(model), scales


@pytest.mark.parametrize("is_torchs", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_skips_on_all_ranks(fused, is_torchs):
    alone = run_on_ranks(1, scaled_run, fused, 1, is_torchs)[0]
    assert alone[1] == [1024.0, 512.0, 512.0, 1024.0]
    for found in run_on_ranks(3, scaled_run, fused, 1, is_torchs):
        assert found == alone
    assert run_on_ranks(3, scaled_run, fused, None, is_torchs)[0][0] != alone[0]


def test_scaler_needs_a_sharded_model():
    with pytest.raises(BadInput, match="is not sharded"):
        GradScaler(nn.Linear(2, 2))
