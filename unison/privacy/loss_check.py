"""Checks that a loss is a sum of per-row terms: of the program that the tape holds.

[Note: separation] Row b's gradient, at the module's outputs, may depend on row b of the outputs and
of the batch, and on public constants. The program is run again

  0. unchanged, where it must give the gradients that the real graph gives: else part of the loss is
     not on the tape;
  1. with other rows replaced, in outputs *and* batch, at one shape: the gradient of the rows that
     were kept must have the same bits. Other rows are replaced by rows of the batch, by values far
     away, and by copies of one row. Where bits differ the comparison is made again in float64,
     where 1e-9 of the row's scale is rounding;
  2. at another number of rows, where gradients may change by the factor of a mean, and no other.
     Python's numbers stay as they are then, unless they are multiples of the number of rows. What
     else may be made of it is seen by comparing numbers, and then gradients, over several passes.

This is a randomised test: it proves coupling, never its absence. It is repeated for each new path
through the user's code and at passes 1, 2, 4, 8, …; what a single batch can show to be wrong
(labels that count unevenly, numbers read from data) is looked at in every pass.

Models of transformers return a loss of their own when they are given labels: a mean over all
labelled tokens of the batch. Where samples have different numbers of them, each sample's share
depends on the other samples through the denominator: no clipping of gradients bounds what one
sample does to the sum. Whether the loss couples samples in another way is found out by running the
module (`unison.capture.separation`); how many labels count is a matter of every single batch.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from unison.capture.capture import ANCHOR
from unison.errors import UnsupportedOperation
from unison.parallel import private_trainings
from unison.privacy.loss_program import (
    ARITHMETIC,
    FLOAT64_TOLERANCE,
    SUBSTITUTES,
    Gradients,
    Program,
    RecordLayout,
    Replay,
    all_by_record,
    by_record,
    far_values,
    first_units,
    is_assertion,
    is_close,
    is_equal,
    is_explained,
    is_function_of_size,
    is_rounding,
    is_same,
    laid_out,
    may_branch,
    multiple_of,
    numbers_of,
    program_of,
    record_dim,
    rows_differ,
    scales_of,
    where_rows_meet,
)
from unison.privacy.loss_tape import (
    EARLIER,
    OTHER_ROWS,
    LossRecorder,
    Operation,
    PublicNumber,
    SlotRef,
    from_other_ranks,
    positions,
)
from unison.privacy.sampling import packed, unpacked
from unison.torch_internals import graph_leaves, has_values, is_dtensor, sent_to_host

# --- losses that a model makes itself -------------------------------------------------------------

IGNORED = -100  # the label that torch's cross-entropy leaves out, unless told otherwise


def label_check(inputs: Sequence[Tensor]) -> Callable[[], None]:
    """Compare the numbers of labels of all samples, in whatever holds some.

    Args:
        inputs: What the module was given, samples first [batch, ...].

    Returns:
        Raises UnsupportedOperation if samples have different numbers of labels that count. It is
        to be called when the backward pass has ended: until then a GPU goes on with it.
    """
    is_uneven: list[Callable[[], Tensor]] = []
    for labels in inputs:
        if not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool):
            is_counted = (labels != IGNORED).unsqueeze(-1).flatten(1)  # [batch, tokens]
            # A causal model leaves the first token out, another one does not: both must be even.
            for counts in (is_counted.sum(1), is_counted[:, 1:].sum(1)):
                is_uneven.append(sent_to_host((counts != counts[:1]).any()))

    def finish() -> None:
        if any(read() for read in is_uneven):
            raise UnsupportedOperation(
                "the model's own loss is a mean over all labelled tokens of the batch, and "
                "samples have different numbers of them: each sample's gradient then depends "
                "on the others. Compute unison.per_sample_loss(logits, labels).mean() from "
                "the model's logits instead"
            )

    return finish


# --- losses that the user makes -------------------------------------------------------------------

REMEDY = (
    "Make one loss per row (reduction='none', then a mean over each row's own elements; "
    "unison.per_sample_loss does it for tokens) and send back their mean or sum; if several rows "
    "belong to one record, say so with make_private(rows_per_sample=)"
)
KEPT = (
    "that the module's forward made and did not return (an attribute such as module.aux_loss, or "
    "what a forward hook kept), so that nobody knows whether rows meet in it. Return it from "
    "forward beside the outputs, and take it from there"
)
GROWTH = 1 << 10  # of a number since a check, after which there is another
FEW_ELEMENTS = 1 << 24  # of all roots together: more are looked at in a part of the rows


class LossCheck:
    """Refuses losses that couple rows; remembers the paths that it has seen.

    Args:
        batch_dim: Dimension of the samples.
        rows_per_sample: Rows that belong to one record.
        rechecks: Whether known paths are checked again at passes 2, 4, 8, ….
        is_mean: Whether the loss is said to be a mean of rows' losses, else a sum.

    Attributes:
        num_checks: How often a loss was run again.
    """

    def __init__(
        self,
        *,
        batch_dim: int,
        rows_per_sample: int,
        rechecks: bool,
        is_mean: bool,
    ) -> None:
        self._rechecks = rechecks
        self._says_mean = self._is_mean = is_mean
        self._rows = RecordLayout(1, rows_per_sample, batch_dim)
        self._rows_per_sample = rows_per_sample
        # Of each path: rows and numbers when it was taken last; rows and numbers when it was
        # checked last, with a record of then and its gradients, by slot,
        # and what stood beside it.
        self._taken: dict[tuple, tuple[int, Sequence[float]]] = {}
        self._checked: dict[tuple, tuple[int, Sequence[float], Gradients, Gradients, list]] = {}
        # Paths whose numbers were taken for multiples of the number of rows.
        self._with_multiples: set[tuple] = set()
        # Of each path: rows and numbers of its last passes; the places of numbers that rows seem to
        # decide, and whether gradients were compared since.
        self._history: dict[tuple, deque[tuple[int, Sequence[float]]]] = {}
        self._of_rows: dict[tuple, dict[int, bool]] = {}
        # Of each path: the largest values of its numbers when it was checked.
        self._largest: dict[tuple, list[float]] = {}
        self._generator = torch.Generator(device="cpu").manual_seed(0x5E9A)
        self._pending: list[tuple[Callable[[], Tensor], Operation, str]] = []
        self.num_checks = 0

    def begin(self, num_samples: int, *, is_sum: bool = False) -> None:
        """Begin a pass over so many samples.

        Args:
            num_samples: How many, padding included.
            is_sum: Whether rows' losses are added up by us, whatever the user says of his.
        """
        self._is_mean = self._says_mean and not is_sum
        num_rows = num_samples * self._rows_per_sample
        self._rows = self._rows._replace(num_units=num_samples, num_rows=num_rows)
        self._pending.clear()

    def judge(
        self, tape: LossRecorder, loss: Tensor, path: dict[int, Operation], gradient: Any = None
    ) -> bool:
        """Make sure that the gradient of each row depends on that row alone.

        Args:
            tape: What the user's code did.
            loss: What is sent back.
            path: The operations that lead to it, by place, last first.
            gradient: What is sent back in the place of 1, as the tape stores it.

        Returns:
            Whether the loss has terms that do not depend on data.

        Raises:
            UnsupportedOperation: It does not, or nobody can tell.
        """
        slot = tape.slot_of(loss)
        assert slot is not None
        rows = self._rows
        program = program_of(tape, slot, path, gradient, rows)
        states = [each for each in path.values() if EARLIER in each.refs][::-1]
        if states or (type(gradient) is SlotRef and gradient.slot == EARLIER):
            _refuse(
                f"{states[0] if states else 'backward'} brings what an earlier step made of its "
                "data, or another engine of its own, into the loss, so that a record of one step "
                "changes the gradients of another before any noise",
                "Keep no tensors or numbers made of private batches between steps; if the value is "
                "public, detach it and declare a number with unison.public(value)",
            )
        if (
            tape.batch
            and not tape.inputs
            and tape.batch.isdisjoint(ref for each in path.values() for ref in each.refs)
        ):
            _refuse(
                "neither what the module was given nor the loss is made of the batch that the "
                "loader handed out last: these rows were not drawn for this step, and the ledger "
                "would say otherwise",
                OTHER_ROWS,
            )
        mixed: set[int] = set()  # what holds more than rows of this batch, as they are
        for each in tape.operations:
            is_other = each.func is from_other_ranks
            is_other |= bool(tape.hidden) and tape.meets_hidden(each.leaves)
            if EARLIER in each.refs or is_other or not mixed.isdisjoint(each.refs):
                mixed.update(each.outs)
        if not mixed.isdisjoint(tape.inputs):
            _refuse(
                "what the module is given is made of an earlier step's data, or of what torch.func "
                "or a backward pass of its own made of the batch, or of what other ranks sent, so "
                "that other rows change it",
                "Make it of this batch by torch functions, or in the data set or in collate_fn; "
                "gradients of rows by torch.autograd.grad(loss, rows), with a copy of the module "
                "or after module.eval()",
            )
        if others := [each for each in path.values() if each.func is from_other_ranks]:
            _refuse(
                f"{others[-1]} brings values of other ranks, and so their rows, into the loss",
                "Send back the loss of this rank's own rows: the gradients of all ranks are added "
                "up in any case. For a metric, give the collective loss.detach().clone()",
            )
        for each in path.values():
            if tape.hidden and tape.meets_hidden(each.leaves):
                _refuse(
                    f"{each} brings what torch.func or a backward pass of its own made of the "
                    "batch into the loss, so that rows may meet in it",
                    "Make the loss of the module's outputs and of the batch, by torch functions",
                )
        if len(private_trainings) > 1:
            _refuse_others(tape, path)
        if tape.kept or tape.kept_memory:
            _refuse_left_behind(tape, path, gradient)
        for place, labels, ignored, _, weight in tape.targets:
            if place in path:
                self._refuse_uneven(path[place], labels, ignored, weight)
        if tape.reads:
            _refuse_reads(program)
        if tape.has_numbers:
            why = "the batch has numbers of Python's, which nobody follows"
            _refuse_numbers(program, 0, why, with_tensors=False)
        known = self._taken.get(program.kind)
        numbers = [each for each in program.numbers if not isinstance(each, PublicNumber)]
        if known is not None and tape.has_read:
            _refuse_changed(*known, rows.num_rows, numbers)
        # Hooks run in the real graph only: that they change nothing is seen by comparing with it.
        is_due = tape.has_hooks or (self._rechecks and is_checked_again(tape.number))
        # Of one there are no others, and without values they cannot be told apart.
        if rows.num_units > 1 and not has_values():
            if program.kind not in self._checked:
                self._keep(program, program.outputs)
        elif rows.num_units > 1:
            is_due |= self._follows_rows(program)
            if self._has_grown(program) or known is None or is_due:
                self.num_checks += 1
                self.finish()  # the check waits for the device anyway, and this says more
                _refuse_items(program)
                self._check(program, loss)
            self._taken[program.kind] = rows.num_rows, numbers
        return bool(program.terms)

    def _has_grown(self, program: Program) -> bool:
        """Whether a number is far larger than at any check, which may not have felt what it scales.

        A term that sets in after a while has the weight 0 until then, and couples nothing.
        """
        now = [abs(each) for each in scales_of(program, of_host=True)]
        largest = self._largest.setdefault((program.kind, len(now)), now)
        has_grown = any(a > GROWTH * b for a, b in zip(now, largest, strict=True))
        if has_grown:
            self._largest[program.kind, len(now)] = list(map(max, now, largest))
        return has_grown

    def _follows_rows(self, program: Program) -> bool:
        """Whether a number may be a function of the number of rows, and it can be looked at now."""
        kind, size, numbers = program.kind, self._rows.num_rows, program.numbers
        history = self._history.setdefault(kind, deque(maxlen=64))
        if history and len(history[0][1]) != len(numbers):
            history.clear()
        history.append((size, numbers))
        of_rows = self._of_rows.setdefault(kind, {})
        for i, number in enumerate(numbers):
            first = history[0][0], history[0][1][i]
            is_public = isinstance(number, PublicNumber)
            if i in of_rows or is_public or is_explained(first, (size, number)):
                continue
            if is_function_of_size([(rows, each[i]) for rows, each in history]):
                of_rows[i] = False
        if kind not in self._checked:
            return False
        before = self._checked[kind][1]
        return any(not done and before[i] != numbers[i] for i, done in of_rows.items())

    def finish(self) -> None:
        """Read the answers that had to wait for the device.

        Raises:
            UnsupportedOperation: Labels count unevenly.
        """
        pending, self._pending = self._pending, []
        for is_so, operation, message in pending:
            if is_so():
                raise UnsupportedOperation(f"{operation} {message}")

    def _refuse_uneven(
        self, operation: Operation, labels: Tensor, ignored: int, weight: Tensor | None
    ) -> None:
        """Raise now, or before anything is released where the answer lies on a GPU."""
        if weight is not None:
            message = (
                "with class weights divides by the weights of all rows' labels, so that each row's "
                "gradient depends on the labels of the others. Use reduction='none', multiply by "
                "the weights, and take the mean"
            )
            is_uneven = sent_to_host((weight != weight.flatten()[0]).any())
            self._pending.append((is_uneven, operation, message))
        if record_dim(self._rows, labels) is not None:
            counts = (by_record(self._rows, labels) != ignored).sum(1)
            message = (
                f"divides by the number of labels that are not {ignored}, and rows have different "
                "numbers of them, so that each row's gradient depends on the others. Use "
                "unison.per_sample_loss(logits, labels).mean(), or a sum over tokens "
                "(reduction='sum') divided by a public number with loss_reduction='sum'"
            )
            is_uneven = sent_to_host((counts != counts[0]).any())
            self._pending.append((is_uneven, operation, message))
        if not labels.is_cuda:
            self.finish()

    # --- the check -------------------------------------------------------------------------------

    def _check(self, program: Program, loss: Tensor) -> None:
        rows, kind = self._rows, program.kind
        if unpacked(loss)[0] is not loss:
            _refuse(
                "the loss is one number for every granule: with granule= a mean or a sum over rows "
                "is taken granule by granule",
                "Make one loss per row (reduction='none'), and send back unison.batch_mean(losses)",
            )
        _refuse_freed(program)
        try:
            base, left = self._self_check(program, loss)
        except UnsupportedOperation:
            raise
        except Exception as error:
            _refuse(
                f"the loss cannot be run again to be checked ({type(error).__name__}: "
                f"{str(error)[:120]})",
                REMEDY,
            )
        _refuse_kept(program)
        known = self._checked.get(kind)
        self._replacements(program, base, left, is_first=known is None)
        if left == rows:
            self._size_check(program, base[0])
            if known is not None:
                self._compare_with_before(program, *known)
            self._keep(program, base[0])
        else:
            self._checked[kind] = rows.num_rows, program.numbers, {}, {}, []

    def _keep(self, program: Program, grads: Gradients) -> None:
        """Keep a record of this batch and its gradients, which a batch of another size must give.

        A plan keeps them too: of large outputs they are most of what a check leaves behind.
        """
        unit, of_unit = (
            {slot: matrix[:1].clone() for slot, matrix in all_by_record(self._rows, values)}
            for values in (program.tape.roots, grads)
        )
        beside = [by_record(self._rows, each)[:1].clone() for each in program.beside().values()]
        numbers = scales_of(program)
        self._checked[program.kind] = self._rows.num_rows, numbers, unit, of_unit, beside

    def _self_check(self, program: Program, loss: Tensor) -> tuple[Replay, RecordLayout]:
        """Replay the program unchanged, and compare with the real graph's gradients.

        Returns:
            What it gave, and which records it was run with: fewer where outputs are large, since a
            replay must fit beside the step; all, if its sizes are fixed.
        """
        rows, real = self._rows, program.real(loss)
        values = [each for value in program.tape.roots.values() for each in unpacked(value)]
        num_elements, num_left = sum(each.numel() for each in values), rows.num_units
        is_granular = len(values) > len(program.tape.roots)
        if num_elements > FEW_ELEMENTS and not is_granular:
            num_left = min(num_left, max(3, FEW_ELEMENTS * num_left // num_elements))
        if num_left < rows.num_units:
            left = first_units(rows, num_left)
            try:
                base = program.replay(program.first_records(left), left)
                for factor in (1.0, num_left / rows.num_units):
                    if all(
                        is_close(by_record(left, base[0][slot]) * factor, grad[:num_left])
                        for slot, grad in all_by_record(rows, real)
                    ):
                        return base, left
            except Exception:  # whatever the user's operations raise at another size
                pass  # sizes are written into the program: it is run with all rows, below
        base = program.replay({})
        draws = any(each.states for each in program.path.values())
        grads = program.replay({}, draws_again=True)[0] if draws else base[0]
        for slot, grad in real.items():
            pairs = zip(unpacked(grads[slot]), unpacked(grad), strict=True)
            if not all(is_close(a, b) for a, b in pairs):
                names = ", ".join(dict.fromkeys(map(str, program.path.values())))
                _refuse(
                    f"part of the loss could not be followed (what could: {names[:200]}); "
                    "torch.jit, vmap and functions outside of torch cannot",
                    "Write the loss with torch functions. " + REMEDY,
                )
        return base, rows

    def _replacements(
        self, program: Program, base: Replay, left: RecordLayout, *, is_first: bool
    ) -> None:
        """Run with other rows replaced: rows that are kept must keep their gradients."""
        failed: dict[tuple[bool, ...], Exception] = {}  # by the rows that were kept
        tried: set[tuple[bool, ...]] = set()
        double: Replay | None = None
        units = torch.arange(left.num_units)
        order = torch.randperm(left.num_units, generator=self._generator)
        half = max(1, left.num_units // 2)
        subsets = [units[:1], order[:half], order[half:], units[-1:]]
        for subset in subsets if is_first else subsets[1:2]:
            kept = torch.isin(units, subset)
            key = tuple(kept.tolist())
            for way in range(3 if len(subset) else 0):
                values = {}
                for slot in program.tape.roots:
                    value = self._replaced(program, slot, kept, way, left)
                    if value is not None:
                        values[slot] = value
                try:
                    other = program.replay(values, left)
                except Exception as found:  # values that an operation of the user's does not take
                    failed[key] = found
                    continue
                tried.add(key)
                _refuse_other_path(program, base[2], other[2])
                moved = _moved(program, base, other, kept, left)
                if moved is None:
                    continue
                first, again = base, other
                try:
                    if double is None:
                        double = program.replay(program.first_records(left), left, is_double=True)
                    again = program.replay(values, left, is_double=True)
                    first = double
                    moved = _moved(program, first, again, kept, left, FLOAT64_TOLERANCE)
                except Exception:  # an operation without a form in float64: the bits have decided
                    first, again = base, other
                if moved is not None:
                    what, remedy = moved
                    _refuse(
                        f"{what}: {where_rows_meet(program, first[2], again[2], kept, left)}",
                        remedy,
                    )
        for key, error in failed.items():
            if key not in tried:  # no values at all could stand in the place of the others
                _refuse(
                    "the loss cannot be run with other rows in the place of these "
                    f"({type(error).__name__}: {str(error)[:120]}), so it cannot be checked",
                    REMEDY,
                )

    def _replaced(
        self, program: Program, slot: int, kept: Tensor, way: int, left: RecordLayout
    ) -> Tensor | None:
        """Replace rows of a root that are not kept; None if it stays as it is.

        Args:
            program: The program.
            slot: Of the root.
            kept: Which rows stay [rows].
            way: 0: rows of the batch. 1: values far away, of a like kind. 2: copies of one row.
            left: Where those rows lie that are left.
        """
        root, rows, generator = program.tape.roots[slot], self._rows, self._generator
        if record_dim(rows, root) is None:
            # A loss that the module made itself, or a statistic: what comes after must not depend
            # on its value.
            if slot not in program.tape.edges or not root.is_floating_point():
                return None
            factor = 1 + float(torch.rand((), generator=generator)) * 10**way
            return packed(root, [each.detach() * factor for each in unpacked(root)])
        value = root
        if left != rows:
            value = laid_out(rows, root, by_record(rows, root)[: left.num_units])
        matrix = by_record(left, value)
        device = matrix.device
        order = torch.randint(0, left.num_units, (left.num_units,), generator=generator)
        if way == 2:
            order = order[:1].expand(left.num_units)
        new = far_values(matrix, generator) if way == 1 else matrix[order.to(device)]
        if way == 2 and not matrix.is_floating_point():
            size = sum(each.numel() for each in unpacked(root))
            for _, labels, _, num_classes, _ in program.tape.targets:
                if sum(each.numel() for each in unpacked(labels)) == size:  # it holds labels
                    label = int(torch.randint(0, num_classes, (), generator=generator))
                    new = torch.full_like(matrix, label)
                    break
        return laid_out(left, value, torch.where(kept.to(device)[:, None], matrix, new))

    def _size_check(self, program: Program, before: Gradients) -> None:
        """Leave one record out: gradients change by a mean's factor, or those of a sum do not."""
        rows = self._rows
        left = first_units(rows, rows.num_units - 1)
        if any(len(unpacked(value)) > 1 for value in program.tape.roots.values()):
            return  # granules have one shape
        draws, values = program.first_draws(left), program.first_records(left)
        factor, first = rows.num_units / left.num_units, _without_last(rows, before)
        try:
            now = program.replay(values, left, given=draws)[0]
        except Exception:  # sizes are written into the program; steps of other sizes will tell
            return
        wrong = _wrong_factor(dict(all_by_record(left, now)), first, factor, is_mean=self._is_mean)
        if wrong is not None:
            now = program.replay(values, left, given=draws, has_multiples=True)[0]
            now = dict(all_by_record(left, now))
            if _wrong_factor(now, first, factor, is_mean=self._is_mean) is None:
                self._with_multiples.add(program.kind)  # steps of other sizes will tell
                return
        usual = self._turned(program) if wrong is not None else None
        if usual is not None and is_rounding(first, usual[1]):
            for slot, own in _without_last(rows, usual[0]).items():
                values[slot] = laid_out(rows, usual[0][slot], own)
            with suppress(Exception):  # what cannot be run with these values stays refused
                now = program.replay(values, left, given=draws)[0]
                first = _without_last(rows, usual[1])
                now = dict(all_by_record(left, now))
                wrong = _wrong_factor(now, first, factor, is_mean=self._is_mean)
        if wrong is not None:
            _refuse(*wrong)

    def _turned(self, program: Program) -> tuple[Gradients, Gradients] | None:
        """Outputs of the module that belong to the next record each, and their gradients.

        They say how large gradients of this loss are. Where its terms cancel, as those of a module
        and its copy do before the first step, what a batch gives is rounding, which says nothing.
        None if the loss takes no such values.
        """
        roots, rows = program.tape.roots, self._rows
        outputs = {slot: roots[slot] for slot in program.outputs}
        values = {
            slot: laid_out(rows, outputs[slot], matrix.roll(1, 0))
            for slot, matrix in all_by_record(rows, outputs)
        }
        try:
            return values, program.replay(values, given=program.draws)[0]
        except Exception:  # an operation of the user's does not take them; the caller refuses then
            return None

    def _compare_with_before(
        self,
        program: Program,
        num_before: int,
        numbers: Sequence[float],
        unit: Gradients,
        grads: Gradients,
        beside: list[Tensor],
    ) -> None:
        """Put a record of an earlier step into this batch, which has another size."""
        rows, roots, now = self._rows, program.tape.roots, scales_of(program)
        if not unit or num_before == rows.num_rows or len(numbers) != len(now):
            return
        if any(each.func in SUBSTITUTES for each in program.path.values()):
            return  # batch_mean divides by the rows of all ranks, which is its own affair
        of_rows = self._of_rows.get(program.kind, {})
        of_rows.update({i: True for i in of_rows if numbers[i] != now[i]})
        # A tensor may be made out of sight of what else the batch holds.
        followed = len(now) if program.tape.batch else len(program.numbers)
        unexplained = [
            a
            for i, (a, b) in enumerate(zip(numbers[:followed], now, strict=False))
            if i not in of_rows and not is_explained((num_before, a), (rows.num_rows, b))
        ]
        if program.kind in self._with_multiples and any(
            multiple_of(number, num_before) for number in unexplained
        ):
            _refuse(
                "a number in the loss that changes with the number of rows is no multiple of it, "
                "so that a row's gradient depends on how many others there are",
                REMEDY,
            )
        # Slots are others where the user's code did something else on the way.
        if unexplained or set(unit) - set(roots) or set(grads) - set(program.outputs):
            return
        values = {}
        for slot, record in unit.items():
            if record_dim(rows, roots[slot]) is None:
                return
            matrix = by_record(rows, roots[slot]).clone()
            if matrix.shape[1:] != record.shape[1:]:
                return
            matrix[:1] = record
            values[slot] = laid_out(rows, roots[slot], matrix)
        given, beside_now = {}, program.beside()
        if len(beside_now) != len(beside):  # a constant is as long as the batch, now or then
            return
        for key, value in beside_now.items() if not program.tape.batch else ():
            if type(key) is int:  # a constant
                _refuse(
                    "the batch holds texts or numbers of Python's, and the loss a tensor of shape "
                    f"{list(value.shape)} that may be made of them out of sight, so that rows may "
                    "meet in it",
                    "Make it with torch.tensor or torch.as_tensor, or in collate_fn",
                )
        for (key, value), record in zip(beside_now.items(), beside, strict=True):
            matrix = by_record(rows, value).clone()
            if matrix.shape[1:] != record.shape[1:]:
                return
            matrix[:1] = record
            given[key] = laid_out(rows, value, matrix)
        try:
            again, _, _ = program.replay(values, given=given)
        except Exception:  # the record's values do not go together with this batch's
            return
        first = {slot: by_record(rows, again[slot])[:1] for slot in grads}
        wrong = _wrong_factor(first, grads, num_before / rows.num_rows, is_mean=self._is_mean)
        if wrong is not None:
            usual = self._turned(program)
            if usual is None or not is_rounding(first, usual[1]):
                _refuse(*wrong)


