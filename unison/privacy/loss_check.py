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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.privacy.dealing import packed, unpacked
from unison.privacy.loss_program import (
    ARITHMETIC,
    Gradients,
    Program,
    RecordLayout,
    Replay,
    Selection,
    numbers_of,
    whole,
)
from unison.privacy.loss_tape import (
    LossTape,
    Operation,
    PublicNumber,
    TapeInput,
    leaves_of,
    may_branch,
    positions,
)

# --- losses that a model makes itself -------------------------------------------------------------

IGNORED = -100  # the label that torch's cross-entropy leaves out, unless told otherwise


class LabelCheck:
    """Requires all samples to have the same number of labels, in whatever holds some.

    The answer is asked for when the backward pass has ended: until then a GPU goes on with it.

    Args:
        inputs: What the module was given, samples first [batch, ...].
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        counts = [each for labels in inputs for each in _counts(labels)]
        self._is_uneven = [_on_host((each != each[:1]).any()) for each in counts]

    def finish(self) -> None:
        """Wait for the answer.

        Raises:
            UnsupportedOperation: Samples have different numbers of labels that count.
        """
        for _, event in self._is_uneven:
            if event is not None:
                event.synchronize()
        if any(found for found, _ in self._is_uneven):
            raise UnsupportedOperation(
                "the model's own loss is a mean over all labelled tokens of the batch, and "
                "samples have different numbers of them: each sample's gradient then depends "
                "on the others. Compute unison.per_sample_loss(logits, labels).mean() from "
                "the model's logits instead"
            )


def _on_host(answer: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of a truth on the host, and what to wait for before it is read."""
    if not answer.is_cuda:
        return answer, None
    copy = torch.empty((), dtype=torch.bool, pin_memory=True)
    with torch.cuda.device(answer.device):
        copy.copy_(answer, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event


def _counts(labels: Tensor) -> list[Tensor]:
    """Labels that count, of each sample [batch]; without the first token, too.

    A causal model leaves it out, another one does not: both must be even.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return []
    is_counted = (labels != IGNORED).unsqueeze(-1).flatten(1)  # [batch, tokens]
    return [is_counted.sum(1), is_counted[:, 1:].sum(1)]


# --- losses that the user makes -------------------------------------------------------------------

REMEDY = (
    "Make one loss per row (reduction='none', then a mean over each row's own elements; "
    "unison.per_sample_loss does it for tokens) and send back their mean or sum; if several rows "
    "belong to one record, say so with make_private(rows_per_sample=)"
)
FLOAT64_TOLERANCE = 1e-9  # of a row's largest element
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}  # of the self-check
FEW_ELEMENTS = 1 << 24  # of all roots together: more are looked at in a part of the rows


@dataclass(eq=False)
class CheckedPath:
    """What is known of one path through the user's code.

    Attributes:
        num_rows: Of the pass in which it was taken last.
        numbers: Python's numbers in it, but for public ones.
        checked_rows: Rows of the pass in which it was checked last.
        checked_numbers: Python's numbers in that one.
        unit: Rows of one record of that pass, by slot.
        grads: The gradients of that record, by slot.
        has_terms: Whether terms that do not depend on data are part of the loss.
    """

    num_rows: int
    numbers: list[float]
    checked_rows: int
    checked_numbers: list[float]
    unit: dict[int, Tensor] = field(default_factory=dict)
    grads: Gradients = field(default_factory=dict)
    has_terms: bool = False


class LossCheck:
    """Refuses losses that couple rows; remembers the paths that it has seen.

    Args:
        batch_dim: Dimension of the samples.
        rows_per_sample: Rows that belong to one record.
        rechecks: Whether known paths are checked again at passes 2, 4, 8, ….
        substitutes: Functions that must not run again, each with what runs in its place.
    """

    def __init__(
        self,
        *,
        batch_dim: int,
        rows_per_sample: int = 1,
        rechecks: bool = True,
        substitutes: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> None:
        self._dim, self._per_unit, self._rechecks = batch_dim, rows_per_sample, rechecks
        self._substitutes = substitutes or {}
        self._known: dict[tuple, CheckedPath] = {}
        self._rows = RecordLayout(1, rows_per_sample, batch_dim)
        self._generator = torch.Generator(device="cpu").manual_seed(0x5E9A)
        self._pending: list[tuple[Tensor, str]] = []
        self.num_checks = 0
        self.has_terms = False  # the loss of this pass has terms that do not depend on data

    def begin(self, num_rows: int) -> None:
        """Begin a pass of so many rows."""
        self._rows = RecordLayout(num_rows // self._per_unit, self._per_unit, self._dim)
        self._pending.clear()
        self.has_terms = False

    def judge(self, tape: LossTape, loss: Tensor, gradient: Any = None) -> None:
        """Make sure that the gradient of each row depends on that row alone.

        Raises:
            UnsupportedOperation: It does not, or nobody can tell.
        """
        slot = tape.slot_of(loss)
        assert slot is not None
        program = Program(tape, slot, tape.stored(gradient), self._substitutes)
        self._refuse_state(program)
        self._refuse_uneven(program)
        self._refuse_reads(program)
        kind = program.kind
        known = self._known.get(kind)
        self._refuse_changed(program, known)
        # Hooks run in the real graph only: that they change nothing is seen by comparing with it.
        is_due = tape.has_hooks or (self._rechecks and tape.number & (tape.number - 1) == 0)
        if self._rows.num_units < 2:  # there are no others, and nothing is learned of them
            self.has_terms = bool(program.terms)
            return
        if known is None or is_due:
            self.num_checks += 1
            self.finish()  # the check waits for the device anyway, and this says more
            self._refuse_items(program)
            known = self._known[kind] = self._check(program, loss, known)
        known.numbers, known.num_rows = program.numbers, self._rows.num_rows
        self.has_terms = known.has_terms

    def finish(self) -> None:
        """Read the answers that had to wait for the device.

        Raises:
            UnsupportedOperation: Labels count unevenly.
        """
        pending, self._pending = self._pending, []
        for flag, message in pending:
            if bool(flag):
                raise UnsupportedOperation(message)

    # --- what every pass is asked ----------------------------------------------------------------

    def _refuse_state(self, program: Program) -> None:
        for event in program.tape.events:
            if event.kind == "state" and event.place in program.path:
                _refuse(
                    f"{program.path[event.place]} brings {event.text} into the loss, so that a "
                    "record of one step changes the gradients of another before any noise",
                    "Keep no tensors or numbers made of private batches between steps; if the "
                    "value is public, detach it and declare a number with unison.public(value)",
                )

    def _refuse_uneven(self, program: Program) -> None:
        for target in program.tape.targets:
            if target.place not in program.path:
                continue
            if target.weight is not None:
                weight = target.weight
                flag = (weight != weight.flatten()[0]).any()
                self._ask(
                    flag,
                    f"{program.path[target.place]} with class weights divides by the weights of "
                    "all rows' labels, so that each row's gradient depends on the labels of the "
                    "others. Use reduction='none', multiply by the weights, and take the mean",
                )
            labels = target.labels
            if self._rows.dim_of(labels) is None:
                continue
            counts = (self._rows.matrix(labels) != target.ignore_index).sum(1)
            self._ask(
                (counts != counts[0]).any(),
                f"{program.path[target.place]} divides by the number of labels that are not "
                f"{target.ignore_index}, and rows have different numbers of them, so that each "
                "row's gradient depends on the others. Use unison.per_sample_loss(logits, labels)"
                ".mean(), or a sum over tokens (reduction='sum') divided by a public number",
            )

    def _ask(self, flag: Tensor, message: str) -> None:
        """Raise now, or before anything is released where the answer lies on a GPU."""
        if flag.device.type == "cpu":
            if bool(flag):
                raise UnsupportedOperation(message)
        else:
            self._pending.append((flag, message))

    def _refuse_reads(self, program: Program) -> None:
        """Refuse numbers that may come from values which left torch."""
        reads = [event for event in program.tape.events if event.kind == "read"]
        if not reads:
            return
        first = reads[0]
        here = positions(sys._getframe(1))
        for event in reads:
            if may_branch(event.where, here):
                line = [each.line for each in event.where if each.is_users][-1]
                _refuse(
                    f"values left torch by {event.text}() ({line}), and code "
                    "between there and loss.backward() has conditions, which may choose another "
                    "loss because of other rows",
                    "Move what reads values behind loss.backward(), or use .item(), which is "
                    "followed",
                )
        self._refuse_numbers(program, first.place, f"values left torch by {first.text}()")
        for value in program.tape.unknown_inputs:
            if self._rows.dim_of(value) is not None:
                _refuse(
                    f"values left torch by {first.text}(), and the module is given a tensor of "
                    f"shape {list(value.shape)} that was not made by torch functions, so it may "
                    "mix rows",
                    "Do it in the data set or in collate_fn, or with torch functions",
                )

    def _refuse_items(self, program: Program) -> None:
        """Refuse numbers that are what a value was, by way of text or of Python's functions."""
        items = [event for event in program.tape.events if event.kind == "item"]
        for operation in program.path.values() if items else ():
            for number in numbers_of(operation):
                if self._is_constant(program, operation, number):
                    continue
                for event in items:
                    if _is_made_of(number, event.value):
                        _refuse(
                            f"{operation} brings a number into the loss that was made of a value "
                            "read from the batch",
                            "Use torch functions of each row's own values, or "
                            "unison.public(number) for a number that is public",
                        )

    def _refuse_numbers(
        self, program: Program, since: int, why: str, *, with_tensors: bool = True
    ) -> None:
        """Refuse numbers and new tensors on the way to the loss that may come from data."""
        for place, operation in program.path.items():
            if place < since:
                continue
            found = [
                f"a tensor of shape {list(leaf.shape)}"
                for leaf in leaves_of(operation) * with_tensors
                if isinstance(leaf, Tensor) and not leaf.requires_grad
            ]
            found += [
                "a number"  # which one, is not for logs
                for number in numbers_of(operation)
                if not self._is_constant(program, operation, number)
            ]
            for what in found:
                _refuse(
                    f"{why}, and {operation} brings {what} into the loss, which may depend on "
                    "other rows",
                    "Use torch functions in the place of numpy and Python, multiply by a mask in "
                    "the place of selecting, and use .item() for metrics, or unison.public(number) "
                    "for a number that is public; or move metrics behind loss.backward()",
                )

    def _is_constant(self, program: Program, operation: Operation, number: float) -> bool:
        """Whether a number cannot come from data: it is in the code, or a dimension, or a size."""
        if isinstance(number, PublicNumber) or number in (0, 1) or number in operation.constants:
            return True
        if not isinstance(number, int) or operation.name in ARITHMETIC:
            return False
        sizes = {size for root in program.tape.roots.values() for size in root.value.shape}
        return -8 <= number <= 8 or number == IGNORED or number in sizes

    def _refuse_changed(self, program: Program, known: CheckedPath | None) -> None:
        """Refuse numbers that change from step to step, where they may come from data."""
        if known is None or not program.tape.has_read:
            return
        for before, now in zip(known.numbers, program.numbers, strict=False):
            # A number may be the size of the batch, or its inverse.
            rows, then = self._rows.num_rows, known.num_rows
            if before != now and before * rows != now * then and before * then != now * rows:
                _refuse(
                    "a number in the loss changes from step to step, and values have left torch "
                    "(numpy, tolist, float), so it may come from the batch",
                    "Use .item() for metrics, or declare the number with unison.public(number) if "
                    "it is public",
                )

    # --- the check -------------------------------------------------------------------------------

    def _check(self, program: Program, loss: Tensor, known: CheckedPath | None) -> CheckedPath:
        some = self._some_rows(program)
        try:
            base, some = self._self_check(program, loss, some)
        except UnsupportedOperation:
            raise
        except Exception as error:
            _refuse(
                f"the loss cannot be run again to be checked ({type(error).__name__}: "
                f"{str(error)[:120]})",
                REMEDY,
            )
        self._replacements(program, base, some, is_first=known is None)
        size, numbers = self._rows.num_rows, program.numbers
        now = CheckedPath(size, numbers, size, program.all_numbers, has_terms=bool(program.terms))
        if some.is_all:
            self._size_check(program, base)
            self._compare_with_before(program, known)
            values = {slot: root.value for slot, root in program.tape.roots.items()}
            for each, into in ((values, now.unit), (base.grads, now.grads)):
                into |= {s: m[:1].clone() for s, m in self._rows.matrices(each)}
        return now

    def _some_rows(self, program: Program) -> Selection:
        """Select fewer rows where outputs are large: a replay must fit beside the step."""
        values = [each for root in program.tape.roots.values() for each in unpacked(root.value)]
        num_elements, num_units = sum(each.numel() for each in values), self._rows.num_units
        if num_elements > FEW_ELEMENTS and not program.is_granular:
            num_units = min(num_units, max(3, FEW_ELEMENTS * num_units // num_elements))
        return self._selection(program, num_units)

    def _selection(self, program: Program, num_units: int) -> Selection:
        sizes = (self._rows.num_rows, self._rows.num_units)
        is_size_read = any(
            not set(sizes).isdisjoint(program.tape.roots[slot].value.shape)
            for slot in program.tape.sized
            if slot in program.tape.roots
        )
        return Selection(self._rows, num_units, is_size_read=is_size_read)

    def _self_check(
        self, program: Program, loss: Tensor, some: Selection
    ) -> tuple[Replay, Selection]:
        """Replay the program unchanged, and compare with the real graph's gradients.

        Returns:
            What it gave, and which records it was run with: all, if its sizes are fixed.
        """
        real = program.real(loss)
        if not some.is_all:
            try:
                base = program.replay(some.values(program.tape), some=some)
                rows, num_left = some.left, some.left.num_units
                for factor in (1.0, num_left / self._rows.num_units):
                    if all(
                        self._is_close(rows.matrix(base.grads[slot]) * factor, grad[:num_left])
                        for slot, grad in self._rows.matrices(real)
                    ):
                        return base, some
            except Exception:  # whatever the user's operations raise at another size
                pass  # sizes are written into the program: it is run with all rows, below
        base = program.replay({})
        other = None
        for slot, grad in real.items():
            for a, b in zip(unpacked(base.grads[slot]), unpacked(grad), strict=True):
                if self._is_close(a, b):
                    continue
                other = other or program.replay({}, seed=1)
                pairs = ((base.grads[slot], other.grads[slot]) for slot in base.grads)
                if all(_is_equal(x, y, 0.0) for x, y in pairs):  # it draws no random numbers
                    names = ", ".join(dict.fromkeys(map(str, program.path.values())))
                    _refuse(
                        f"part of the loss could not be followed (what could: {names[:200]}); "
                        "torch.jit, vmap and functions outside of torch cannot",
                        "Write the loss with torch functions. " + REMEDY,
                    )
        return base, self._selection(program, self._rows.num_units)

    def _is_close(self, a: Tensor, b: Tensor, least: float = 1e-9) -> bool:
        tolerance = max(least, TOLERANCE.get(b.dtype, 1e-9))
        a, b = whole(a).double(), whole(b).double()
        scale = float(torch.nan_to_num(b.abs(), posinf=0.0).max()) if b.numel() else 0.0
        return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))

    def _replacements(
        self, program: Program, base: Replay, some: Selection, *, is_first: bool
    ) -> None:
        rows = some.left
        failed: dict[tuple[bool, ...], Exception] = {}  # by the rows that were kept
        tried: set[tuple[bool, ...]] = set()
        double: Replay | None = None
        for kept, way in self._trials(rows, is_first=is_first):
            values = {
                slot: value
                for slot, root in program.tape.roots.items()
                if (value := self._replaced(program, root, kept, way, rows)) is not None
            }
            try:
                other = program.replay(values, some=some)
            except Exception as found:  # values that an operation of the user's does not take
                failed[tuple(kept.tolist())] = found
                continue
            tried.add(tuple(kept.tolist()))
            self._refuse_other_path(program, base, other)
            moved = self._moved(program, base, other, kept, rows)
            if moved is None:
                continue
            try:
                double = double or program.replay(
                    some.values(program.tape), is_double=True, some=some
                )
                again = program.replay(values, is_double=True, some=some)
                moved = self._moved(program, double, again, kept, rows, tolerance=FLOAT64_TOLERANCE)
            except Exception:  # an operation without a form in float64: the bits have decided
                again, double = other, base
            if moved is not None:
                what, remedy = moved
                where = self._blame(program, double, again, kept, rows)
                _refuse(f"{what}: {where}", remedy)
        for kept, error in failed.items():
            if kept not in tried:  # no values at all could stand in the place of the others
                _refuse(
                    "the loss cannot be run with other rows in the place of these "
                    f"({type(error).__name__}: {str(error)[:120]}), so it cannot be checked",
                    REMEDY,
                )

    def _trials(self, rows: RecordLayout, *, is_first: bool) -> Iterator[tuple[Tensor, int]]:
        """Yield which rows are kept [rows], and how the others are replaced."""
        units = torch.arange(rows.num_units)
        order = torch.randperm(rows.num_units, generator=self._generator)
        half = max(1, rows.num_units // 2)
        last = torch.tensor([rows.num_units - 1])
        subsets = [torch.zeros(1, dtype=torch.int64), order[:half], order[half:], last]
        if not is_first:
            subsets = subsets[1:2]
        for subset in subsets:
            if len(subset):
                for way in range(3):
                    yield torch.isin(units, subset), way

    def _replaced(
        self,
        program: Program,
        root: TapeInput,
        kept: Tensor,
        way: int,
        rows: RecordLayout,
    ) -> Tensor | None:
        """Replace rows of a root that are not kept; None if it stays as it is.

        Args:
            program: The program.
            root: The root.
            kept: Which rows stay [rows].
            way: 0: rows of the batch. 1: values far away, of a like kind. 2: copies of one row.
            rows: Where those rows lie that are left.
        """
        value = root.value
        if self._rows.dim_of(value) is None:
            # A loss that the module made itself, or a statistic: what comes after must not depend
            # on its value.
            if not root.is_output or not value.is_floating_point():
                return None
            factor = 1 + float(torch.rand((), generator=self._generator)) * 10**way
            return packed(value, [each.detach() * factor for each in unpacked(value)])
        if rows != self._rows:
            value = self._rows.like(value, self._rows.matrix(value)[: rows.num_units])
        matrix = rows.matrix(value)
        device, generator = matrix.device, self._generator
        order = torch.randint(0, rows.num_units, (rows.num_units,), generator=generator)
        if way == 2:
            order = order[:1].expand(rows.num_units)
        new = matrix[order.to(device)]
        size = sum(each.numel() for each in unpacked(root.value))
        labels = None  # how many there are, if the root holds some
        for target in program.tape.targets:
            if sum(each.numel() for each in unpacked(target.labels)) == size:
                labels = target.num_classes
                break
        if way == 2 and labels is not None and not matrix.is_floating_point():
            label = int(torch.randint(0, labels, (), generator=generator))
            new = torch.full_like(matrix, label)
        if way == 1:
            new = _far(matrix, generator)
        return rows.like(value, torch.where(kept.to(device)[:, None], matrix, new))

    def _refuse_other_path(self, program: Program, base: Replay, other: Replay) -> None:
        here = positions(sys._getframe(1))
        for event in program.tape.events:
            if event.kind != "branch":
                continue
            truths = {bool(each.env.get(event.slot, event.value)) for each in (base, other)}
            # The same truth here and now says little, if what it was found from has changed.
            is_other = len(truths) > 1 or (
                may_branch(event.where, here)
                and any(
                    not _is_same(base.env.get(slot), other.env.get(slot))
                    for slot in program.compared(event.slot)
                )
            )
            if is_other:
                _refuse(
                    f"Python code asks {event.text} of a value that depends on several rows, and "
                    "goes one way or another",
                    "Use torch.where on values of single rows, or ask after loss.backward()",
                )
        for slot in program.tape.sized:
            a, b = base.env.get(slot), other.env.get(slot)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
                program.tape.has_read = True
                self._refuse_numbers(
                    program,
                    0,
                    "the size of a selection was asked for, which depends on other rows",
                    with_tensors=False,
                )

    def _moved(
        self,
        program: Program,
        base: Replay,
        other: Replay,
        kept: Tensor,
        rows: RecordLayout,
        tolerance: float = 0.0,
    ) -> tuple[str, str] | None:
        """Return what changed in the kept rows, with a remedy; None if nothing did."""
        for slot in program.tape.inputs - set(program.tape.roots):
            a, b = base.env.get(slot), other.env.get(slot)
            if not isinstance(a, Tensor):
                continue
            if _rows_differ(a, b, kept, rows, tolerance) is not None:
                return "what the module is given for one row depends on other rows", REMEDY
        for slot, a in base.grads.items():
            b = other.grads[slot]
            if rows.dim_of(a) is None:
                if not _is_equal(a, b, tolerance):
                    return (
                        "the gradient of an output that does not hold the rows (a loss that the "
                        "module made) depends on the batch",
                        REMEDY,
                    )
                continue
            row = _rows_differ(a, b, kept, rows, tolerance)
            if row is not None:
                return (
                    f"the loss couples rows: the gradient of row {row} depends on other rows",
                    REMEDY,
                )
        for tensor, a, b in zip(program.terms, base.terms, other.terms, strict=True):
            if not _is_equal(a, b, tolerance):
                return (
                    f"a trainable tensor of shape {list(tensor.shape)} meets the private batch "
                    "outside of the module's forward, so its gradient would be neither clipped "
                    "nor noised",
                    "Use it inside of the module that was made private, or freeze it with "
                    "requires_grad_(False)",
                )
        return None

    def _blame(
        self, program: Program, base: Replay, other: Replay, kept: Tensor, rows: RecordLayout
    ) -> str:
        """Name the operation where rows meet."""
        path = [program.path[place] for place in sorted(program.path)]
        for operation in program.tape.operations:
            for slot in operation.outs:
                a, b = base.env.get(slot), other.env.get(slot)
                if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
                    continue
                if rows.dim_of(a) is None:
                    continue
                if _rows_differ(a, b, kept, rows, FLOAT64_TOLERANCE) is not None:
                    return f"rows meet in {operation}"
        reducing = [
            operation
            for operation in path
            if any(isinstance(base.env.get(slot), Tensor) for slot in operation.outs)
            and all(rows.dim_of(base.env.get(slot)) is None for slot in operation.outs)
        ]
        return f"rows meet in or after {reducing[0]}" if reducing else "see the loss"

    def _size_check(self, program: Program, base: Replay) -> None:
        """Leave one record out: gradients may change by the factor of a mean."""
        if program.is_granular:
            return  # granules have one shape
        fewer = self._selection(program, self._rows.num_units - 1)
        try:
            now = program.replay(fewer.values(program.tape), some=fewer)
        except Exception:  # sizes are written into the program; steps of other sizes will tell
            return
        before = self._rows.matrices(base.grads)
        self._require_factor(
            dict(fewer.left.matrices(now.grads)),
            {slot: grad[: fewer.left.num_units] for slot, grad in before},
            self._rows.num_units / fewer.left.num_units,
        )

    def _compare_with_before(self, program: Program, known: CheckedPath | None) -> None:
        """Put a record of an earlier step into this batch, which has another size."""
        rows = self._rows
        if known is None or not known.unit or known.checked_rows == rows.num_rows:
            return
        if any(each.func in self._substitutes for each in program.path.values()):
            return  # batch_mean divides by the rows of all ranks, which is its own affair
        numbers = program.all_numbers
        is_explained = len(numbers) == len(known.checked_numbers) and all(
            a == b or a * rows.num_rows == b * known.checked_rows
            for a, b in zip(known.checked_numbers, numbers, strict=True)
        )
        if not is_explained or set(known.unit) - set(program.tape.roots):
            return
        values = {}
        for slot, unit in known.unit.items():
            root = program.tape.roots[slot]
            if rows.dim_of(root.value) is None:
                return
            matrix = rows.matrix(root.value).clone()
            if matrix.shape[1:] != unit.shape[1:]:
                return
            matrix[:1] = unit
            values[slot] = rows.like(root.value, matrix)
        try:
            now = program.replay(values)
        except Exception:  # the record's values do not go together with this batch's
            return
        self._require_factor(
            {s: rows.matrix(now.grads[s])[:1] for s in known.grads},
            known.grads,
            known.checked_rows / rows.num_rows,
        )

    def _require_factor(self, now: Gradients, before: Gradients, factor: float) -> None:
        for each in (1.0, factor):
            # Losses are often made in float32, whatever the module's dtype is.
            if all(self._is_close(now[slot], grad * each, 1e-4) for slot, grad in before.items()):
                return
        _refuse(
            "with another number of rows the gradient of a row changes by neither 1 nor "
            f"{factor:.4g}, the factor of a mean, so it depends on how many others there are",
            REMEDY,
        )


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


def _far(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """Values far away, of a like kind: a probability stays one, a weight stays positive.

    Integers stay in their range: not all kernels check it.
    """
    # Drawn where they are used: logits have hundreds of millions of elements.
    shape, device = matrix.shape, matrix.device
    own = torch.Generator(device=device)
    own.manual_seed(int(torch.randint(0, 1 << 62, (), generator=generator)))

    def uniform() -> Tensor:
        return torch.rand(shape, generator=own, device=device)

    if matrix.dtype == torch.bool:
        return uniform() < 0.5
    u = uniform()
    pick = torch.randint(0, matrix.numel(), shape, generator=own, device=device)
    mixed = matrix.flatten()[pick]
    if not matrix.is_floating_point():
        high = max(0, int(matrix.max())) + 1
        return torch.where(uniform() < 0.5, mixed, (u * high).to(matrix.dtype))
    finite = matrix.nan_to_num(0.0, 0.0, 0.0)
    low, high = (float(each) for each in finite.aminmax())
    if low >= 0 and high <= 1:
        return u.to(matrix.dtype)
    largest = math.log10(torch.finfo(matrix.dtype).max) / 2  # its square is finite
    power = min(6.0, largest - math.log10(max(abs(low), abs(high), 1.0)))
    scale = 10 ** (power * u) if low < 0 else 10 ** (power * (u - 0.5))
    return (mixed * scale).to(matrix.dtype)


def _rows_differ(
    a: Tensor, b: Any, kept: Tensor, rows: RecordLayout, tolerance: float
) -> int | None:
    """The first kept row in which two tensors differ; None if none does."""
    if rows.dim_of(a) is None:
        return None if _is_equal(a, b, tolerance) else 0
    if not isinstance(b, Tensor) or rows.dim_of(b) is None:
        return 0
    kept = kept.to(unpacked(a)[0].device)
    x, y = rows.matrix(a)[kept], rows.matrix(b)[kept]
    if x.shape != y.shape:
        return 0
    is_same = (x == y) | ((x != x) & (y != y))
    if tolerance and x.is_floating_point():
        scale = torch.nan_to_num(x.abs(), posinf=0.0).amax(1, keepdim=True)
        is_same |= (x - y).abs() <= tolerance * scale
    is_wrong = ~is_same.all(1)
    if not bool(is_wrong.any()):
        return None
    return int(kept.nonzero().flatten()[is_wrong.nonzero().flatten()[0]])


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return _is_equal(a, b, 0.0)
    return a == b or (a != a and b != b)


def _is_equal(a: Tensor, b: Any, tolerance: float) -> bool:
    if not isinstance(b, Tensor) or a.shape != b.shape:
        return False
    for x, y in zip(map(whole, unpacked(a)), map(whole, unpacked(b)), strict=True):
        is_same = (x == y) | ((x != x) & (y != y))
        if tolerance and x.is_floating_point() and x.numel():
            is_same |= (x - y).abs() <= tolerance * x.abs().max()
        if not bool(is_same.all()):
            return False
    return True
