"""The ordered reducer on torch's own FSDP2: the bits of our own engine."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import unison
from tests.harness import World, assert_close, ranks, run_on_ranks
from tests.shard.common import DECODER, GPT2, ODD, ordered_run, per_sample_loss, tokens
from tests.shard.test_ordered import checkpoint_inside, checkpoint_outside
from unison.errors import BadInput, UnsupportedOperation
from unison.models import ModelConfig, build
from unison.rng import Key, dropout_context
from unison.shard import (
    auto_shard,
    batch_mean,
    clip_grad_norm_,
    current_plan,
    deal,
    digest,
    find_blocks,
    full_parameters,
    grad_norm,
    param_groups,
    param_norm,
)
from unison.shard.deal import take_mean_was_used
from unison.shard.fsdp2 import stop_ordered_reduction, use_ordered_reduction

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def lm(config: ModelConfig = GPT2) -> Any:
    return build(config, seed=1)


def every_part(model: Any) -> list[nn.Module]:
    """So many modules that the root has no parameters left, and blocks have modules below them."""
    inside = [part for layer in model.layers for part in (layer.attn, layer.ffn, layer)]
    return [*inside, model.token_embeddings, model.ln_final, model.lm_head]


def nothing(_: nn.Module) -> list[nn.Module]:
    return []


def fsdp2(
    model: Any, world: World, parts: Callable[[Any], list[nn.Module]] = find_blocks, **options: Any
) -> Any:
    """Shard as users of FSDP2 do: the blocks, then the root."""
    mesh = init_device_mesh("cpu", (world.size,))
    for part in parts(model):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    loss_of: Callable[[Any, Tensor], Tensor] = per_sample_loss,
    *,
    granule: int | None = 1,
    micro_batch: int | None = None,
    max_norm: float = 0.5,
    is_bf16: bool = False,
    has_dropout: bool = False,
    optimizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a sharded model; returns everything that must not depend on the ranks."""
    adamw = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2, **(optimizer or {}))
    losses, norms, share = [], [], 0.0
    for rows in deal(batches, granule=granule, micro_batch=micro_batch):
        plan = current_plan()
        assert plan is not None
        dropout = dropout_context(Key.from_seed(3), plan.step, plan.sample_ids)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16),
            dropout if has_dropout else nullcontext(),
        ):
            loss = batch_mean(loss_of(model, rows))
        loss.backward()
        share += loss.item()
        if plan.closes_logical_batch:
            norms.append(clip_grad_norm_(model, max_norm).item())
            adamw.step()
            adamw.zero_grad()
            losses, share = [*losses, share], 0.0
    return {
        "digest": digest(model),
        "losses": losses,
        "norms": norms,
        "param_norm": param_norm(model).item(),
    }