# --- what every pass is asked ---------------------------------------------------------------------


def _refuse_reads(program: Program) -> None:
    """Refuse numbers that may come from values which left torch."""
    tape, here = program.tape, positions(sys._getframe(1))
    for name, _, where in tape.reads:
        if may_branch(where, here):
            line = [each[3] for each in where if each[3] is not None][-1]
            _refuse(
                f"values left torch by {name}() ({line}), and code between there and "
                "loss.backward() has conditions, which may choose another loss because of other "
                "rows",
                "Move what reads values behind loss.backward(), or use .item(), which is followed",
            )
    name, place, _ = tape.reads[0]
    _refuse_numbers(program, place, f"values left torch by {name}()")
    for value in tape.unknown_inputs:
        if record_dim(program.rows, value) is not None:
            _refuse(
                f"values left torch by {name}(), and the module is given a tensor of shape "
                f"{list(value.shape)} that was not made by torch functions, so it may mix rows",
                "Do it in the data set or in collate_fn, or with torch functions",
            )


def _refuse_numbers(program: Program, since: int, why: str, *, with_tensors: bool = True) -> None:
    """Refuse numbers and new tensors on the way to the loss that may come from data."""
    for place, operation in program.path.items():
        if place < since:
            continue
        found = [
            f"a tensor of shape {list(leaf.shape)}"
            for leaf in operation.leaves * with_tensors
            if isinstance(leaf, Tensor) and not leaf.requires_grad
        ]
        if not all(_is_constant(program, operation, each) for each in numbers_of(operation)):
            found.append("a number")  # which one, is not for logs
        if found:
            _refuse(
                f"{why}, and {operation} brings {found[0]} into the loss, which may depend on "
                "other rows",
                "Use torch functions in the place of numpy and Python, multiply by a mask in "
                "the place of selecting, and use .item() for metrics, or unison.public(number) "
                "for a number that is public; or move metrics behind loss.backward()",
            )


