"""Sharded parameters in the hands of users: right, or refused by name."""

import copy
import io
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.harness import World, assert_close, assert_same_bits, ranks, run_on_ranks
from unison.errors import BadInput, NeedsWhole
from unison.shard import digest, full_state_dict, fully_shard, grad_norm, save_checkpoint
from unison.shard import ranks as ranks_module
from unison.shard.layout import Placement, boxes_of
from unison.shard.ranks import Ranks
from unison.shard.sharded_tensor import ShardedTensor


@ranks(2)
def test_ddp_around_a_sharded_module_is_refused_by_name(world: World) -> None:
    with pytest.raises(NeedsWhole, match=r"'0\.weight'.*DistributedDataParallel.*leave it out"):
        DistributedDataParallel(fully_shard(nn.Sequential(nn.Linear(5, 3))))


class MLP(nn.Sequential):
    """Layers of odd sizes, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 33), nn.Linear(33, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def make_mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def sharded_mlp(seed: int = 0, **options: object) -> MLP:
    model = make_mlp(seed)
    for block in model:
        if isinstance(block, nn.Linear):
            fully_shard(block, **options)  # type: ignore[arg-type]
    return fully_shard(model, **options)  # type: ignore[arg-type]


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def train_step(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(inputs(world.rank, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- what it shows -----------------------------------------------------------------------------


@ranks(1, 2, 3)
def test_parameters_have_the_shapes_of_the_whole(world):
    plain, model = make_mlp(), sharded_mlp()
    for (name, whole), (same_name, piece) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert (name, whole.shape, whole.numel()) == (same_name, piece.shape, piece.numel())
        assert isinstance(piece, nn.Parameter)
        assert isinstance(piece, ShardedTensor) == (world.size > 1)
        assert piece.is_leaf
        assert piece.requires_grad
        if world.size > 1:
            assert_same_bits(piece.full_tensor(), whole)
            assert f"of {list(whole.shape)}" in repr(piece)
    held = world.gather(sum(getattr(p, "local", p).numel() for p in model.parameters()))
    assert sum(held) == sum(p.numel() for p in plain.parameters())


@ranks(2)
def test_gradients_and_state_are_sharded_as_parameters_are(world):
    model = sharded_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs(world.rank)).sum().backward()
    optimizer.step()
    for piece in model.parameters():
        if piece.grad is not None:
            for value in (piece.grad, optimizer.state[piece]["exp_avg"]):
                assert isinstance(value, ShardedTensor)
                assert value.shape == piece.shape
                assert value.placement is piece.placement
                assert len(value.local) == len(piece.local)


# ---- optimizers --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, foreach=True),
    "adamw amsgrad, one by one": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, foreach=False),
    "adamw maximize": lambda p: torch.optim.AdamW(p, 1e-2, maximize=True, foreach=False),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), fused=True),
    "adam decay": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, foreach=False),
    "sgd nesterov": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, foreach=False),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2, foreach=True),
    "adamax, one by one": lambda p: torch.optim.Adamax(p, 1e-2, foreach=False),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_optimizers_do_to_parts_what_they_do_to_plain_tensors(world, name):
    model = sharded_mlp()
    pieces = list(model.parameters())
    plain = [nn.Parameter(piece.local.clone()) for piece in pieces]
    optimizers = [OPTIMIZERS[name](pieces), OPTIMIZERS[name](plain)]
    for step in range(3):
        model(inputs(world.rank, step)).square().mean().backward()
        for piece, other in zip(pieces, plain, strict=True):
            other.grad = None if piece.grad is None else piece.grad.local.clone()
        for optimizer in optimizers:
            optimizer.step()
            if optimizer is optimizers[0]:
                optimizer.zero_grad()
    for piece, other in zip(pieces, plain, strict=True):
        assert_same_bits(piece.local, other.detach())


@ranks(1, 2)
def test_a_forward_pass_sees_what_an_optimizer_wrote(world):
    """Below the dispatcher a write does not count in a tensor's version by itself."""
    model = sharded_mlp(reshard_after_forward=False)
    x = inputs(0)
    with torch.no_grad():
        model(x)
        for make in (
            lambda p: torch.optim.SGD(p, 0.1, foreach=True),
            lambda p: torch.optim.SGD(p, 0.1, foreach=False),
            lambda p: torch.optim.SGD(p, 0.1, fused=True),
        ):
            before = model(x)
            for piece in model.parameters():
                piece.grad = torch.ones_like(piece)
            make(model.parameters()).step()
            plain = make_mlp()
            plain.load_state_dict(full_state_dict(model))
            assert_close(model(x), plain(x))
            assert not torch.equal(model(x), before)


