"""What `fully_shard` promises about names, ownership and errors."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.harness import World, assert_close, ranks, run_on_ranks
from tests.shard.common import DECODER, GPT2, per_sample_loss, shard, tokens
from unison.errors import BadInput, NeedsWhole
from unison.models import build, count_parameters
from unison.shard import (
    CPUOffload,
    MixedPrecision,
    auto_shard,
    batch_mean,
    clip_grad_norm_,
    deal,
    digest,
    find_blocks,
    fingerprint,
    full_parameters,
    fully_shard,
    grad_norm,
    memory_report,
    param_groups,
    param_norm,
    unit_memory,
    units_of,
)
from unison.shard.sharded_tensor import local_part


def owners(model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each unit."""
    names = {id(piece): name for name, piece in model.named_parameters()}
    return [
        [names[id(piece)] for group in unit.groups for piece in group.pieces]
        for unit in units_of(model)
    ]


def test_names_of_the_reference_notes_are_each_owned_once():
    """Note 002: parameters of wrapped children were owned by the root too."""
    model = build(DECODER)
    names = [name for name, _ in model.named_parameters()]
    for part in (*model.layers, model.token_embeddings, model.ln_final, model.lm_head):
        fully_shard(part)
    fully_shard(model)
    owned = owners(model)
    assert [len(each) for each in owned] == [0, 1, 9, 9, 9, 1, 1]
    assert sorted(name for each in owned for name in each) == sorted(names)
    assert [name for name, _ in model.named_parameters()] == names


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(5))
        self.middle = nn.Module()
        self.middle.scale = nn.Parameter(torch.ones(3))
        self.middle.inner = nn.Linear(2, 2)
        self.middle.other = nn.Linear(2, 2)


def test_wrapped_grandchild_does_not_hide_its_parents_parameters():
    model = Nested()
    fully_shard(model.middle.inner)
    fully_shard(model)
    root, inner = owners(model)
    assert inner == ["middle.inner.weight", "middle.inner.bias"]
    assert root == ["own", "middle.scale", "middle.other.weight", "middle.other.bias"]


def test_auto_shard_finds_the_repeated_blocks():
    model = build(DECODER)
    assert find_blocks(model) == list(model.layers)
    auto_shard(model)
    assert [unit.module for unit in units_of(model)] == [model, *model.layers]


def test_auto_shard_by_policy():
    model = build(GPT2)
    auto_shard(model, policy=lambda module: type(module).__name__ == "FeedForward")
    assert len(units_of(model)) == 1 + GPT2.num_layers


def state_dict_keys(world: World) -> bool:
    plain, sharded = build(GPT2), auto_shard(build(GPT2))
    same = list(plain.state_dict()) == list(sharded.state_dict())
    shapes = [[value.shape for value in each.state_dict().values()] for each in (plain, sharded)]
    return same and shapes[0] == shapes[1]


def test_state_dict_keeps_its_keys():
    assert run_on_ranks(2, state_dict_keys) == [True, True]


