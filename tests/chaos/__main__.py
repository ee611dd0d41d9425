"""What comes of all runs that are disturbed: `python -m tests.chaos [--runs 0:50] [--anew]`.

The result is bench/results/chaos.json, written after each run; what it holds of this commit already
is not done again, so that the runs may be done in portions.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch.distributed.launcher import api

from bench.provenance import commit
from bench.runner import ROOT, write_result
from tests.chaos.runs import NUM_RUNS, PRELOADED, SEED, disturb, outcome_of, train_straight

RESULT = ROOT / "bench" / "results" / "chaos.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default=f"0:{NUM_RUNS}", help="Which, as FIRST:END.")
    parser.add_argument("--anew", action="store_true", help="Forget the runs that are done.")
    arguments = parser.parse_args()
    first, end = map(int, arguments.runs.split(":"))
    known = {} if arguments.anew else read_runs()
    # `run_on_local_ranks` forks its ranks too.
    multiprocessing.set_forkserver_preload(PRELOADED)
    api.LaunchConfig = partial(api.LaunchConfig, start_method="forkserver")  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        straight = train_straight(Path(folder))
        for number in range(first, end):
            if number in known:
                continue
            run = Path(folder) / str(number) / "run"
            started = time.perf_counter()
            kills, how = disturb(run, straight.parent / "text.txt", number)
            found = outcome_of(run, straight, kills)
            known[number] = {
                "number": number,
                "is_good": found.is_good,
                **how,
                "kills": [asdict(kill) for kill in kills],
                **asdict(found),
                "seconds": round(time.perf_counter() - started, 1),
            }
            write(known)
            print(known[number], flush=True)
    return 0 if all(each["is_good"] for each in known.values()) else 1


def read_runs() -> dict[int, dict]:
    """Runs that were done at this commit."""
    if not RESULT.is_file():
        return {}
    found = json.loads(RESULT.read_text())
    if found["commit"] != commit()["commit"]:
        return {}
    return {each["number"]: each for each in found["figures"]["runs"]}


def write(known: dict[int, dict]) -> None:
    runs = [known[number] for number in sorted(known)]
    figures = {
        "seed": SEED,
        "listed": NUM_RUNS,
        "runs_done": len(runs),
        "good": sum(each["is_good"] for each in runs),
        "equal_digests": sum(each["is_equal"] for each in runs),
        "epsilon_at_least_true": sum(each["epsilon"] >= each["true_epsilon"] for each in runs),
        "runs_with_repeated_batches": sum(bool(each["repeated"]) for each in runs),
        "kills": sum(len(each["kills"]) for each in runs),
        "runs": runs,
    }
    write_result(RESULT.stem, figures)


if __name__ == "__main__":
    sys.exit(main())
