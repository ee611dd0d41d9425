"""Making sure that samples do not mix: what a sample leaves behind depends on the sample alone.

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
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from unison.capture.axes import AxisTable
from unison.capture.capture import PLACING, Capture
from unison.capture.other_modes import NoDropout, additions_in_order, as_double, in_float64
from unison.capture.other_rows import (
    NUM_PROBED,
    Replacement,
    are_distinct,
    probe_rows,
    with_others,
)
from unison.capture.parts import is_in_parts
from unison.capture.probe_state import ProbeState
from unison.capture.recompute import checkpointing_quiet
from unison.capture.sketches import RowResults, Sketches
from unison.errors import BadInput, UnisonError, UnsupportedOperation

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
    """What a check found.

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
    is_pinned: bool = False,
    whole: bool = False,
    state: ProbeState | None = None,
    is_public: Callable[[str], bool] = lambda name: False,
    agree: Agree = bool,
    seed: int = 0,
    is_light: bool = False,
    is_rounded: bool = False,
) -> MixingReport:
    """Find out whether samples mix; see `check_samples_apart`.

    Args:
        module: The model.
        run: One loss per sample.
        batch: Some samples.
        axes: Where samples lie.
        is_scalar: Whether `run` returns one loss of the whole batch instead, of which each sample's
            share is looked at.
        is_pinned: Whether negative integers (labels that are left out) stay where they are, as a
            loss of the whole batch needs: how many there are in each row is for others to compare.
        whole: Whether outputs are compared for all rows of the batch, too, at its own size.
        state: What the module was like before it was probed; of now, unless given.
        is_public: Whether a buffer or parameter of this name may hold what passes write there.
        agree: Lets ranks that run the module together decide together.
        seed: Of what stands in the place of rows.
        is_light: Whether some of it will do, for a module that was examined before: one way of
            replacing rows, which changes with the seed, and no other numbers of rows. Where bits
            are known to differ, turns are taken at comparing in the model's dtype and in float64.
        is_rounded: Whether bits are known to differ, and need not be compared.

    Raises:
        BadInput: The losses have another shape.
        UnsupportedOperation: The module does not run with other values.
    """
    state = state or ProbeState(module, batch)
    examination = _Examination(
        module,
        run,
        batch,
        axes,
        is_scalar,
        is_pinned,
        whole,
        state,
        is_public,
        agree,
        seed,
        is_light,
        is_rounded,
    )
    try:
        with additions_in_order():
            return examination.verdict()
    finally:
        state.restore()


@dataclass
class _Examination:
    """The passes of one check, and what they show."""

    module: nn.Module
    run: Run
    batch: Any
    axes: AxisTable
    is_scalar: bool
    is_pinned: bool
    whole: bool
    state: ProbeState
    is_public: Callable[[str], bool]
    agree: Agree
    seed: int
    is_light: bool = False
    is_rounded: bool = False

    def verdict(self) -> MixingReport:
        """Run the passes, in float64 too where that is needed."""
        rows = probe_rows(self.batch, seed=self.seed)
        found = self._compare_twice(rows, _Examination._compare, is_rounded=self.is_rounded)
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
        """All of them, or those whose turn it is."""
        start = self.seed % len(ways)
        return [*ways[start:], *ways[:start]][: 1 if self.is_light else None]

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
            other = with_others(rows, kept, how, 0.0, generator, self.is_pinned)
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
        tolerance = NUM_LAST_PLACES * 8 * self._epsilon(rows)
        is_narrow = tolerance > 1e-4 and not self._is_sharded
        return self._compare_twice(
            rows, _Examination._compare_sizes, tolerance, is_rounded=is_narrow
        ).mixing

    def _compare_sizes(self, rows: Any, tolerance: float) -> MixingReport:
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
            return MixingReport(None)
        where = f" before {found[0]!r}" if found else ""
        return MixingReport(
            f"samples mix{where}: a sample's {'gradient' if found else 'output'} changes with the "
            f"number of samples beside it ({size} or {size - 1}). Divide by a constant, not by the "
            "size of the batch; a sample must depend on its own rows only"
        )

    def _compare_whole(self, batch: Any, tolerance: float) -> MixingReport:
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
            return MixingReport(self._mixing(reached or None, None, ~is_random))
        kept_by = {Replacement.VALUES: is_first, Replacement.ROWS: is_random}
        base = RowResults(base.losses)
        for how in self._turn(_BESIDE_MANY):
            kept = kept_by.get(how, ~is_first)
            other = self._pass_beside(base, batch, kept, how, generator, None)
            found = base.differs(RowResults(other.losses), kept, tolerance)
            if self.agree(found is not None):
                return MixingReport(self._mixing(found, how, kept))
        return MixingReport(None)

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
                return RowResults(self._losses(rows, size))
        sketches, versions = Sketches(size), self.state.versions()
        capture = Capture(self.module, size, axes=self.axes, on_record=sketches.take, streams=True)
        with capture.installed(is_guarded=True), torch.enable_grad():
            with capture.following(rows):
                result, shared = self._run(rows, size)
            if result.requires_grad:
                weighed = result if self.is_scalar else result * weights.to(result)
                _run_backward(
                    weighed.sum() if shared is None else weighed.sum() + shared.to(weighed)
                )
        losses = None if self.is_scalar else result.detach().cpu().double()
        found = {name: each.cpu() for name, each in sketches.found.items()}
        buffers = self.state.values()
        # Writing through .data leaves no version, and writing the same value no other bits.
        written = _differing(versions, self.state.versions()) | self.state.written(buffers)
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

    def _losses(self, rows: Any, size: int) -> Tensor | None:
        found = self._run(rows, size)[0].detach().cpu().double()
        return found.expand(size) if self.is_scalar else found

    def _run(self, rows: Any, size: int) -> tuple[Tensor, Tensor | None]:
        """Losses to be compared, and one of the whole batch, of which each sample has a share."""
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
        return PLACING in vars(self.module) or any(map(is_in_parts, parameters))

    def _is_wide(self, rows: Any) -> bool:
        found = {*_float_dtypes([*self.module.parameters(), *tree_leaves(rows)])}
        return found <= {torch.float64} and not _autocast_dtypes()

    def _epsilon(self, rows: Any) -> float:
        tensors = [*self.module.parameters(), *self.module.buffers(), *tree_leaves(rows)]
        found = {torch.float32, *_float_dtypes(tensors), *_autocast_dtypes()}
        return max(torch.finfo(each).eps for each in found if each.itemsize > 1)


Compare = Callable[[_Examination, Any, float], MixingReport]

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