def _refuse_items(program: Program) -> None:
    """Refuse numbers that are what a value was, by way of text or of Python's functions."""
    items = program.tape.items
    for operation in program.path.values() if items else ():
        for number in numbers_of(operation):
            if _is_constant(program, operation, number):
                continue
            if any(_is_made_of(number, value) for value in items):
                _refuse(
                    f"{operation} brings a number into the loss that was made of a value read from "
                    "the batch",
                    "Use torch functions of each row's own values, or unison.public(number) for a "
                    "number that is public",
                )


def _refuse_changed(then: int, before: Sequence[float], rows: int, now: Sequence[float]) -> None:
    """Refuse numbers that change from step to step, where they may come from data."""
    for a, b in zip(before, now, strict=False):
        # A number may be the size of the batch, or its inverse.
        if a != b and a * rows != b * then and a * then != b * rows:
            _refuse(
                "a number in the loss changes from step to step, and values have left torch "
                "(numpy, tolist, float), so it may come from the batch",
                "Use .item() for metrics, or declare the number with unison.public(number) if it "
                "is public",
            )


def is_checked_again(number: int) -> bool:
    """Whether what is known is checked again in a pass: in those of 1, 2, 4, 8 and so on."""
    return number & (number - 1) == 0


def _refuse_others(tape: LossRecorder, path: dict[int, Operation]) -> None:
    """Refuse what was made of rows that another engine's loader handed out."""
    others = [each.recorder for each in private_trainings if each.recorder is not tape]
    for operation in path.values():
        for leaf in operation.leaves:
            if isinstance(leaf, Tensor) and any(each.is_made_of_rows(leaf) for each in others):
                _refuse(
                    f"{operation} brings a tensor of shape {list(leaf.shape)} into the loss that "
                    "is made of the rows of another engine's loader, which this engine's noise "
                    "does not cover",
                    "Make the loss of this engine's module and of the batch of its own loader",
                )


