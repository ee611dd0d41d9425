"""Making sure that samples do not mix: what a sample leaves behind depends on the sample alone.

[Note: replaced at one shape] Clipping bounds what a sample does to the sum only if nothing of the
*other* samples' gradients depends on it. So a few rows go through the model, and again with some of
them replaced: by rows of the batch, by far values, by copies of one row, by one outlier. All passes
have one shape and begin with the same generators, so that dropout draws the same numbers and
kernels add up in the same order. Rows that were kept must then have the same outputs, and the same
gradient of every parameter, *to the bit*, whatever stands beside them. The losses of replaced rows
get other weights besides: a gradient that reaches a kept row from another one changes with them.

Where bits differ, kernels may have rounded differently (atomic additions on a GPU; experts that get
other numbers of tokens). Then all of it is repeated in float64, and 1e-9 of the row's scale is all
that may change. What cannot run in float64 (sharded modules, kernels for one dtype) may change by a
few units in the last place of its own dtype.

Per-sample gradients are too large to keep for comparison. A *sketch* of each is: its inner products
with a few random matrices u vᵀ, which differ, with probability 1, where gradients do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from unison.capture.again import checkpointing_quiet
from unison.capture.axes import AxisTable
from unison.capture.capture import PLACING, Capture
from unison.capture.other_modes import NoDropout, as_double, in_float64
from unison.capture.parts import is_in_parts, local
from unison.capture.probe_state import ProbeState
from unison.errors import BadInput, UnisonError, UnsupportedOperation
from unison.ops import Dense, Lookup, Product, Record, Streamed

Run = Callable[[nn.Module, Any], Tensor]
"""(module, batch) -> losses [batch], or one of the whole batch []."""
Agree = Callable[[bool], bool]
"""Whether it is so on any of the ranks that run the module together; a collective."""

NUM_PROBED = 4  # rows that go through the model: one kept, one replaced, and both again
TOLERANCE = 1e-9  # in float64, of the row's scale
NUM_LAST_PLACES = 8  # in a dtype of its own
NUM_DRAWS = 6  # other random numbers that are tried
_NUM_SKETCHES = 2
_WIDE = 1 << 22  # elements that are made float64 at once


class Replacement(Enum):
    """What stands in the place of the rows that are not kept."""

    VALUES = "values far from theirs"
    ROWS = "other rows of the batch"
    COPIES = "copies of one row"
    OUTLIER = "one row of far values"
    ALIKE = "copies of one row of far values"
    OPPOSITE = "copies of one row of opposite values"


_BESIDE_FEW = (Replacement.VALUES, Replacement.ROWS, Replacement.COPIES, Replacement.OUTLIER)
_BESIDE_MANY = (Replacement.OPPOSITE, Replacement.ALIKE, Replacement.VALUES, Replacement.ROWS)


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        mixing: Why samples are not apart, or None.
        written: Names of buffers and parameters that passes write, with the same values for any
            batch.
        is_conclusive: Whether the rows could be told apart at all.
    """

    mixing: str | None
    written: frozenset[str] = frozenset()
    is_conclusive: bool = True


