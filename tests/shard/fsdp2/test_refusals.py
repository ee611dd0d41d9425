"""What ordered reduction on FSDP2 refuses: when attached, or in the pass that meets it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.harness import World, ranks
from tests.shard.common import GPT2, per_sample_loss, tokens
from tests.shard.fsdp2.common import fsdp2, lm
from unison.errors import BadInput, UnsupportedOperation
from unison.shard import auto_shard, batch_mean, deal, digest, find_blocks, grad_norm, param_norm
from unison.shard.fsdp2 import use_ordered_reduction


def sharded(world: World, **options: Any) -> Any:
    return fsdp2(lm(), world, **options)


@ranks(1)
def test_refused_when_attached(world):
    with pytest.raises(BadInput, match="is not under FSDP2; call"):
        use_ordered_reduction(lm())
    blocks_only = lm()
    mesh = init_device_mesh("cpu", (world.size,))  # else torch takes a GPU that is there
    for block in find_blocks(blocks_only):
        fully_shard(block, mesh=mesh)
    with pytest.raises(BadInput, match="then on the model itself"):
        use_ordered_reduction(blocks_only)
    with pytest.raises(BadInput, match="pass reducer='ordered' there"):
        use_ordered_reduction(auto_shard(lm()))
    model = sharded(world)
    with torch.no_grad():
        model(tokens(1, GPT2)[:, :-1])
    with pytest.raises(BadInput, match="is a part of a larger model"):
        use_ordered_reduction(model.layers[0])

    model = sharded(world)
    model.layers[1].set_gradient_divide_factor(2.0)
    with pytest.raises(UnsupportedOperation, match=r"factor of layers.1 is 2.0"):
        use_ordered_reduction(model)
    model = sharded(world)
    model.set_all_reduce_hook(lambda output: None)
    with pytest.raises(UnsupportedOperation, match="root has an all-reduce hook"):
        use_ordered_reduction(model)
    model = sharded(world)
    model.layers[0].compile(backend="eager")
    with pytest.raises(UnsupportedOperation, match=r"layers.0 is compiled"):
        use_ordered_reduction(model)
    model = lm()
    fully_shard([model.layers[0], model.layers[1]], mesh=mesh)
    with pytest.raises(UnsupportedOperation, match="once per module"):
        use_ordered_reduction(fully_shard(model, mesh=mesh))
    model = lm()
    fully_shard(model, mesh=mesh, ignored_params={model.ln_final.bias})
    with pytest.raises(BadInput, match=r"'ln_final.bias' is not sharded"):
        use_ordered_reduction(model)
    assert "_unison_ordered_model" not in model.__dict__


@ranks(4)
def test_meshes_of_two_dimensions_are_refused(world):
    model = lm()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
    with pytest.raises(UnsupportedOperation, match=r"on a mesh of shape \(2, 2\)"):
        use_ordered_reduction(model)
    for refused in (param_norm, digest):
        with pytest.raises(UnsupportedOperation, match=r"on a mesh of shape \(2, 2\)"):
            refused(model)


@ranks(3)
def test_three_ranks_are_refused(world):
    with pytest.raises(BadInput, match=r"the mesh has 3 ranks.*takes any number"):
        use_ordered_reduction(sharded(world))


@ranks(2)
def test_batches_that_do_not_fit_are_refused(world):
    model = use_ordered_reduction(sharded(world))
    for count, granule in ((6, 1), (1, 1), (12, 2)):
        for rows in deal([tokens(count, GPT2)], granule=granule):
            with pytest.raises(BadInput, match=rf"2 \* {granule} \* a power of two"):
                model(rows[:, :-1])
    for rows in deal([tokens(4, GPT2)], mesh=alone(world), granule=1):
        with pytest.raises(BadInput, match=r"rank 0 of 1.*pass the model's mesh"):
            model(rows[:, :-1])
    # What was refused has left nothing behind.
    for rows in deal([tokens(4, GPT2)], granule=1):
        batch_mean(per_sample_loss(model, rows)).backward()
    assert grad_norm(model) > 0


def alone(world: World) -> Any:
    """A mesh of this rank only."""
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("others", "alone"))
    return mesh["alone"]


class Reentrant(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=True)


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
def test_gradients_past_the_granules_are_refused(world):
    model = lm()
    model.layers[1] = Reentrant(model.layers[1])
    use_ordered_reduction(fsdp2(model, world))
    for rows in deal([tokens(4, GPT2)], granule=1):
        loss = batch_mean(per_sample_loss(model, rows))
        with pytest.raises(UnsupportedOperation, match=r"'layers.1.block.+use_reentrant=False"):
            loss.backward()


@ranks(2)
def test_settings_changed_later_are_refused(world):
    def change_sync(model):
        model.set_requires_gradient_sync(False)

    def change_factor(model):
        model.set_gradient_divide_factor(2.0)

    changes = {change_sync: r"gradient sync of 'layers.2' is off", change_factor: r"was set to 2.0"}
    for change, message in changes.items():
        model = use_ordered_reduction(sharded(world))
        change(model)
        for rows in deal([tokens(4, GPT2)], granule=1):
            loss = batch_mean(per_sample_loss(model, rows))
            with pytest.raises(UnsupportedOperation, match=message):
                loss.backward()
