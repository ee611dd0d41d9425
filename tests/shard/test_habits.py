"""What users do with FSDP2's modules, and with modules at all."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.harness import World, assert_close, ranks, run_on_ranks
from tests.shard.common import GPT2, per_sample_loss, tokens
from unison.errors import BadInput, NeedsWhole, UnsupportedOperation
from unison.models import build
from unison.shard import (
    MixedPrecision,
    auto_shard,
    batch_mean,
    deal,
    digest,
    full_parameters,
    fully_shard,
    grad_norm,
)
from unison.shard.sharded_tensor import ShardedTensor, local_part


def step_of(world: World, model: nn.Module, lr: float = 0.1, step: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.zero_grad()
    per_sample_loss(model, tokens(2, GPT2, 10 * step + world.rank)).mean().backward()
    optimizer.step()


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
@ranks(1, 2)
def test_a_copy_is_a_model_of_its_own(world, options):
    """S7: training the copy filled the original's gradients."""
    model = auto_shard(build(GPT2, seed=1), **options)
    step_of(world, model)
    model.zero_grad()
    before = digest(model)
    twin = copy.deepcopy(model)
    assert digest(twin) == before
    step_of(world, twin, step=1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert digest(model) == before
    after = digest(twin)
    assert after != before
    step_of(world, model, step=1)
    assert digest(model) == after
    shapes = [[p.shape for p in each.parameters()] for each in (model, twin)]
    assert shapes[0] == shapes[1]


@ranks(1, 2)
def test_a_copy_of_an_ordered_model_trains(world):
    def train(model: nn.Module) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in deal([tokens(4, GPT2)], granule=2):
            batch_mean(per_sample_loss(model, rows)).backward()
        optimizer.step()
        return digest(model)

    model = auto_shard(build(GPT2, seed=1), reducer="ordered", gradient_divisor=1)
    twin = copy.deepcopy(model)
    assert train(twin) == train(model)


@ranks(1, 2)
def test_averages_of_weights(world):
    def run(model: nn.Module) -> tuple[str, str]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(3):
            step_of(world, model, step=step)
            average.update_parameters(model)
        with torch.no_grad():
            average(tokens(2, GPT2)[:, :-1])
        values = [value.double().sum() for _, value in full_parameters(average.module)]
        return digest(model), f"{float(sum(values)):.6f}"

    trained, average = run(auto_shard(build(GPT2, seed=1)))
    assert len(set(world.gather(average))) == 1
    if world.size == 1:
        assert (trained, average) == run(build(GPT2, seed=1))


# ---- freezing after sharding -------------------------------------------------------------------


@pytest.mark.parametrize(("reducer", "granule"), [("fast", None), ("ordered", 2)])
@ranks(1, 2)
def test_a_frozen_copy_is_a_teacher(world, reducer, granule):
    model = auto_shard(build(GPT2, seed=1), reducer=reducer, gradient_divisor=1)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        expected = teacher(tokens(2, GPT2)[:, :-1])
        assert torch.equal(model(tokens(2, GPT2)[:, :-1]), expected)
    for rows in deal([tokens(4, GPT2)], granule=granule):
        batch_mean((per_sample_loss(model, rows) - per_sample_loss(teacher, rows)).abs()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    next(teacher.parameters()).requires_grad_(True)
    with pytest.raises(BadInput, match=r"requires_grad of 'token_embeddings\.weight' was"):
        teacher(tokens(2, GPT2)[:, :-1])


def frozen_by_turns(world: World, size: int, is_sharded: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    makes, judges = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    parts = [makes.double().requires_grad_(False), judges.double()]
    fed = range(size)
    if is_sharded:
        parts = [fully_shard(makes), fully_shard(judges)]
        fed = [world.rank]
    makes.requires_grad_(True)  # thawed for the first time
    for rank in fed:
        x = torch.full((3, 5), rank + 1.0).double()
        of_real = judges(x).mean() / len(fed)
        dropped = judges(x).mean()
        judges.requires_grad_(False)
        dropped.backward()
        (judges(makes(x)).mean() / -len(fed)).backward()
        judges.requires_grad_(True)
        of_real.backward()
    grads = [parameter.grad for part in parts for parameter in part.parameters()]
    return [grad.full_tensor() if isinstance(grad, ShardedTensor) else grad for grad in grads]


@pytest.mark.parametrize("size", [1, 2])
def test_two_networks_are_frozen_by_turns(size):
    expected = run_on_ranks(1, frozen_by_turns, size, False)[0]
    for found in run_on_ranks(size, frozen_by_turns, size, True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


# ---- FSDP2's verbs -----------------------------------------------------------------------------


def accumulated(world: World, size: int, syncs: bool | None) -> dict[str, Tensor]:
    """Gradients over three passes, of which the first two are not summed if so asked."""
    model: Any = build(GPT2, seed=1)
    fed = range(size)
    if syncs is not None:
        auto_shard(model)
        fed = [world.rank]
    for step in range(3):
        if syncs is False:
            model.set_requires_gradient_sync(step == 2)
        for rank in fed:
            rows = tokens(2, GPT2, 10 * step + rank)
            (per_sample_loss(model, rows).mean() / len(fed)).backward()
        if syncs is False and step < 2 and world.size > 1:
            for use in (torch.optim.SGD(model.parameters()).step, lambda: grad_norm(model)):
                with pytest.raises(UnsupportedOperation, match=r"gradient of 'token_embeddings\."):
                    use()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, ShardedTensor) else grad
        for name, grad in grads.items()
    }


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_may_add_up_without_sums_over_ranks(size):
    expected = run_on_ranks(1, accumulated, size, None)[0]
    for syncs in (True, False):
        for found in run_on_ranks(size, accumulated, size, syncs):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clears", ["model", "optimizer", "to zeros", "by hand"])
@ranks(1, 2)
def test_gradients_that_are_held_can_be_cleared(world, clears):
    """They came back in the next sum."""
    model: Any = fully_shard(
        nn.Linear(6, 1, bias=False).double(), mp_policy=MixedPrecision(param=torch.float32)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 6) * (1 + world.rank)
    model(100 * x).mean().backward()  # summed
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(1000 * x).mean().backward()
        if clears == "model":
            model.zero_grad()
        elif clears == "by hand":
            model.weight.grad = None
        else:
            optimizer.zero_grad(set_to_none=clears == "optimizer")
        assert (model.weight.grad is not None) == (clears == "to zeros")
    model(x).mean().backward()
    model.weight.sum().backward()  # which autograd adds itself
    model.set_requires_gradient_sync(True)
    with pytest.raises(
        UnsupportedOperation,
        match=r"'weight' is this rank's own .* call set_requires_gradient_sync\(True\) before",
    ):
        optimizer.step()
    optimizer.step(lambda: model(x).mean().backward())
    # Two means over all ranks' rows, and the ones of the sum.
    assert local_part(model.weight.grad).eq(1 + world.size + 1).all()


@ranks(1, 2)
def test_gradients_in_granules_are_held_from_batch_to_batch(world):
    model: Any = fully_shard(nn.Linear(6, 1), gradient_divisor=1)
    for step, rows in enumerate(deal([torch.ones(4, 6), torch.full((4, 6), 2.0)], granule=2)):
        model.set_requires_gradient_sync(step == 1)
        batch_mean(model(rows).squeeze(1)).backward()
    assert local_part(model.weight.grad).eq(3).all()


def test_the_ordered_reducer_has_micro_batches_instead():
    model: Any = auto_shard(build(GPT2), reducer="ordered", gradient_divisor=1)
    with pytest.raises(UnsupportedOperation, match=r"deal\(loader, granule=..., micro_batch=...\)"):
        model.set_requires_gradient_sync(False)


class Encoder(nn.Module):
    """A method beside forward, and a parameter that the loss uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(9, 31), nn.Linear(31, 5)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def by_method(world: World, size: int, how: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Encoder()
    fed = range(size)
    if how is not None:
        fully_shard(model)
        fed = [world.rank]
    for _ in range(2):
        model.zero_grad()
        for rank in fed:
            x = torch.full((3, 9), rank + 1.0)
            if how is not None:
                model.unshard()
            loss = (model.encode(x) * model.logit_scale.exp()).square().mean() / len(fed)
            if how == "resharded":
                model.reshard()
                assert isinstance(model.logit_scale, ShardedTensor) == (world.size > 1)
            loss.backward()
    if how is not None:
        model.reshard()
    grads = [p.grad for p in (model.layer.weight, model.layer.bias, model.logit_scale)]
    assert model.head.weight.grad is None
    return [grad.full_tensor() if isinstance(grad, ShardedTensor) else grad for grad in grads]


@pytest.mark.parametrize("how", ["resharded", "left"])
@pytest.mark.parametrize("size", [1, 2])
def test_methods_and_parameters_outside_of_forward(size, how):
    expected = run_on_ranks(1, by_method, size, None)[0]
    for found in run_on_ranks(size, by_method, size, how):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "before": lambda scale, logits: scale.exp() * logits,
    "after": lambda scale, logits: logits * scale.exp().clamp(max=100),
    "as a temperature": lambda scale, logits: logits / scale,
    "as a sum": lambda scale, logits: logits * scale.exp().sum(),
    "as a norm": lambda scale, logits: logits * scale.norm(),
}


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("shape", [(), (1,)])
@ranks(2)
def test_a_parameter_in_a_loss_names_the_remedy(world, shape, how):
    """A sum took its own rank's gradient for that of all."""
    model: Any = Encoder()
    model.logit_scale = nn.Parameter(torch.full(shape, 0.7))
    fully_shard(model)
    logits = model(torch.full((3, 9), world.rank + 1.0))
    with pytest.raises(NeedsWhole, match=r"'logit_scale'.* call unshard\(\) of the sharded module"):
        SCALED[how](model.logit_scale, logits).square().mean().backward()


class Contrast(nn.Module):
    """CLIP's model in forward, its loss outside."""

    def __init__(self) -> None:
        super().__init__()
        self.texts, self.images = nn.Linear(9, 7), nn.Linear(9, 7)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.texts(x), self.images(x.tanh())


def contrasted(world: World, size: int, is_sharded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Contrast().double()
    fed = range(size)
    if is_sharded:
        fully_shard(model)
        fed = [world.rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in fed:
            a, b = model(torch.eye(3, 9).double() * (rank + 1))
            if is_sharded:
                model.unshard()
            logits = model.logit_scale.exp() * (a @ b.T)
            if is_sharded:
                model.reshard()
            (F.cross_entropy(logits, torch.arange(3)) / len(fed)).backward()
        optimizer.step()
    return [value for _, value in full_parameters(model)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_with_a_parameter_after_forward(size):
    expected = run_on_ranks(1, contrasted, size, False)[0]
    for found in run_on_ranks(size, contrasted, size, True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def clip_model() -> Any:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2}
    torch.manual_seed(0)
    texts = {**small, "vocab_size": 23, "max_position_embeddings": 7, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=texts,
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=6,
    )
    return transformers.CLIPModel(config).double()


def clip(world: World, size: int, is_sharded: bool) -> dict[str, Tensor]:
    model = clip_model()
    fed = range(size)
    if is_sharded:
        auto_shard(model)
        fed = [world.rank]
    for rank in fed:
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(3, 23, (3, 7), generator=generator)
        images = torch.randn(3, 3, 8, 8, generator=generator).double()
        loss = model(input_ids=ids, pixel_values=images, return_loss=True).loss
        (loss / len(fed)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return dict(full_parameters(model))


def test_clip_of_transformers():
    expected = run_on_ranks(1, clip, 2, False)[0]
    for found in run_on_ranks(2, clip, 2, True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


# ---- dtypes and padding ------------------------------------------------------------------------


class Waves(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(7, 5, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.tensor(0.5 + 0.1j, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.phase * self.scale).abs()


def waves(world: World, size: int, is_sharded: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    model = Waves()
    fed = range(size)
    if is_sharded:
        fully_shard(model)
        fed = [world.rank]
    for rank in fed:
        x = torch.arange(14.0).view(2, 7) + rank
        (model(x).square().mean() / len(fed)).backward()
    norm = grad_norm(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    values = [value for _, value in full_parameters(model)]
    digest(model)
    return values, norm


@pytest.mark.parametrize("size", [1, 2])
def test_complex_parameters(size):
    expected, norm = run_on_ranks(1, waves, size, False)[0]
    for found, found_norm in run_on_ranks(size, waves, size, True):
        assert_close(found_norm, norm)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def logarithms(world: World, loss_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model = fully_shard(nn.Linear(3, 2), reducer="ordered", gradient_divisor=1)
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).fill_(0.5)
    batch = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    for rows in deal([batch], granule=2):
        batch_mean(loss_of(model(rows.log()) / rows.sum(1, keepdim=True))).backward()
    return [local_part(parameter.grad) for parameter in model.parameters()]  # type: ignore[arg-type]


def by_row(values: Tensor) -> Tensor:
    return values.square().sum(1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_padding_have_finite_gradients(size):
    """S8: zeros in a logarithm gave NaN gradients with a finite loss."""
    for found in run_on_ranks(size, logarithms, by_row):
        for gradient in found:
            assert torch.isfinite(gradient).all()
