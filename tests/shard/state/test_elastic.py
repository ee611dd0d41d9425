"""A run that changes its number of ranks through checkpoints, and one that never did."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import World, run_on_ranks
from tests.shard.common import DECODER, GPT2, ODD, per_sample_loss, shard, tokens
from unison.models import ModelConfig, build
from unison.shard import (
    batch_mean,
    clip_grad_norm_,
    deal,
    digest,
    load_checkpoint,
    param_groups,
    save_checkpoint,
)

COUNTS = (3, 2, 3, 2, 3)  # rows of each step


def train_for(
    world: World,
    config: ModelConfig,
    steps: range,
    folder: Path | None,
    how: str,
    options: dict[str, Any],
) -> tuple[str, list[float]]:
    """Train for some steps, from the checkpoint to the checkpoint."""
    model = shard(build(config, seed=1), how, reducer="ordered", gradient_divisor=1)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2, **options)
    if steps.start > 0:
        assert folder is not None
        assert load_checkpoint(folder, model, optimizer, verify=True) == {"step": steps.start}
    norms = []
    for rows in deal([tokens(COUNTS[step], config, step) for step in steps], granule=1):
        batch_mean(per_sample_loss(model, rows)).backward()
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        save_checkpoint(folder, model, optimizer, extra={"step": steps.stop})
    return digest(model), norms


PHASES = ((2, range(2), "auto"), (4, range(2, 4), "root"), (3, range(4, 5), "auto"))
CASES = {
    "tied": (GPT2, {}),
    "fused, odd sizes": (ODD, {"fused": True}),
    "amsgrad, untied": (DECODER, {"amsgrad": True}),
}


@pytest.mark.parametrize(
    "case", ["tied", "fused, odd sizes", pytest.param("amsgrad, untied", marks=pytest.mark.full)]
)
def test_two_then_four_then_three_ranks_end_as_one(case, tmp_path):
    config, options = CASES[case]
    straight, norms = run_on_ranks(1, train_for, config, range(5), None, "auto", options)[0]
    seen = []
    for size, steps, how in PHASES:
        found, some = run_on_ranks(size, train_for, config, steps, tmp_path / "a", how, options)[0]
        seen += some
    assert seen == norms
    assert max(norms) > 0.5  # clipping was on
    assert found == straight
