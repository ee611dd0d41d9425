"""A pass as a CUDA graph: forward, backward, norms and coefficients, launched as one.

[Note: what a graph holds] Hundreds of small kernels cost Python and the driver more time than the
GPU needs to run them. A CUDA graph records them once, with their addresses, and repeats them. What
changes from step to step must therefore lie at a fixed place: the batch, and how many of its rows
are real. What is not recorded: the ledger, the noise, and the optimizer, a few launches more;
`step_graph` records the last two where the user asks for it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unison.clip import NormTable, SampleNorms
from unison.clip.measured import SumGrid, stacked
from unison.errors import BadInput
from unison.kernels.multi_tensor import Tables, combine, tables_kept
from unison.privacy.attachment import Attachment
from unison.privacy.dealing import FixedRows, Part
from unison.privacy.mechanism import Grid
from unison.privacy.passes import PhysicalBatch
from unison.privacy.step_state import PassSums

LossOf = Callable[..., Tensor]
"""(*batch) -> one loss per row [rows]."""
Rule = Callable[[NormTable, SampleNorms, float], Mapping[str, Tensor]]
"""(norms of the used parameters, norms over all, C) -> coefficients by name."""

NUM_WARM_UPS = 2  # passes before the one that is recorded: kernels are compiled, memory is found


class GraphedPass:
    """One physical batch of a fixed number of rows: `replay` it, then use `shares`.

    Args:
        attachment: The engine's hold on the module.
        loss_of: One loss per row.
        example: A batch: its shapes but for the number of rows, dtypes and device.
        num_rows: Rows of every batch; fewer are padded.
        clip_norm: C, of every batch.
        rule: Decides the coefficients.
        followed: A context in which the loss of some tensors is followed, and refused if it
            couples rows.

    Attributes:
        clip_norm: C, for which the pass was recorded.
        loss: Mean over the real rows of the last replay, a tensor without dimensions.
        norms: Of all rows [rows], float64.
        shares: What the clipped sums of each used parameter are made of, see `Clipping.shares`.
            Like the other tensors here, they hold the last replay's values.
    """

    def __init__(
        self,
        attachment: Attachment,
        loss_of: LossOf,
        example: Sequence[Tensor],
        *,
        num_rows: int,
        clip_norm: float,
        rule: Rule,
        followed: Callable[[Sequence[Tensor]], AbstractContextManager[None]],
    ) -> None:
        _check_example(example)
        self.num_rows, self.clip_norm = num_rows, clip_norm
        self._loss_of, self._rule, self._attachment = loss_of, rule, attachment
        self._followed = followed
        device = example[0].device
        self._inputs = [x.new_zeros(num_rows, *x.shape[1:]) for x in example]
        for place, x in zip(self._inputs, example, strict=True):
            place[: len(x)].copy_(x[:num_rows])
        self._rows = torch.arange(num_rows, device=device)
        self._num_real = torch.full((), num_rows, device=device)
        self._spacing = torch.ones(1, dtype=torch.float64, device=device)
        self.loss = torch.zeros((), device=device)
        self.norms = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self.shares: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[torch.dtype, dict[str, tuple[Tensor, Tensor]]] = {}  # of several replays
        self._graph, self._tables = torch.cuda.CUDAGraph(), Tables(device)
        self._record(device)

    def check(self, batch: Sequence[Tensor], grid: SumGrid) -> None:
        """Refuse what the graph was not recorded for, before a step is counted.

        Raises:
            BadInput: Naming it, and the remedy.
        """
        if len(batch) != len(self._inputs):
            raise BadInput(
                f"expected {len(self._inputs)} tensors, as when the graph was recorded, found "
                f"{len(batch)}"
            )
        for i, (place, x) in enumerate(zip(self._inputs, batch, strict=True)):
            if x.shape[1:] != place.shape[1:] or len(x) > len(place):
                raise BadInput(
                    f"argument {i}: the graph was recorded for at most {len(place)} rows of shape "
                    f"{list(place.shape[1:])}, found {list(x.shape)}; record another, or give "
                    "make_private a max_physical_batch_size"
                )
        if self._has_integers and not grid.is_held:
            raise BadInput(
                "the noise is so small that shares would have to be counted in more than 32 bits, "
                "which a recorded pass does not do: use a smaller max_physical_batch_size, "
                "clipping='grad_materialize', or no graph"
            )

    def replay(self, batch: Sequence[Tensor], num_real: int, grid: SumGrid) -> None:
        """Run the pass on a batch that was checked.

        Args:
            batch: As the loss takes it.
            num_real: How many of its rows count, the first ones.
            grid: To which kernels round the shares that they add up inside of one product.
        """
        for place, x in zip(self._inputs, batch, strict=True):
            place[: len(x)].copy_(x, non_blocking=True)
            if len(x) < len(place):
                place[len(x) :].zero_()
        self._num_real.fill_(num_real)
        self._spacing.fill_(grid.spacing)
        self._graph.replay()

    @property
    def _has_integers(self) -> bool:
        return any(values.dtype == torch.int32 for values, _ in self.shares.values())

    def added(self, grid: Grid, *, is_first: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Add the sums of the last replay to those of the replays before it.

        Args:
            grid: On which they lie; the same for all replays of a logical batch.
            is_first: Whether there are none.

        Returns:
            The sums as integers, each of which weighs a spacing, at the same place every time.
        """
        if grid.dtype not in self._sums:
            weight = torch.empty(1, dtype=torch.float64, device=self.loss.device)
            self._sums[grid.dtype] = {
                name: (values.new_empty(1, *values.shape[1:], dtype=grid.dtype), weight)
                for name, (values, _) in self.shares.items()
            }
        sums = self._sums[grid.dtype]
        next(iter(sums.values()))[1].fill_(grid.spacing)
        by_length: dict[int, list[str]] = {}
        for name, (values, _) in self.shares.items():
            by_length.setdefault(len(values), []).append(name)
        for names in by_length.values():
            combine(
                [self.shares[name][0] for name in names],
                stacked([self.shares[name][1] for name in names]),
                [sums[name][0] for name in names],
                add=not is_first,
                spacing=grid.spacing,
            )
        return sums

    def _record(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        redirected = self._attachment.redirected(
            rows=FixedRows(self.num_rows),
            current=lambda: self._batch,
            coefficients=self._coefficients,
            add_sums=self._add_sums,
        )
        with torch.cuda.stream(stream), redirected:
            for number in range(NUM_WARM_UPS):
                # A recorded pass runs no Python: what its loss does is looked at once.
                with self._followed(self._inputs) if number == 0 else nullcontext():
                    self._run()
                self.shares = {}
            with tables_kept(self._tables), torch.cuda.graph(self._graph, stream=stream):
                self._run()
        self._tables.fill()
        torch.cuda.current_stream(device).wait_stream(stream)

    def _run(self) -> None:
        self._batch = PhysicalBatch(  # of nobody's records
            step=0,
            record_ids=torch.arange(self.num_rows),
            first_position=0,
            index=0,
            num_passes=1,
            logical_size=self.num_rows,
        )
        losses = self._loss_of(*self._inputs)
        if losses.shape != (self.num_rows,):
            raise BadInput(
                f"expected one loss per row, [{self.num_rows}], found {list(losses.shape)}; "
                "unison.per_sample_loss gives them"
            )
        losses.sum().backward()
        is_real = self._is_real()
        total = losses.detach().masked_fill(~is_real, 0.0).sum()
        self.loss.copy_(total / self._num_real.clamp(min=1))

    def _is_real(self) -> Tensor:
        return self._rows < self._num_real

    def _coefficients(
        self, batch: PhysicalBatch, part: Part, norms: Mapping[str, SampleNorms]
    ) -> tuple[Mapping[str, Tensor], SumGrid]:
        table = NormTable.of(norms, part.num_rows)
        total = table.total()
        self.norms.copy_(total.squared.clamp(min=0).sqrt())
        is_real, own = self._is_real(), {}
        by_name = self._rule(table, total, self.clip_norm)
        for each in by_name.values():
            if id(each) not in own:
                own[id(each)] = each.where(is_real, 0.0)
        return {name: own[id(each)] for name, each in by_name.items()}, SumGrid(self._spacing)

    def _add_sums(self, batch: PhysicalBatch, sums: PassSums) -> None:
        shares = sums.shares()
        assert shares is not None
        self.shares = shares


def _check_example(example: Sequence[Any]) -> None:
    if not example or not all(isinstance(x, Tensor) and x.is_cuda for x in example):
        raise BadInput(
            "capture_graph needs an example batch of CUDA tensors, as the loss takes them"
        )