def check_samples_apart(
    module: nn.Module,
    run: Run,
    batch: Any,
    axes: AxisTable,
    **settings: Any,
) -> Verdict:
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
        settings: Of `examine`.

    Raises:
        BadInput: There is not one loss per sample.
        UnsupportedOperation: Naming the parameter or the buffer, and the remedy.
    """
    verdict = examine(module, run, batch, axes, **settings)
    if verdict.mixing is not None:
        raise UnsupportedOperation(verdict.mixing)
    return verdict


def examine(
    module: nn.Module,
    run: Run,
    batch: Any,
    axes: AxisTable,
    *,
    is_scalar: bool = False,
    whole: bool = False,
    state: ProbeState | None = None,
    is_public: Callable[[str], bool] = lambda name: False,
    agree: Agree = bool,
    seed: int = 0,
    is_light: bool = False,
) -> Verdict:
    """Find out whether samples mix; see `check_samples_apart`.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Some samples.
        axes: Where samples lie.
        is_scalar: Whether `run` returns one loss of the whole batch instead, of which each sample's
            share is looked at. Negative integers (labels that are left out) then stay where they
            are: how many there are in each row is for others to compare.
        whole: Whether outputs are compared for all rows of the batch, too, at its own size.
        state: What the module was like before it was probed; of now, unless given.
        is_public: Whether a buffer or parameter of this name may hold what passes write there.
        agree: Lets ranks that run the module together decide together.
        seed: Of what stands in the place of rows.
        is_light: Whether some of it will do, for a module that was examined before: two ways of
            replacing rows, which change with the seed, and no other numbers of rows.

    Raises:
        BadInput: The losses have another shape.
        UnsupportedOperation: The module does not run with other values.
    """
    state = state or ProbeState(module, batch)
    examination = _Examination(
        module, run, batch, axes, is_scalar, whole, state, is_public, agree, seed, is_light
    )
    try:
        return examination.verdict()
    finally:
        state.restore()


# ---- rows ----------------------------------------------------------------------------------------


def probe_rows(batch: Any, num_rows: int = NUM_PROBED, seed: int = 0) -> Any:
    """Some rows of a batch, the first and the last among them; repeated ones are made others.

    Floating-point values are shuffled within the row and scaled a little, integers shuffled within
    the values that are there, so that they stay of their kind.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    size = len(tensors[0])
    chosen = torch.linspace(0, size - 1, min(size, num_rows)).round().long()
    if seed and size > num_rows:  # another time, others
        inner = 1 + torch.randperm(size - 2, generator=generator)[: num_rows - 2]
        chosen = torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([size - 1])])
    chosen = chosen[torch.arange(num_rows) % len(chosen)]
    keys = torch.cat([_as_key(leaf[chosen.to(leaf.device)]) for leaf in tensors], 1)
    repeated = torch.tensor(
        [any(torch.equal(key, before) for before in keys[:row]) for row, key in enumerate(keys)]
    )

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        found = leaf[chosen.to(leaf.device)]
        if not repeated.any():
            return found
        is_repeated = _rowwise(repeated, found)
        return torch.where(is_repeated, _shuffled(found, generator), found)

    return tree_map(rows, batch)


def _as_key(rows: Tensor) -> Tensor:
    """The values of rows, to be compared [rows, values]."""
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    return rows.detach().reshape(len(rows), -1).cpu().double().nan_to_num()