@ranks(1, 2)
def test_an_optimizer_made_before_sharding_is_noticed(world):
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(inputs(world.rank)).sum().backward()
    with pytest.raises(BadInput, match=r"SGD was made before fully_shard: .* make the optimizer"):
        optimizer.step()


@ranks(1, 2)
def test_flat_state_of_earlier_versions_is_taken_over(world):
    def run(is_flattened: bool) -> str:
        model = sharded_mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        train_step(world, model, optimizer, 0)
        if is_flattened:
            state = optimizer.state_dict()
            for values in state["state"].values():
                for key in ("exp_avg", "exp_avg_sq"):
                    values[key] = getattr(values[key], "local", values[key]).reshape(-1)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            optimizer.load_state_dict(state)
        train_step(world, model, optimizer, 1)
        return digest(model)

    assert run(True) == run(False)


# ---- with the other ranks ----------------------------------------------------------------------

TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda p: p.norm(),
    "vector norm 3": lambda p: torch.linalg.vector_norm(p, 3),
    "squares": lambda p: p.pow(2).sum(),
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.abs().mean(),
    "largest": lambda p: p.abs().max(),
    "smallest": lambda p: p.min(),
}


def with_term(world: World, name: str, size: int, is_sharded: bool) -> dict[str, Tensor]:
    model = sharded_mlp() if is_sharded else make_mlp()
    fed = [world.rank] if is_sharded else range(size)
    loss = sum(model(inputs(rank)).square().mean() for rank in fed) / len(fed)
    (loss + 0.1 * sum(TERMS[name](p) for p in model.parameters())).backward()
    gradients = {}
    for each, parameter in model.named_parameters():
        value = parameter.grad
        assert value is not None
        gradients[each] = value.full_tensor() if isinstance(value, ShardedTensor) else value
    return gradients


@pytest.mark.parametrize("name", [name for name in TERMS if name not in ("largest", "smallest")])
@pytest.mark.parametrize("size", [2, 3])
def test_terms_of_parameters_in_a_loss(size, name):
    """S6: a norm of what a rank holds of a parameter is not the parameter's."""
    expected = run_on_ranks(1, with_term, name, size, False)[0]
    for found in run_on_ranks(size, with_term, name, size, True):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


@ranks(2, 3)
def test_reductions_are_those_of_the_whole(world):
    plain = dict(make_mlp().named_parameters())
    for name, piece in sharded_mlp().named_parameters():
        with torch.no_grad():
            for term in TERMS.values():
                torch.testing.assert_close(term(piece), term(plain[name]), rtol=1e-5, atol=1e-6)
            assert not torch.isnan(piece).any()
            assert torch.isfinite(piece).all()
            if world.rank == world.size - 1 and len(piece.local):
                piece.local[-1] = torch.nan
    assert_nan = [bool(torch.isnan(p.max())) for p in sharded_mlp().parameters()]
    assert not any(assert_nan)


@ranks(2)
def test_a_nan_on_one_rank_is_known_to_all(world):
    piece = sharded_mlp().get_parameter("0.weight")
    if world.rank == 1:
        piece.local[-1] = torch.nan
    with torch.no_grad():
        assert torch.isnan(piece.max())
        assert torch.isnan(piece.norm())
        assert torch.isnan(piece).any()


@ranks(2)
def test_the_ordered_reducer_refuses_sums_in_another_order(world):
    model = sharded_mlp(reducer="ordered", gradient_divisor=1)
    for act in (Tensor.norm, Tensor.sum, Tensor.mean):
        with pytest.raises(NeedsWhole, match=r"use unison.grad_norm, .*clip_grad_norm_"):
            act(next(iter(model.parameters())).detach())


