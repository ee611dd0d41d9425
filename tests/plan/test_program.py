"""A plan, counted without memory and without other ranks, beside the same program on real ranks."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.harness import World, run_on_ranks
from unison.cli.plan import from_transformers
from unison.models import build, preset
from unison.plan import Meter, Scenario, Usage, count_trained, measure, simulate
from unison.plan.meter import ALLOCATION, HOST
from unison.privacy import learning
from unison.shard import norms, unit
from unison.shard import ranks as shard_ranks
from unison.shard.ranks import DONE
from unison.torch_internals import without_values

SHAPE: dict[str, Any] = {"d_model": 32, "num_heads": 2, "d_ff": 72, "num_layers": 2}
SIZES: dict[str, Any] = {"rows": 3, "row_length": 17, "vocab_size": 61}

CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2, bf16, computed again": {
        "shard": "zero2",
        "precision": "bf16",
        "checkpoint_activations": True,
    },
    "auto": {"clipping": "auto"},
}
LONG: dict[str, dict[str, Any]] = {
    "zero2": {"shard": "zero2"},
    "bf16": {"precision": "bf16"},
    "two passes": {"passes": 2},
    "one rank": {"world_size": 1},
    **{
        f"{clipping}, {shard}": {"clipping": clipping, "shard": shard}
        for clipping in ("auto", "grad_materialize", "ghost_bk")
        for shard in ("full", "zero2")
    },
    "ghost": {"clipping": "ghost"},
    "flash_fuse_bk": {"clipping": "flash_fuse_bk"},
    "private lora": {"lora": 4, "clipping": "auto"},
    "hybrid": {"shard": "hybrid", "world_size": 4},
    "replicas": {"shard": "hybrid"},
    "kfac": {"kfac": True},
    "kfac, zero2": {"kfac": True, "shard": "zero2"},
    "private, two passes": {"clipping": "ghost_bk", "passes": 2},
    "private, one rank": {"world_size": 1, "clipping": "auto"},
    "private, bf16": {"precision": "bf16", "clipping": "ghost_bk"},
}


def small_model() -> nn.Module:
    shape = preset("gpt2", vocab_size=61, context_length=17, **SHAPE)
    return build(shape, device="meta")


def count(
    world: World, scenario: Scenario, build: Callable[[], nn.Module], room: int | None
) -> Usage:
    """Measure a step, but for what is not the device's.

    Gloo sums a copy when it is waited for, which no other backend does; and what is pickled for
    other ranks lies on the host, which is the device here.
    """
    start, gather, broadcast = (
        shard_ranks._reduce_scatter,
        dist.all_gather_object,
        dist.broadcast_object_list,
    )

    def quiet(*args: Any, **kwargs: Any) -> Any:
        work = start(*args, **kwargs)
        with _disable_current_modes():
            work.wait()
        return DONE

    def unseen(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return collective(*args, **kwargs)

        return call

    with (
        patch.object(shard_ranks, "_reduce_scatter", quiet),
        patch.object(dist, "all_gather_object", unseen(gather)),
        patch.object(dist, "broadcast_object_list", unseen(broadcast)),
        patch.object(learning, "room_for_tensors", lambda _: room),
        # Bits of parameters are looked at in passes 1, 2, 4, …, which most steps are not.
        patch.object(unit, "has_values", lambda: False),
    ):
        return measure(build, scenario, torch.device("cpu"))


def check(
    settings: dict[str, Any],
    build: Callable[[], nn.Module] = small_model,
    room: int | None = None,
) -> None:
    scenario = Scenario(**{"world_size": 2, **SIZES, **settings})
    with patch.object(learning, "room_for_tensors", lambda _: room):
        planned = simulate(build, scenario, machine="cpu")
    real = run_on_ranks(scenario.world_size, count, scenario, build, room, timeout=600)[0]
    assert [each.place for each in planned.peaks] == [each.place for each in real.peaks]
    assert planned.peaks == real.peaks  # every category, to the byte
    assert planned.bytes_sent == real.bytes_sent
    assert planned.flops == real.flops > 0


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_real_ranks_hold_and_send(case):
    check(CASES[case])


def test_an_offloaded_model_is_on_the_host():
    settings = {"world_size": 2, **SIZES, "offload": frozenset({"params", "optimizer"})}
    found = simulate(small_model, Scenario(**settings))
    assert not {"parameters", "optimizer", "gradients"} & set(found.peak.by_category)
    # Parameters, gradients and Adam's two moments in float32; allocations are rounded up.
    share = 16 * count_trained(small_model) / 2
    assert share <= found.host_bytes <= 1.3 * share


def test_two_backward_passes_hold_the_sums_of_no_more_units_in_a_deeper_model():
    held = []
    for num_layers in (3, 5):
        shape = preset(
            "gpt2", vocab_size=61, context_length=17, **SHAPE | {"num_layers": num_layers}
        )
        scenario = Scenario(world_size=64, **SIZES, clipping="ghost")
        found = simulate(lambda shape=shape: build(shape, device="meta"), scenario)
        kinds = ("gathered", "per-sample gradients", "communication")
        held.append([max(peak.by_category.get(kind, 0) for peak in found.peaks) for kind in kinds])
    # Each rank keeps its part of a block's sums: a few vectors, each rounded up.
    assert all(deep - flat < 2**15 for flat, deep in zip(*held, strict=True))


def test_auto_keeps_what_the_gpu_has_room_for():
    shape = preset("gpt2", vocab_size=64, context_length=2048, **SHAPE | {"num_layers": 2})
    settings = {**SIZES, "rows": 1, "row_length": 2048, "vocab_size": 64, "precision": "bf16"}
    scenario = Scenario(world_size=64, **settings, clipping="auto")
    plans: list[tuple[int, int | None]] = []
    own = learning.Learning.plan

    def plan(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        plans.append((found.bytes_needed, found.memory_budget))
        return found

    with patch.object(learning.Learning, "plan", plan):
        for memory in (10**12, 2**31 + 10**5):
            simulate(lambda: build(shape, device="meta"), scenario, memory=memory)
    (free, no_bound), (tight, bound) = plans[0], plans[-1]
    assert (no_bound, bound) == (None, 0)  # of the second one, states alone take more
    assert tight <= free


@pytest.mark.full
@pytest.mark.parametrize("shard", ["full", "zero2"])
def test_a_plan_for_little_memory_is_what_real_ranks_do_with_it(shard):
    check({"clipping": "auto", "shard": shard}, room=10**5)


def test_the_optimizer_of_a_gpu_takes_all_parameters_at_once(monkeypatch):
    monkeypatch.setattr(norms, "BLOCKS_AT_ONCE", 4)  # as little to this model as they are to others
    found = simulate(small_model, Scenario(**SIZES))
    update = found.peaks[-1].by_category
    # AdamW has the square roots of all second moments at a time.
    assert update["optimizer"] / 2 <= update["temporaries"] <= update["optimizer"] / 2 + 2**15


def test_calls_of_a_private_step_are_those_of_kernels_and_python():
    pytest.importorskip("triton")
    settings = {**SIZES, "row_length": 16, "vocab_size": 64, "precision": "bf16"}
    shape = preset("gpt2", vocab_size=64, context_length=16, **{**SHAPE, "d_ff": 64})
    found = simulate(
        lambda: build(shape, device="meta"), Scenario(**settings, clipping="grad_materialize")
    )
    launches = [each for each in found.calls if each.is_triton]
    assert any(each.flops for each in launches)
    assert all(each.moved_bytes and each.is_kernel for each in launches)
    assert sum(each.python_calls for each in found.calls) > len(found.calls)
    # Rows go to the GPU in one pass, and a few numbers of the loss; nothing is read before the end.
    assert {each.phase for each in found.calls if each.waits} == {"forward", "loss"}
    assert sum(each.waits for each in found.calls) < 10


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks whether it has
def test_compiled_blocks_keep_less_and_run_fewer_kernels():
    shape = preset("tiny", num_layers=2)  # with RMSNorm and SwiGLU, of many operations each
    eager, compiled = (
        simulate(lambda: build(shape, device="meta"), Scenario(**SIZES, compiled=each))
        for each in (False, True)
    )
    kept = [
        max(peak.by_category.get("activations", 0) for peak in each.peaks)
        for each in (eager, compiled)
    ]
    assert kept[1] < kept[0]
    kernels = [
        sum(call.is_kernel for call in each.calls if call.phase in ("forward", "backward"))
        for each in (eager, compiled)
    ]
    assert kernels[1] < kernels[0]
    assert compiled.flops == eager.flops


class BrokenBlock(nn.Module):
    """A block whose graph breaks, as that of experts does, around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows, tokens, 16]
        heads = self.linear(x).unflatten(2, (2, 8)).transpose(1, 2)
        torch._dynamo.graph_break()
        return x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class BrokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.layers = nn.ModuleList(BrokenBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_block_may_break_its_graph():
    eager, compiled = (
        simulate(BrokenModel, Scenario(**SIZES, compiled=each)) for each in (False, True)
    )
    assert compiled.flops == eager.flops > 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_block_is_computed_again():
    eager, compiled = (
        simulate(small_model, Scenario(**SIZES, compiled=each, checkpoint_activations=True))
        for each in (False, True)
    )
    assert compiled.flops == eager.flops > 0


@pytest.mark.full
@pytest.mark.parametrize("case", LONG)
def test_a_plan_is_what_real_ranks_hold_and_send_in_more_settings(case):
    check(LONG[case])


def transformers_model(name: str) -> nn.Module:
    """A small model of transformers, as a config of its kind names it."""
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    configs: dict[str, Callable[..., Any]] = {
        "Bert": functools.partial(
            transformers.BertConfig, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
        "T5": functools.partial(
            transformers.T5Config, d_model=32, d_kv=8, d_ff=48, num_layers=2, dropout_rate=0.0
        ),
        "Qwen2": functools.partial(transformers.Qwen2Config, num_key_value_heads=2),
        "Mixtral": functools.partial(
            transformers.MixtralConfig, num_key_value_heads=2, num_local_experts=4
        ),
        "Mistral": functools.partial(
            transformers.MistralConfig, num_key_value_heads=2, sliding_window=8
        ),
    }
    kind = name.partition("For")[0]
    own = {"num_heads": 4} if kind == "T5" else shape
    config = configs[kind](vocab_size=61, architectures=[name], **own)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        build, _, _ = from_transformers(Path(folder) / "config.json")
    return build()


KINDS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {},
    "BertForSequenceClassification": {"clipping": "ghost_bk"},
    "T5ForConditionalGeneration": {},  # whose mask is trained
    "MistralForCausalLM": {"clipping": "ghost_bk"},  # masks that are not, and keys that are shared
    "Qwen2ForCausalLM": {},
    "MixtralForCausalLM": {},
}


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_models_of_other_kinds_are_planned_as_they_run(name):
    check(KINDS[name], functools.partial(transformers_model, name))


# --- attention: a GPU has one kernel where the meta device would write it out --------------------

B, H, T, D = 2, 4, 64, 16  # rows, heads, tokens, features


def held_by_attention(
    kind: torch.dtype, num_keys: int, size: int, mask: torch.Tensor | None
) -> tuple[int, list[int]]:
    """What attention of a GPU holds after its forward pass, beside its inputs, and at each peak."""
    meter = Meter("meta")
    with without_values("cuda"), meter.counting():
        q, k, v = (
            torch.empty(B, heads, T, size, dtype=kind, device="meta", requires_grad=True)
            for heads in (H, num_keys, num_keys)
        )
        grad = torch.empty(B, H, T, size, dtype=kind, device="meta")
        meter.assign(HOST, [q, k, v, grad, mask])
        meter.begin()
        meter.enter_place("forward")
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=num_keys != H
        )
        meter.enter_place("loss")
        meter.enter_place("backward")
        out.backward(grad)
    for given in (q, k, v, mask):
        if given is not None and given.requires_grad:
            assert given.grad is not None
            assert given.grad.shape == given.shape
    found = meter.finish()
    assert found.flops > 0
    totals = [each.total for each in found.peaks if each.place != "start"]
    return totals[1], totals