def _shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rows like these: their values in another order, and a little off where that can be."""
    flat = x.reshape(len(x), -1)
    order = torch.rand(flat.shape, generator=generator).argsort(1).to(x.device)
    found = flat.gather(1, order) if flat.shape[1] else flat
    if x.dtype == torch.bool:
        return (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    is_constant = x.numel() == 0 or bool((x == x.flatten()[0]).all())
    if x.is_floating_point():
        if is_constant:
            noise = torch.rand(x.shape, generator=generator).to(x.device, x.dtype)
            return x + noise * (1 + x.abs())
        factor = 0.5 + 0.5 * torch.rand(flat.shape, generator=generator)
        return (found * factor.to(x.device, x.dtype)).view_as(x)
    if is_constant and x.numel() and int(x.flatten()[0]) > 0:
        most = int(x.flatten()[0])  # from 1 on: it may be a length
        return torch.randint(1, most + 1, x.shape, generator=generator).to(x.device, x.dtype)
    return found.view_as(x)


def _rowwise(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (like.ndim - 1)).to(like.device)


def _are_distinct(batch: Any) -> bool:
    rows = torch.cat([_as_key(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], 1)
    return len(torch.unique(rows, dim=0)) == len(rows)


def _replaced(
    batch: Any,
    kept: Tensor,
    how: Replacement,
    largest_power: float,
    generator: torch.Generator,
    is_pinned: bool,
) -> Any:
    """The batch with other rows beside the kept ones.

    Args:
        batch: The rows.
        kept: Which stay as they are [batch].
        how: What stands in the place of the others.
        largest_power: Far values are up to as many powers of ten away; below 1, not at all.
        generator: Draws.
        is_pinned: Whether negative integers stay where they are.
    """
    size = len(kept)
    # Random numbers that are the same for all tensors: rows stay together.
    source = torch.randint(1, size, (size,), generator=generator).add_(torch.arange(size)) % size
    first_kept = int(kept.nonzero()[0])
    powers = torch.rand(size, generator=generator) * largest_power
    powers = powers.round() if largest_power >= 1 else torch.zeros(size)
    if how is Replacement.OUTLIER:
        powers.fill_(largest_power if largest_power >= 1 else 0.0)

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if how is Replacement.COPIES:
            other = leaf[first_kept].expand_as(leaf)
        elif how in (Replacement.ALIKE, Replacement.OPPOSITE):
            # Far enough for any threshold; of what has no sign, another row's.
            sign = 1 if how is Replacement.ALIKE else -1
            is_signed = leaf.is_floating_point() or leaf.is_complex()
            row = leaf[first_kept - (not is_signed and sign < 0)]
            other = (sign * 10 ** (largest_power / 2) * row if is_signed else row).expand_as(leaf)
        elif how is Replacement.ROWS:
            other = leaf[source.to(leaf.device)]
        else:
            other = _far(leaf, powers, how, generator)
        if is_pinned and not leaf.is_floating_point() and leaf.dtype != torch.bool:
            valid = leaf[leaf >= 0]
            if valid.numel():
                drawn = torch.randint(valid.numel(), leaf.shape, generator=generator)
                other = torch.where(other < 0, valid[drawn.to(leaf.device)], other)
            other = torch.where(leaf < 0, leaf, other)
        return torch.where(_rowwise(kept, leaf), leaf, other)

    return tree_map(rows, batch)


def _far(leaf: Tensor, powers: Tensor, how: Replacement, generator: torch.Generator) -> Tensor:
    """Values that stood in the same place of some row: each is one that the place can have."""
    if leaf.dtype == torch.bool:
        if powers.any():
            return (torch.rand(leaf.shape, generator=generator) < 0.5).to(leaf.device)
        return leaf.roll(1, 0)
    if how is Replacement.OUTLIER and not leaf.is_floating_point() and powers.any():
        return leaf.amax().expand_as(leaf) if leaf.numel() else leaf
    drawn = torch.randint(len(leaf), leaf.shape, generator=generator).to(leaf.device)
    other = leaf.gather(0, drawn) if leaf.numel() else leaf
    if leaf.is_floating_point() or leaf.is_complex():
        other = other * _rowwise(10.0**powers, leaf).to(leaf.dtype)
    return other


# ---- one pass ------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """What one pass left of each row.

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

    def differs(self, other: "_Trace", kept: Tensor, tolerance: float) -> list[str] | None:
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
            mine, others = self._stacked(names, len(kept)), other._stacked(names, len(kept))
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

    def reached(self, kept: Tensor) -> list[str]:
        """Names of the parameters of which rows that are not kept have a gradient.

        Where their losses have the weight 0, that is exactly 0, or 0 · inf.
        """
        found = {name: each[~kept].nan_to_num(0, 0, 0) for name, each in self.sketches.items()}
        return [name for name, each in found.items() if bool(each.any())]

    def of_first(self, num_rows: int) -> "_Trace":
        """What it left of the first rows."""
        losses = None if self.losses is None else self.losses[:num_rows]
        return _Trace(losses, {name: each[:num_rows] for name, each in self.sketches.items()})

    def is_finite_beside(self, base: "_Trace", kept: Tensor) -> bool:
        """Whether kept rows are finite wherever those of another pass are."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(self.losses, base.losses)]
        pairs += [(each, base.sketches.get(name)) for name, each in self.sketches.items()]
        return all(
            bool((mine.isfinite() | ~theirs.isfinite())[kept].all())
            for mine, theirs in pairs
            if mine is not None and theirs is not None
        )

    def _stacked(self, names: Sequence[str], size: int) -> Tensor:
        nothing = torch.zeros(size, _NUM_SKETCHES, dtype=torch.float64)
        return torch.stack([self.sketches.get(name, nothing) for name in names])


def _differ(first: Tensor, second: Tensor, tolerance: Tensor) -> Tensor:
    is_same = (first == second) | (first.isnan() & second.isnan())
    return ~(is_same | ((first - second).abs() <= tolerance))


class _Sketches:
    """Adds up sketches of per-sample gradients as records come."""

    def __init__(self, batch: int) -> None:
        self._batch, self.found = batch, {}

    def take(self, name: str, record: Record | Streamed) -> None:
        """Add a record's."""
        if isinstance(record, Streamed):
            for samples, piece in record.first_chunks():
                self._add(name, samples.start or 0, _sketch(piece))
        else:
            self._add(name, 0, _sketch(record))

    def _add(self, name: str, start: int, values: Tensor) -> None:
        total = self.found.get(name)
        if total is None:
            total = values.new_zeros(self._batch, _NUM_SKETCHES)
            self.found[name] = total
        total[start : start + len(values)] += values.to(total.device)


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