def alone(world: World, name: str) -> tuple[str, float]:
    model = sharded_mlp()
    parameter = model.get_parameter("0.weight")
    parameter.grad = torch.ones_like(parameter)
    state = {key: torch.ones(each.shape) for key, each in model.state_dict().items()}
    act = {
        "norm": lambda: parameter.detach().norm(),
        "clip": lambda: torch.nn.utils.clip_grad_norm_([parameter], 1.0),
        "any": lambda: torch.isnan(parameter.detach()).any(),
        "full": parameter.full_tensor,
        "evaluation": lambda: torch.no_grad()(model)(inputs(0)),
        "state": lambda: full_state_dict(model),
        "load": lambda: model.load_state_dict(state),
        "grad_norm": lambda: grad_norm(model),
        "checkpoint": lambda: save_checkpoint("nowhere", model),
    }[name]
    if world.rank != 0:
        return "", 0.0
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        for patience in ("PATIENCE", "PATIENCE_BESIDE_WORK"):
            patch.setattr(ranks_module, patience, timedelta(seconds=0.5))
        with pytest.raises(RuntimeError if name == "load" else NeedsWhole) as caught:
            act()
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(
    "name",
    ["norm", "clip", "any", "full", "evaluation", "state", "load", "grad_norm", "checkpoint"],
)
def test_a_rank_that_is_alone_raises_and_names_the_line(name):
    message, seconds = run_on_ranks(2, alone, name)[0]
    assert seconds < 10
    assert "rank 0 was alone in it" in message
    assert "test_sharded_tensor.py:" in message
    assert "call it on every rank" in message


@ranks(1, 2)
def test_the_state_of_an_optimizer_of_whole_parameters_is_taken(world):
    """Of a run on one process, by `optimizer.load_state_dict`, before the first step and later."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1) * parameter.detach()
        optimizer.step()

    for num_steps in (0, 1):
        plain, model = make_mlp(), sharded_mlp()
        adams = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (plain, model)]
        step(plain, adams[0])
        for _ in range(num_steps):
            step(model, adams[1])
        model.load_state_dict(plain.state_dict())
        adams[1].load_state_dict(copy.deepcopy(adams[0].state_dict()))
        step(plain, adams[0])
        step(model, adams[1])
        state = full_state_dict(model)
        assert all(torch.equal(state[key], each) for key, each in plain.state_dict().items())


@pytest.mark.parametrize("what", ["lr", "params"])
@ranks(2)
def test_optimizers_that_differ_between_ranks_are_refused(world, what):
    """From the first step, or later by a scheduler that follows a rank's own loss."""
    model = sharded_mlp()
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(parameters[world.rank if what == "params" else 0 :], lr=0.1)
    message = ""
    try:
        for step in range(4):
            if step == 2 and what == "lr" and world.rank == 0:
                optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()
    except BadInput as error:
        message = str(error)
    found = [each for each in world.gather(message) if each]
    assert len(found) == 1  # whoever comes second; the other one is told of it by its collectives
    assert f"{what} of SGD differs between ranks" in found[0]


# ---- refused -----------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Tensor], object]] = {
    "matmul": lambda p: p @ torch.ones(20, 2),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 20), p),
    "index": lambda p: p[0],
    "slice": lambda p: p[:, 1:2],
    "mask": lambda p: p[p > 0],
    "write an element": lambda p: p.__setitem__(0, 1.0),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(20, 70),
    "transpose": lambda p: p.t(),
    "expand": lambda p: p.expand(2, 70, 20),
    "item": lambda p: p.sum(dim=0),
    "norm of rows": lambda p: p.norm(dim=1),
    "std": lambda p: p.std(),
    "sort": lambda p: p.sort(),
    "softmax": lambda p: p.softmax(0),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "einsum": lambda p: torch.einsum("ij,ij->", p, p),
    "svd": torch.linalg.svd,
    "equal": lambda p: torch.equal(p, p),
    "draw": nn.init.normal_,
    "randn_like": torch.randn_like,
    "dropout": lambda p: nn.functional.dropout(p, 0.5),
    "plus a plain tensor": lambda p: p + torch.ones(70, 20),
    "a plain tensor plus": lambda p: torch.ones(70, 20) + p,
    "into a plain tensor": lambda p: torch.ones(70, 20).copy_(p),
    "into a plain tensor, added": lambda p: torch.ones(70, 20).add_(p),
    "out": lambda p: torch.add(p, 1, out=torch.ones(70, 20)),
    "numpy": lambda p: p.numpy(),
    "tolist": lambda p: p.tolist(),
    "dlpack": torch.from_dlpack,
    "share_memory_": lambda p: p.share_memory_(),
    "iterate": list,
    "cumsum": lambda p: p.cumsum(0),
    "triu": lambda p: p.triu(),
    "flip": lambda p: p.flip(0),
    "histc": lambda p: p.histc(),
    "foreach max": lambda p: torch._foreach_max([p]),
}


