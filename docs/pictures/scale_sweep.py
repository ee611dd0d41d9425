"""Draw docs/pictures/scale-sweep.png from bench/results/scale-sweep.json."""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Draw memory and step time of 175 billion parameters against the number of GPUs."""
    found = json.loads((ROOT / "bench/results/scale-sweep.json").read_text())["figures"]
    figure = Figure(figsize=(7, 6), layout="constrained")
    memory, seconds = figure.subplots(2, sharex=True)
    for label, ending in (("ordinary", ""), ("private, auto", ", private")):
        names = [each for each in found if (", private" in each) == bool(ending)]
        worlds = [int(each.removesuffix(ending).split()[-1]) for each in names]
        memory.plot(worlds, [found[each]["needed_gib"] for each in names], "o-", label=label)
        seconds.plot(worlds, [found[each]["step_seconds"] for each in names], "o-")
    memory.axhline(79, linestyle="--", color="grey", label="80 GB")
    memory.set(ylabel="GiB on each GPU, with margin", ylim=(0, 100))
    memory.legend()
    seconds.set(ylabel="seconds a step (estimate)", xlabel="GPUs", xscale="log", ylim=(0, 60))
    seconds.set_xticks([], minor=True)
    seconds.set_xticks(worlds, [str(each) for each in worlds])
    figure.savefig(ROOT / "docs/pictures/scale-sweep.png", dpi=120)


if __name__ == "__main__":
    main()
