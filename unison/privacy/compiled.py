"""Private passes under torch.compile: which modules are compiled, and that it comes out the same.

[Note: whole, or by blocks] A model that is one graph is compiled whole. One that is not (a layer is
dropped by a drawn number, and Python reads it) is compiled block by block, and an eager capture
follows what lies between. So are models whose blocks are sharded, and those that train in granules:
what is compiled together must not depend on how many ranks there are, or bits would.

What is compiled is tried out first, on the first batch of each kind, before anything is spent: its
per-sample norms must be those of the eager capture, parameter by parameter. A module for which that
does not work runs as it is, and a warning says why.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unison.capture import Capture, state_kept
from unison.capture.compiled_forward import CapturedPasses
from unison.clip import Clipping, Learned, Plan
from unison.privacy.inputs import Inputs, output_dims, probe_losses
from unison.privacy.learning import Learning
from unison.rng.draw_mode import outside_draws
from unison.torch_internals import DynamoBackend, has_values


class CompiledPasses(CapturedPasses):
    """Compiles a module's private passes.

    Args:
        module: The user's module.
        inner: The backend that compiles it.
        learning: Runs the module for another reason than to be trained, and lets ranks agree.
        is_granular: Whether passes are cut into granules.
    """

    what = "private passes"

    def __init__(
        self,
        module: nn.Module,
        inner: DynamoBackend,
        learning: Learning,
        *,
        is_granular: bool,
    ) -> None:
        super().__init__(module, inner, is_granular=is_granular, agree=learning.agree)
        self._learning = learning
        self._learned: dict[tuple[int, int], Learned] = {}  # kinds of batches that were tried
        self.attach()

    @property
    def is_aside(self) -> bool:
        """Whether the module runs for another reason than to be used; see `CapturedPasses`."""
        return self.is_trying or self._learning.is_running

    @property
    def captures(self) -> Sequence[Capture]:
        """Those of the pass under way, if it is compiled; see `CapturedPasses`."""
        return () if self._learning.is_running else self._captures

    # --- trying it out ---------------------------------------------------------------------------

    def takes(self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int) -> bool:
        """Whether batches of a kind are compiled; the first of each is tried out.

        Args:
            inputs: What the module is given.
            learned: What is known of batches like that.
            plan: How they are clipped.
            num_rows: How many rows this one has.
        """
        kind = id(learned), num_rows
        if self.refusal is None and kind not in self._learned:
            self._learned[kind] = learned
            reason = self._refusal_of(learned, plan)
            if reason is None:
                self._try_out(lambda: self._difference(inputs, learned, plan, num_rows))
            else:
                self._refuse(reason)
        return self.refusal is None

    def _refusal_of(self, learned: Learned, plan: Plan) -> str | None:
        if plan.num_forwards != 1 or plan.num_backwards != 1:
            return "clipping takes two passes over the model; use clipping='auto' and more memory"
        if learned.axes.is_traced:
            return (
                "values or drawn numbers decide where rows of samples lie, or which layers run, "
                "which a graph cannot follow"
            )
        return self._too_many_kinds if len(self._learned) > self.max_kinds else None

    def _difference(
        self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int
    ) -> str | None:
        """Why compiled passes are not what they should be; None if they are.

        In granules, the user's backend is not compared: its graphs are others, with draws in them.
        """
        with outside_draws(), state_kept(self._module, inputs.samples) as state:
            expected = self._norms(inputs, learned, plan, num_rows, is_compiled=False)

            def run() -> Mapping[str, Tensor]:
                state.restore()
                return self._norms(inputs, learned, plan, num_rows, is_compiled=True)

            return self._compare(
                run, lambda found: _difference(found, expected), skips_inner=self._is_granular
            )

    def _norms(
        self, inputs: Inputs, learned: Learned, plan: Plan, num_rows: int, *, is_compiled: bool
    ) -> Mapping[str, Tensor]:
        """Norms [rows] of each used parameter, in a pass whose loss stands in for the user's."""
        clipping = Clipping(plan, num_rows, learned.storage)
        capture = Capture(self._module, num_rows, axes=learned.axes, on_record=clipping.take)
        capture.factored = plan.factored
        running = self.running([capture] if is_compiled else [])
        with capture.installed(), running, torch.enable_grad():
            output = inputs.run(self._module, inputs.samples)
            dims = output_dims(inputs.dim, inputs.rows)(output, num_rows)
            losses, _ = probe_losses(output, num_rows, dims, inputs.rows)
            assert losses is not None  # it was learned of the same output
            losses.sum().backward()
        capture.release()
        return {name: each.squared.sqrt() for name, each in clipping.norms().items()}


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Why norms are not those that were expected; None if they are."""
    for name in sorted(found.keys() ^ expected.keys()):
        where = "outside of the compiled graph" if name in expected else "in compiled graphs alone"
        return f"{name!r} is used {where}"
    total = torch.stack([each.square() for each in expected.values()]).sum(0).sqrt().max()
    for name, wanted in expected.items() if has_values() else ():
        # Softmax does not see a bias of keys: its gradient is nothing but rounding.
        scale = torch.maximum(wanted.max(), _LEAST * total).clamp(min=1e-30)
        off = float(((found[name] - wanted).abs() / scale).max())
        if not off < _TOLERANCE:
            return f"per-sample norms of {name!r} differ by {off:.1%} from those of an eager pass"
    return None


_LEAST = 0.01  # of the norms over all parameters
_TOLERANCE = 0.05  # samples that were mistaken for others are off by more, bfloat16 by less
