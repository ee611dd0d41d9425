"""Sharding on one GPU: speed beside FSDP2 and beside no sharding, memory on 8 ranks, and bits.

    python -m bench.shard_gpu speed     # bench/results/shard-gpu-speed.json
    python -m bench.shard_gpu memory    # bench/results/shard-gpu-memory.json
    python -m bench.shard_gpu bits      # bench/results/shard-gpu-bits.json
    python -m bench.shard_gpu dropout   # bench/results/shard-gpu-dropout.json

`speed` runs one rank: what the engine itself costs when there is nothing to send. In each round
every contender takes one whole step (forward, backward, optimizer), in an order that rotates.
`memory` and `bits` start several gloo ranks that share the GPU. `dropout` is transformers' GPT-2
with its default dropout, whose masks are torch's or belong to samples.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import unison
from bench.runner import ratio_of, write_result
from unison.models import ModelConfig, build, preset
from unison.rng import Key, draws_by_sample
from unison.shard import find_blocks
from unison.train import run_on_local_ranks
from unison.train.world import join_world

SPEED_LIMIT = 1.03
SAVING_LIMIT = 3.9
DROPOUT_LIMIT = 1.15
MIB = 2**20


def rows_of(config: ModelConfig, batch_size: int, tokens: int, step: int) -> Tensor:
    """[batch_size, tokens + 1], the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, config.vocab_size, (batch_size, tokens + 1), generator=generator)


