"""A plan, counted without memory and without other ranks, beside the same program on real ranks."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.harness import World, run_on_ranks
from unison.models import build, preset
from unison.plan import Scenario, Usage, measure, simulate
from unison.shard import ranks as shard_ranks
from unison.shard.ranks import DONE

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
    "recompute_bk": {"clipping": "recompute_bk"},
    "private, two passes": {"clipping": "ghost_bk", "passes": 2},
    "private, one rank": {"world_size": 1, "clipping": "auto"},
    "private, bf16": {"precision": "bf16", "clipping": "ghost_bk"},
}


def small_model() -> nn.Module:
    shape = preset("gpt2", vocab_size=61, context_length=17, **SHAPE)
    return build(shape, device="meta")


def count(world: World, scenario: Scenario) -> Usage:
    """Measure a step; gloo sums a copy when it is waited for, which no other backend does."""
    start = shard_ranks._reduce_scatter

    def quiet(*args: Any, **kwargs: Any) -> Any:
        work = start(*args, **kwargs)
        with _disable_current_modes():
            work.wait()
        return DONE

    with patch.object(shard_ranks, "_reduce_scatter", quiet):
        return measure(small_model, scenario, torch.device("cpu"))


def check(settings: dict[str, Any]) -> None:
    scenario = Scenario(**{"world_size": 2, **SIZES, **settings})
    planned = simulate(small_model, scenario, machine="cpu")
    real = run_on_ranks(scenario.world_size, count, scenario)[0]
    assert [each.place for each in planned.peaks] == [each.place for each in real.peaks]
    assert planned.peaks == real.peaks  # every category, to the byte
    assert planned.bytes_sent == real.bytes_sent
    assert planned.flops == real.flops > 0


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_real_ranks_hold_and_send(case):
    check(CASES[case])


@pytest.mark.full
@pytest.mark.parametrize("case", LONG)
def test_a_plan_is_what_real_ranks_hold_and_send_in_more_settings(case):
    check(LONG[case])
