"""Checks that samples do not mix: what a sample leaves behind depends on the sample alone.

[Note: replaced at one shape] Clipping bounds what a sample does to the sum only if nothing of the
*other* samples' gradients depends on it. So a few rows go through the model, and again with some of
them replaced: by rows of the batch, by far values, by copies of one row, by one outlier. All passes
have one shape and begin with the same generators, so that dropout draws the same numbers and
kernels add up in the same order. Rows that were kept must then have the same outputs, and the same
gradient of every parameter, *to the bit*, whatever stands beside them. The losses of replaced rows
get other weights besides: a gradient that reaches a kept row from another one changes with them.

Where bits differ, kernels may have rounded differently (atomic additions on a GPU, where torch has
no other kernel; experts that get other numbers of tokens). Then all of it is repeated in float64,
and 1e-9 of the row's scale is all that may change. That excuses rounding and nothing more: code may
ask for its dtype, and mix samples in that one alone, so in the model's own dtype nothing may move
by more than √ε. What cannot run in float64 (sharded modules, kernels for one dtype) may change by a
few units in the last place of its own dtype.

Per-sample gradients are too large to keep for comparison. A *sketch* of each is kept: its inner
products with a few random matrices u vᵀ, which differ, with probability 1, where gradients do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from unison.capture.axes import AxisTable
from unison.capture.capture import PLACING, Capture
from unison.capture.parts import local
from unison.capture.probes import (
    NUM_PROBED,
    ProbeState,
    Replacement,
    additions_in_order,
    are_distinct,
    as_dtype,
    probe_rows,
    widened,
    with_others,
    without_dropout,
)
from unison.capture.recompute import checkpointing_quiet
from unison.errors import BadInput, UnisonError, UnsupportedOperation
from unison.ops import Dense, Lookup, Product, Record, Streamed
from unison.torch_internals import FunctionMode, autocast_dtypes, is_dtensor

# --- what a pass leaves of each row ---------------------------------------------------------------

_NUM_SKETCHES = 2
_WIDE = 1 << 22  # elements that are made float64 at once


@dataclass
class RowResults:
    """Losses and gradient sketches of each row, and buffers, after one pass.

    Attributes:
        losses: [batch], or None where there is one of the whole batch.
        sketches: Of each parameter's per-sample gradients [batch, sketches], in the order in which
            they came: last layers first.
        buffers: Fingerprints of all buffers after the pass.
        written: Names of those that it wrote to.
    """

    losses: Tensor | None
    sketches: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def differs(self, other: "RowResults", kept: Tensor, tolerance: float) -> list[str] | None:
        """Names of the parameters whose gradients of kept rows differ.

        It is empty where outputs alone do, and None where nothing does.

        Args:
            other: Of another pass.
            kept: The rows to compare [batch].
            tolerance: Of the row's scale; 0 compares bits.
        """
        names = sorted({*self.sketches, *other.sketches})
        found = []
        if names:
            nothing = torch.zeros(len(kept), _NUM_SKETCHES, dtype=torch.float64)
            mine, others = (
                torch.stack([each.sketches.get(name, nothing) for name in names])
                for each in (self, other)
            )
            scale = mine.abs().nan_to_num(0, 0, 0).amax((0, 2))  # [batch]
            differ = _differ(mine, others, tolerance * scale[None, :, None])
            differ = differ[:, kept].flatten(1).any(1)
            order = list(self.sketches)
            found = [name for name, each in zip(names, differ.tolist(), strict=True) if each]
            found.sort(key=lambda name: -order.index(name) if name in order else 0)
        if found:
            return found
        if self.losses is None or other.losses is None:
            return None
        differ = _differ(self.losses, other.losses, tolerance * self.losses.abs())
        return [] if bool(differ[kept].any()) else None

    def is_finite_beside(self, base: "RowResults", kept: Tensor) -> bool:
        """Whether kept rows are finite wherever those of another pass are."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(self.losses, base.losses)]
        pairs += [(each, base.sketches.get(name)) for name, each in self.sketches.items()]
        return all(
            bool((mine.isfinite() | ~theirs.isfinite())[kept].all())
            for mine, theirs in pairs
            if mine is not None and theirs is not None
        )