# ---- all passes ----------------------------------------------------------------------------------


@dataclass
class _Examination:
    """The passes of one check, and what they show."""

    module: nn.Module
    run: Run
    batch: Any
    axes: AxisTable
    is_scalar: bool
    whole: bool
    state: ProbeState
    is_public: Callable[[str], bool]
    agree: Agree
    seed: int
    is_light: bool = False

    def verdict(self) -> Verdict:
        """Run the passes, in float64 too where that is needed."""
        rows = probe_rows(self.batch, seed=self.seed)
        found = self._compare_twice(rows, _Examination._compare)
        if found.mixing is None and not self.is_scalar and not self.is_light:
            found = replace(found, mixing=self._mixing_by_number(rows))
        if found.mixing is None and self.whole and not self.is_scalar:
            # The same number of passes on every rank, however many rows each has.
            many = self.batch if _size_of(self.batch) > NUM_PROBED else rows
            at_size = self._compare_twice(many, _Examination._compare_whole)
            self.state.restore()
            found = replace(found, mixing=at_size.mixing)
        if found.mixing is None and not self._is_sharded:
            found = replace(found, mixing=self._parameters_written(rows))
        # Ranks go on together: one that has samples speaks for one that has padding alone.
        return replace(found, is_conclusive=self.agree(_are_distinct(rows)))

    # --- comparing -------------------------------------------------------------------------------

    def _compare(self, rows: Any, tolerance: float) -> Verdict:
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
            return Verdict(_REMEMBERS)
        if mixing is not None:
            return Verdict(mixing)
        private = sorted(name for name in written & of_data if not self.is_public(name))
        if self.agree(bool(private)):
            return Verdict(self._buffers_written(private))
        return Verdict(None, frozenset(written - of_data))

    def _turn(self, ways: Sequence[Replacement]) -> Sequence[Replacement]:
        """All of them, or those whose turn it is."""
        start = self.seed % len(ways)
        return [*ways[start:], *ways[:start]][: 2 if self.is_light else None]

    def _kept(self, size: int, number: int, how: Replacement, generator: torch.Generator) -> Tensor:
        """Which rows stay: the first one or the last, and some of the others."""
        if how is Replacement.OUTLIER:
            return torch.arange(size) != int(torch.randint(1, size - 1, (), generator=generator))
        kept = torch.rand(size, generator=generator) < 0.34
        kept[[0, -1][number % 2]] = True
        kept[[-1, 0][number % 2]] = False
        return kept

    def _pass_beside(
        self,
        base: _Trace,
        rows: Any,
        kept: Tensor,
        how: Replacement,
        generator: torch.Generator,
        weights: Tensor | None,
    ) -> _Trace:
        """Run with rows replaced, by milder values where others cannot be computed with.

        An overflow that reaches the kept rows may be 0 · inf, and not mixing: it is looked at again
        without one.
        """
        error: Exception | None = None
        for largest_power in (6.0, 1.0, 0.0):
            milder = how if largest_power else Replacement.ROWS
            other = _replaced(rows, kept, milder, largest_power, generator, self.is_scalar)
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

    def _compare_twice(self, rows: Any, compare: "Compare", tolerance: float = 0.0) -> Verdict:
        """Compare passes as they are, and in float64 where they differ."""
        found = compare(self, rows, tolerance)
        is_mixed = self.agree(found.mixing is not None)
        return self._compare_wide(rows, compare) if is_mixed else found

    def _compare_wide(self, rows: Any, compare: "Compare") -> Verdict:
        """Compare passes in float64, or where that cannot be, in the module's own dtype."""
        if self._is_wide(rows):
            return compare(self, rows, TOLERANCE)
        if not self._is_sharded:
            try:
                with in_float64(self.module):
                    wide = replace(self, state=ProbeState(self.module, rows))
                    return compare(wide, as_double(rows), TOLERANCE)
            except UnisonError:
                raise
            except Exception:
                # A kernel for other dtypes, whatever it raises: the dtype's own last places decide.
                self.state.restore()
            finally:
                self.state.restore()
        return compare(self, rows, NUM_LAST_PLACES * self._epsilon(rows))

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
            other = _replaced(rows, kept, how, 0.0, generator, self.is_scalar)
            first, second = (
                self._pass(each, None, seed=NUM_DRAWS * self.seed + seed) for each in (rows, other)
            )
            found = None if self.is_scalar else first.differs(second, kept, tolerance)
            if self.agree(found is not None):
                return self._mixing(found, how, kept)
        return None

    def _mixing_by_number(self, rows: Any) -> str | None:
        """Find out whether what a sample leaves depends on how many samples there are.

        Kernels round differently for other shapes. Without dropout: it draws other numbers, too.
        """
        epsilon = self._epsilon(rows)
        if epsilon < 1e-6 or self._is_sharded:
            tolerance = NUM_LAST_PLACES * 8 * epsilon
            return self._compare_twice(rows, _Examination._compare_sizes, tolerance).mixing
        return self._compare_wide(rows, _Examination._compare_sizes).mixing

    def _compare_sizes(self, rows: Any, tolerance: float) -> Verdict:
        size = _size_of(rows)
        fewer = tree_map(lambda leaf: leaf[:-1] if isinstance(leaf, Tensor) else leaf, rows)
        with NoDropout():
            first = self._pass(rows, torch.ones(size))
            has_drawn = self.state.has_drawn()
            second = self._pass(fewer, torch.ones(size - 1))
        self.state.restore()
        first = first.of_first(size - 1)
        found = first.differs(second, torch.ones(size - 1, dtype=torch.bool), tolerance)
        if self.agree(has_drawn) or not self.agree(found is not None):
            return Verdict(None)
        where = f" before {found[0]!r}" if found else ""
        return Verdict(
            f"samples mix{where}: a sample's {'gradient' if found else 'output'} changes with the "
            f"number of samples beside it ({size} or {size - 1}). Divide by a constant, not by the "
            "size of the batch; a sample must depend on its own rows only"
        )

    def _compare_whole(self, batch: Any, tolerance: float) -> Verdict:
        """Compare outputs for a whole batch: a model may do something else with many rows.

        Each half is kept once: where experts take rows until they are full, a row feels only those
        before it. Many copies fill an expert, or leave it empty. What outputs do not show, the
        gradients that losses of one half send to the other do.
        """
        generator = torch.Generator().manual_seed(self.seed)
        size = _size_of(batch)
        is_first = torch.arange(size) < size // 2
        is_random = torch.randperm(size, generator=generator) < (size + 1) // 2
        base = self._pass(batch, None if self.is_light else is_random.double())
        reached = [] if self.is_light else base.reached(is_random)
        if self.agree(bool(reached)):
            return Verdict(self._mixing(reached or None, None, ~is_random))
        kept_by = {Replacement.VALUES: is_first, Replacement.ROWS: is_random}
        base = _Trace(base.losses)
        for how in self._turn(_BESIDE_MANY):
            kept = kept_by.get(how, ~is_first)
            other = self._pass_beside(base, batch, kept, how, generator, None)
            found = base.differs(_Trace(other.losses), kept, tolerance)
            if self.agree(found is not None):
                return Verdict(self._mixing(found, how, kept))
        return Verdict(None)

    # --- passes ----------------------------------------------------------------------------------

    def _pass(
        self,
        rows: Any,
        weights: Tensor | None,
        *,
        is_clean: bool = True,
        seed: int | None = None,
    ) -> _Trace:
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
                return _Trace(self._losses(rows, size))
        sketches, versions = _Sketches(size), self.state.versions()
        capture = Capture(self.module, size, axes=self.axes, on_record=sketches.take, streams=True)
        with capture.installed(is_guarded=True), torch.enable_grad():
            with capture.following(rows):
                result = self._checked(self.run(self.module, rows), size)
            if result.requires_grad:
                weighed = result if self.is_scalar else result * weights.to(result)
                _run_backward(weighed.sum())
        losses = None if self.is_scalar else result.detach().cpu().double()
        found = {name: each.cpu() for name, each in sketches.found.items()}
        buffers = self.state.values()
        # Writing through .data leaves no version, and writing the same value no other bits.
        written = _differing(versions, self.state.versions()) | self.state.written(buffers)
        return _Trace(losses, found, buffers, written)

    def _pass_again(self, rows: Any) -> _Trace:
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

    def _losses(self, rows: Any, size: int) -> Tensor | None:
        found = self._checked(self.run(self.module, rows), size).detach().cpu().double()
        return found.expand(size) if self.is_scalar else found

    def _checked(self, losses: Tensor, size: int) -> Tensor:
        if not self.is_scalar and losses.shape != (size,):
            raise BadInput(f"expected one loss per sample, [{size}], found {list(losses.shape)}")
        return losses

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
        return (
            f"the forward pass writes values of the batch to the buffer {names[0]!r}, which is "
            f"saved with the model and gets no noise. {_buffer_remedy(self.module, names[0])}"
        )

    def _parameters_written(self, rows: Any) -> str | None:
        """What is wrong with parameters that were written: that their values are of the batch."""
        names = sorted(self.state.written_parameters())
        names = [name for name in names if not self.is_public(name)]
        if not self.agree(bool(names)):
            return None
        by_name = dict(self.module.named_parameters())
        copies = {name: by_name[name].detach().clone() for name in names}
        kept = torch.arange(_size_of(rows)) == 0
        generator = torch.Generator().manual_seed(self.seed)
        other = _replaced(rows, kept, Replacement.VALUES, 0.0, generator, self.is_scalar)
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
        return PLACING in vars(self.module) or any(map(is_in_parts, parameters))

    def _is_wide(self, rows: Any) -> bool:
        found = {*_float_dtypes([*self.module.parameters(), *tree_leaves(rows)])}
        return found <= {torch.float64} and not _autocast_dtypes()

    def _epsilon(self, rows: Any) -> float:
        tensors = [*self.module.parameters(), *self.module.buffers(), *tree_leaves(rows)]
        found = {torch.float32, *_float_dtypes(tensors), *_autocast_dtypes()}
        return max(torch.finfo(each).eps for each in found if each.itemsize > 1)


