"""The loss curve of a run as a picture."""

from pathlib import Path
from typing import Any

CURVE_FILE = "loss.png"


def plot_losses(records: list[dict[str, Any]], path: Path, *, unigram_entropy: float) -> None:
    """Draw training loss, evaluation loss and the loss of the best model without context.

    Of a private run there may be no training loss to draw.
    """
    # The object interface, not pyplot: no global state and no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r]
    evals = [(r["step"], r["eval/loss"]) for r in records if "eval/loss" in r]
    axes.axhline(unigram_entropy, color="0.55", linestyle="--", linewidth=1)
    axes.annotate(
        f"unigram entropy {unigram_entropy:.2f}",
        (1, unigram_entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color="0.4",
        fontsize=8,
    )
    if train:
        axes.plot(
            *zip(*train, strict=True), color="#4c78a8", linewidth=1, label="training, per step"
        )
    axes.plot(
        *zip(*evals, strict=True), color="#e45756", marker="o", markersize=4, label="evaluation"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
