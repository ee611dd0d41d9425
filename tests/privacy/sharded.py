"""Noisy Poisson runs of a small tied GPT-2 on any number of ranks, any sharding, any mode."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import unison
from tests.harness import World
from tests.harness.oracle import clipped_sum, per_sample_norms
from tests.privacy.loaders import drawn, records_of
from unison.clip import MODES
from unison.kernels.random import Cipher
from unison.models import ModelConfig, build, preset
from unison.privacy import Poisson, PrivacyEngine
from unison.rng import Key, NoiseClock, Stream, secure_normal
from unison.shard import find_blocks
from unison.shard.digest import full_parameters

NUM_RECORDS, NUM_TOKENS = 24, 9
CONFIG = preset(
    "gpt2",
    vocab_size=37,
    d_model=20,
    num_layers=2,
    num_heads=2,
    d_ff=36,
    context_length=16,
    dropout=0.0,
)


WHOLE = ("none", "ddp")  # every rank holds the whole model


def modes_of(how: str) -> list[str]:
    """The modes of clipping that a sharding takes: a forward pass again needs the whole model."""
    return [mode for mode, choice in MODES.items() if how in WHOLE or choice.num_forwards == 1]


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, CONFIG.vocab_size, (NUM_RECORDS, NUM_TOKENS), generator=generator)


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return unison.per_sample_loss(model(ids[:, :-1]), ids[:, 1:])


def shard(model: nn.Module, how: str, world: World | None, reducer: str) -> nn.Module:
    options: dict[str, Any] = {"reducer": reducer, "gradient_divisor": 1}
    match how:
        case "none":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "zero3":
            return unison.auto_shard(model, **options)
        case "zero2":
            return unison.auto_shard(model, reshard_after_forward=False, **options)
        case "root":
            return unison.fully_shard(model, **options)
        case "hybrid":
            assert world is not None
            mesh = torch.distributed.init_device_mesh(
                "cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard")
            )
            return unison.auto_shard(model, mesh=mesh, **options)
        case "fsdp2":
            assert world is not None
            mesh = torch.distributed.init_device_mesh("cpu", (world.size,))
            for block in find_blocks(model):
                fsdp.fully_shard(block, mesh=mesh)
            fsdp.fully_shard(model, mesh=mesh)
            return model
        case _:
            raise AssertionError(how)


def private_run(
    world: World | None,
    *,
    how: str = "zero3",
    mode: str = "auto",
    granule: int | None = None,
    steps: int = 4,
    noise_multiplier: float = 0.5,
    physical: int | None = None,
    rate: float = 0.15,
    max_grad_norm: float = 0.2,
    learning_rate: float = 0.5,
    config: ModelConfig = CONFIG,
    reduction: str = "mean",
    checkpointed: bool = False,
    compile: Any = False,  # noqa: A002
    reducer: str | None = None,
    memory_budget: int | None = None,
) -> dict[str, Any]:
    """Train, and return what must not depend on the number of ranks."""
    model = build(config, seed=3)
    model = shard(model, how, world, reducer or ("ordered" if granule else "fast"))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    engine = PrivacyEngine(secure_noise=False, accountant="rdp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise and sampling come from a seed")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(rows()), batch_size=4),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            sampling=Poisson(rate=rate),
            expected_batch_size=4,
            clipping=mode,
            granule=granule,
            max_physical_batch_size=physical,
            loss_reduction="sum" if reduction == "sum" else "mean",
            recheck=how == "zero3",  # it takes passes, of which tests have few
            compile=compile,
            memory_budget=memory_budget,
            seed=5,
        )
    found: dict[str, Any] = {"losses": [], "norms": [], "records": [], "sizes": []}
    done, loss_of_step = 0, 0.0
    while done < steps:
        for (ids,) in loader:
            optimizer.zero_grad()
            each = losses(model, ids)
            match reduction:
                case "mean":
                    loss = unison.batch_mean(each)
                case "own mean":
                    loss = each.mean()
                case _:
                    loss = each.sum()
            loss.backward()
            loss_of_step += loss.item()
            current = loader.current
            if current.is_last:
                found["losses"].append(loss_of_step)
                found["norms"].append(engine.per_sample_norms().tolist())
                found["records"].append(records_of(loader, current.step).tolist())
                found["sizes"].append(current.logical_size)
                found["mine"] = [*found.get("mine", []), current.num_samples]
                loss_of_step, done = 0.0, done + 1
            optimizer.step()
            if done == steps:
                break
    found["parameters"] = {name: value.double().tolist() for name, value in full_parameters(model)}
    found["digest"] = unison.digest(model)
    assert engine._training is not None
    plan = engine._training.attachment.plan
    found["passes"] = None if plan is None else (plan.num_forwards, plan.num_backwards)
    return found


def oracle_run(
    *,
    steps: int,
    noise_multiplier: float = 0.5,
    rate: float = 0.15,
    max_grad_norm: float = 0.2,
    learning_rate: float = 0.5,
    config: ModelConfig = CONFIG,
) -> dict[str, Any]:
    """The same run in float64, one sample at a time, on one process, fed the same noise."""
    model = build(config, seed=3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    key = Key.from_seed(5)
    sampling = Poisson(rate=rate)
    clock = NoiseClock(key)
    std = noise_multiplier * max_grad_norm
    found: dict[str, Any] = {"norms": [], "sizes": []}
    for step in range(steps):
        batch = rows()[drawn(sampling, key, NUM_RECORDS, step)]
        sums = clipped_sum(model, losses, batch, max_grad_norm)
        found["norms"].append(per_sample_norms(model, losses, batch).tolist())
        found["sizes"].append(len(batch))
        of_step = clock.advance(step)
        for name, parameter in model.named_parameters():
            stream = Stream(of_step, name, step=step, purpose="noise", cipher=Cipher.CHACHA20)
            noise = secure_normal(stream, tuple(parameter.shape), std).double()
            parameter.grad = (sums[name] + noise) / 4
        optimizer.step()
    found["parameters"] = {name: each.tolist() for name, each in model.named_parameters()}
    return found


def relative(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative L2 error of any parameter."""
    worst = 0.0
    for name, value in expected["parameters"].items():
        wanted = torch.tensor(value, dtype=torch.float64)
        error = (torch.tensor(found["parameters"][name], dtype=torch.float64) - wanted).norm()
        worst = max(worst, float(error / wanted.norm()))
    return worst