def mask_of(*shape: int, **settings: Any) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **settings)


HALF, NUMBERS = torch.bfloat16, B * H * T * 4  # bytes of the sums of exponentials, in float32
ATTENTION: dict[str, tuple[torch.dtype, int, int, torch.Tensor | None, int]] = {
    # dtype, heads of keys, features, mask; what is kept beside the output and `NUMBERS`
    "causal": (HALF, H, D, None, 0),
    "shared keys": (HALF, 2, D, None, 0),
    "a mask of numbers": (HALF, H, D, mask_of(B, 1, T, T, dtype=HALF), 0),
    "shared keys, a mask of numbers": (HALF, 2, D, mask_of(B, 1, T, T, dtype=HALF), 0),
    # They become numbers, for each layer again.
    "a mask of bits": (HALF, H, D, mask_of(B, 1, T, T, dtype=torch.bool), 2 * B * T * T),
    "float32, a mask of numbers": (torch.float32, H, D, mask_of(B, H, T, T), 0),
    # Heads of 20 features are filled up to 24, and so is what is kept of them.
    "odd heads": (HALF, H, 20, None, 2 * B * H * T * (4 + 3 * 24)),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_on_a_gpu_keeps_no_scores(case):
    kind, num_keys, size, mask, more = ATTENTION[case]
    kept, peaks = held_by_attention(kind, num_keys, size, mask)
    assert kept == B * H * T * size * kind.itemsize + NUMBERS + more
    # Not even for a moment: gradients of the inputs are all that comes to it.
    assert max(peaks) <= kept + 4 * B * H * T * (size + 4) * kind.itemsize


def test_attention_with_a_trained_mask_keeps_no_scores_and_makes_its_gradient():
    mask = mask_of(1, H, T, T, dtype=HALF, requires_grad=True)  # as T5's bias of positions
    kept, peaks = held_by_attention(HALF, H, D, mask)
    assert kept == B * H * T * D * 2 + NUMBERS + 2 * ALLOCATION  # a seed and a place of dropout's
    assert max(peaks) >= kept + B * H * T * T * 2  # the gradient of each row's


@pytest.mark.parametrize(
    ("kind", "num_keys", "size", "mask"),
    [
        (torch.float64, H, D, None),
        (torch.float32, H, 18, None),
        (HALF, H, 20, mask_of(B, 1, T, T, dtype=HALF)),
        (HALF, 2, D, mask_of(1, H, T, T, dtype=HALF, requires_grad=True)),
    ],
    ids=["float64", "odd float32", "odd with a mask", "shared keys with a trained mask"],
)
def test_attention_without_a_kernel_is_written_out(kind, num_keys, size, mask):
    kept, _ = held_by_attention(kind, num_keys, size, mask)
    assert kept >= B * H * T * T * kind.itemsize  # the weights, at least
