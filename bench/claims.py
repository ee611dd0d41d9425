"""Do unison's claims hold, on every number of ranks up to eight?

    python -m bench.claims

`unison verify --full`, one claim after the other, with what is needed to judge the verdicts beside
them (bench/results/verify.json). It goes on where it stopped if the code is still the same: eight
ranks on two cores take their time.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from bench.provenance import ROOT, commit, write_result
from unison.cli.account import for_json
from unison.shard import fingerprint
from unison.train import run_on_local_ranks
from unison.verify import claims, try_claims

FILE = ROOT / "bench/results/verify.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600, help="begin no claim after these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, before, started = [], {}, time.perf_counter()
    if FILE.exists():
        written = json.loads(FILE.read_text())
        if written["commit"] == commit()["commit"]:
            before = {each["claim"]: each for each in written["figures"]["claims"]}
    tried = claims("full")
    for claim in tried:
        if claim.name in before:
            found.append(before[claim.name])
        elif time.perf_counter() - started < options.seconds:
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="unison-claims-") as folder:
                (verdict,) = try_claims([claim], launch=run_on_local_ranks, folder=Path(folder))
            seconds = round(time.perf_counter() - begun, 1)
            told = {"holds": verdict.holds, "seconds": seconds}
            found.append(for_json(asdict(verdict) | told))
            print(f"{'holds' if verdict.holds else 'FAILS'}  {claim.name}  {seconds} s", flush=True)
            for fault in verdict.faults:
                print(f"  {fault}", flush=True)
        figures = {
            "holds": all(each["holds"] for each in found),
            "num_claims": len(tried),
            "claims": found,
            "conditions": fingerprint(),
        }
        write_result(FILE, "verify", figures)
    print(f"{len(found)} of {len(tried)} claims tried; wrote {FILE.name}")


if __name__ == "__main__":
    main()