def _refuse_left_behind(tape: LossRecorder, path: dict[int, Operation], gradient: Any) -> None:
    """Refuse constants that forward made of the batch; see [Note: left behind]."""
    for operation in path.values():
        for leaf in operation.leaves:
            if tape.is_kept(leaf):
                raise UnsupportedOperation(
                    f"{operation} brings a tensor of shape {list(leaf.shape)} into the loss {KEPT}"
                )
    if tape.is_kept(gradient):
        raise UnsupportedOperation(f"backward(gradient=) is given a tensor {KEPT}")


def _refuse_kept(program: Program) -> None:
    """Refuse what forward made of the batch and did not return: nobody looked for rows in it."""
    for term in program.terms:
        if any(hasattr(leaf, ANCHOR) for leaf in graph_leaves([term])):
            users = (each for each in program.path.values() if any(term is a for a in each.leaves))
            raise UnsupportedOperation(
                f"{next(users)} brings a tensor of shape {list(term.shape)} into the loss {KEPT}"
            )


def _refuse_freed(program: Program) -> None:
    """Refuse parameters whose memory is gone, as FSDP2 gives it back when a module has run."""
    for operation in program.tape.operations:
        for leaf in operation.leaves:
            is_plain = isinstance(leaf, Tensor) and leaf.layout == torch.strided
            is_plain = is_plain and not is_dtensor(leaf) and leaf.numel() > 0
            if is_plain and not leaf.untyped_storage().nbytes():
                _refuse(
                    f"{operation} used a tensor of shape {list(leaf.shape)} of another sharded "
                    "module, whose memory has been given back, so that the loss cannot be run "
                    "again to be checked",
                    "Shard that module with reshard_after_forward=False, with unison.fully_shard, "
                    "or not at all",
                )