def test_tied_across_units_is_refused_with_the_remedy():
    model = build(GPT2)
    fully_shard(model.token_embeddings)
    with pytest.raises(BadInput, match=r"'lm_head.weight' is tied .* leave that unit out"):
        fully_shard(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reducer": "orderd"}, "did you mean 'ordered'"),
        ({"reducer": "ordered"}, "gradient_divisor=1"),
        ({"gradient_divisor": "mean"}, "'world_size' or a number"),
        ({"gradient_divisor": 0}, "must be above 0"),
        ({"reshard_after_forward": 3.5}, "True, False or a number"),
        ({"reshard_after_forward": 2}, "must divide the number of ranks, 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(BadInput, match=message):
        fully_shard(nn.Linear(2, 2), **options)


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="reshard_after_foward"):
        fully_shard(nn.Linear(2, 2), reshard_after_foward=True)  # type: ignore[call-arg]


def test_module_without_parameters():
    with pytest.raises(BadInput, match="has no parameters"):
        fully_shard(nn.ReLU())


def test_twice():
    module = fully_shard(nn.Linear(2, 2))
    with pytest.raises(BadInput, match="sharded already"):
        fully_shard(module)


def test_not_a_module():
    with pytest.raises(BadInput, match="takes a module, found list"):
        fully_shard([nn.Linear(2, 2)])  # type: ignore[type-var]


def replace_parameter(model: nn.Module) -> None:
    model.get_submodule("0").weight = nn.Parameter(torch.zeros(2, 2))


def move_parameter(model: nn.Module) -> None:
    model.to(torch.float64)


def freeze_parameter(model: nn.Module) -> None:
    model.get_submodule("0").weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_parameter, "'0.weight' was replaced"),
        (move_parameter, "'0.weight' was moved"),
        (freeze_parameter, "requires_grad of '0.weight' was changed"),
    ],
)
def test_parameters_changed_afterwards(change, message):
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    change(model)
    with pytest.raises(BadInput, match=message):
        model(torch.zeros(1, 2))


def lay_out_otherwise(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def swap_tensors(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.to("cpu:0")


@pytest.mark.parametrize("change", [lay_out_otherwise, swap_tensors])
def test_what_cannot_go_back_is_refused(change):
    model = fully_shard(nn.Sequential(nn.Conv2d(3, 2, 3)))
    try:
        change(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with pytest.raises(BadInput, match=r"'0\.weight' was moved"):
        model(torch.zeros(1, 3, 4, 4))


def addresses(model: nn.Module) -> set[int]:
    parts = [local_part(each) for each in model.parameters()]
    return {each.data_ptr() for each in parts if each.numel()}


def trained(
    options: dict, move_at: str, *, by_part: bool = False, makes_optimizer_first: bool = True
) -> list[Tensor]:
    """Parameters after three steps, where `model.to("cpu:0")` copies them all now and then."""

    def move(when: str) -> None:
        if when == move_at:
            before = addresses(model)
            for part in (
                (model.get_submodule("0"), model.get_submodule("2")) if by_part else [model]
            ):
                part.to("cpu:0")
            # A part is no unit itself: the unit notices at its next pass.
            assert before.isdisjoint(addresses(model)) if by_part else before == addresses(model)

    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    move("start")
    if not makes_optimizer_first:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for x in torch.randn(3, 4, 3) + rank:
        move("forward")
        loss = model(x).square().mean()
        move("backward")
        loss.backward()
        move("step")
        optimizer.step()
        optimizer.zero_grad()
        move("unshard")
        model.unshard()  # type: ignore[operator]
        seen = model.get_parameter("0.weight").detach().clone()
        model.reshard()  # type: ignore[operator]
    found = [each.detach().clone() for _, each in full_parameters(model)]
    assert torch.equal(seen, found[0].to(seen.dtype))
    return found


COPIES = ["start", "forward", "backward", "step", "unshard"]


@pytest.mark.parametrize("move_at", COPIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"offload_policy": CPUOffload()}, {"mp_policy": MixedPrecision(param=torch.bfloat16)}],
    ids=["plain", "offload", "bf16"],
)
def test_a_copy_on_the_same_device_changes_nothing(options, move_at):
    """Accelerate moves models to "cpu:0", which makes copies."""
    expected = trained(options, "never")
    for by_part, is_first in itertools.product((True, False), repeat=2):
        found = trained(options, move_at, by_part=by_part, makes_optimizer_first=is_first)
        assert all(map(torch.equal, found, expected))


@ranks(2)
def test_a_copy_on_the_same_device_changes_nothing_on_ranks(world):
    for options in ({}, {"mp_policy": MixedPrecision(param=torch.bfloat16)}):
        expected = trained(options, "never")
        for move_at, by_part in itertools.product(COPIES, (True, False)):
            found = trained(options, move_at, by_part=by_part)
            assert all(map(torch.equal, found, expected)), (move_at, by_part)


@ranks(1, 2)
def test_values_assigned_to_data_are_taken(world):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    expected = (model.weight * -0.5).detach()
    x = torch.ones(1, 3) * (1 + world.rank)
    fully_shard(model)
    model(x)
    model.weight.data = model.weight.data * -0.5
    with torch.no_grad():
        assert_close(model(x) - model(x * 0), x @ expected.T)
    found = dict(full_parameters(model))["weight"]
    assert torch.equal(found.detach(), expected)


@pytest.mark.parametrize("between", ["nothing", "a forward pass", "a look", "training"])
@ranks(1, 2)
def test_values_put_aside_come_back(world, between):
    """What `.data` had given out was overwritten by what was assigned."""
    x = torch.ones(1, 3) * (1 + world.rank)

    @torch.no_grad()
    def output(model: nn.Module) -> Tensor:
        return model(x)

    policy = MixedPrecision(param=torch.float64, output=torch.float32)
    for options in ({}, {"mp_policy": policy}, {"offload_policy": CPUOffload()}):
        model: Any = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), **options)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        before = digest(model), output(model)
        for part in (model, model[0]):
            alias, kept = model[1].bias.data, {}
            for name, parameter in part.named_parameters():
                kept[name] = parameter.data
                same = parameter.data.clone()  # as for steps that are taken back
                parameter.data = same if between == "training" else same * 0.5
            if between == "a forward pass":
                output(model)
            elif between == "a look":
                assert digest(model) != before[0]
            elif between == "training":
                model(x).sum().backward()
                optimizer.step()
            for name, parameter in part.named_parameters():
                parameter.data = kept[name]
            assert digest(model) == before[0]
            assert torch.equal(output(model), before[1])
        alias.add_(1)  # of one that nothing was assigned to: it is seen as ever
        assert_close(output(model), before[1] + 1)


