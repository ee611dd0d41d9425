"""One batch on its way from records to clipped sums, parameter by parameter."""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

import torch
from torch import Tensor

from unison.clip import measured
from unison.clip.bounds import Grid, NormTable, SampleNorms, is_taken, num_terms, tensors_of
from unison.clip.costs import KINDS, Choice, describe
from unison.clip.measured import Factors
from unison.clip.norms import add_clipped, from_records, measure, needed_to_keep
from unison.clip.plan import LayerPlan, Plan
from unison.errors import UnsupportedOperation
from unison.kernels import factored
from unison.kernels.available import takes
from unison.kernels.multi_tensor import combine, squares
from unison.ops import Dense, Product, Record, Streamed, plain_record
from unison.ops.records import shape_of
from unison.torch_internals import machine_of


class Storage:
    """Memory for per-sample gradients, used again from batch to batch.

    Per-sample gradients are large, and a CPU's allocator returns large blocks to the operating
    system at once: to get them again costs a page fault per 4 KiB, about as much time as to fill
    them by a matrix product. A GPU's allocator keeps its blocks, so there nothing is kept here.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def lend(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a tensor of any content. Nobody else holds it until it is given back."""
        found = self._free.pop((name, math.prod(shape), dtype), None)
        if found is None or machine_of(device) != "cpu":
            self._free = {key: value for key, value in self._free.items() if key[0] != name}
            return torch.empty(shape, dtype=dtype, device=device)
        return found.view(shape)

    def give_back(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor for the next batch."""
        if machine_of(tensor.device) == "cpu":
            self._free[name, tensor.numel(), tensor.dtype] = tensor


@dataclass(eq=False)
class UsedParameter:
    """The records of one parameter in one batch, until its clipped sum is made.

    Attributes:
        name: Its name.
        planned: What was planned for it; None if nothing was.
        records: What is to be measured, or to be added up.
        comes_again: Which records of the first pass a second one makes again.
        choice: Its methods, once it was measured.
        norms: Its samples' norms, once they are known.
        num_missing: Records that were dropped, and that a second pass has not made again yet.
        lent: Storage of its per-sample gradients.
        total: The float64 sum of records that have come again, while others are missing.
        clipped: Its clipped sum, where a second pass made it.
        is_fast: Whether Triton kernels take its records.
        gradients: Per-sample gradients that kernels take together with those of other parameters,
            measuring them when the pass is over if their norms are not known.
        factors: Of its one use, likewise.
    """

    name: str
    planned: LayerPlan | None
    records: list[Record] = field(default_factory=list)
    comes_again: list[bool] = field(default_factory=list)
    choice: Choice | None = None
    norms: SampleNorms | None = None
    num_missing: int = 0
    lent: Tensor | None = None
    total: Tensor | None = None
    clipped: Tensor | None = None
    is_fast: bool = False
    gradients: Tensor | None = None
    factors: Factors | None = None

    def refuse(self, what: str) -> NoReturn:
        """Raise for a use that came otherwise than expected."""
        raise UnsupportedOperation(
            f"{self.name} {what}. Use a clipping mode that keeps records, such as 'flash_fuse_bk'"
        )


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
        self.grid: Grid | None = None
        self._is_bounded = plan.memory_budget is not None  # memory
        self._storage = storage or Storage()
        self._parameters: dict[str, UsedParameter] = {}
        self._coefficients: Mapping[str, Tensor] | None = None  # in the second pass

    # --- records come ----------------------------------------------------------------------------

    def take(self, name: str, record: Record | Streamed, *, comes_again: bool = False) -> None:
        """Take a record of a parameter; given to `Capture` as its `on_record`.

        Args:
            name: Of the parameter.
            record: Of one use.
            comes_again: Whether a second forward pass makes it again.
        """
        parameter = self._parameters.get(name)
        if parameter is None:
            parameter = UsedParameter(name, self.plan.by_name.get(name))
            self._parameters[name] = parameter
        if isinstance(record, Streamed):
            record = self._read(parameter, record)
        if self._coefficients is not None:
            self._take_again(parameter, record, self._coefficients[name])
            return
        if parameter.choice is not None:  # used more often than planned
            if parameter.num_missing:
                parameter.refuse(
                    "was used more often by this batch than by the one that clipping was planned "
                    "for, and the records of its first uses are gone"
                )
            if parameter.factors is not None:
                parameter.factors.check()
            parameter.norms = parameter.gradients = parameter.factors = None
        planned = parameter.planned
        kinds = None if planned is None else planned.kinds
        is_alone = kinds is not None and len(kinds) == 1 and not parameter.records
        if isinstance(record, Dense) and is_alone and parameter.choice is None:
            assert planned is not None
            choice = planned.chosen.choice
            # Per-sample gradients that compiled passes have formed. As `_measure` would, in fewer
            # steps: the host must not be slower than a GPU.
            if choice.is_kept and choice.norm in measured.METHODS and takes(record.value):
                kept = measured.materialize([record])
                parameter.choice, parameter.is_fast, parameter.gradients = choice, True, kept
                parameter.records, parameter.comes_again = [Dense(kept)], [False]
                return
        parameter.records.append(record)
        parameter.comes_again.append(comes_again)
        if kinds is not None and len(parameter.comes_again) == len(kinds):
            self._measure(parameter)

    def take_product(self, name: str, record: Product) -> bool:
        """Take a record that a second forward pass can make again, and return whether it should.

        Given to `Capture` as its `on_product`.
        """
        planned = self.plan.by_name.get(name)
        comes_again = planned is not None and planned.chosen.choice.num_forwards == 2
        self.take(name, record, comes_again=comes_again)
        return comes_again

    def _read(self, parameter: UsedParameter, record: Streamed) -> Record:
        """Read a record that comes in pieces.

        It is multiplied out piece by piece, or kept as it is, to be made again: then nothing but
        one piece ever exists.
        """
        planned = parameter.planned
        if self._coefficients is None and planned is not None and planned.kinds is not None:
            choice = planned.chosen.choice
            if choice.is_kept:
                return Dense(measured.form(record), is_ours=True)
            if choice.gradient == "records" and is_taken([record]):
                record.finish()
                return cast(Record, record)  # kernels take it for one
        return record.as_product()

    # --- norms -----------------------------------------------------------------------------------

    def _measure(self, parameter: UsedParameter) -> None:
        """Measure a parameter by the methods that were planned, if its records were, too."""
        records: Sequence[Record] = parameter.records
        planned, choice = parameter.planned, None
        if planned is not None and planned.kinds is not None:
            # Code may cut a batch to its longest row: tokens differ where shapes of inputs do not.
            is_as_planned = any(isinstance(each, Streamed) for each in records)
            if not is_as_planned:
                found = sorted((KINDS[type(each)], num_terms(each)) for each in records)
                # Compiled passes multiply products out themselves.
                is_formed = found == [("dense", 1)] and planned.chosen.choice.is_kept
                is_as_planned = found == planned.kinds or is_formed
            choice = planned.chosen.choice if is_as_planned else None
        if choice is None:
            choice = self.plan.choice_for(describe(parameter.name, records))
        parameter.choice = choice
        parameter.is_fast = choice.norm in measured.METHODS and is_taken(records)
        if not parameter.is_fast:
            lent = None
            needs_memory = choice.is_kept and parameter.lent is None
            needed = needed_to_keep(records) if needs_memory else None
            if needed is not None:  # else the records are in storage already
                device = tensors_of(records[0])[0].device
                lent = parameter.lent = self._storage.lend(parameter.name, *needed, device)
            parameter.norms, records = measure(records, choice.norm, lent)
        elif measured.can_wait(records, choice):
            parameter.factors = Factors.of(cast(Product, records[0]))
        elif choice.is_kept:
            records = [Dense(measured.materialize(records))]
        else:
            parameter.norms = measured.squared_norms(records, choice.norm)
        # Of the records, what the gradient method needs is kept.
        is_dropped = parameter.comes_again if choice.num_forwards == 2 else ()
        if choice.num_backwards == 2:
            is_dropped = [True] * len(parameter.comes_again)
        parameter.num_missing = sum(is_dropped)
        if parameter.num_missing:  # then no method has put other records in their place
            records = [each for each, is_out in zip(records, is_dropped, strict=True) if not is_out]
        parameter.records = list(records)
        only = records[0] if parameter.is_fast and len(records) == 1 else None
        if isinstance(only, Dense) and not parameter.num_missing:
            parameter.gradients = only.value

    def norms(self) -> NormTable:
        """End the first pass: each used parameter's norms, by name and in order of names.

        The order in which parameters came is that of autograd, and sums of norms depend on it.
        """
        gradients: dict[str, Tensor] = {}
        found: dict[str, Factors] = {}
        for name, parameter in self._parameters.items():
            if parameter.norms is parameter.gradients is parameter.factors is None:
                self._measure(parameter)
            if parameter.norms is not None:
                continue
            if parameter.factors is not None:
                found[name] = parameter.factors
            else:
                assert parameter.gradients is not None
                gradients[name] = parameter.gradients
        norms: dict[str, SampleNorms] = {}
        if gradients:
            names = sorted(gradients)
            values = [gradients[name] for name in names]
            numel = max(value.numel() for value in values) // max(1, self.num_samples)
            rows = measured.bound(squares(values), self.num_samples, numel)
            if len(names) == len(self._parameters):  # they are the whole table
                return NormTable(names, rows.squared, rows.upper)
            norms |= _by_name(names, rows)
        for names in measured.groups_of(found) if found else ():
            norms |= _by_name(names, measured.measure_factors(names, found))
        for name, each in norms.items():
            self._parameters[name].norms = each
        by_name = {name: self._parameters[name].norms for name in sorted(self._parameters)}
        return NormTable.of(cast(dict[str, SampleNorms], by_name), self.num_samples)

    # --- a second pass, where the plan has one ---------------------------------------------------

    @property
    def num_backwards(self) -> int:
        """Backward passes that the used parameters' methods need."""
        choices = [parameter.choice for parameter in self._parameters.values()]
        return max((choice.num_backwards for choice in choices if choice), default=1)

    @property
    def num_forwards(self) -> int:
        """Forward passes that they need: one, if nothing was dropped that it would make again."""
        is_missing = any(each.num_missing for each in self._parameters.values())
        return 2 if self.num_backwards == 1 and is_missing else 1

    def begin_second_pass(self, coefficients: Mapping[str, Tensor]) -> None:
        """Make sums of the records that come from now on, forward or backward.

        The coefficients are applied to the records, not to the losses: on the way through the model
        they would be rounded in its dtype, and nothing could be proved of the result.

        Args:
            coefficients: [batch] of every parameter.
        """
        self._coefficients = coefficients

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
        elif not parameter.is_fast:
            held = sum(each.nbytes for kept in parameter.records for each in tensors_of(kept))
            if 8 * math.prod(shape_of(record)) <= held:  # a float64 sum is smaller
                self._add(parameter, coefficients)

    def is_complete(self, names: Iterable[str]) -> bool:
        """Whether a second pass has made all records of these parameters again."""
        used = [self._parameters[each] for each in names if each in self._parameters]
        return not any(each.num_missing for each in used)

    def _refuse_missing(self, names: Iterable[str]) -> None:
        """Refuse to make sums of records that a second pass should have made again."""
        for parameter in (self._parameters[each] for each in names if each in self._parameters):
            if parameter.num_missing:
                parameter.refuse(
                    f"was used by the first pass, and {parameter.num_missing} of those uses did "
                    "not come again in the second: the model is not the same in both"
                )

    # --- clipped sums ----------------------------------------------------------------------------

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
        wanted = list(self._parameters) if names is None else names
        self._refuse_missing(wanted)
        used = [self._parameters[each] for each in wanted if each in self._parameters]
        if any(each.gradients is not None for each in used):
            self._combine(used, coefficients)
        if self.grid is None or self.grid.dtype == torch.int32:  # else it is too fine for int32
            found: dict[str, Factors] = {}
            for parameter in used:
                if parameter.factors is not None and parameter.clipped is None:
                    found[parameter.name] = parameter.factors
                    parameter.factors, parameter.records = None, []
            if found:
                sums = measured.sums_of(found, coefficients, self.grid, is_bounded=self._is_bounded)
                for name, total in sums:
                    self._parameters[name].clipped = total
        for parameter in used:
            del self._parameters[parameter.name]
            if parameter.clipped is None:
                self._finish(parameter, coefficients[parameter.name])
            assert parameter.clipped is not None
            yield parameter.name, parameter.clipped

    def add_on_grid(
        self,
        coefficients: Mapping[str, Tensor],
        totals: MutableMapping[str, Tensor | None],
        onto: Grid,
    ) -> None:
        """Add the clipped sums of some parameters to integers: each sum is rounded to a grid.

        Args:
            coefficients: As for `clipped_sums`.
            totals: The integers by name [elements], None where there are none yet. A parameter that
                was not used stays as it is.
            onto: The grid, of which a spacing is one; `grid`, which kernels use, may be another.
        """
        spacing, dtype = float(onto.spacing), onto.dtype
        self._refuse_missing(totals)  # before anything is added
        gradients: dict[str, Tensor] = {}
        found: dict[str, Factors] = {}
        grid = self.grid
        is_same = grid == Grid(spacing) and dtype == torch.int32 and not self._is_bounded
        for name, before in totals.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.clipped is not None:
                continue
            if parameter.gradients is not None:
                gradients[name] = parameter.gradients
                del self._parameters[name]
            elif parameter.factors is not None and is_same:
                left, shape = parameter.factors.left, parameter.factors.shape
                found[name] = parameter.factors
                del self._parameters[name]
                if before is None:
                    totals[name] = left.new_zeros(math.prod(shape), dtype=torch.int32)
        if gradients:
            is_first = all(totals[name] is None for name in gradients)
            for name, value in gradients.items():
                if totals[name] is None:
                    make = value.new_empty if is_first else value.new_zeros
                    totals[name] = make(math.prod(value.shape[1:]), dtype=dtype)
            combine(
                list(gradients.values()),
                measured.stacked([coefficients[name] for name in gradients]),
                [each for name in gradients if (each := totals[name]) is not None],
                add=not is_first,
                spacing=spacing,
            )
            gradients.clear()
        for names in measured.groups_of(found) if found else ():
            outs = [each for name in names if (each := totals[name]) is not None]
            weights = measured.stacked([coefficients[name] for name in names], grid)
            factored.weighted_sums(*measured.sides_of(names, found), weights, outs, add=True)
        for name, total in self.clipped_sums(coefficients, list(totals)):
            unit = 1.0 if grid is None or total.is_floating_point() else grid.spacing
            if total.dtype == dtype and unit == spacing:  # it lies there already
                integers = total.flatten()
            else:  # both are powers of two
                integers = (total.double() * (unit / spacing)).round_().to(dtype).flatten()
            before = totals[name]
            totals[name] = integers if before is None else before.add_(integers)

    def shares(self, coefficients: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Hand out what the clipped sums are made of: X [n, *shape] and weights [n] of each.

        For who adds them up, noises and casts them in one go. Where per-sample gradients were kept,
        X is they, and the weights are the coefficients; else X is the one clipped sum, of weight 1
        (as two numbers in float32, if it is float64).
        """
        made: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in list(self._parameters.items()):
            if parameter.gradients is not None:
                del self._parameters[name]
                made[name] = parameter.gradients, coefficients[name]
        for name, total in self.clipped_sums(coefficients):
            if total.dtype == torch.float64:  # in two halves, which kernels take, and add exactly
                parts = torch.stack([total.float(), (total - total.float()).float()])
                made[name] = parts, total.new_ones(2)
            else:
                grid = self.grid if total.dtype == torch.int32 else None
                made[name] = total.unsqueeze(0), (grid or Grid(1.0)).weight(total.device)
        return made

    def _combine(
        self, parameters: Sequence[UsedParameter], coefficients: Mapping[str, Tensor]
    ) -> None:
        """Make the clipped sums of kept per-sample gradients, all at once."""
        values, weights, sums = [], [], []
        for each in parameters:
            if each.gradients is not None:
                values.append(each.gradients)
                weights.append(coefficients[each.name])
                each.clipped = each.gradients.new_empty(
                    each.gradients.shape[1:], dtype=torch.float64
                )
                sums.append(each.clipped)
                each.records, each.gradients = [], None
        combine(values, measured.stacked(weights), sums)

    def _add(self, parameter: UsedParameter, coefficients: Tensor) -> None:
        """Put the float64 sum of the records in their place."""
        if parameter.total is None:
            first = parameter.records[0]
            device = tensors_of(first)[0].device
            parameter.total = torch.zeros(shape_of(first), dtype=torch.float64, device=device)
        while parameter.records:
            add_clipped(parameter.total, parameter.records.pop(0), coefficients)

    def _finish(self, parameter: UsedParameter, coefficients: Tensor) -> None:
        """Make the clipped sum: no record is missing."""
        if parameter.total is None:
            records, parameter.records = parameter.records, []
            shape = shape_of(records[0])
            if parameter.is_fast and (self.grid is None or self.grid.dtype == torch.int32):
                parameter.clipped = measured.clipped_sum(records, coefficients, shape, self.grid)
            else:
                whole = [plain_record(each) for each in records]
                parameter.clipped = from_records(whole, coefficients, shape)
        else:
            self._add(parameter, coefficients)
            parameter.clipped, parameter.total = parameter.total, None
        if parameter.lent is not None:
            self._storage.give_back(parameter.name, parameter.lent)


def _by_name(names: Iterable[str], norms: SampleNorms) -> dict[str, SampleNorms]:
    """Return the norms of several parameters [parameters, samples] one by one."""
    rows = zip(norms.squared.unbind(0), norms.upper.unbind(0), strict=True)
    return {name: SampleNorms(*row) for name, row in zip(names, rows, strict=True)}
