"""Draw the pictures of docs/clipping.md from the planner's own estimates.

python docs/pictures/clipping.py    # writes clipping-time.png and clipping-memory.png beside it
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from unison.clip import LayerShape, plan_clipping
from unison.clip.costs import MACHINES, MODES, Choice, UseShape, method_costs

HERE = Path(__file__).parent
COLOURS = {"gram": "#0072b2", "tile": "#d55e00", "materialize": "#009e73"}
INK, GRID = "#222222", "#dddddd"
plt.rcParams.update(
    {
        "font.size": 10,
        "axes.edgecolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "savefig.dpi": 150,
    }
)


def linear(
    name: str, tokens: int, rows: int, columns: int, *, batch: int, itemsize: int
) -> LayerShape:
    """A linear layer's one use."""
    use = UseShape(kind="product", tokens=tokens, rows=rows, columns=columns)
    return LayerShape(name=name, batch=batch, itemsize=itemsize, uses=(use,))


# ---- time --------------------------------------------------------------------------------------

BATCH, ROWS, COLUMNS = 8, 3072, 768
TOKENS = [2 ** (i / 4) for i in range(16, 57)]  # 16 to 16384
PAIRS = {
    "gram": Choice("gram", "records"),
    "tile": Choice("tile", "records"),
    "materialize": Choice("materialize", "kept"),
}


def draw_time(axes: Axes, machine: str) -> None:
    """Time of norm and clipped sum over tokens, in units of one float32 weight-gradient GEMM."""
    times: dict[str, list[float]] = {name: [] for name in PAIRS}
    picks: list[str] = []
    for tokens in map(int, TOKENS):
        layer = linear("weight", tokens, ROWS, COLUMNS, batch=BATCH, itemsize=4)
        unit = 2 * BATCH * tokens * ROWS * COLUMNS / MACHINES[machine]["native_flops"]
        (planned,) = plan_clipping([layer], machine=machine).layers
        seconds = {each.choice: each.seconds for each in planned.alternatives}
        for name, choice in PAIRS.items():
            times[name].append(seconds[choice] / unit)
        picks.append(planned.chosen.choice.norm)
    for name, values in times.items():
        axes.plot(TOKENS, values, color=COLOURS[name], linewidth=2, label=f"{PAIRS[name]}")
    starts = [i for i, pick in enumerate(picks) if i == 0 or pick != picks[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(TOKENS) - 1], strict=True):
        span, colour = (TOKENS[start], TOKENS[end]), COLOURS[picks[start]]
        axes.plot(span, (0.72, 0.72), color=colour, linewidth=7, solid_capstyle="butt")
    axes.set(xscale="log", yscale="log", xlim=(16, 16384), ylim=(0.62, 60))
    axes.set_xticks([16, 64, 256, 1024, 4096, 16384], ["16", "64", "256", "1024", "4096", "16384"])
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens per sample")


def time_picture() -> None:
    """Draw what the three ways cost over tokens."""
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.5), sharey=True, layout="constrained")
    names = {"cpu": "a few cores of a CPU", "cuda": "a data-centre GPU"}
    for axes, machine in zip(panels, MACHINES, strict=True):
        draw_time(axes, machine)
        axes.set_title(names[machine])
    panels[0].set_ylabel("time ÷ one weight-gradient GEMM")
    panels[0].annotate("taken by auto", (18, 0.82), fontsize=8, color=INK)
    panels[1].legend(frameon=False, loc="upper center")
    figure.savefig(HERE / "clipping-time.png")


# ---- memory ------------------------------------------------------------------------------------

BLOCKS, D_MODEL, MEMORY_BATCH, ITEMSIZE = 12, 768, 8, 2
SHAPES = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
PARTS = {"a": "#56b4e9", "g": "#e69f00", "per-sample gradients": "#009e73"}


def kept_parts(mode: str, tokens: int) -> dict[str, float]:
    """Gigabytes that a mode keeps of twelve blocks, by what they are."""
    kept = dict.fromkeys(PARTS, 0.0)
    for name, (rows, columns) in SHAPES.items():
        layer = linear(
            name,
            tokens,
            rows * D_MODEL,
            columns * D_MODEL,
            batch=MEMORY_BATCH,
            itemsize=ITEMSIZE,
        )
        costs = {each: cost.kept_bytes for each, cost in method_costs(layer, "cpu").items()}
        if MODES[mode].gradient == "kept":
            parts = {"per-sample gradients": costs["kept"]}
        else:
            g = min(costs["recomputed"], costs[MODES[mode].gradient])
            parts = {"a": costs[MODES[mode].gradient] - g, "g": g}
        for part, size in parts.items():
            kept[part] += BLOCKS * size / 1e9
    return kept


def draw_memory(axes: Axes, tokens: int) -> None:
    """Bytes that each mode keeps, as bars."""
    rows = {
        "grad_materialize": "grad_materialize",
        "ghost_bk, flash_fuse_bk": "flash_fuse_bk",
        "recompute_bk": "recompute_bk",
        "ghost, flash_fuse": "flash_fuse",
    }
    for place, mode in enumerate(reversed(rows.values())):
        left = 0.0
        for part, size in kept_parts(mode, tokens).items():
            axes.barh(place, size, left=left, color=PARTS[part], height=0.62)
            left += size
        axes.annotate(f"{left:.1f}", (left, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.tick_params(left=False)
    axes.set_xlim(0, 11)
    axes.set_xlabel("GB kept until the end of the backward pass")
    axes.set_title(f"{tokens} tokens per sample")
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def memory_picture() -> None:
    """Draw what each mode keeps, for short and for long samples."""
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 2.6), sharey=True, layout="constrained")
    for axes, tokens in zip(panels, (512, 4096), strict=True):
        draw_memory(axes, tokens)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in PARTS.values()]
    panels[0].legend(handles, list(PARTS), facecolor="white", edgecolor="none", loc="center right")
    figure.savefig(HERE / "clipping-memory.png")


if __name__ == "__main__":
    time_picture()
    memory_picture()