def _is_constant(program: Program, operation: Operation, number: float) -> bool:
    """Whether a number cannot come from data: it is in the code, or a dimension, or a size."""
    if isinstance(number, PublicNumber) or number in (0, 1) or number in operation.constants:
        return True
    if not isinstance(number, int) or operation.name in ARITHMETIC:
        return False
    sizes = {size for value in program.tape.roots.values() for size in value.shape}
    return -8 <= number <= 8 or number == IGNORED or number in sizes


def _is_made_of(number: float, value: float) -> bool:
    """Whether a number is a value, or what one of Python's usual functions makes of it."""
    made = [value, -value, value * value]
    if value:
        made.append(1 / value)
    if value > 0:
        made += [math.sqrt(value), math.log(value)]
    if abs(value) < 300:
        made += [math.exp(value), math.exp(-value), math.tanh(value), 1 / (1 + math.exp(-value))]
    return any(math.isclose(number, each, rel_tol=1e-6) for each in made)


def _refuse(what: str, remedy: str) -> NoReturn:
    raise UnsupportedOperation(f"{what}. {remedy}")


# --- what a replay is asked -----------------------------------------------------------------------


def _refuse_other_path(program: Program, base: dict[int, Any], other: dict[int, Any]) -> None:
    """Refuse truths and sizes that other rows change, where Python was told of them."""
    here = positions(sys._getframe(1))
    for name, slot, truth, where in program.tape.branches:
        if is_assertion(where, here):
            continue
        truths = {bool(each.get(slot, truth)) for each in (base, other)}
        # The same truth here and now says little, if what it was found from has changed.
        is_other = len(truths) > 1 or (
            may_branch(where, here)
            and any(not is_same(base.get(each), other.get(each)) for each in program.compared(slot))
        )
        if is_other:
            lines = [each[3] for each in where if each[3] is not None]
            _refuse(
                f"Python code asks {name} of a value that depends on several rows "
                f"({lines[-1] if lines else 'in torch'}), and goes one way or another",
                "Use torch.where on values of single rows, or ask after loss.backward()",
            )
    for slot in program.tape.sized:
        a, b = base.get(slot), other.get(slot)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
            program.tape.has_read = True
            why = "the size of a selection was asked for, which depends on other rows"
            _refuse_numbers(program, 0, why, with_tensors=False)