def test_a_backward_pass_over_values_that_were_assigned_since_is_refused():
    model = fully_shard(nn.Linear(3, 2))
    loss = model(torch.ones(1, 3, requires_grad=True)).square().sum()
    model.weight.data = model.weight.data * 2
    model(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed after"):
        loss.backward()


def test_ordered_needs_a_dealt_batch():
    model = fully_shard(nn.Linear(2, 2), reducer="ordered", gradient_divisor=1)
    with pytest.raises(BadInput, match=r"feed the model from unison.deal\(loader, granule="):
        model(torch.zeros(1, 2))
    with torch.no_grad():
        assert model(torch.zeros(1, 2)).shape == (1, 2)


def divided_twice(world: World) -> str:
    model = fully_shard(nn.Linear(2, 2))
    for x in deal([torch.ones(4, 2)]):
        with pytest.raises(BadInput) as met:
            batch_mean(model(x).sum(dim=1)).backward()
    return str(met.value)


def test_batch_mean_with_another_divisor_is_refused():
    assert all("pass gradient_divisor=1" in text for text in run_on_ranks(2, divided_twice))


def clip(world: World, how: str | None, max_norm: float) -> dict[str, Tensor]:
    model = build(GPT2).double()
    if how:
        shard(model, how)
    rows = tokens(4, GPT2)
    mine = rows.chunk(world.size)[world.rank] if how else rows
    per_sample_loss(model, mine).mean().backward()
    if how:
        assert_close(grad_norm(model), clip_grad_norm_(model, max_norm))
        found = {"param_norm": param_norm(model), "after": grad_norm(model)}
    else:
        before = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        squares = sum(p.detach().square().sum() for p in model.parameters())
        found = {"param_norm": squares.sqrt(), "after": before.clamp(max=max_norm)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    values = full_parameters(model) if how else model.named_parameters()
    return {**found, **{name: value.detach() for name, value in values}}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_clipping_uses_the_norm_of_the_whole(size, max_norm):
    """Note 000, bug 2, and note 001: a norm of local shards is not the norm."""
    expected = run_on_ranks(1, clip, None, max_norm)[0]
    for found in run_on_ranks(size, clip, "auto", max_norm):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("foreach", [True, False, None])
@ranks(1, 2, 3)
def test_torchs_own_clipping_is_right(world, foreach):
    model = auto_shard(build(GPT2))
    per_sample_loss(model, tokens(2, GPT2, world.rank)).mean().backward()
    expected = grad_norm(model)
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_norm(model).item(), 0.1, rtol=1e-4, atol=0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 2**-10)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == 2**-10


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
@ranks(1, 2)
def test_optimizers_that_need_whole_matrices(world, name):
    """What they do decides, not their names: one rank has the whole."""
    model = fully_shard(nn.Linear(40, 40, bias=False))
    before = digest(model)
    model(torch.full((1, 40), world.rank + 1.0)).sum().backward()
    optimizer = getattr(torch.optim, name)(model.parameters())
    if world.size == 1:
        optimizer.step(lambda: torch.tensor(0.0))
        assert digest(model) != before
    else:
        with pytest.raises(NeedsWhole, match="needs all of 'weight'"):
            optimizer.step(lambda: torch.tensor(0.0))
        assert digest(model) == before


@ranks(3)
def test_pointwise_optimizers_work(world):
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad):
        model = auto_shard(build(GPT2))
        before = digest(model)
        optimizer = make(model.parameters(), lr=0.1)
        per_sample_loss(model, tokens(3, GPT2, world.rank)).mean().backward()
        optimizer.step()
        assert digest(model) != before