def _differ(first: Tensor, second: Tensor, tolerance: Tensor) -> Tensor:
    is_same = (first == second) | (first.isnan() & second.isnan())
    return ~(is_same | ((first - second).abs() <= tolerance))


def _add_sketch(
    found: dict[str, Tensor],
    dtypes: set[torch.dtype],
    batch: int,
    name: str,
    record: Record | Streamed,
) -> None:
    """Add the sketch of a record to those of each parameter [batch, sketches]; note its dtype."""
    is_streamed = isinstance(record, Streamed)
    for samples, piece in record.first_chunks() if is_streamed else [(slice(None), record)]:
        dtypes.add(piece.value.dtype if isinstance(piece, Dense) else piece.g.dtype)
        values, start = _sketch(piece), samples.start or 0
        if name not in found:
            found[name] = values.new_zeros(batch, _NUM_SKETCHES)
        found[name][start : start + len(values)] += values.to(found[name].device)


@torch.no_grad()
def _sketch(record: Record) -> Tensor:
    """Inner products of each sample's gradient with random matrices [batch, sketches], float64."""
    match record:
        case Product():
            left = _projected(record.g, "g")  # [batch, tokens, sketches]
            return (left * _projected(record.a, "a")).sum(1)
        case Lookup():
            rows = _directions(record.shape[0], "a", record.g.device)
            found = rows[record.ids.clamp(min=0)]  # [batch, tokens, sketches]
            found = torch.where((record.ids >= 0).unsqueeze(-1), found, 0.0)
            projected = _projected(record.g, "g")
            # 0 · NaN is NaN, and padding counts for nothing.
            return torch.where(found == 0, 0.0, projected * found).sum(1)
        case Dense():
            value = record.value.flatten(2) if record.value.ndim > 2 else record.value
            value = value.unsqueeze(1) if value.ndim == 2 else value  # [batch, rows, columns]
            value = value.view(len(value), 1, 1) if value.ndim == 1 else value
            rows = _directions(value.shape[1], "a", value.device)
            return (_projected(value, "g") * rows).sum(1)
    raise AssertionError(f"no rule for {record!r}")


def _projected(x: Tensor, name: str) -> Tensor:
    """[batch, tokens, features] times random directions: [batch, tokens, sketches], float64."""
    x = local(x.detach())
    keys = _directions(x.shape[-1], name, x.device)
    if x.numel() <= _WIDE:
        return x.double() @ keys
    return torch.stack([row.double() @ keys for row in x])


@lru_cache(maxsize=256)
def _directions(size: int, name: str, device: torch.device) -> Tensor:
    """Random directions [size, sketches], the same ones every time."""
    generator = torch.Generator().manual_seed(size * 2 + (name == "a"))
    values = torch.randn(size, _NUM_SKETCHES, generator=generator, dtype=torch.float64)
    return values.to(device)


# --- the check ------------------------------------------------------------------------------------

Run = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | None]]
"""(module, batch) -> losses [batch], or one of the whole batch [], or both."""
Agree = Callable[[bool], bool]
"""Whether it is so on any of the ranks that run the module together; a collective."""

TOLERANCE = 1e-9  # in float64, of the row's scale
NUM_LAST_PLACES = 8  # in a dtype of its own
NUM_DRAWS = 6  # other random numbers that are tried


_BESIDE_FEW = (Replacement.VALUES, Replacement.ROWS, Replacement.COPIES, Replacement.OUTLIER)
_BESIDE_MANY = (Replacement.OPPOSITE, Replacement.ALIKE, Replacement.VALUES, Replacement.ROWS)