def _moved(
    program: Program,
    base: Replay,
    other: Replay,
    kept: Tensor,
    rows: RecordLayout,
    tolerance: float = 0.0,
) -> tuple[str, str] | None:
    """Return what changed in the kept rows, with a remedy; None if nothing did."""
    for slot in program.tape.inputs - set(program.tape.roots):
        a, b = base[2].get(slot), other[2].get(slot)
        if isinstance(a, Tensor) and rows_differ(a, b, kept, rows, tolerance) is not None:
            return "what the module is given for one row depends on other rows", REMEDY
    for slot, a in base[0].items():
        row = rows_differ(a, other[0][slot], kept, rows, tolerance)
        if row is None:
            continue
        if record_dim(rows, a) is None:
            return (
                "the gradient of an output that does not hold the rows (a loss that the module "
                "made) depends on the batch",
                REMEDY,
            )
        return f"the loss couples rows: the gradient of row {row} depends on other rows", REMEDY
    for tensor, a, b in zip(program.terms, base[1], other[1], strict=True):
        if not is_equal(a, b, tolerance):
            return (
                f"a trainable tensor of shape {list(tensor.shape)} meets the private batch outside "
                "of the module's forward, so its gradient would be neither clipped nor noised",
                "Use it inside of the module that was made private, or freeze it with "
                "requires_grad_(False)",
            )
    return None


def _without_last(rows: RecordLayout, values: Gradients) -> Gradients:
    """All records but the last one of what holds some, as matrices."""
    return {slot: matrix[: rows.num_units - 1] for slot, matrix in all_by_record(rows, values)}


def _wrong_factor(
    now: Gradients, before: Gradients, factor: float, *, is_mean: bool
) -> tuple[str, str] | None:
    """What is wrong if gradients do not change as said with the number of rows, and the remedy."""

    def changes_by(factor: float) -> bool:
        # Losses are often made in float32, whatever the module's dtype is.
        return all(is_close(now[slot], grad * factor, 1e-4) for slot, grad in before.items())

    if changes_by(factor if is_mean else 1.0):
        return None
    if changes_by(1.0 if is_mean else factor):
        found, said = ("sum", "mean") if is_mean else ("mean", "sum")
        return (
            f"the loss is a {found} over rows and was said to be a {said}, so that a row's "
            "gradient would be multiplied by a number of others",
            f"Send back the {said} of the rows' losses, or say make_private("
            f"loss_reduction={found!r})",
        )
    return (
        "with another number of rows the gradient of a row changes by neither 1 nor "
        f"{factor:.4g}, the factor of a mean, so it depends on how many others there are",
        REMEDY,
    )