def test_param_groups_know_original_shapes():
    model = auto_shard(build(GPT2))
    decayed, others = param_groups(model, 0.1, no_decay=["*embeddings*"])
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert {names[id(p)].rsplit(".", 1)[1] for p in decayed["params"]} == {"weight"}
    plain = {id(p) for p in others["params"]}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith("bias") or ".ln" in name or name.startswith("ln")
        assert (id(parameter) in plain) == (is_vector or "embeddings" in name), name


def digest_of(world: World, how: str | None) -> str:
    model = build(GPT2, seed=5)
    if how:
        shard(model, how)
    return digest(model)


@pytest.mark.full
def test_digest_knows_neither_ranks_nor_units():
    found = {run_on_ranks(1, digest_of, None)[0]}
    for size in (1, 2, 3, 8):
        for how in ("auto", "root"):
            found |= set(run_on_ranks(size, digest_of, how))
    assert len(found) == 1
    model = build(GPT2, seed=5)
    with torch.no_grad():
        model.get_parameter("layers.0.ln1.bias")[3] = 1e-30
    assert digest(model) not in found


def test_fingerprint_names_what_changes_bits():
    found = fingerprint(granule=2)
    assert found["granule"] == 2
    assert found["threads"] == torch.get_num_threads()
    assert {"torch", "instruction_set", "blas", "gpu", "attention"} <= found.keys()
    assert fingerprint(granule=2, is_compiled=True) != found


def test_fingerprint_says_whether_onednn_is_switched_off():
    torch.backends.mkldnn.set_flags(True)
    before = fingerprint()
    torch.backends.mkldnn.set_flags(False)  # by hand, or by torch on a CPU without bf16
    assert (fingerprint() == before) == (not torch.backends.mkldnn.is_available())


@pytest.mark.parametrize("how", ["autocast", "policy", "plain"])
def test_torch_switches_onednn_off_before_the_first_pass_or_not_at_all(how, monkeypatch):
    """On a CPU without bf16 its first narrow product does; here it is played."""
    products: list[torch.dtype] = []
    seen: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda x, _: products.append(x.dtype))
    model = build(GPT2, seed=5)
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    auto_shard(model, **(options if how == "policy" else {}))
    model.get_submodule("layers.0").register_forward_pre_hook(lambda *_: seen.append(len(products)))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            model(tokens(2, GPT2)[:, :-1])
    assert products == ([] if how == "plain" else [torch.bfloat16])
    assert seen == [len(products)] * 2