Compare = Callable[[_Examination, Any, float], Verdict]

_REMEMBERS = (
    "the module remembers the batch: its outputs for the same rows and the same random numbers "
    "depend on the rows that it was called with before (a running mean, a queue, a cache). Such "
    "state gets no noise: remove it, or call module.eval() on the part that keeps it"
)


def _remedy(module: nn.Module) -> str:
    """What to do about samples that mix, as far as the modules tell."""
    norms = [name for name, each in module.named_modules() if _is_batch_norm(each)]
    if norms:
        return (
            f"Batch norm in train mode does that (here {norms[0]!r}): use GroupNorm instead, or "
            "call .eval() on it to use its running statistics"
        )
    return (
        "Statistics over the batch, routing of tokens to experts, a loss over the whole batch and "
        "flattening token by token do that; a sample must depend on its own rows only"
    )


def _buffer_remedy(module: nn.Module, name: str) -> str:
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.modules.batchnorm._NormBase):
        return (
            "Use GroupNorm, or call .eval() on the layer so that it uses its running statistics; "
            f"make_private(public_buffers=[{name!r}]) says that they may be published"
        )
    return (
        "Keep statistics of the data out of buffers, or say that it may be published: "
        f"make_private(public_buffers=[{name!r}])"
    )


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (
        module.training or module.running_mean is None
    )


def _differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}


def _size_of(batch: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _float_dtypes(tensors: Sequence[Any]) -> Iterator[torch.dtype]:
    return (each.dtype for each in tensors if isinstance(each, Tensor) and each.is_floating_point())


def _autocast_dtypes() -> list[torch.dtype]:
    kinds = ("cpu", "cuda")
    return [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]


def _run_backward(loss: Tensor) -> None:
    """Run a backward pass in which function modes are on, as they are in the forward pass.

    `Tensor.backward` is a torch function itself: inside of it a mode is off, and activation
    checkpointing would run something else than in the forward pass.
    """
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,  # keep_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
