"""Modes: the named points of norm methods × gradient methods."""

from dataclasses import dataclass

from unison.clip.gradients import GRADIENT_METHODS
from unison.clip.norms import NORM_METHODS


@dataclass(frozen=True)
class Choice:
    """A norm method and a gradient method that go together.

    Attributes:
        norm: A name in `NORM_METHODS`.
        gradient: A name in `GRADIENT_METHODS`.
    """

    norm: str
    gradient: str

    def __str__(self) -> str:
        return f"{self.norm}+{self.gradient}"

    @property
    def num_backwards(self) -> int:
        """Backward passes of the whole model."""
        return GRADIENT_METHODS[self.gradient].num_backwards

    @property
    def num_forwards(self) -> int:
        """Forward passes of the whole model."""
        return GRADIENT_METHODS[self.gradient].num_forwards


# A norm method that forms per-sample gradients goes with the gradient method that uses them.
CHOICES: tuple[Choice, ...] = tuple(
    Choice(norm, gradient)
    for norm in NORM_METHODS
    for gradient in GRADIENT_METHODS
    if NORM_METHODS[norm].is_kept == GRADIENT_METHODS[gradient].needs_kept
)

AUTO = "auto"
MODES: dict[str, Choice] = {
    "grad_materialize": Choice("materialize", "kept"),
    "ghost": Choice("gram", "second_backward"),
    "ghost_bk": Choice("gram", "records"),
    "flash_fuse": Choice("tile", "second_backward"),
    "flash_fuse_bk": Choice("tile", "records"),
    "recompute_bk": Choice("tile", "recomputed"),
}
