"""Private training on one GPU: is the result that of one rank, to the bit?

    python -m bench.private_gpu bits      # bench/results/private-gpu-bits.json

Several gloo ranks share the GPU. Every run trains with Poisson sampling, clipping, noise and AdamW,
in bf16 with cuDNN attention; runs with the ordered reducer must agree in losses, per-sample norms
and digest, whatever holds the parameters. One run of the fast reducer shows how far it is. Compiled
runs have other kernels and so bits of their own, which must agree among themselves.
"""

import argparse
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import unison
from bench.runner import write_result
from unison.models import build, preset
from unison.privacy import PrivacyEngine
from unison.train import run_on_local_ranks
from unison.train.world import World, join_world

NUM_STEPS = 5
NUM_RECORDS, BATCH_SIZE, TOKENS, GRANULE = 64, 8, 256, 2


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    num_ranks: int
    how: str
    is_ordered: bool = True
    mode: str = "auto"
    is_compiled: bool = False


CASES = (
    Case("1 rank, unsharded", 1, "none"),
    Case("1 rank", 1, "units"),
    Case("2 ranks", 2, "units"),
    Case("2 ranks, again", 2, "units"),
    Case("2 ranks, DDP", 2, "ddp"),
    Case("4 ranks, hybrid 2x2", 4, "hybrid"),
    Case("2 ranks, fast", 2, "units", is_ordered=False),
    Case("1 rank, compiled", 1, "units", is_compiled=True),
    Case("1 rank, compiled, again", 1, "units", is_compiled=True),
    Case("2 ranks, compiled", 2, "units", is_compiled=True),
    Case("2 ranks, compiled, again", 2, "units", is_compiled=True),
)


def shard(model: nn.Module, case: Case, world: World) -> nn.Module:
    match case.how:
        case "none":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "units" | "hybrid":
            mesh = init_device_mesh("cuda", (2, world.size // 2)) if case.how == "hybrid" else None
            return unison.auto_shard(
                model,
                mesh=mesh,
                reducer="ordered" if case.is_ordered else "fast",
                gradient_divisor=1,
            )
        case _:
            raise ValueError(f"expected none, ddp, units or hybrid, found {case.how!r}")


def measure(case: Case) -> dict[str, Any]:
    with join_world("cuda") as world, sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        config = preset("gpt2", num_layers=4, context_length=TOKENS)
        model = shard(build(config, seed=0, device=world.device), case, world)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(0, config.vocab_size, (NUM_RECORDS, TOKENS + 1), generator=generator)
        engine = PrivacyEngine(secure_noise=False, accountant="rdp")
        with warnings.catch_warnings(action="ignore"):
            model, optimizer, loader = engine.make_private(
                module=model,
                optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
                data_loader=DataLoader(TensorDataset(rows), batch_size=BATCH_SIZE),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                clipping=case.mode,
                granule=GRANULE if case.is_ordered else None,
                seed=2,
                compile=case.is_compiled,
            )
        losses, norms = [], []
        for (ids,) in loader:
            ids = ids.to(world.device)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                each = unison.per_sample_loss(model(ids[:, :-1]), ids[:, 1:])
            loss = unison.batch_mean(each)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            norms.append(engine.per_sample_norms().tolist())
            if len(losses) == NUM_STEPS:
                break
        compiled = engine._attached.attachment._compiled
        assert bool(compiled and compiled.num_graphs) == case.is_compiled
        return {
            "digest": unison.digest(model),
            "losses": losses,
            "norms": norms,
            "fingerprint": unison.fingerprint(granule=GRANULE, device=world.device),
        }


def run(case: Case) -> dict[str, Any]:
    return run_on_local_ranks(measure, case, num_ranks=case.num_ranks)


def bits_figures() -> dict[str, Any]:
    # The variable is read when cuBLAS starts, in the ranks, which inherit it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Side by side, each with ranks of its own: what they wait for is mostly the start of processes.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(CASES), mp_context=spawn) as pool:
        runs = dict(zip([case.name for case in CASES], pool.map(run, CASES), strict=True))
    for name, found in runs.items():
        print(name, found["digest"], found["losses"], flush=True)
    alone = {
        is_compiled: runs[next(case.name for case in CASES if case.is_compiled == is_compiled)]
        for is_compiled in (False, True)
    }
    return {
        "runs": {
            name: {"digest": run["digest"], "losses": run["losses"]} for name, run in runs.items()
        },
        "fingerprint": alone[False]["fingerprint"],
        "equal_to_one_rank": {
            case.name: all(
                runs[case.name][what] == alone[case.is_compiled][what]
                for what in ("digest", "losses", "norms")
            )
            for case in CASES
            if case.is_ordered
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["bits"])
    parser.parse_args()
    print(write_result("private-gpu-bits", bits_figures()).read_text())


if __name__ == "__main__":
    main()
