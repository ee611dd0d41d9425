"""Passes for statistics under torch.compile: what compiles the user's passes compiles them too.

Records come out of compiled graphs as factors, the same ones as of an eager pass. They are tried
out like private passes ([Note: whole, or by blocks] in privacy/compiled.py): the first part of each
kind runs both ways, and must make the same sums. A module for which that does not work runs as it
is, and a warning says why.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unison.capture import Capture
from unison.capture.compiled_forward import CapturedPasses, reason_of
from unison.dynamo import DynamoBackend
from unison.kfac.part_sums import PartSums

MAX_KINDS = 16  # of parts, each with kernels of its own

Run = Callable[[bool], PartSums]
"""Makes the sums of a part, of a pass that is compiled or runs as it is."""


class CompiledStatistics(CapturedPasses):
    """Compiles a module's passes for statistics.

    Args:
        module: What runs under the capture.
        inner: The backend that compiles the user's passes.
        is_granular: Whether passes are cut into granules.
        agree: Whether something is so on any rank; a collective.
        keeps_graph: Whether several backward passes go through one graph.

    Attributes:
        settings: The backend, and whether passes are cut.
    """

    what = "passes for statistics"

    def __init__(
        self,
        module: nn.Module,
        inner: DynamoBackend,
        *,
        is_granular: bool,
        agree: Callable[[bool], bool],
        keeps_graph: bool,
    ) -> None:
        super().__init__(module, inner, is_granular=is_granular, agree=agree)
        self.settings = inner, is_granular
        self._keeps_graph = keeps_graph
        self._kinds: set[Hashable] = set()
        self._is_new = True  # a kind of some part of the update under way, on any rank

    @property
    def is_aside(self) -> bool:
        """Whether the module does not run for statistics; see `CapturedPasses`."""
        return self.is_trying or not self._captures

    @contextmanager
    def attached(self, kinds: Sequence[Hashable]) -> Iterator[None]:
        """Around an update; a collective.

        Args:
            kinds: Of the parts that this rank runs.
        """
        if self.refusal is None:
            self._is_new = self._agree(not self._kinds.issuperset(kinds))
            self._kinds.update(kinds)
        self.attach()
        try:
            is_new = self.refusal is None and self._is_new
            if is_new and self._agree(len(self._kinds) > MAX_KINDS):
                self._refuse(
                    f"batches come in more than {MAX_KINDS} shapes, and each would be compiled; "
                    "pad them to a few lengths"
                )
            yield
        finally:
            self.detach()

    @contextmanager
    def running(self, captures: Sequence[Capture]) -> Iterator[None]:
        """Around a pass that is compiled; see `CapturedPasses`."""
        config: Any = torch._functorch.config  # type: ignore[attr-defined]
        # A backward pass that may give the graph's buffers away may come only once.
        is_kept = config.patch(donated_buffer=False) if self._keeps_graph else nullcontext()
        with is_kept, super().running(captures):
            yield

    def sums(self, run: Run) -> PartSums:
        """Make the sums of a part; the first ones of each kind are compared with eager ones."""
        if self.refusal is not None or not self._is_new:
            return run(self.refusal is None)
        expected = run(False)
        found: list[PartSums] = []
        self._try_out(lambda: self._difference(run, expected, found))
        return expected if self.refusal is not None else found[-1]

    def _difference(self, run: Run, expected: PartSums, found: list[PartSums]) -> str | None:
        """Why compiled passes are not what they should be; None if they are.

        Where the user's backend rounds otherwise, or draws other masks of dropout, the same graphs
        are compared in the kernels of an eager pass.

        Args:
            run: Runs a pass.
            expected: What comes out of it uncompiled.
            found: Gets what comes out of the user's backend.
        """
        eager = torch._dynamo.lookup_backend("aot_eager")
        reason: str | None = None
        for backend in (self._inner, eager):
            has_failed = False
            try:
                with self._compiling_by(backend):
                    sums = run(True)
                if backend is not eager:
                    found.append(sums)
                reason = _difference(sums, expected)
            except Exception as error:  # of compiled code: the same pass has run as it is
                reason, has_failed = reason_of(error), True
            # All ranks run the module again, or none does: its passes may be collectives.
            if not self._agree(reason is not None):
                return None
            if self._agree(has_failed):
                break
        return reason or "it is not the same on another rank"


def _difference(found: PartSums, expected: PartSums) -> str | None:
    """Why sums are not those that were expected; None if they are."""
    for name, side in sorted(found.sums.keys() ^ expected.sums.keys()):
        return f"{side!r} of {name!r} comes out of one of a compiled and an eager pass alone"
    largest: dict[str, Tensor] = {}
    for (_, side), wanted in expected.sums.items():
        own = wanted.abs().max()
        largest[side] = torch.maximum(own, largest[side]) if side in largest else own
    for (name, side), wanted in expected.sums.items():
        # Softmax does not see a bias of keys: its gradient is nothing but rounding.
        scale = torch.maximum(wanted.abs().max(), _LEAST * largest[side]).clamp(min=1e-30)
        off = float((found.sums[name, side] - wanted).abs().max() / scale)
        if not off < _TOLERANCE:
            return f"{side!r} of {name!r} differs by {off:.1%} from that of an eager pass"
    return None


_LEAST = 1e-4  # of the largest sums of the same kind, which are squares
_TOLERANCE = 0.05  # samples that were mistaken for others are off by more, bfloat16 by less
