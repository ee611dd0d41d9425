"""What do 13, 175 and 1,000 billion parameters take of each GPU, and does the ZeRO paper agree?

    python -m bench.scale headline      # bench/results/scale.json
    python -m bench.scale sweep         # 175b on 64 to 1,024 GPUs; bench/results/scale-sweep.json
    python -m bench.scale sweep --keep parts "175b on 64"   # one case; the next run goes on

Each case is `unison plan ... --json` in a process of its own, whose time and memory are written
beside what it says. Nothing here needs a GPU. Beside it stands the arithmetic of the ZeRO paper
(Rajbhandari et al. 2020, section 5): with N parameters on W ranks, float32 shards take 4N/W bytes,
their gradients as much, Adam's two moments 8N/W.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.runner import ROOT, write_result

GIB = 2**30
COMMON = "--precision bf16 --checkpoint-activations --batch 1 --seq 2048"
HEADLINE = {
    "13b on 8": "--preset 13b --gpus 8",
    "13b on 8, private": "--preset 13b --gpus 8 --private",
    "175b on 128": "--preset 175b --gpus 128",
    "1t on 256, offloaded": "--preset 1t --gpus 256 --offload params,optimizer",
}
WORLDS = (64, 128, 256, 512, 1024)
SWEEP = {
    f"175b on {world}{kind}": f"--preset 175b --gpus {world}{option}"
    for kind, option in (("", ""), (", private", " --private"))
    for world in WORLDS
}


def run_plan(options: str) -> dict[str, Any]:
    """Run a plan in a new process; return what it said, and what it took itself."""
    command = [sys.executable, "-m", "unison", "plan", *f"{options} {COMMON}".split(), "--json"]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"unison plan {options} ended with {process.returncode}")
        output.seek(0)
        found = json.loads(output.read())
    count, world = found["parameters"], found["scenario"]["world_size"]
    by_category = found["peak"]["bytes"]
    return {
        "options": f"{options} {COMMON}",
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "rss_gib": round(used.ru_maxrss / 2**20, 3),
        "parameters": count,
        "peak_place": found["peak"]["place"],
        "peak_gib": {key: round(value / GIB, 4) for key, value in by_category.items()},
        "total_gib": round(found["estimate"]["peak_bytes"] / GIB, 3),
        "needed_gib": round(found["estimate"]["needed_bytes"] / GIB, 3),
        "host_gib": round(found["host_bytes"] / GIB, 3),
        **{key: round(found["estimate"][key], 3) for key in TIMES},
        "paper_gib": {
            "parameters": round(4 * count / world / GIB, 4),
            "gradients": round(4 * count / world / GIB, 4),
            "optimizer": round(8 * count / world / GIB, 4),
        },
        "fits": {name: found["estimate"]["needed_bytes"] <= gib * GIB for name, gib in SIZES},
        "assumptions": found["assumptions"],
    }


SIZES = (("80 GB", 79), ("141 GB", 139))
TIMES = ("compute_seconds", "host_seconds", "network_seconds", "update_seconds", "step_seconds")


def main(arguments: list[str]) -> None:
    """Run the cases, print a line for each, write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("question", choices=("headline", "sweep"))
    parser.add_argument("cases", nargs="*", help="plan these alone, and write no result yet")
    parser.add_argument("--keep", type=Path, help="folder for figures of cases that were planned")
    given = parser.parse_intermixed_args(arguments)
    cases = HEADLINE if given.question == "headline" else SWEEP
    figures = {}
    for name in given.cases or cases:
        kept = None if given.keep is None else given.keep / f"{name}.json"
        if kept is not None and kept.is_file():
            found = json.loads(kept.read_text())
        else:
            found = run_plan(cases[name])
        if kept is not None:
            kept.write_text(json.dumps(found))
        figures[name] = found
        fits = ", ".join(
            f"{size} {'yes' if is_so else 'no'}" for size, is_so in found["fits"].items()
        )
        print(
            f"| {name} | {found['total_gib']:.1f} | {found['needed_gib']:.1f} | "
            f"{found['host_gib']:.1f} | {found['step_seconds']:.1f} | {fits} | "
            f"{found['seconds']:.0f} s, {found['rss_gib']:.2f} GiB |",
            flush=True,
        )
    if not given.cases:
        write_result("scale" if given.question == "headline" else "scale-sweep", figures)


if __name__ == "__main__":
    main(sys.argv[1:])