def bytes_on_the_wire(world: World, options: dict) -> dict[str, int]:
    model = build(GPT2)
    auto_shard(model, **options)
    is_ordered = options.get("reducer") == "ordered"
    for _ in range(2):  # the second step is the steady state
        for unit in units_of(model):
            unit.ranks.bytes_sent.clear()
        for rows in deal([tokens(4, GPT2)], granule=1 if is_ordered else None):
            loss = per_sample_loss(model, rows)
            (batch_mean(loss) if is_ordered else loss.mean()).backward()
    total: dict[str, int] = {}
    for unit in units_of(model):
        for kind, count in unit.ranks.bytes_sent.items():
            total[kind] = total.get(kind, 0) + count
    return total


def test_bytes_on_the_wire():
    """Note 001: ZeRO-2 costs what DDP costs, ZeRO-3 half as much again."""
    size = 2
    zero2 = run_on_ranks(size, bytes_on_the_wire, {"reshard_after_forward": False})[0]
    zero3 = run_on_ranks(size, bytes_on_the_wire, {})[0]
    ordered = run_on_ranks(size, bytes_on_the_wire, {"reducer": "ordered", "gradient_divisor": 1})[
        0
    ]
    model = auto_shard(build(GPT2))
    root, *blocks = [sum(len(group.shard) for group in u.groups) * 4 for u in units_of(model)]
    # A ring all-reduce of n bytes sends 2 n (size - 1) / size.
    of_ddp = 2 * (root + sum(blocks)) * (size - 1) // size
    flags = zero2.pop("sum")
    assert flags == zero3.pop("sum") == ordered["sum"] < 1000  # one small sum for the whole model
    assert sum(zero2.values()) == of_ddp
    # The root is kept between forward and backward, so only the blocks are gathered twice.
    assert sum(zero3.values()) - sum(zero2.values()) == sum(blocks) * (size - 1) // size
    assert ordered["exchange"] == zero3["reduce_scatter"]
    assert ordered["gather"] == zero3["gather"]


@ranks(2)
def test_ddp_agrees(world):
    """The usual loop, a mean over the rank's own samples, gives what DDP gives."""
    ours, theirs = auto_shard(build(GPT2).double()), build(GPT2).double()
    ddp = DistributedDataParallel(theirs)
    mine = tokens(4, GPT2).chunk(world.size)[world.rank]
    for model, optimizer in (
        (ours, torch.optim.SGD(ours.parameters(), lr=0.1)),
        (ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)),
    ):
        per_sample_loss(model, mine).mean().backward()
        optimizer.step()
    expected = dict(theirs.named_parameters())
    assert_close(dict(full_parameters(ours)), {name: expected[name] for name in expected})


def reported(world: World) -> tuple[list, str]:
    model = auto_shard(build(GPT2))
    return unit_memory(model), memory_report(model)


def test_memory_report_counts_what_is_held():
    units, text = run_on_ranks(2, reported)[0]
    assert [unit.name for unit in units] == ["root", "layers.0", "layers.1", "layers.2"]
    assert sum(unit.num_parameters for unit in units) == count_parameters(build(GPT2))
    for unit in units:
        assert unit.full == 2 * unit.shard
        assert unit.gradient == unit.shard
        assert unit.shard * 2 >= unit.num_parameters * 4
        assert unit.name in text
    alone = run_on_ranks(1, reported)[0][0]
    assert all(unit.full == 0 for unit in alone)


@ranks(2)
@pytest.mark.parametrize("with_root", [True, False])
def test_parameters_without_a_unit_are_told_of(world, with_root):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    if with_root:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((3, 4), float(world.rank))).sum().backward()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    messages = [str(each.message) for each in found if "no unit has" in str(each.message)]
    assert len(messages) == (not with_root)
    assert all("2 parameters" in each and "shape [2, 4]" in each for each in messages)