@dataclass(frozen=True)
class MixingReport:
    """The outcome of a check.

    Attributes:
        mixing: Why samples are not apart, or None.
        written: Names of buffers and parameters that passes write, with the same values for any
            batch.
        is_conclusive: Whether the rows could be told apart at all.
        is_rounded: Whether bits differed, and float64 had to decide.
    """

    mixing: str | None
    written: frozenset[str] = frozenset()
    is_conclusive: bool = True
    is_rounded: bool = False


def _of_other_shapes(epsilon: float) -> float:
    """Return how far kernels for other shapes may round from one another."""
    return min(NUM_LAST_PLACES * 8 * epsilon, math.sqrt(epsilon))


def check_samples_apart(
    module: nn.Module,
    run: Run,
    batch: Any,
    axes: AxisTable,
    **settings: Any,
) -> MixingReport:
    """Make sure that a sample's outputs and gradients depend on its own rows only.

    See [Note: replaced at one shape]. Passes also may not remember the batch: neither in buffers,
    which are saved with the model, nor elsewhere for the passes after them.

    Guarantees:
        The module's parameters, gradients, buffers and attributes, and all generators, are left as
        they were found.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Some samples.
        axes: Where samples lie.
        settings: Of `MixingCheck`, and the `state` of `examine`.

    Raises:
        BadInput: There is not one loss per sample.
        UnsupportedOperation: Naming the parameter or the buffer, and the remedy.
    """
    report = examine(module, run, batch, axes, **settings)
    if report.mixing is not None:
        raise UnsupportedOperation(report.mixing)
    return report


def examine(
    module: nn.Module,
    run: Run,
    batch: Any,
    axes: AxisTable,
    *,
    state: ProbeState | None = None,
    **settings: Any,
) -> MixingReport:
    """Find out whether samples mix; see `check_samples_apart`.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Some samples.
        axes: Where samples lie.
        state: What the module was like before it was probed; of now, unless given.
        settings: Of `MixingCheck`.

    Raises:
        BadInput: The losses have another shape.
        UnsupportedOperation: The module does not run with other values.
    """
    state = state or ProbeState(module, batch)
    try:
        with additions_in_order():
            return MixingCheck(module, run, batch, axes, state, **settings).report()
    finally:
        state.restore()


