"""One batch on its way from records to clipped sums, parameter by parameter."""

import math
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from unison.capture.sites import PlainUse
from unison.clip.bounds import NormTable, SampleNorms
from unison.clip.factored import Factors, can_wait, groups_of, stacked, sums_of
from unison.clip.gradients import GRADIENT_METHODS, add_clipped
from unison.clip.kept import Found, KeptSet, SharesByName, set_of
from unison.clip.layers import describe, signature_of
from unison.clip.matrix import tensors_of
from unison.clip.measured import (
    METHODS,
    can_make_again,
    clipped_sum,
    form,
    is_taken,
    materialize,
    squared_norms,
)
from unison.clip.modes import Choice
from unison.clip.norms import NORM_METHODS, measure, needed_to_keep
from unison.clip.plan import Plan
from unison.clip.quick import KeptMaker, maker_of
from unison.clip.storage import Storage
from unison.clip.sum_grid import SumGrid
from unison.clip.used import UsedParameter
from unison.clip.waiting import Kept
from unison.kernels.multi_tensor import TensorBatch, combine
from unison.ops import Dense, Layout, Product, Record, Streamed


class Clipping:
    """Measures the records of one batch as they come, and makes clipped sums of them.

    A parameter is measured in the backward pass as soon as it has as many records as the plan says:
    what its method does not need later is given back there and then. The plan decides the methods,
    not the result: a parameter that is used more or less often than planned is measured when
    the pass is over.

    Methods that drop records want them again, in a second pass: `second_backward` all of them, in
    the order of a backward pass; `recomputed` those that were given to `take_product`, in that of a
    forward pass. What the forward pass will not meet again is given to `take`, and kept.

    Args:
        plan: The methods of every parameter.
        num_samples: Samples in the batch.
        storage: Lends memory for per-sample gradients.

    Attributes:
        plan: Likewise.
        num_samples: Likewise.
        grid: To which kernels round each sample's share before they add it to others: their sums
            are integers. None unless it is set, before sums are made: they add float32 numbers.
    """

    def __init__(self, plan: Plan, num_samples: int, storage: Storage | None = None) -> None:
        self.plan, self.num_samples = plan, num_samples
        self.grid: SumGrid | None = None
        self._is_bounded = plan.memory_budget is not None  # memory
        self._storage = storage or Storage()
        self._parameters: dict[str, UsedParameter] = {}
        # Per-sample gradients of parameters that are known to be used once, as makers made them.
        self._kept = self._no_kept()
        self._makers: list[KeptMaker] = []
        # All that was measured at once, until it is handed out.
        self._measured: tuple[KeptSet, Found, TensorBatch] | None = None
        self._coefficients: Mapping[str, Tensor] | None = None  # in the second pass

    def take(self, name: str, record: Record | Streamed) -> None:
        """Take a record of a parameter; given to `Capture` as its `on_record`."""
        parameter = self._parameter(name)
        if isinstance(record, Streamed):
            record = self._read(parameter, record)
        if self._coefficients is None:
            self._take(parameter, record, comes_again=False)
        else:
            self._take_again(parameter, record, self._coefficients[name])

    def take_product(self, name: str, record: Product) -> bool:
        """Take a record that a second forward pass can make again, and return whether it should.

        Given to `Capture` as its `on_product`.
        """
        comes_again = self.plan.num_forwards_of(name) == 2
        self._take(self._parameter(name), record, comes_again=comes_again)
        return comes_again

    def maker_of(
        self, uses: Sequence[PlainUse], layout: Layout, g: Tensor, x: Tensor
    ) -> KeptMaker | None:
        """Return what takes uses like this one from now on; see [Note: known uses] of the capture.

        Called by it after `take` has got the use's records.
        """
        found = [self._parameters.get(use.name) for use in uses]
        is_kept = all(each is not None and each.is_waiting for each in found)
        is_only = all(self.plan.num_uses(use.name) == 1 for use in uses)
        if not (is_kept and is_only):
            return None
        factored = frozenset([each.name for each in found if each and each.factors])
        return maker_of(uses, layout, g, x, factored)

    def _no_kept(self) -> Kept:
        return Kept(is_bounded=self._is_bounded)

    def room_for(self, maker: KeptMaker) -> Kept | None:
        """Return where to keep per-sample gradients by name; None if there are some already."""
        names = maker.names
        is_free = self._kept.has_none_of(names) and self._parameters.keys().isdisjoint(names)
        if not is_free or self._coefficients is not None:
            return None
        self._makers.append(maker)
        return self._kept

    def _parameter(self, name: str) -> UsedParameter:
        """The uses of a parameter until now."""
        if name in self._kept.found:
            self._parameters[name] = UsedParameter.of_kept(name, self._kept.made().pop(name))
        elif name in self._kept.factors:
            factors = self._kept.factors.pop(name)
            self._parameters[name] = UsedParameter.of_factors(name, factors)
        return self._parameters.get(name) or self._parameters.setdefault(name, UsedParameter(name))

    def _take(self, parameter: UsedParameter, record: Record, *, comes_again: bool) -> None:
        if parameter.choice is not None:  # used more often than planned
            if parameter.num_missing:
                parameter.refuse(
                    "was used more often by this batch than by the one that clipping was planned "
                    "for, and the records of its first uses are gone"
                )
            if parameter.factors is not None:
                parameter.factors.check()
            parameter.norms, parameter.is_waiting, parameter.factors = None, False, None
        parameter.records.append(record)
        parameter.comes_again.append(comes_again)
        if len(parameter.comes_again) == self.plan.num_uses(parameter.name):
            self._measure(parameter)

    def _read(self, parameter: UsedParameter, record: Streamed) -> Record:
        """Read a record that comes in pieces.

        It is multiplied out piece by piece, or kept as it is, to be made again: then nothing but
        one piece ever exists.
        """
        is_known = self._coefficients is None and self.plan.num_uses(parameter.name) is not None
        choice = self.plan.choice(parameter.name) if is_known else None
        if choice is not None and NORM_METHODS[choice.norm].is_kept:
            return Dense(form(record), is_ours=True)
        if choice is not None and choice.gradient == "records" and can_make_again(record):
            record.finish()
            return cast(Record, record)  # kernels take it for one
        return record.as_product()

    def norms(self) -> NormTable:
        """End the first pass: each used parameter's norms, by name and in order of names.

        The order in which parameters came is that of autograd, and sums of norms depend on it.
        """
        for parameter in self._parameters.values():
            if parameter.norms is None and not parameter.is_waiting:
                self._measure(parameter)
        waiting = [each for each in self._parameters.values() if each.is_waiting]
        table = self._measure_waiting(waiting)
        for parameter in waiting:
            parameter.is_waiting = False
        if len(waiting) == len(self._parameters):
            return table
        for parameter in waiting:
            parameter.norms = table[parameter.name]
        found = dict(self._norms()) | {name: table[name] for name in self._kept}
        return NormTable.of(dict(sorted(found.items(), key=itemgetter(0))), self.num_samples)

    def _measure_waiting(self, waiting: Sequence[UsedParameter]) -> NormTable:
        """Measure the per-sample gradients that lie there, and the factors, all at once."""
        others = Found(
            {each.name: each.kept for each in waiting if each.kept is not None},
            {each.name: each.factors for each in waiting if each.factors is not None},
        )
        gradients = {**self._kept.made(), **others.gradients}
        found = Found(gradients, {**self._kept.factors, **others.factors})
        if not found.gradients and not found.factors:
            return NormTable.of({}, self.num_samples)
        kept = set_of(self._makers, found, others)
        asked = kept.asked(found)
        self._measured = kept, found, asked
        return kept.measure(found, asked, self.num_samples)

    def _norms(self) -> Iterator[tuple[str, SampleNorms]]:
        for name, parameter in self._parameters.items():
            assert parameter.norms is not None
            yield name, parameter.norms

    @property
    def num_backwards(self) -> int:
        """Backward passes that the used parameters' methods need."""
        choices = [parameter.choice for parameter in self._parameters.values()]
        return max((choice.num_backwards for choice in choices if choice), default=1)

    @property
    def num_forwards(self) -> int:
        """Forward passes that they need: one, if nothing was dropped that it would make again."""
        return 2 if self.num_backwards == 1 and any(self._missing()) else 1

    def _missing(self) -> Iterator[UsedParameter]:
        return (each for each in self._parameters.values() if each.num_missing)

    def begin_second_pass(self, coefficients: Mapping[str, Tensor]) -> None:
        """Make sums of the records that come from now on, forward or backward.

        The coefficients are applied to the records, not to the losses: on the way through the model
        they would be rounded in its dtype, and nothing could be proved of the result.

        Args:
            coefficients: [batch] of every parameter.
        """
        self._coefficients = coefficients

    def clipped_sums(
        self, coefficients: Mapping[str, Tensor], names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Make the clipped sum of one used parameter after the other, giving their records back.

        Args:
            coefficients: [batch] of every parameter, as given to `begin_second_pass` if there was
                one.
            names: Which parameters; all unless given. Those that were not used are left out.

        Yields:
            Names and sums: float64, or as kernels make them, float32 or int32 on the `grid`.
        """
        self._refuse_missing()
        self._measured = None  # it would hold what is given back here
        wanted = [*self._kept, *self._parameters] if names is None else names
        for name in [each for each in wanted if each in self._kept]:
            self._parameter(name).is_waiting = False
        used = [self._parameters[each] for each in wanted if each in self._parameters]
        self._combine(used, coefficients)
        if not self._is_too_fine:
            self._add_factors_up(used, coefficients)
        for name in wanted:
            parameter = self._parameters.pop(name, None)
            if parameter is None:
                continue
            if parameter.clipped is None:
                self._finish(parameter, coefficients[name])
            assert parameter.clipped is not None
            yield name, parameter.clipped

    def add_on_grid(
        self,
        coefficients: Mapping[str, Tensor],
        totals: MutableMapping[str, Tensor | None],
        *,
        spacing: float,
        dtype: torch.dtype,
    ) -> None:
        """Add the clipped sums of some parameters to integers: each sum is rounded to a grid.

        Args:
            coefficients: As for `clipped_sums`.
            totals: The integers by name [elements], None where there are none yet. A parameter that
                was not used stays as it is.
            spacing: Of the grid, a power of two.
            dtype: Of the integers.
        """
        self._refuse_missing()  # before anything is added
        kept = self._take_kept(totals)
        if kept:
            is_first = all(totals[name] is None for name in kept)
            for name, value in kept.items():
                if totals[name] is None:
                    make = value.new_empty if is_first else value.new_zeros
                    totals[name] = make(math.prod(value.shape[1:]), dtype=dtype)
            combine(
                list(kept.values()),
                stacked([coefficients[name] for name in kept]),
                [each for name in kept if (each := totals[name]) is not None],
                add=not is_first,
                spacing=spacing,
            )
            kept.clear()
        grid = self.grid
        is_same = grid == SumGrid(spacing) and dtype == torch.int32
        if grid is not None and is_same and not self._is_bounded:
            self._add_factors_to(totals, coefficients, grid)
        for name, total in self.clipped_sums(coefficients, list(totals)):
            unit = 1.0 if self.grid is None else self.grid.spacing
            exact = total.double() if total.is_floating_point() else total.double() * unit
            integers = (exact / spacing).round_().to(dtype).flatten()
            before = totals[name]
            totals[name] = integers if before is None else before.add_(integers)

    def _refuse_missing(self) -> None:
        """Refuse to make sums of records that a second pass should have made again."""
        for parameter in self._missing():
            parameter.refuse(
                f"was used by the first pass, and {parameter.num_missing} of those uses did not "
                "come again in the second: the model is not the same in both"
            )

    def _add_factors_to(
        self,
        totals: MutableMapping[str, Tensor | None],
        coefficients: Mapping[str, Tensor],
        grid: SumGrid,
    ) -> None:
        """Add the clipped sums of parameters whose factors wait to integers on the same grid."""
        for name in [each for each in totals if each in self._kept.factors]:
            self._parameter(name)
        found: dict[str, Factors] = {}
        for name, before in totals.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.factors is None or parameter.clipped is not None:
                continue
            found[name] = parameter.factors
            del self._parameters[name]
            if before is None:
                left, numel = parameter.factors.left, math.prod(parameter.factors.shape)
                totals[name] = left.new_zeros(numel, dtype=torch.int32)
        for group in groups_of(found):
            outs = [each for name in group.names if (each := totals[name]) is not None]
            group.add(found, [coefficients[name] for name in group.names], grid, outs)

    @property
    def _is_too_fine(self) -> bool:
        """Whether the grid is too fine for what kernels count in."""
        return self.grid is not None and not self.grid.is_held

    def _take_kept(self, names: Collection[str]) -> dict[str, Tensor]:
        """Hand out the per-sample gradients that compiled kernels take, by name; they are gone."""
        self._measured = None  # it would hold what is given back here
        for name in [each for each in names if each in self._kept.found]:
            self._parameter(name).is_waiting = False
        found: dict[str, Tensor] = {}
        for name in names:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.kept is None or parameter.clipped is not None:
                continue
            found[name] = parameter.kept
            del self._parameters[name]
        return found

    def shares(self, coefficients: Mapping[str, Tensor]) -> SharesByName:
        """Hand out what the clipped sums are made of: X [n, *shape] and weights [n] of each.

        For who adds them up, noises and casts them in one go. Where per-sample gradients were kept,
        X is they, and the weights are the coefficients; else X is the one clipped sum, of weight 1
        (as two numbers in float32, if it is float64).
        """
        made = self._shares_at_once(coefficients)
        if made is not None:
            return made
        made = SharesByName()
        gradients = self._kept.made()
        made.update((name, (value, coefficients[name])) for name, value in gradients.items())
        gradients.clear()
        for name, parameter in list(self._parameters.items()):
            if parameter.kept is not None:
                del self._parameters[name]
                made[name] = parameter.kept, coefficients[name]
        for name, total in self.clipped_sums(coefficients):
            if total.dtype == torch.float64:  # in two halves, which kernels take, and add exactly
                parts = torch.stack([total.float(), (total - total.float()).float()])
                made[name] = parts, total.new_ones(2)
            else:
                grid = self.grid if total.dtype == torch.int32 else None
                made[name] = total.unsqueeze(0), (grid or SumGrid(1.0)).weight(total.device)
        self._kept = self._no_kept()
        return made

    def _shares_at_once(self, coefficients: Mapping[str, Tensor]) -> SharesByName | None:
        """Hand out what was measured at once, if there is nothing else."""
        measured, self._measured = self._measured, None
        if measured is None or (measured[1].factors and (self._is_bounded or self._is_too_fine)):
            return None
        kept, found, asked = measured
        others = self._parameters.values()
        is_all = len(kept.names) == len(self._kept) + len(others)
        if not is_all or any(each.kept is None and each.factors is None for each in others):
            return None
        self._kept, self._parameters = self._no_kept(), {}
        return kept.shares(found, asked, coefficients, self.grid)

    def _combine(
        self, parameters: Sequence[UsedParameter], coefficients: Mapping[str, Tensor]
    ) -> None:
        """Make the clipped sums of kept per-sample gradients, all at once."""
        found = [each for each in parameters if each.kept is not None and each.clipped is None]
        values = [each.kept for each in found if each.kept is not None]
        if not values:
            return
        for parameter, value in zip(found, values, strict=True):
            parameter.clipped = value.new_empty(value.shape[1:], dtype=torch.float64)
            parameter.records = []
        combine(
            values,
            stacked([coefficients[each.name] for each in found]),
            [each.clipped for each in found if each.clipped is not None],
        )

    def _add_factors_up(
        self, parameters: Sequence[UsedParameter], coefficients: Mapping[str, Tensor]
    ) -> None:
        """Make the clipped sums of those whose factors were measured with others."""
        by_name = {each.name: each for each in parameters if each.factors and each.clipped is None}
        found = {each.name: each.factors for each in by_name.values() if each.factors}
        for parameter in by_name.values():
            parameter.factors, parameter.records = None, []
        sums = sums_of(found, coefficients, self.grid, is_bounded=self._is_bounded)
        for name, total in sums:
            by_name[name].clipped = total.squeeze(0)

    def _measure(self, parameter: UsedParameter) -> None:
        signature = tuple(map(signature_of, parameter.records))
        decided = self.plan.known_choice(parameter.name, signature)
        if decided is None and any(isinstance(each, Streamed) for each in parameter.records):
            decided = self.plan.choice(parameter.name), is_taken(parameter.records)
        if decided is None:
            choice = self.plan.choice_for(describe(parameter.name, parameter.records))
            decided = choice, is_taken(parameter.records)
            self.plan.remember(parameter.name, signature, decided)
        choice, parameter.is_fast = decided
        if parameter.is_fast and choice.norm in METHODS:
            records = self._measure_fast(parameter, choice)
        else:
            records = self._measure_in_torch(parameter, choice)
        self._keep(parameter, choice, records)

    def _measure_fast(self, parameter: UsedParameter, choice: Choice) -> Sequence[Record]:
        if can_wait(parameter.records, choice):
            parameter.factors = Factors.of(cast(Product, parameter.records[0]))
            parameter.is_waiting = True
            return parameter.records
        if not NORM_METHODS[choice.norm].is_kept:
            parameter.norms = squared_norms(parameter.records, choice.norm)
            return parameter.records
        parameter.is_waiting = True
        return [Dense(materialize(parameter.records))]

    def _measure_in_torch(self, parameter: UsedParameter, choice: Choice) -> Sequence[Record]:
        parameter.is_fast = False
        if NORM_METHODS[choice.norm].is_kept and parameter.lent is None:
            needed = needed_to_keep(parameter.records)
            if needed is not None:
                device = tensors_of(parameter.records[0])[0].device
                parameter.lent = self._storage.lend(parameter.name, *needed, device)
        # Storage holds the result only if the records are not in it already.
        out = parameter.lent if parameter.choice is None else None
        parameter.norms, records = measure(parameter.records, choice.norm, out)
        return records

    def _keep(self, parameter: UsedParameter, choice: Choice, records: Sequence[Record]) -> None:
        """Keep of the records what the gradient method needs."""
        parameter.choice = choice
        if choice.num_backwards == 2:
            dropped = [True] * len(parameter.comes_again)
        else:
            dropped = [choice.num_forwards == 2 and each for each in parameter.comes_again]
        parameter.num_missing = sum(dropped)
        if parameter.num_missing:  # then no method has put other records in their place
            records = [each for each, is_out in zip(records, dropped, strict=True) if not is_out]
        parameter.records = list(records)

    def _take_again(self, parameter: UsedParameter, record: Record, coefficients: Tensor) -> None:
        """Add a record up as soon as all others are there, or earlier where that saves memory."""
        if parameter.choice is None or parameter.clipped is not None:
            parameter.refuse("was used more often by the second pass than by the first")
        if not parameter.num_missing:
            return  # its records were kept
        parameter.records.append(record)
        parameter.num_missing -= 1
        if not parameter.num_missing:
            self._finish(parameter, coefficients)
        elif not parameter.is_fast and parameter.is_worth_adding:
            self._add(parameter, coefficients)

    def _add(self, parameter: UsedParameter, coefficients: Tensor) -> None:
        """Put the float64 sum of the records in their place."""
        if parameter.total is None:
            first = parameter.records[0]
            device = tensors_of(first)[0].device
            parameter.total = torch.zeros(first.shape, dtype=torch.float64, device=device)
        while parameter.records:
            add_clipped(parameter.total, parameter.records.pop(0), coefficients)

    def _finish(self, parameter: UsedParameter, coefficients: Tensor) -> None:
        """Make the clipped sum: no record is missing."""
        assert parameter.choice is not None
        if parameter.total is None:
            method = GRADIENT_METHODS[parameter.choice.gradient]
            records, parameter.records = parameter.records, []
            shape = records[0].shape
            if parameter.is_fast and not self._is_too_fine:
                parameter.clipped = clipped_sum(records, coefficients, shape, self.grid)
            else:
                parameter.clipped = method.clipped_sum(
                    [_as_record(each) for each in records], coefficients, shape
                )
        else:
            self._add(parameter, coefficients)
            parameter.clipped, parameter.total = parameter.total, None
        if parameter.lent is not None:
            self._storage.give_back(parameter.name, parameter.lent)


def _as_record(record: Record | Streamed) -> Record:
    return record.as_product() if isinstance(record, Streamed) else record