@pytest.mark.parametrize("name", REFUSED)
@ranks(2)
def test_what_needs_the_whole_is_refused_by_name(world, name):
    parameter = sharded_mlp().get_parameter("0.weight").detach()
    before = parameter.local.clone()
    with pytest.raises(NeedsWhole, match=r"'weight'.*(full_tensor|draw before)"):
        REFUSED[name](parameter)
    assert_same_bits(parameter.local, before)


@ranks(2)
def test_savers_that_would_write_a_part_raise_on_the_rank_that_calls_them(world, tmp_path):
    """S5: half of a model was written without a word."""
    model = sharded_mlp()
    state = model.state_dict()
    savers = [
        lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(state),
        lambda: save_file(state, tmp_path / f"{world.rank}.safetensors"),
    ]
    for saver in savers:
        if world.rank == 0:  # nobody waits for the others
            with pytest.raises(NeedsWhole, match=r"unison.full_state_dict\(model\)"):
                saver()
    whole = full_state_dict(model)
    torch.save(whole, io.BytesIO())
    assert not (tmp_path / "0.safetensors").exists()


@ranks(1, 2)
def test_save_pretrained(world, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    expected = digest(model)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    if world.size > 1:
        with pytest.raises(NeedsWhole, match=r"unison.full_state_dict\(model\)"):
            model.save_pretrained(tmp_path / f"part{world.rank}")
    # A collective, called by every rank; one of them writes.
    state = full_state_dict(model)
    if world.rank == 0:
        model.save_pretrained(tmp_path / "whole", state_dict=state)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
        assert digest(again) == expected
    if world.size == 1:
        model.save_pretrained(tmp_path / "plain")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain")
        assert digest(again) == expected


# ---- torch.distributed.checkpoint --------------------------------------------------------------


def save_dcp(world: World, path: str, how: str) -> str:
    model = sharded_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(2):
        train_step(world, model, optimizer, step)
    if how == "state_dict":
        parts, states = get_state_dict(model, optimizer)
    else:
        parts, states = model.state_dict(), {}
    dcp.save({"model": parts, "optimizer": states}, checkpoint_id=path)
    return digest(model)


def load_dcp(world: World, path: str, how: str) -> str:
    model = sharded_mlp(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if how == "state_dict":
        parts, states = get_state_dict(model, optimizer)
        dcp.load({"model": parts, "optimizer": states}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=parts, optim_state_dict=states)
    else:
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    return digest(model)


@pytest.mark.parametrize("how", ["state_dict", "raw"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_distributed_checkpoints_go_to_any_number_of_ranks(saved_on, loaded_on, how, tmp_path):
    expected = run_on_ranks(saved_on, save_dcp, str(tmp_path), how)[0]
    assert set(run_on_ranks(loaded_on, load_dcp, str(tmp_path), how)) == {expected}


@ranks(2)
def test_checkpoints_are_fsdp2s_too(world, tmp_path):
    from torch.distributed.fsdp import fully_shard as fsdp2

    model = sharded_mlp()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ours")
    theirs = make_mlp(seed=1)
    del theirs.scale  # FSDP2 takes no parameter without dimensions
    fsdp2(theirs, mesh=init_device_mesh("cpu", (world.size,)))
    dcp.load(theirs.state_dict(), checkpoint_id=tmp_path / "ours")
    for name, value in theirs.named_parameters():
        assert_same_bits(value.full_tensor(), model.get_parameter(name).full_tensor())
    dcp.save(theirs.state_dict(), checkpoint_id=tmp_path / "theirs")
    again = sharded_mlp(seed=2)
    state = {name: value for name, value in again.state_dict().items() if name != "scale"}
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    for name in state:
        whole = again.get_parameter(name).full_tensor()
        assert_same_bits(whole, model.get_parameter(name).full_tensor())


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 3, 2, 3), (2, 2, 2, 2, 2)])
def test_boxes_cover_a_run_once(shape):
    numel = int(torch.Size(shape).numel())
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            covered = torch.zeros(shape, dtype=torch.int64)
            boxes = list(boxes_of(shape, start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            for offsets, sizes, first in boxes:
                corner = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                part = torch.arange(numel).view(shape)[corner].reshape(-1)
                assert part.tolist() == list(range(first, first + len(part)))
                covered[corner] += 1
            flat = covered.view(-1)
            assert flat[start:stop].tolist() == [1] * (stop - start)
            assert int(flat.sum()) == stop - start


# ---- habits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("when", ["before", "after", "cpu", "cpu:0"])
@ranks(1, 2)
def test_hooks_and_attributes_of_parameters_are_kept(world, when, factor):
    """S10; also where `Module.to` is called, which swaps parameters of our class."""
    seen: list[str] = []

    def decorate(parameter: nn.Parameter) -> None:
        parameter.my_group = "decayed"  # type: ignore[attr-defined]
        if factor != 1:
            parameter.register_hook(lambda gradient: gradient * factor)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(str(tuple(p.shape))))

    expected, model = fully_shard(make_mlp()), make_mlp()
    if when == "before":
        decorate(model[0].weight)
    fully_shard(model)
    if when != "before":
        decorate(model[0].weight)
    if when.startswith("cpu"):
        model.to(when)
    assert model[0].weight.my_group == "decayed"
    for each in (model, expected):
        each(inputs(world.rank)).square().mean().backward()
    assert seen == ["(70, 20)"]
    found, plain = (each.get_parameter("0.weight").grad for each in (model, expected))
    assert plain is not None
    assert_close(getattr(found, "local", found), factor * getattr(plain, "local", plain))


@ranks(2)
def test_copies_have_memory_of_their_own(world):
    piece = sharded_mlp().get_parameter("0.weight")
    twin = copy.deepcopy(piece)
    assert isinstance(twin, nn.Parameter)
    assert twin.requires_grad
    with torch.no_grad():
        twin.add_(1.0)
        assert_close(twin.local, piece.local + 1.0)
        twin.lerp_(piece, 0.5)  # an average of weights
        assert_close(twin.local, piece.local + 0.5)
        twin.data = piece
        assert_same_bits(twin.local, piece.local)
        twin.copy_(torch.ones(70, 20))  # a whole tensor: every rank takes its elements
        assert (twin.local == 1).all()


@ranks(2)
def test_data_of_another_dtype_is_refused(world):
    parameter = sharded_mlp().get_parameter("0.weight")
    with pytest.raises(BadInput, match=r"cast parameters before sharding"):
        parameter.data = parameter.data.double()


@ranks(2)
def test_a_whole_state_dict_loads(world):
    model, plain = sharded_mlp(seed=1), make_mlp(seed=2)
    model.load_state_dict(plain.state_dict())
    assert digest(model) == digest(plain)


@ranks(2)
def test_a_ranks_own_elements_have_gradients(world):
    parameter = sharded_mlp().get_parameter("0.weight")
    parameter.to_local().square().sum().backward()
    assert isinstance(parameter.grad, ShardedTensor)
    assert_close(parameter.grad.local, 2 * parameter.local)


@ranks(2)
def test_gradients_do_not_go_through_full_tensor(world):
    parameter = sharded_mlp().get_parameter("0.weight")
    with pytest.raises(NeedsWhole, match=r"full_tensor\(\) of 'weight'"):
        parameter.full_tensor().sum().backward()


# ---- everything torch has ----------------------------------------------------------------------


def walk_operations(world: World) -> tuple[dict[str, str], list[str]]:
    """Run torch's own samples of every operation on sharded inputs: the whole's result, or refused.

    Returns:
        What became of each operation, and what was silently wrong.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    everyone = Ranks.of(None)

    def sharded(whole: Tensor) -> ShardedTensor:
        cut = whole.numel() // 2
        place = Placement(
            "x", tuple(whole.shape), ((0, cut), (cut, whole.numel())), everyone, whole.device
        )
        return ShardedTensor(whole.reshape(-1)[place.start : place.stop].clone(), place)

    found: dict[str, str] = {}
    wrong: list[str] = []
    for operation in op_db:
        is_open = "jiterator" in operation.name or "empty" in operation.name  # values: anything
        if is_open or not operation.supports_dtype(torch.float32, "cpu"):
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(operation.sample_inputs("cpu", torch.float32))[:6]
            for sample in samples:
                if not isinstance(sample.input, Tensor):
                    continue
                shape = sample.input.shape

                def wrap(value: object, shape: torch.Size = shape) -> object:
                    fits = isinstance(value, Tensor) and value.shape == shape
                    return sharded(value) if fits else value  # type: ignore[arg-type]

                outcome = "refused"
                try:
                    mine = sample.transform(wrap)
                    got = operation(mine.input, *mine.args, **mine.kwargs)
                except (NeedsWhole, RuntimeError, TypeError, ValueError, NotImplementedError):
                    pass  # loud, by us or by torch: what is looked for is a wrong answer
                else:
                    outcome = "computed"
                    torch.manual_seed(0)
                    expected = operation(sample.input, *sample.args, **sample.kwargs)
                    if not _is_part_of(got, expected):
                        wrong.append(operation.name)
                if len(set(world.gather(outcome))) > 1:
                    wrong.append(f"{operation.name}: one rank alone was refused")
                found[operation.name] = max(found.get(operation.name, ""), outcome)
    return found, wrong


def _is_part_of(found: object, expected: object) -> bool:
    if isinstance(found, ShardedTensor):
        part = expected.reshape(-1)[found.placement.start : found.placement.stop]  # type: ignore[attr-defined]
        return found.shape == expected.shape and torch.allclose(  # type: ignore[attr-defined]
            found.local, part, rtol=1e-5, atol=1e-6, equal_nan=True
        )
    if isinstance(found, Tensor):
        assert isinstance(expected, Tensor)
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(found, list | tuple):
        return all(map(_is_part_of, found, expected))  # type: ignore[arg-type]
    return found == expected


@pytest.mark.full
def test_no_operation_of_torchs_is_silently_wrong():
    pytest.importorskip("expecttest", reason="torch's samples of its operations need it")
    for found, wrong in run_on_ranks(2, walk_operations, timeout=900):
        assert sorted(set(wrong)) == []
        assert len(found) > 400
        assert sum(outcome == "computed" for outcome in found.values()) > 50


@pytest.mark.parametrize("foreach", [True, False])
@ranks(3)
def test_rprop_writes_where_signs_differ(world: World, foreach: bool) -> None:
    """It sets gradients to 0 by a mask: an operation element by element, spelt as indexing."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 3)).double()
    sharded = fully_shard(copy.deepcopy(alone))
    models = alone, sharded
    optimizers = [torch.optim.Rprop(each.parameters(), lr=0.5, foreach=foreach) for each in models]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows = [inputs(rank, step).double() for rank in range(3)]
        alone(torch.cat(rows)).square().mean().backward()
        sharded(rows[world.rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    found = full_state_dict(sharded)
    for name, value in alone.state_dict().items():
        assert_close(found[name], value)


@ranks(2)
def test_what_is_written_by_other_indices_is_refused(world: World) -> None:
    weight = fully_shard(nn.Linear(4, 3)).weight.detach()
    before, mask = weight.full_tensor(), weight > 0
    for indices, value in [
        ((torch.tensor([0]),), torch.tensor(1.0)),
        ((mask.full_tensor(),), torch.tensor(1.0)),
        ((mask,), torch.ones(int(mask.sum()))),
    ]:
        with pytest.raises(NeedsWhole, match="index_put_ needs all of"):
            weight.index_put_(indices, value)
    assert_same_bits(weight.full_tensor(), before)
    weight[mask] = 0.5
    assert_same_bits(weight.full_tensor(), before.masked_fill(before > 0, 0.5))