def language_model(
    world: World,
    config: ModelConfig = GPT2,
    *,
    kind: str = "fsdp2",
    counts: tuple[int, ...] = (8, 8, 8),
    parts: Callable[[Any], list[nn.Module]] = find_blocks,
    change: Callable[[nn.Module], None] | None = None,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> dict[str, Any]:
    model = lm(config)
    if change is not None:
        change(model)
    if kind == "fsdp2":
        use_ordered_reduction(fsdp2(model, world, parts, **(options or {})))
    else:
        auto_shard(model, reducer="ordered", gradient_divisor=1, **(options or {}))
    return train(model, [tokens(n, config, step) for step, n in enumerate(counts)], **how)


# ---- the same bits ---------------------------------------------------------------------------

ENGINE_CASES = {
    "tied": {"config": GPT2},
    "untied": {"config": DECODER},
    "odd sizes": {"config": ODD, "counts": (4, 4)},
    "granule of 2": {"config": GPT2, "granule": 2},
    "clipped hard": {"config": DECODER, "max_norm": 1e-3},
}


def engine(world: World, case: dict) -> dict:
    return ordered_run(world, **case)


def adapter(world: World, case: dict) -> dict:
    return language_model(world, **case)


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_the_bits_of_our_own_engine(case):
    expected = run_on_ranks(1, engine, ENGINE_CASES[case])[0]
    for size in (1, 2, 4):
        assert run_on_ranks(size, adapter, ENGINE_CASES[case]) == [expected] * size


OTHER_CASES = {
    "bf16 autocast": {"is_bf16": True},
    "bf16 parameters": {"options": {"mp_policy": BF16}, "config": DECODER},
    "kept after forward": {"options": {"reshard_after_forward": False}},
    "everything at the root": {"parts": nothing},
    "every part by itself": {"parts": every_part, "config": DECODER},
    "checkpointed blocks": {"change": checkpoint_inside},
    "checkpointed from outside": {"change": checkpoint_outside},
    "dropout": {"config": replace(DECODER, dropout=0.3), "has_dropout": True},
    "an empty batch": {"counts": (8, 0, 4)},
    "AdamW for all at once": {"optimizer": {"foreach": True}},
}


@pytest.mark.parametrize("case", OTHER_CASES)
def test_the_same_bits_with(case):
    case = {"counts": (4, 4), **OTHER_CASES[case]}
    expected = run_on_ranks(1, language_model_of, {**case, "kind": "engine"})[0]
    assert run_on_ranks(2, language_model_of, case) == [expected] * 2


def language_model_of(world: World, case: dict) -> dict:
    return language_model(world, **case)


def test_micro_batches_change_no_bit():
    whole = run_on_ranks(1, engine, {"config": GPT2, "counts": (8, 8)})[0]
    for size in (1, 2):
        case = {"micro_batch": 2, "counts": (8, 8)}
        found = run_on_ranks(size, language_model_of, case)[0]
        assert found.pop("losses") == pytest.approx(whole["losses"], rel=1e-6)
        assert found == {name: value for name, value in whole.items() if name != "losses"}


@pytest.mark.full
@pytest.mark.parametrize("config", [GPT2, DECODER, ODD], ids=["tied", "untied", "odd"])
def test_more_ranks_and_steps(config):
    case = {"config": config, "counts": (16,) * 10}
    expected = run_on_ranks(1, engine, case)[0]
    for size in (1, 2, 4, 8):
        assert run_on_ranks(size, adapter, case) == [expected] * size


# ---- parameters that not everybody uses ------------------------------------------------------


class Choosy(nn.Module):
    """A block with parameters that are frozen, never used, or used by some samples only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(width, width), nn.Linear(width, width)
        self.sometimes, self.never = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        x = x + self.frozen(self.first(x)).tanh()
        return x + self.sometimes(x) if marks.sum() > 0 else x


class Awkward(nn.Module):
    """A model with a block that is called twice and one that is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(Choosy(7) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:  # [rows, 6] -> [rows, 3]
        marks, x = rows[:, 0], self.stem(rows[:, 1:])
        for block in (*self.blocks[:3], self.blocks[1]):
            x = block(x, marks)
        return self.head(x)


def squares(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [rows]
    return model(rows).square().mean(dim=1)


def awkward_batches(marked: tuple[int, ...]) -> list[Tensor]:
    """Rows whose first feature says whether they use every parameter."""
    batches = []
    for step in range(3):
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        rows[:, 0] = torch.tensor([float(row in marked) for row in range(8)])
        batches.append(rows)
    return batches


def awkward_run(world: World, kind: str, marked: tuple[int, ...]) -> dict:
    torch.manual_seed(0)
    model = Awkward()
    if kind == "fsdp2":
        use_ordered_reduction(fsdp2(model, world))
    else:
        auto_shard(model, reducer="ordered", gradient_divisor=1)
    return train(model, awkward_batches(marked), squares)


@pytest.mark.parametrize("marked", [(0, 1, 2, 3), (5,), ()], ids=["a half", "one", "none"])
def test_unused_parameters(marked):
    expected = run_on_ranks(1, awkward_run, "engine", marked)[0]
    for size in (1, 4):
        assert run_on_ranks(size, awkward_run, "fsdp2", marked)[0] == expected


@ranks(2)
def test_what_no_rank_used_has_no_gradient(world):
    torch.manual_seed(0)
    model = use_ordered_reduction(fsdp2(Awkward(), world))
    for rows in deal(awkward_batches((5,))[:1], granule=1):
        batch_mean(squares(model, rows)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    never = {f"blocks.{i}.never.{kind}" for i in range(3) for kind in ("weight", "bias")}
    frozen = {f"blocks.{i}.frozen.{kind}" for i in range(4) for kind in ("weight", "bias")}
    outside = {name for name, _ in model.named_parameters() if name.startswith("blocks.3")}
    assert without == never | frozen | outside | {"unused"}


# ---- attaching, detaching, evaluating --------------------------------------------------------


def state_of(model: Any) -> list[Any]:
    """What attaching could leave behind."""
    found = []
    for module in model.modules():
        found += [sorted(module.__dict__), list(module._forward_pre_hooks.values())]
        found += [list(module._forward_hooks.values())]
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.append(sorted(state.__dict__))
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            settings = ("gradient_divide_factor", "force_sum_reduction_for_comms")
            found += [(sorted(g.__dict__), [getattr(g, name) for name in settings]) for g in groups]
            found += [type(g._reduce_scatter_comm).__name__ for g in groups]
    return found


@ranks(2)
def test_detaching_gives_the_model_back(world):
    model = fsdp2(lm(), world)
    before = state_of(model)
    assert use_ordered_reduction(model) is model
    with pytest.raises(BadInput, match="uses ordered reduction already"):
        use_ordered_reduction(model)
    assert state_of(model) != before
    assert stop_ordered_reduction(model) is model
    assert state_of(model) == before
    with pytest.raises(BadInput, match="does not use ordered reduction"):
        stop_ordered_reduction(model)
    rows = tokens(2, GPT2)[world.rank :][:1]
    per_sample_loss(model, rows).mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    use_ordered_reduction(model)  # and again


@ranks(1, 2)
def test_evaluation_needs_no_granules(world):
    model = lm()
    rows = tokens(3, GPT2)
    with torch.no_grad():
        expected = per_sample_loss(model, rows)
        expected_alone = torch.cat([per_sample_loss(model, row[None]) for row in rows])
    plain = (
        digest(model),
        torch.linalg.vector_norm(
            torch.cat([p.detach().double().flatten() for p in model.parameters()])
        ),
    )
    use_ordered_reduction(fsdp2(model, world))
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(per_sample_loss(model, rows), expected)
        # The root's parameters are full now, which none of these may mind.
        assert digest(model) == plain[0]
        assert param_norm(model).item() == pytest.approx(plain[1].item(), rel=1e-12)
        assert len([p for g in param_groups(model, 0.1) for p in g["params"]]) == len(
            list(model.parameters())
        )
    for dealt in deal([rows], granule=1):  # three granules would be refused in training
        with torch.no_grad():
            per_granule = per_sample_loss(model, dealt)
        ids = current_plan().granule_ids
        assert torch.equal(torch.cat(per_granule.parts), expected_alone[list(ids)])
    with pytest.raises(BadInput, match="needs a batch cut into granules"):
        model(rows[:, :-1])


@ranks(2)
def test_granules_cost_no_more_collectives(world):
    model = use_ordered_reduction(fsdp2(lm(), world))
    num_modules = len(model.layers) + 1
    for rows in deal([tokens(8, GPT2)], granule=1):
        with Collectives() as seen:
            batch_mean(per_sample_loss(model, rows)).backward()
    assert seen.counts == {
        "_allgather_base_": 2 * num_modules - 1,  # the root keeps its own for the backward pass
        "alltoall_base_": num_modules,
        "allreduce_": 2,  # the loss, and the used flags
    }


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_a_hook_of_the_user_sees_values_per_granule(world):
    model = lm(DECODER)
    seen = []
    model.layers[0].register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    fsdp2(model, world)
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    use_ordered_reduction(model)
    for rows in deal([tokens(4, DECODER)], granule=1):
        batch_mean(per_sample_loss(model, rows)).backward()
    before, (given, returned) = seen
    assert [len(value.parts) for value in (before, given, returned)] == [2, 2, 2]


# ---- what is refused -------------------------------------------------------------------------


def sharded(world: World, **options: Any) -> Any:
    return fsdp2(lm(), world, **options)


@ranks(1)
def test_refused_when_attached(world):
    with pytest.raises(BadInput, match="is not under FSDP2; call"):
        use_ordered_reduction(lm())
    blocks_only = lm()
    for block in find_blocks(blocks_only):
        fully_shard(block)
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
    fully_shard([model.layers[0], model.layers[1]])
    with pytest.raises(UnsupportedOperation, match="once per module"):
        use_ordered_reduction(fully_shard(model))
    model = lm()
    fully_shard(model, ignored_params={model.ln_final.bias})
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


# ---- FSDP2 as it is --------------------------------------------------------------------------


def fast_run(world: World, kind: str, config: ModelConfig) -> tuple[dict, dict]:
    model = lm(config)
    if kind == "fsdp2":
        fsdp2(model, world)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    else:
        auto_shard(model, gradient_divisor=1)
    result = train(model, [tokens(7, config, step) for step in range(2)], granule=None)
    take_mean_was_used()  # FSDP2 does not ask; the next model in this process would
    return result, dict(full_parameters(model))


@pytest.mark.parametrize("config", [GPT2, ODD], ids=["tied", "odd"])
def test_plain_fsdp2_and_our_fast_reducer(config):
    ours, expected = run_on_ranks(2, fast_run, "engine", config)[0]
    theirs, found = run_on_ranks(2, fast_run, "fsdp2", config)[0]
    for name in ("losses", "norms"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5)
    assert_close(found, expected)


@ranks(1, 2, 3, 4)
def test_norms_on_rows_cut_anywhere(world):
    """The same bits as on our own shards, where each is cut between blocks of 256."""
    torch.manual_seed(0)
    sizes = [(1, 3), (5, 7), (3, 333), (257, 2), (16, 16), (1025, 1)]

    def make() -> nn.Module:
        model = nn.Module()
        for index, (rows, columns) in enumerate(sizes):
            values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(index))
            setattr(model, f"weight{index}", nn.Parameter(values))
        return model

    ours, theirs = unison.fully_shard(make()), make()
    fully_shard(theirs, mesh=init_device_mesh("cpu", (world.size,)))
    with Collectives() as seen:  # DTensor is quick to gather without being asked
        param_norm(theirs)
    assert seen.counts == ({"_allgather_base_": 1, "allreduce_": 1} if world.size > 1 else {})
    for model in (ours, theirs):
        for name, value in list(model.named_parameters())[:-1]:  # the last one has no gradient
            value.grad = value.detach() * (1 + len(name))
    assert torch.equal(param_norm(ours), param_norm(theirs))
    assert torch.equal(grad_norm(ours), grad_norm(theirs))
    assert torch.equal(clip_grad_norm_(ours, 0.5), clip_grad_norm_(theirs, 0.5))
    assert torch.equal(grad_norm(ours), grad_norm(theirs))
    assert grad_norm(theirs).item() == pytest.approx(0.5, rel=1e-5)
    assert digest(ours) == digest(theirs)
