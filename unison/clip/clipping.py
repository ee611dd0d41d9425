"""One batch on its way from records to clipped sums, parameter by parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from unison.clip.bounds import SampleNorms
from unison.clip.gradients import GRADIENT_METHODS
from unison.clip.layers import describe
from unison.clip.modes import Choice
from unison.clip.norms import NORM_METHODS, measure, needed_to_keep
from unison.clip.plan import Plan
from unison.clip.storage import Storage
from unison.errors import UnsupportedOperation
from unison.ops import Record
from unison.ops.records import Dense


@dataclass(eq=False)
class _Parameter:
    """The uses of one parameter by one batch.

    Attributes:
        name: Its name.
        records: What is waiting to be measured, or kept for the clipped sum.
        num_uses: Records that came in the first pass.
        choice: Its methods, once it was measured.
        norms: Its samples' norms; None while records wait.
        lent: Storage of its per-sample gradients.
        clipped: Its clipped sum, where a second pass made it.
    """

    name: str
    records: list[Record] = field(default_factory=list)
    num_uses: int = 0
    choice: Choice | None = None
    norms: SampleNorms | None = None
    lent: Tensor | None = None
    clipped: Tensor | None = None


class Clipping:
    """Measures the records of one batch as they come, and makes clipped sums of them.

    A parameter is measured in the backward pass as soon as it has as many records as the plan says:
    what its method does not need later is given back there and then. The plan decides the methods,
    not the result: a parameter that is used more or less often than planned is measured when
    the pass is over.

    Args:
        plan: The methods of every parameter.
        num_samples: Samples in the batch.
        storage: Lends memory for per-sample gradients.
    """

    def __init__(self, plan: Plan, num_samples: int, storage: Storage | None = None) -> None:
        self.plan, self.num_samples = plan, num_samples
        self._storage = storage or Storage()
        self._parameters: dict[str, _Parameter] = {}
        self._coefficients: Mapping[str, Tensor] | None = None  # in the second pass

    def take(self, name: str, record: Record) -> None:
        """Take a record of a parameter; given to `Capture` as its `on_record`."""
        parameter = self._parameters.setdefault(name, _Parameter(name))
        if self._coefficients is not None:
            self._take_again(parameter, record, self._coefficients[name])
            return
        if parameter.norms is not None:  # used more often than planned
            if not parameter.records:
                raise UnsupportedOperation(
                    f"{name} was used more often by this batch than by the one that clipping was "
                    "planned for, and the records of its first uses are gone. Use a clipping mode "
                    "of one pass, such as 'flash_fuse_bk'"
                )
            parameter.norms = None
        parameter.records.append(record)
        parameter.num_uses += 1
        if parameter.num_uses == self.plan.num_uses(name):
            self._measure(parameter)

    def norms(self) -> dict[str, SampleNorms]:
        """End the first pass: each used parameter's norms, by name and in order of names.

        The order in which parameters came is that of autograd, and sums of norms depend on it.
        """
        for parameter in self._parameters.values():
            if parameter.norms is None:
                self._measure(parameter)
        return dict(sorted(self._norms(), key=itemgetter(0)))

    def _norms(self) -> Iterator[tuple[str, SampleNorms]]:
        for name, parameter in self._parameters.items():
            assert parameter.norms is not None
            yield name, parameter.norms

    @property
    def num_backwards(self) -> int:
        """Passes that the used parameters' methods need."""
        choices = [parameter.choice for parameter in self._parameters.values()]
        return max((choice.num_backwards for choice in choices if choice), default=1)

    def begin_second_pass(self, coefficients: Mapping[str, Tensor]) -> None:
        """Make sums of the records that come from now on.

        The coefficients are applied to the records, not to the losses: on the way through the model
        they would be rounded in its dtype, and nothing could be proved of the result.

        Args:
            coefficients: [batch] of every parameter.
        """
        self._coefficients = coefficients

    def clipped_sums(self, coefficients: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Make the clipped sum of one used parameter after the other, giving their records back.

        Args:
            coefficients: [batch] of every parameter, as given to `begin_second_pass` if there was
                one.
        """
        for name, parameter in self._parameters.items():
            if parameter.clipped is None:
                parameter.clipped = self._clipped_sum(parameter, coefficients[name])
            clipped, parameter.clipped = parameter.clipped, None
            yield name, clipped
        self._parameters.clear()

    def _measure(self, parameter: _Parameter) -> None:
        choice = self._choice(parameter)
        if NORM_METHODS[choice.norm].is_kept and parameter.lent is None:
            needed = needed_to_keep(parameter.records)
            if needed is not None:
                device = _device_of(parameter.records[0])
                parameter.lent = self._storage.lend(parameter.name, *needed, device)
        # Storage holds the result only if the records are not in it already.
        out = parameter.lent if parameter.choice is None else None
        parameter.norms, records = measure(parameter.records, choice.norm, out)
        parameter.choice = choice
        parameter.records = list(records) if choice.num_backwards == 1 else []

    def _choice(self, parameter: _Parameter) -> Choice:
        layer = describe(parameter.name, parameter.records)
        return self.plan.choice_for(layer)

    def _take_again(self, parameter: _Parameter, record: Record, coefficients: Tensor) -> None:
        """Use the records of a parameter as soon as they are all there."""
        parameter.records.append(record)
        if len(parameter.records) == parameter.num_uses:
            parameter.clipped = self._clipped_sum(parameter, coefficients)

    def _clipped_sum(self, parameter: _Parameter, coefficients: Tensor) -> Tensor:
        records, parameter.records = parameter.records, []
        assert parameter.choice is not None
        method = GRADIENT_METHODS[parameter.choice.gradient]
        if not records:
            raise UnsupportedOperation(
                f"{parameter.name} was used by the first backward pass and not by the second: the "
                "model is not the same in both. Use a clipping mode of one pass"
            )
        clipped = method.clipped_sum(records, coefficients, records[0].shape)
        if parameter.lent is not None:
            self._storage.give_back(parameter.name, parameter.lent)
        return clipped


def _device_of(record: Record) -> torch.device:
    return record.value.device if isinstance(record, Dense) else record.g.device
