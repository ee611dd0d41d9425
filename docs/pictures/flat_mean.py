"""Why a mean over all tokens is not a per-row loss: `python docs/pictures/flat_mean.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import unison

ROWS, TOKENS, VOCAB = 8, 64, 32
INK, QUIET = "#1f4e79", "#c55a11"


def gradient_of_first_row(num_labels: int, *, is_flat: bool) -> float:
    """The norm of row 0's gradient, as row 1 has more or fewer labels."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, TOKENS, VOCAB, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    labels[:, 8:] = -100
    labels[1, :num_labels] = 1
    if is_flat:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        loss = unison.per_sample_loss(logits, labels).mean()
    loss.backward()
    assert logits.grad is not None
    return float(logits.grad[0].norm())


def main() -> None:
    """Draw the picture."""
    counts = list(range(8, TOKENS + 1, 4))
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for is_flat, color, offset, name in (
        (True, QUIET, -18, "F.cross_entropy over all tokens"),
        (False, INK, 7, "unison.per_sample_loss(...).mean()"),
    ):
        norms = [gradient_of_first_row(count, is_flat=is_flat) for count in counts]
        axes.plot(counts, [each / norms[0] for each in norms], color=color, lw=2)
        end = (counts[-1], norms[-1] / norms[0])
        style = {"color": color, "ha": "right", "textcoords": "offset points"}
        axes.annotate(name, end, (-6, offset), **style)
    axes.set_ylim(0, 1.25)
    axes.set_xlabel("labels that row 1 has")
    axes.set_ylabel("gradient of row 0\n(1 = 8 labels in row 1)")
    axes.set_title("Another row's length changes this row's gradient", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png").with_stem("flat-mean"), dpi=150)


if __name__ == "__main__":
    main()