@dataclass
class MixingCheck:
    """Runs a module with rows replaced, and compares.

    Attributes:
        module: The model.
        run: One loss per sample.
        batch: Some samples.
        axes: Where samples lie.
        state: What the module was like before it was probed.
        is_scalar: Whether `run` returns one loss of the whole batch instead, of which each sample's
            share is looked at.
        is_pinned: Whether negative integers (labels that are left out) stay where they are, as a
            loss of the whole batch needs: how many there are in each row is for others to compare.
        whole: Whether outputs are compared for all rows of the batch, too, at its own size.
        is_public: Whether a buffer or parameter of this name may hold what passes write there.
        agree: Lets ranks that run the module together decide together.
        seed: Of what stands in the place of rows.
        is_light: Whether some of it will do, for a module that was examined before: one way of
            replacing rows, which changes with the seed, and no other numbers of rows. Where bits
            are known to differ, turns are taken at comparing in the model's dtype and in float64.
        is_rounded: Whether bits are known to differ, and need not be compared.
        dtypes: Of gradients that passes have made. Sharded modules compute in others than their
            parameters have.
    """

    module: nn.Module
    run: Run
    batch: Any
    axes: AxisTable
    state: ProbeState
    is_scalar: bool = False
    is_pinned: bool = False
    whole: bool = False
    is_public: Callable[[str], bool] = lambda name: False
    agree: Agree = bool
    seed: int = 0
    is_light: bool = False
    is_rounded: bool = False
    dtypes: set[torch.dtype] = field(default_factory=set)

    def report(self) -> MixingReport:
        """Run the passes, in float64 too where that is needed."""
        rows = probe_rows(self.batch, seed=self.seed)
        found = self._compare_twice(rows, MixingCheck._compare, is_rounded=self.is_rounded)
        # The same number of passes on every rank, however many rows each has.
        many = self.batch if _size_of(self.batch) > NUM_PROBED else rows
        if found.mixing is None and not self.is_scalar:
            found = replace(found, mixing=self._depends_on_number(rows, many))
        if found.mixing is None and self.whole and not self.is_scalar:
            mixing = None if self.is_light else self._reached_by_others(many)
            if mixing is None:
                mixing = self._compare_twice(many, MixingCheck._compare_whole).mixing
            found = replace(found, mixing=mixing)
            self.state.restore()
        if found.mixing is None and not self._is_sharded:
            found = replace(found, mixing=self._parameters_written(rows))
        # Ranks go on together: one that has samples speaks for one that has padding alone.
        return replace(found, is_conclusive=self.agree(are_distinct(rows)))

    # --- comparing -------------------------------------------------------------------------------

    def _compare(self, rows: Any, tolerance: float) -> MixingReport:
        """Compare what passes leave of rows that are kept, and what they write."""
        generator = torch.Generator().manual_seed(self.seed)
        size = _size_of(rows)
        base = self._pass(rows, torch.ones(size))
        # A pass after one of the same rows, and one after one of others: what differs between them
        # is what the module remembers of a batch. Counting calls is no such thing. Buffers are put
        # back: what they hold of a batch is looked at by itself, and may be public.
        after_same = self._pass_again(rows)
        mixing: str | None = None
        written, of_data = set(base.written), set()
        for number, how in enumerate(self._turn(_BESIDE_FEW)):
            kept = self._kept(size, number, how, generator)
            weights = torch.where(kept, 1.0, torch.randn(size, generator=generator))
            other = self._pass_beside(base, rows, kept, how, generator, weights)
            written |= other.written
            of_data |= _differing(base.buffers, other.buffers)
            differing = base.differs(other, kept, tolerance)
            if self.agree(differing is not None):
                mixing = self._mixing(differing, how, kept)
                break
        after_others = self._pass_again(rows)
        if mixing is None and not self.is_light:
            mixing = self._compare_draws(rows, tolerance, generator)
        self.state.restore()
        remembered = after_same.differs(after_others, torch.ones(size, dtype=torch.bool), tolerance)
        if self.agree(remembered is not None):
            return MixingReport(_REMEMBERS)
        if mixing is not None:
            return MixingReport(mixing)
        private = sorted(name for name in written & of_data if not self.is_public(name))
        if self.agree(bool(private)):
            return MixingReport(self._buffers_written(private))
        return MixingReport(None, frozenset(written - of_data))

    def _turn(self, ways: Sequence[Replacement]) -> Sequence[Replacement]:
        """Return all ways of replacing rows, or in a light check the one whose turn it is."""
        start = self.seed % len(ways)
        return [*ways[start:], *ways[:start]][: 1 if self.is_light else None]

    def _kept(self, size: int, number: int, how: Replacement, generator: torch.Generator) -> Tensor:
        """Choose which rows are kept: the first one or the last, and some of the others."""
        if how is Replacement.OUTLIER:
            return torch.arange(size) != int(torch.randint(1, size - 1, (), generator=generator))
        kept = torch.rand(size, generator=generator) < 0.34
        kept[[0, -1][number % 2]] = True
        kept[[-1, 0][number % 2]] = False
        return kept

    def _pass_beside(
        self,
        base: RowResults,
        rows: Any,
        kept: Tensor,
        how: Replacement,
        generator: torch.Generator,
        weights: Tensor | None,
    ) -> RowResults:
        """Run with rows replaced, by milder values where others cannot be computed with.

        An overflow that reaches the kept rows may be 0 · inf, and not mixing: it is looked at again
        without one.
        """
        error: Exception | None = None
        for largest_power in (6.0, 1.0, 0.0):
            milder = how if largest_power else Replacement.ROWS
            other = with_others(rows, kept, milder, largest_power, generator, self.is_pinned)
            trace = None
            try:
                trace = self._pass(other, weights)
            except UnisonError:
                if not largest_power:
                    raise
            except Exception as raised:  # whatever the user's code raises
                error = raised
            is_good = trace is not None and trace.is_finite_beside(base, kept)
            if not self.agree(not is_good) or (trace is not None and not largest_power):
                assert trace is not None
                return trace
        raise UnsupportedOperation(
            "it cannot be checked that samples do not mix: the module runs with the rows of the "
            f"batch, and not with rows in another order ({type(error).__name__}: {error}). Its "
            "forward must take any rows of the data set side by side"
        ) from error

    def _compare_twice(
        self, rows: Any, compare: "Compare", tolerance: float = 0.0, *, is_rounded: bool = False
    ) -> MixingReport:
        """Compare passes as they are, and where they differ, as far as rounding and in float64."""
        if not is_rounded:
            found = compare(self, rows, tolerance)
            if not self.agree(found.mixing is not None):
                return found
        takes_turns = is_rounded and self.is_light
        if not takes_turns or self.seed // len(_BESIDE_FEW) % 2:  # all ways, then all ways again
            found = compare(self, rows, math.sqrt(self._epsilon(rows)))
            if takes_turns or self.agree(found.mixing is not None):
                return replace(found, is_rounded=True)
        return replace(self._compare_wide(rows, compare), is_rounded=True)

    def _compare_wide(self, rows: Any, compare: "Compare") -> MixingReport:
        """Compare passes in float64, or where that cannot be, in the module's own dtype."""
        if self._dtypes(rows) <= {torch.float64}:
            return compare(self, rows, TOLERANCE)
        found = self._compare_in(torch.float64, rows, compare, TOLERANCE)
        return found or compare(self, rows, NUM_LAST_PLACES * self._epsilon(rows))

    def _compare_in(
        self, dtype: torch.dtype, rows: Any, compare: "Compare", tolerance: float
    ) -> MixingReport | None:
        """Compare passes in a wide dtype; None where that cannot be."""
        if self._is_sharded:
            return None
        device = next(self.module.parameters()).device.type
        try:
            with widened(self.module, dtype), torch.autocast(device, enabled=False):
                wide = replace(self, state=ProbeState(self.module, rows))
                return compare(wide, as_dtype(rows, dtype), tolerance)
        except UnisonError:
            raise
        except Exception:  # whatever a kernel for other dtypes raises, or no memory
            return None
        finally:
            self.state.restore()

    def _depends_on_number(self, rows: Any, many: Any) -> str | None:
        """Return how what a sample leaves depends on how many samples there are, or None."""
        size, mixing = _size_of(rows), None
        if not self.is_light:
            mixing = self._compare_numbers(rows, size - 1).mixing
        if mixing is None and self.whole and (self._is_sharded or _size_of(many) > size):
            mixing = self._compare_numbers(many, size - 1, has_gradients=False).mixing
        return mixing

    def _compare_numbers(
        self, rows: Any, number: int, *, has_gradients: bool = True
    ) -> MixingReport:
        """Compare passes of two sizes, for which kernels round differently.

        Of narrow dtypes that leaves little to see. There outputs are compared in float32, too: with
        gradients, or in float64, it would take many times the memory of a training step.
        """
        outputs = partial(MixingCheck._compare_sizes, number=number, has_gradients=False)
        compare = partial(outputs, has_gradients=has_gradients)
        epsilon = self._epsilon(rows)
        tolerance, is_fine = _of_other_shapes(epsilon), not (self.is_light or self._is_sharded)
        if (has_gradients and self._is_sharded) or (is_fine and tolerance < 1e-4):
            return self._compare_twice(rows, compare, tolerance)
        found = compare(self, rows, math.sqrt(epsilon))
        if not is_fine or self.agree(found.mixing is not None):
            return found
        tolerance = _of_other_shapes(torch.finfo(torch.float32).eps)
        single = self._compare_in(torch.float32, rows, outputs, tolerance)
        if self.agree(single is None or single.mixing is not None):
            return self._compare_wide(rows, outputs)
        return found

    def _compare_draws(self, rows: Any, tolerance: float, generator: torch.Generator) -> str | None:
        """Compare outputs with other random numbers: some may mix samples, such as a permutation.

        A pass forward of a few rows each, and only where the module draws at all.
        """
        self._pass(rows, None)
        if not self.agree(self.state.has_drawn()):
            return None
        size = _size_of(rows)
        for seed in range(NUM_DRAWS):
            how = (Replacement.ROWS, Replacement.VALUES)[seed % 2]
            kept = self._kept(size, seed, how, generator)
            other = with_others(rows, kept, how, 0.0, generator, self.is_pinned)
            first, second = (
                self._pass(each, None, seed=NUM_DRAWS * self.seed + seed) for each in (rows, other)
            )
            found = None if self.is_scalar else first.differs(second, kept, tolerance)
            if self.agree(found is not None):
                return self._mixing(found, how, kept)
        return None

    def _compare_sizes(
        self, rows: Any, tolerance: float, *, number: int, has_gradients: bool
    ) -> MixingReport:
        """Compare a pass with one of its first rows alone.

        Without dropout: it draws other numbers, too.
        """
        size = _size_of(rows)
        fewer = tree_map(lambda leaf: leaf[:number] if isinstance(leaf, Tensor) else leaf, rows)
        with FunctionMode(without_dropout):
            first = self._pass(rows, torch.ones(size) if has_gradients else None)
            has_drawn = self.state.has_drawn()
            second = self._pass(fewer, torch.ones(number) if has_gradients else None)
        self.state.restore()
        assert first.losses is not None
        both = {name: each[:number] for name, each in first.sketches.items()}
        first = RowResults(first.losses[:number], both if has_gradients else {})
        second = RowResults(second.losses, second.sketches if has_gradients else {})
        found = first.differs(second, torch.ones(number, dtype=torch.bool), tolerance)
        if self.agree(has_drawn) or not self.agree(found is not None):
            return MixingReport(None)
        where = f" before {found[0]!r}" if found else ""
        return MixingReport(
            f"samples mix{where}: a sample's {'gradient' if found else 'output'} changes with the "
            f"number of samples beside it ({size} or {number}). Divide by a constant, not by the "
            "size of the batch; a sample must depend on its own rows only"
        )

    def _compare_whole(self, batch: Any, tolerance: float) -> MixingReport:
        """Compare outputs for a whole batch: a model may do something else with many rows.

        Each half is kept once: where experts take rows until they are full, a row feels only those
        before it. Many copies fill an expert, or leave it empty.
        """
        generator = torch.Generator().manual_seed(self.seed)
        is_first, is_random = self._halves(batch, generator)
        kept_by = {Replacement.VALUES: is_first, Replacement.ROWS: is_random}
        base = RowResults(self._pass(batch, None).losses)
        for how in self._turn(_BESIDE_MANY):
            kept = kept_by.get(how, ~is_first)
            other = self._pass_beside(base, batch, kept, how, generator, None)
            found = base.differs(RowResults(other.losses), kept, tolerance)
            if self.agree(found is not None):
                return MixingReport(self._mixing(found, how, kept))
        return MixingReport(None)

    def _reached_by_others(self, batch: Any) -> str | None:
        """Return what gets a gradient from losses of the other half, which outputs do not show."""
        is_random = self._halves(batch, torch.Generator().manual_seed(self.seed))[1]
        # Losses of the weight 0 send exactly 0 back, or 0 · inf.
        sketches = self._pass(batch, is_random.double()).sketches
        of_others = {name: each[~is_random].nan_to_num(0, 0, 0) for name, each in sketches.items()}
        reached = [name for name, each in of_others.items() if bool(each.any())]
        found = self.agree(bool(reached))
        return self._mixing(reached or None, None, ~is_random) if found else None

    def _halves(self, batch: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return which rows are of the first half, and of a random one."""
        size = _size_of(batch)
        is_first = torch.arange(size) < size // 2
        return is_first, torch.randperm(size, generator=generator) < (size + 1) // 2

    # --- passes ----------------------------------------------------------------------------------

    def _pass(
        self,
        rows: Any,
        weights: Tensor | None,
        *,
        is_clean: bool = True,
        seed: int | None = None,
    ) -> RowResults:
        """Run the module.

        Args:
            rows: A batch.
            weights: Of the samples' losses, to be sent back [batch]; None runs forward alone.
            is_clean: Whether attributes are as they were at first; generators and buffers are, in
                any case.
            seed: Of generators, to draw other numbers than at first.
        """
        if is_clean:
            self.state.restore()
            if seed is not None:
                self.state.restore_generators(seed)
        else:
            self.state.restore_generators()
            self.state.restore_buffers()
        size = _size_of(rows)
        if weights is None and self._is_sharded:
            weights = torch.ones(size)  # what is gathered is freed by the backward pass
        if weights is None:
            with torch.no_grad(), checkpointing_quiet():
                losses = self._run(rows, size)[0].detach().cpu().double()
                return RowResults(losses.expand(size) if self.is_scalar else losses)
        sketches: dict[str, Tensor] = {}
        versions, take = self.state.versions(), partial(_add_sketch, sketches, self.dtypes, size)
        capture = Capture(self.module, size, axes=self.axes, on_record=take, streams=True)
        with capture.installed(is_guarded=True), torch.enable_grad():
            with capture.following(rows):
                result, shared = self._run(rows, size)
            if result.requires_grad:
                weighed = result if self.is_scalar else result * weights.to(result)
                total = weighed.sum() if shared is None else weighed.sum() + shared.to(weighed)
                # Not `Tensor.backward`, a torch function itself, inside of which modes are off:
                # activation checkpointing would run something else than in the forward pass.
                engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
                flags = {"allow_unreachable": True, "accumulate_grad": True}
                keep_graph, create_graph, inputs = False, False, ()
                ones = torch.ones_like(total)
                engine.run_backward((total,), (ones,), keep_graph, create_graph, inputs, **flags)
        losses = None if self.is_scalar else result.detach().cpu().double()
        buffers = self.state.values()
        # Writing through .data leaves no version, and writing the same value no other bits.
        written = _differing(versions, self.state.versions()) | self.state.written(buffers)
        found = {name: each.cpu() for name, each in sketches.items()}
        return RowResults(losses, found, buffers, written)

    def _pass_again(self, rows: Any) -> RowResults:
        """Run the module forward, as the last pass has left it."""
        try:
            return self._pass(rows, None, is_clean=False)
        except UnisonError:
            raise
        except Exception as error:
            raise UnsupportedOperation(
                f"the module cannot be called twice ({type(error).__name__}: {error}): it "
                "remembers something of the rows that it was called with before. Remove such state"
            ) from error

    def _run(self, rows: Any, size: int) -> tuple[Tensor, Tensor | None]:
        """Return losses to be compared, and one of the whole batch, shared by all samples."""
        found = self.run(self.module, rows)
        losses, shared = found if isinstance(found, tuple) else (found, None)
        if not self.is_scalar and losses.shape != (size,):
            raise BadInput(f"expected one loss per sample, [{size}], found {list(losses.shape)}")
        return losses, shared

    # --- what is found ---------------------------------------------------------------------------

    def _mixing(self, names: Sequence[str] | None, how: Replacement | None, kept: Tensor) -> str:
        if names is None:
            return "another rank found that samples mix; its own error names the parameter"
        row = int(kept.nonzero()[0])
        if how is None:
            what = f"samples mix before {names[0]!r}: losses of others give it a gradient of sample"
            return f"{what} {row}, or of one after it. {_remedy(self.module)}"
        if self.is_scalar:
            return (
                "an output of the module that is no sample's own, such as a loss of the whole "
                f"batch, gives {names[0]!r} a gradient of sample {row} that changes when other "
                f"samples are replaced by {how.value}. Compute one loss per sample from the other "
                "outputs instead: unison.per_sample_loss(logits, labels).mean()"
            )
        what = (
            f"samples mix before {names[0]!r}: its gradient of sample {row} changes"
            if names
            else f"samples mix: the module's outputs for sample {row} change"
        )
        return (
            f"{what} when other samples of the batch are replaced by {how.value}. "
            f"{_remedy(self.module)}"
        )

    def _buffers_written(self, names: Sequence[str]) -> str:
        if not names:
            return "on another rank the forward pass writes values of the batch to a buffer"
        owner = self.module.get_submodule(names[0].rpartition(".")[0])
        remedy = (
            "Keep statistics of the data out of buffers, or say that it may be published: "
            f"make_private(public_buffers=[{names[0]!r}])"
        )
        if isinstance(owner, nn.modules.batchnorm._NormBase):
            remedy = (
                "Use GroupNorm, or call .eval() on the layer so that it uses its running "
                f"statistics; make_private(public_buffers=[{names[0]!r}]) says that they may be "
                "published"
            )
        return (
            f"the forward pass writes values of the batch to the buffer {names[0]!r}, which is "
            f"saved with the model and gets no noise. {remedy}"
        )

    def _parameters_written(self, rows: Any) -> str | None:
        """Return why parameters that a pass has written hold values of the batch, or None."""
        names = sorted(self.state.written_parameters())
        names = [name for name in names if not self.is_public(name)]
        if not self.agree(bool(names)):
            return None
        by_name = dict(self.module.named_parameters())
        copies = {name: by_name[name].detach().clone() for name in names}
        kept = torch.arange(_size_of(rows)) == 0
        generator = torch.Generator().manual_seed(self.seed)
        other = with_others(rows, kept, Replacement.VALUES, 0.0, generator, self.is_pinned)
        after = []
        for each in (rows, other):
            self._pass(each, None)
            after.append({name: by_name[name].detach().clone() for name in names})
            with torch.no_grad():
                for name, copy in copies.items():
                    by_name[name].copy_(copy)
        self.state.restore()
        for name in names:
            if not torch.equal(after[0][name], after[1][name]):
                return (
                    f"the forward pass writes values of the batch to the parameter {name!r}, which "
                    "gets no noise. Write it outside of training, from public data"
                )
        return None

    @property
    def _is_sharded(self) -> bool:
        parameters = self.module.parameters()
        return PLACING in vars(self.module) or any(map(is_dtensor, parameters))

    def _dtypes(self, *tensors: Any) -> set[torch.dtype]:
        """Floating-point dtypes of parameters, of other tensors, and of autocast."""
        found = {each for each in autocast_dtypes() if each is not None}
        given = [each for each in tree_leaves(tensors) if isinstance(each, Tensor)]
        for each in (*self.module.parameters(), *given):
            if each.is_floating_point():
                found.add(each.dtype)
        return found

    def _epsilon(self, rows: Any) -> float:
        found = {torch.float32, *self.dtypes, *self._dtypes(list(self.module.buffers()), rows)}
        return max(torch.finfo(each).eps for each in found if each.itemsize > 1)


Compare = Callable[[MixingCheck, Any, float], MixingReport]

_REMEMBERS = (
    "the module remembers the batch: its outputs for the same rows and the same random numbers "
    "depend on the rows that it was called with before (a running mean, a queue, a cache). Such "
    "state gets no noise: remove it, or call module.eval() on the part that keeps it"
)


def _remedy(module: nn.Module) -> str:
    """What to do about samples that mix, as far as the modules tell."""
    for name, each in module.named_modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and (
            each.training or each.running_mean is None
        ):
            return (
                f"Batch norm in train mode does that (here {name!r}): use GroupNorm instead, or "
                "call .eval() on it to use its running statistics"
            )
    return (
        "Statistics over the batch, routing of tokens to experts, a loss over the whole batch and "
        "flattening token by token do that; a sample must depend on its own rows only"
    )


def _differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}


def _size_of(batch: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