def mean_loss(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return unison.per_sample_loss(model(rows[:, :-1]), rows[:, 1:]).mean()


def with_fsdp2(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    policy = policy or MixedPrecisionPolicy()
    for block in find_blocks(model):
        torch_fully_shard(block, mp_policy=replace(policy, output_dtype=None))
    torch_fully_shard(model, mp_policy=policy)
    return model


# ---- speed ---------------------------------------------------------------------------------------


def measure_speed(name: str, batch_size: int, tokens: int, rounds: int) -> dict[str, Any]:
    config = preset(name, context_length=tokens)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def fresh(dtype: torch.dtype = torch.float32) -> nn.Module:
        return build(config, seed=0, device="cuda").to(dtype)

    models = {
        "fast": unison.auto_shard(fresh(), mp_policy=policy),
        "fsdp2": with_fsdp2(fresh(), policy),
        "fast, bf16 shards": unison.auto_shard(fresh(torch.bfloat16)),
        "fsdp2, bf16 shards": with_fsdp2(fresh(torch.bfloat16)),
        "unsharded, bf16": fresh(torch.bfloat16),
    }
    optimizers = {
        key: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for key, model in models.items()
    }
    rows = rows_of(config, batch_size, tokens, 0).cuda()

    def step(key: str) -> None:
        mean_loss(models[key], rows).backward()
        optimizers[key].step()
        optimizers[key].zero_grad()

    names = list(models)
    seconds: dict[str, list[float]] = {key: [] for key in names}
    launches: dict[str, list[float]] = {key: [] for key in names}  # the host's part of a step
    gc.collect()
    gc.disable()  # a collection in the middle of a step would be counted against it alone
    for number in range(-5, rounds):
        turn = number % len(names)
        for key in names[turn:] + names[:turn]:
            gc.collect()
            torch.cuda.synchronize()
            started = time.perf_counter()
            step(key)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            if number >= 0:
                launches[key].append(launched - started)
                seconds[key].append(time.perf_counter() - started)
    gc.enable()
    pairs = [
        ("fast", "fsdp2"),
        ("fast, bf16 shards", "unsharded, bf16"),
        ("fast, bf16 shards", "fsdp2, bf16 shards"),
    ]
    ratios = {}
    for ours, peer in pairs:
        ratio = asdict(ratio_of(seconds[ours], seconds[peer]))
        ratios[f"{ours} / {peer}"] = ratio | {
            "limit": SPEED_LIMIT,
            "is_within": ratio["ratio"] <= SPEED_LIMIT,
        }
    return {
        "model": name,
        "batch_size": batch_size,
        "tokens": tokens,
        "ratios": ratios,
        "median_host_seconds": {key: statistics.median(launches[key]) for key in names},
        "median_seconds": {key: statistics.median(seconds[key]) for key in names},
    }


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryCase:
    """One contender of the memory measurement."""

    engine: str
    preset: str
    tokens: int


def measure_memory(case: MemoryCase) -> dict[str, float]:
    """Peak MiB that this rank's tensors take on the GPU over three steps; the largest of ranks."""
    with join_world("cuda") as world:
        config = preset(case.preset, context_length=case.tokens)
        model = build(config, seed=0)  # on the CPU, so that only what is kept reaches the GPU
        mesh = init_device_mesh("cuda", (world.size,))
        match case.engine:
            case "one process":
                model.cuda()
            case "fsdp2":
                for block in find_blocks(model):
                    torch_fully_shard(block, mesh=mesh)
                torch_fully_shard(model, mesh=mesh)
            case "fast":
                unison.auto_shard(model, mesh=mesh)
            case "ordered":
                unison.auto_shard(model, mesh=mesh, reducer="ordered", gradient_divisor=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
        in_backward = held = 0
        for number in range(3):
            torch.cuda.reset_peak_memory_stats()
            rows = rows_of(config, world.size, case.tokens, number).cuda()
            if case.engine == "ordered":
                for dealt in unison.deal([rows], granule=1):
                    losses = unison.per_sample_loss(model(dealt[:, :-1]), dealt[:, 1:])
                    unison.batch_mean(losses).backward()
            else:
                mean_loss(model, rows[world.rank : world.rank + 1]).backward()
            in_backward = torch.cuda.max_memory_allocated()
            held = torch.cuda.memory_allocated()
            optimizer.step()
            if number < 2:
                optimizer.zero_grad()
        mine = [torch.cuda.max_memory_allocated(), in_backward, held]
        every: list[list[int]] = [[]] * world.size
        dist.all_gather_object(every, mine)
        peak, backward, held = (max(values) / MIB for values in zip(*every, strict=True))
        return {"peak": peak, "peak in backward": backward, "between": held}


def memory_figures(name: str, tokens: int, num_ranks: int) -> dict[str, Any]:
    engines = {"one process": 1, "fsdp2": num_ranks, "fast": num_ranks, "ordered": num_ranks}
    peaks = {}
    for engine, size in engines.items():
        case = MemoryCase(engine=engine, preset=name, tokens=tokens)
        peaks[engine] = run_on_local_ranks(measure_memory, case, num_ranks=size)
        print(engine, peaks[engine], flush=True)
    alone = peaks["one process"]["peak"]
    return {
        "model": name,
        "tokens": tokens,
        "num_ranks": num_ranks,
        "mib_per_rank": peaks,
        "saving": {engine: alone / of["peak"] for engine, of in peaks.items()},
        "fast / fsdp2": peaks["fast"]["peak"] / peaks["fsdp2"]["peak"],
        "ordered / fsdp2": peaks["ordered"]["peak"] / peaks["fsdp2"]["peak"],
    }


# ---- dropout -------------------------------------------------------------------------------------


def measure_dropout(batch_size: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Whole steps of GPT-2 under bf16 autocast: torch's draws, draws by sample, ordered units."""
    import transformers

    config = transformers.GPT2Config(n_positions=tokens)

    def fresh() -> Any:
        torch.manual_seed(0)
        model: Any = transformers.GPT2LMHeadModel(config)
        return model.cuda().train()

    models = {"torch": fresh(), "by sample": fresh()}
    models["ordered"] = unison.auto_shard(fresh(), reducer="ordered", gradient_divisor=1)
    optimizers = {
        key: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for key, model in models.items()
    }
    rows = torch.randint(0, config.vocab_size, (batch_size, tokens + 1)).cuda()
    (granular,) = unison.deal([rows], granule=batch_size, first_step=5)

    def losses_of(key: str, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = models[key](ids[:, :-1], use_cache=False).logits
        return unison.per_sample_loss(logits, ids[:, 1:])

    def step(key: str) -> None:
        if key == "ordered":
            loss = unison.batch_mean(losses_of(key, granular))
        elif key == "torch":
            loss = losses_of(key, rows).mean()
        else:
            with draws_by_sample(Key.from_seed(0), 0, range(batch_size)):
                loss = losses_of(key, rows).mean()
        loss.backward()
        optimizers[key].step()
        optimizers[key].zero_grad()

    names = list(models)
    seconds: dict[str, list[float]] = {key: [] for key in names}
    peaks = dict.fromkeys(names, 0.0)
    gc.collect()
    gc.disable()
    for number in range(-5, rounds):
        turn = number % len(names)
        for key in names[turn:] + names[:turn]:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            started = time.perf_counter()
            step(key)
            torch.cuda.synchronize()
            if number >= 0:
                seconds[key].append(time.perf_counter() - started)
                peaks[key] = max(peaks[key], (torch.cuda.max_memory_allocated() - held) / MIB)
    gc.enable()
    ratios = {
        f"{key} / torch": asdict(ratio_of(seconds[key], seconds["torch"])) for key in names[1:]
    }
    ratios["by sample / torch"] |= {
        "limit": DROPOUT_LIMIT,
        "is_within": ratios["by sample / torch"]["ratio"] <= DROPOUT_LIMIT,
    }
    weights = config.n_layer * batch_size * config.n_head * tokens**2 * 2 / MIB
    return {
        "model": "transformers GPT-2, dropout 0.1, bf16 autocast",
        "batch_size": batch_size,
        "tokens": tokens,
        "ratios": ratios,
        "median_seconds": {key: statistics.median(seconds[key]) for key in names},
        "mib_of_a_step": peaks,
        "mib_of_attention_weights_if_kept": weights,
    }


# ---- bits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BitsCase:
    """One run whose digest must be that of one rank."""

    name: str
    num_ranks: int
    replicas: int = 1
    offload: bool = False
    reshard: bool = True


BITS = (
    BitsCase("1 rank", 1),
    BitsCase("2 ranks", 2),
    BitsCase("2 ranks, again", 2),
    BitsCase("2 ranks, ZeRO-2", 2, reshard=False),
    BitsCase("4 ranks, hybrid 2x2", 4, replicas=2),
    # Offloaded parameters step on the CPU, whose AdamW rounds otherwise: a family of its own.
    BitsCase("1 rank, offload", 1, offload=True),
    BitsCase("2 ranks, offload", 2, offload=True),
)


def measure_bits(case: BitsCase) -> dict[str, Any]:
    """Five AdamW steps in bf16 with cuDNN attention and clipping on; the digest and the losses."""
    with join_world("cuda") as world, sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        config = preset("gpt2", num_layers=4, context_length=256)
        shape = (case.replicas, world.size // case.replicas)
        mesh = init_device_mesh("cuda", shape) if case.replicas > 1 else None
        model = unison.auto_shard(
            build(config, seed=0, device=world.device),
            mesh=mesh,
            reshard_after_forward=case.reshard,
            mp_policy=unison.MixedPrecision(param=torch.bfloat16, output=torch.float32),
            offload_policy=unison.CPUOffload() if case.offload else None,
            reducer="ordered",
            gradient_divisor=1,
        )
        optimizer = torch.optim.AdamW(unison.param_groups(model, 0.1), lr=1e-3)
        losses = []
        for number in range(5):
            rows = rows_of(config, 8, 256, number)
            for dealt in unison.deal([rows], granule=2):
                dealt = dealt.to(world.device)
                each = unison.per_sample_loss(model(dealt[:, :-1]), dealt[:, 1:])
                loss = unison.batch_mean(each)
                loss.backward()
                losses.append(loss.item())
            unison.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {
            "digest": unison.digest(model),
            "losses": losses,
            "fingerprint": unison.fingerprint(granule=2, device=world.device),
        }


def bits_figures() -> dict[str, Any]:
    # The variable is read when cuBLAS starts, in the ranks, which inherit it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    runs = {}
    for case in BITS:
        runs[case.name] = run_on_local_ranks(measure_bits, case, num_ranks=case.num_ranks)
        print(case.name, runs[case.name]["digest"], flush=True)
    alone = {False: runs["1 rank"], True: runs["1 rank, offload"]}
    return {
        "runs": {
            name: {"digest": run["digest"], "losses": run["losses"]} for name, run in runs.items()
        },
        "fingerprint": alone[False]["fingerprint"],
        "equal_to_one_rank": {
            case.name: all(
                runs[case.name][what] == alone[case.offload][what] for what in ("digest", "losses")
            )
            for case in BITS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["speed", "memory", "bits", "dropout"])
    parser.add_argument("--preset")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    match arguments.question:
        case "speed":
            with join_world("cuda") if not dist.is_initialized() else nullcontext():
                figures = measure_speed(
                    arguments.preset or "gpt2-large",
                    arguments.batch_size,
                    arguments.tokens or 1024,
                    arguments.rounds,
                )
        case "memory":
            figures = memory_figures(
                arguments.preset or "gpt2", arguments.tokens or 64, arguments.ranks
            )
        case "dropout":
            figures = {
                f"{size} samples": measure_dropout(size, arguments.tokens or 1024, arguments.rounds)
                for size in (8, 16)
            }
        case _:
            figures = bits_figures()
    print(write_result(f"shard-gpu-{arguments.question}", figures).read_text())


if __name__ == "__main__":
    main()
