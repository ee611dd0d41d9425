"""What a step applies: sampling, clip norm, noise, and the grid of its sums, from one object.

[Note: one source] The sampler, the clipper, the noise and the ledger all read the `Release` of a
step, and nothing else. The noise's standard deviation is no setting: it is σ·C of the same release,
so a clip norm that moves takes its noise along, and what the ledger counts is what was applied.

[Note: sums on a grid] The sum of the rows that are computed together, float64, is rounded to a
public grid before it is added to any other. From there on sums are integers: over granules, passes
and ranks they are the same in any order, by any reducer. Emptying a record changes the sum of its
own rows, and no rounding elsewhere: so all that one record can change is what it changes there
([Note: proved sensitivity] in unison/clip/bounds.py), and two roundings of each element.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from unison import check
from unison.clip import RULES, SampleNorms, per_layer
from unison.clip.bounds import SUM_ERROR, Grid, Rule
from unison.errors import BadInput
from unison.privacy import sampling as samplings
from unison.privacy.sampling import Sampling
from unison.rng import noise_spacing
from unison.rng.streams import GRID_BITS

# The spacing of the secure noise's grid is a power of two below this part of the noise's std.
GRID_SPACING = 2.0 ** (1 - GRID_BITS)
FINER = 2.0**-4  # at most: the grid of sums, where it is not the noise's, beside that

# ---- schedules -----------------------------------------------------------------------------------
#
# A schedule must be a function of the step alone, which counts from 0: a budget looks ahead with
# it, and a resumed run reads it anew. Any callable will do; those here also describe themselves in
# the ledger.

Schedule = Callable[[int], float]


def _check_positive(schedule: Any) -> None:
    """Require all settings of a schedule to be positive, when it has been made."""
    check.positive(**vars(schedule))


@dataclass(frozen=True, kw_only=True)
class Exponential:
    """Multiplied by `factor` at every step.

    >>> [Exponential(start=8.0, factor=0.5)(step) for step in range(3)]
    [8.0, 4.0, 2.0]
    """

    start: float
    factor: float

    __post_init__ = _check_positive

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start * self.factor**step


@dataclass(frozen=True, kw_only=True)
class Stairs:
    """Multiplied by `factor` after every `every` steps.

    >>> [Stairs(start=8.0, factor=0.5, every=2)(step) for step in range(4)]
    [8.0, 8.0, 4.0, 4.0]
    """

    start: float
    factor: float
    every: int

    __post_init__ = _check_positive

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start * self.factor ** (step // self.every)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """On a straight line from `start` to `end` in `steps` steps, and `end` after that.

    >>> [Linear(start=4.0, end=2.0, steps=2)(step) for step in range(4)]
    [4.0, 3.0, 2.0, 2.0]
    """

    start: float
    end: float
    steps: int

    __post_init__ = _check_positive

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """On half a cosine from `start` to `end` in `steps` steps, and `end` after that.

    >>> [round(Cosine(start=4.0, end=2.0, steps=4)(step), 3) for step in (0, 1, 2, 4, 9)]
    [4.0, 3.707, 3.0, 2.0, 2.0]
    """

    start: float
    end: float
    steps: int

    __post_init__ = _check_positive

    def __call__(self, step: int) -> float:
        """The value at a step."""
        part = min(step / self.steps, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * part)) / 2


def describe(value: float | Schedule) -> float | dict[str, Any]:
    """A constant as itself, and a schedule as its name and settings.

    >>> describe(1.5), describe(Stairs(start=2.0, factor=0.5, every=10))
    (1.5, {'schedule': 'Stairs', 'start': 2.0, 'factor': 0.5, 'every': 10})
    """
    if not callable(value):
        return float(value)
    kind = type(value)
    if kind.__module__ == __name__ and is_dataclass(value):
        return {"schedule": kind.__name__, **asdict(value)}
    # Only the name: the repr of a user's object may hold anything.
    return {"schedule": getattr(value, "__qualname__", kind.__qualname__)}


# ---- adaptive clipping ---------------------------------------------------------------------------
#
# Clipping at a quantile of the norms, which is itself estimated with noise (Andrew et al. 2021).
# Each step also releases how many of its records had a norm of at most C, with noise of its own,
# and C follows that count. The count is a function of the private batch: its noise is part of the
# mechanism, and the ledger counts both releases as one.


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """How C follows a quantile of the per-sample norms.

    With b = 1 for a record whose norm is at most C and 0 for any other, the statistic of a step is
    the sum over its records of b − ½. One record moves it by ½ at most. A record that is not there,
    padding included, adds nothing: neither ½ nor −½.

    Attributes:
        quantile: The part of the norms that C should lie above.
        learning_rate: How fast C follows, in log C per unit of the fraction.
        count_noise_multiplier: Standard deviation of the noise on the statistic.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float

    def __post_init__(self) -> None:
        check.probability(quantile=self.quantile)
        check.positive(learning_rate=self.learning_rate)
        check.not_negative(count_noise_multiplier=self.count_noise_multiplier)

    def updated(self, max_grad_norm: float, noisy_fraction: float) -> float:
        """C for the next step.

        Args:
            max_grad_norm: C of this step.
            noisy_fraction: See `noisy_fraction`; noise may carry it outside [0, 1].

        Raises:
            BadInput: If the fraction is not finite or C would leave the range of floats.
        """
        if not math.isfinite(noisy_fraction):
            raise BadInput(f"expected a finite noisy_fraction, found {noisy_fraction!r}")
        exponent = -self.learning_rate * (noisy_fraction - self.quantile)
        updated = max_grad_norm * math.exp(exponent) if exponent < 700 else math.inf
        if not (math.isfinite(updated) and updated > 0):
            raise BadInput(
                f"adaptive clipping would set max_grad_norm to {updated!r} after a "
                f"{noisy_fraction=}; lower its learning_rate or its count_noise_multiplier"
            )
        return updated


def noisy_fraction(noisy_statistic: float, expected_batch_size: float) -> float:
    """The part of norms that are at most C, from the noisy sum of b − ½.

    The divisor is the public expected batch size, never the realised one.

    >>> noisy_fraction(2.0, 8)
    0.75
    """
    check.positive(expected_batch_size=expected_batch_size)
    return noisy_statistic / expected_batch_size + 0.5


# ---- what one step applies -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one logical step applies, and all that its privacy cost depends on.

    Attributes:
        step: Number of the logical step, from 0.
        sampling: How its records are chosen.
        noise_multiplier: σ; the noise on the sum of gradients has standard deviation σ·C. 0 means
            no noise and no privacy.
        max_grad_norm: C, the bound on each record's gradient.
        expected_batch_size: The public number that the noisy sum is divided by.
        count_noise_multiplier: Standard deviation of the noise on the statistic of adaptive
            clipping, whose sensitivity is ½; None without it.
        sensitivity_factor: What emptying one record can change in the sum that gets the noise, in
            units of C: 1 and a little more, for the sum's roundings.
        rounded_elements: Elements of the noised gradient, if its noise lies on the secure grid:
            each is a draw whose distance from an ideal one is taken off δ.
        is_chosen: Whether σ may have been chosen from what earlier steps released. No accountant of
            fixed plans holds then; the account is an odometer's.
    """

    step: int
    sampling: Sampling
    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float
    count_noise_multiplier: float | None = None
    sensitivity_factor: float = 1.0
    rounded_elements: int = 0
    is_chosen: bool = False

    def __post_init__(self) -> None:
        check.not_negative(step=self.step, noise_multiplier=self.noise_multiplier)
        check.positive(max_grad_norm=self.max_grad_norm)
        check.positive(expected_batch_size=self.expected_batch_size)
        if self.count_noise_multiplier is not None:
            check.not_negative(count_noise_multiplier=self.count_noise_multiplier)
        if not (math.isfinite(self.sensitivity_factor) and self.sensitivity_factor >= 1):
            raise BadInput(
                f"sensitivity_factor must be 1 or more, found {self.sensitivity_factor!r}"
            )
        check.not_negative(rounded_elements=self.rounded_elements)
        if not isinstance(self.is_chosen, bool):
            raise BadInput(f"is_chosen must be true or false, found {self.is_chosen!r}")

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients: σ·C."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def effective_noise_multiplier(self) -> float:
        """The noise multiplier z of one Gaussian release that costs as much as this step does.

        The step releases the gradient, of sensitivity f·C, and with adaptive clipping a statistic,
        of sensitivity ½. A record moves the two, each in units of its own noise, by at most 1/z,
        where z^-2 = (f/σ)^2 + (2·σ_b)^-2.

        >>> from unison.privacy.sampling import Poisson
        >>> Release(
        ...     step=0,
        ...     sampling=Poisson(rate=0.1),
        ...     max_grad_norm=1.0,
        ...     noise_multiplier=3.0,
        ...     count_noise_multiplier=2.0,
        ...     expected_batch_size=8,
        ... ).effective_noise_multiplier.hex() == (1 / math.hypot(1 / 3, 1 / 4)).hex()
        True
        """
        if self.noise_multiplier == 0 or self.count_noise_multiplier == 0:
            return 0.0
        if self.count_noise_multiplier is None:
            return self.noise_multiplier / self.sensitivity_factor
        shift = self.sensitivity_factor / self.noise_multiplier
        return 1 / math.hypot(shift, 0.5 / self.count_noise_multiplier)

    def to_fields(self) -> dict[str, Any]:
        """The release as values that JSON can hold; `from_fields` gives it back exactly."""
        return {**vars(self), "sampling": samplings.to_fields(self.sampling)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Release":
        """The release that `to_fields` described.

        Raises:
            BadInput: If the fields describe none.
        """
        try:
            values: dict[str, Any] = dict(fields)
            values["sampling"] = samplings.from_fields(values["sampling"])
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"the fields do not describe a release ({error!r}): {fields}") from None


def sensitivity_factor(noise_multiplier: float, rounded_elements: int) -> float:
    """How much the sensitivity grows by roundings, in units of C.

    To the secure noise's grid: that moves each element of either neighbour's sum by half a spacing
    at most (docs/rng.md, "Secure normals"). The spacing lies between half of `GRID_SPACING` and all
    of it, depending on σ·C; the larger is taken, so that a clip norm which moves does not move ε.
    Before that, to the grid on which sums over passes and ranks are made. And before that, where
    samples are added up: `SUM_ERROR`, see [Note: proved sensitivity].

    Args:
        noise_multiplier: σ.
        rounded_elements: Number of elements of the noised gradient; 0 if the noise has no grid.
    """
    if rounded_elements == 0:
        return 1.0
    spacing = (1 + FINER) * GRID_SPACING * noise_multiplier
    return 1 + SUM_ERROR + spacing * math.sqrt(rounded_elements)


# ---- the grid of clipped sums --------------------------------------------------------------------


def grid_of(release: Release, num_samples: int) -> Grid:
    """Return the grid for a logical batch: as fine as the integers that hold its sum allow.

    It is that of the noise, or at least 16 times as fine: a sum is rounded to the noise's grid when
    it meets the noise, and `sensitivity_factor` counts both roundings. The integers are as narrow
    as the sum allows.

    Args:
        release: What the step applies.
        num_samples: Samples in the logical batch, none of which exceeds C.

    Raises:
        BadInput: If so many samples are too much for the noise's grid.
    """
    finest = _finest(release, num_samples)
    if release.noise_std == 0:
        return Grid(finest[torch.int64], torch.int64)
    spacing = noise_spacing(release.noise_std)
    for dtype, finer in finest.items():
        if finer <= spacing * FINER:
            return Grid(finer, dtype)
        if finer <= spacing:
            return Grid(spacing, dtype)
    raise BadInput(
        f"{num_samples} samples of norm {release.max_grad_norm} are too much for the grid of a "
        f"noise of standard deviation {release.noise_std}: use a larger noise_multiplier"
    )


def grid_of_pass(release: Release, num_samples: int, num_rows: int) -> Grid:
    """Return the grid that kernels use within a pass: `grid_of`, or multiples that int32 holds.

    Args:
        release: What the step applies.
        num_samples: Samples in the logical batch.
        num_rows: Rows of the pass.
    """
    num_rows = min(num_rows, num_samples)
    if release.noise_std == 0:  # nothing to be proved of it
        return Grid(_finest(release, num_rows)[torch.int32])
    whole = found = grid_of(release, num_samples)
    if whole.dtype != torch.int32:
        found = grid_of(release, num_rows)
    return found if found.spacing >= whole.spacing else Grid(whole.spacing, found.dtype)


def _finest(release: Release, num_samples: int) -> dict[torch.dtype, float]:
    """The finest spacings of which integers hold the sum of so many samples, by their dtype."""
    largest = max(1, num_samples) * release.max_grad_norm
    exponent = math.frexp(largest)[1]  # largest < 2^exponent
    return {torch.int32: 2.0 ** (exponent - 30), torch.int64: 2.0 ** (exponent - 50)}


# ---- what all steps apply ------------------------------------------------------------------------


class Mechanism:
    """The single source of what each step applies.

    Guarantees:
        Clipping, noise, sampling and ledger agree: all read one `Release`, and between `begin` and
        `finish` nothing can change it. What a step costs is fixed in advance: σ is a constant or a
        function of the step alone, and cannot be set, unless `is_chosen` says so in every release.
        C may be set between steps: noise follows it, and the cost does not depend on it.

    Args:
        sampling: How each step chooses its records.
        noise_multiplier: σ, or a schedule step -> σ. 0 is allowed, gives ε = inf, and must then be
            constant.
        max_grad_norm: C, or a schedule step -> C. With `adaptive`, C of the first step.
        expected_batch_size: The public divisor.
        adaptive: Lets C follow a quantile of the norms.
        rounded_elements: Number of elements of the noised gradient when its noise lies on the
            secure grid; see `sensitivity_factor`. 0 if it does not.
        is_chosen: Lets σ be set between steps, from what came out of earlier ones if you like. All
            steps are then counted by an odometer, which costs more than a plan (docs/privacy.md).
    """

    __slots__ = ("_adaptive", "_constants", "_current", "_made_with", "_settings")

    def __init__(
        self,
        *,
        sampling: Sampling,
        noise_multiplier: float | Schedule,
        max_grad_norm: float | Schedule,
        expected_batch_size: float,
        adaptive: AdaptiveClipping | None = None,
        rounded_elements: int = 0,
        is_chosen: bool = False,
    ) -> None:
        if adaptive is not None and callable(max_grad_norm):
            raise BadInput(
                "max_grad_norm cannot follow a schedule and adaptive clipping at once; give one"
            )
        check.not_negative(rounded_elements=rounded_elements)
        self._settings: dict[str, float | Schedule] = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
        }
        self._constants: dict[str, Any] = {
            "sampling": sampling,
            "expected_batch_size": expected_batch_size,
            "rounded_elements": rounded_elements,
            "is_chosen": is_chosen,
        }
        self._adaptive = adaptive
        self._current: Release | None = None
        self.release(0)  # a setting that cannot be used is refused here, not in the first step
        # C and σ may move later; a run that goes on must have begun with the same.
        self._made_with = self.describe()

    # ---- what a step applies ---------------------------------------------------------------------

    def release(self, step: int) -> Release:
        """What a step applies, or will apply if nothing is changed until then.

        Raises:
            BadInput: If a schedule gives a value that cannot be used.
        """
        if self._current is not None and self._current.step == step:
            return self._current
        values: dict[str, float] = {}
        for name, setting in self._settings.items():
            value = values[name] = float(setting(step) if callable(setting) else setting)
            if callable(setting) and not (math.isfinite(value) and value > 0):
                raise BadInput(
                    f"the schedule of {name}, {describe(setting)}, must give values above 0, found "
                    f"{value!r} at step {step}"
                )
        num_rounded = self._constants["rounded_elements"]
        return Release(
            step=step,
            count_noise_multiplier=self._adaptive and self._adaptive.count_noise_multiplier,
            sensitivity_factor=sensitivity_factor(values["noise_multiplier"], num_rounded),
            **values,
            **self._constants,
        )

    def begin(self, step: int) -> Release:
        """Fix what a step applies until `finish` or `abandon`.

        Raises:
            BadInput: If another step was begun and not finished.
        """
        if self._current is not None:
            raise BadInput(
                f"step {self._current.step} was begun and not finished; finish or abandon it "
                f"before step {step}"
            )
        self._current = self.release(step)
        return self._current

    def finish(self, step: int, *, noisy_fraction: float | None = None) -> None:
        """End a step; with adaptive clipping, move C.

        Args:
            step: The step that was begun.
            noisy_fraction: The noisy part of norms at most C; with adaptive clipping only.

        Raises:
            BadInput: If that step was not begun, or the fraction is missing or not expected.
        """
        if self._current is None or self._current.step != step:
            found = "none" if self._current is None else f"step {self._current.step}"
            raise BadInput(f"expected the step that was begun, {found}, found step {step}")
        if self._adaptive is None:
            if noisy_fraction is not None:
                raise BadInput(f"without adaptive clipping there is no fraction: {noisy_fraction=}")
        elif noisy_fraction is None:
            raise BadInput("adaptive clipping needs noisy_fraction= to move max_grad_norm")
        else:
            before = self._current.max_grad_norm
            self._settings["max_grad_norm"] = self._adaptive.updated(before, noisy_fraction)
        self._current = None

    def abandon(self) -> None:
        """End a step that failed. What the ledger holds of it still counts."""
        self._current = None

    # ---- settings --------------------------------------------------------------------------------

    @property
    def current(self) -> Release | None:
        """The release of the step that was begun, if any."""
        return self._current

    @property
    def sampling(self) -> Sampling:
        """How each step chooses its records."""
        return self._constants["sampling"]

    @property
    def adaptive(self) -> AdaptiveClipping | None:
        """How C follows the norms, if it does."""
        return self._adaptive

    @property
    def expected_batch_size(self) -> float:
        """The public divisor."""
        return self._constants["expected_batch_size"]

    @property
    def noise_multiplier(self) -> float | Schedule:
        """σ, or its schedule. Between steps it may be set if the mechanism `is_chosen`.

        Raises:
            BadInput: If it is set otherwise: the account would be that of another plan.
        """
        return self._settings["noise_multiplier"]

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._refuse_in_a_step()
        if not self._constants["is_chosen"] and not callable(self._settings["noise_multiplier"]):
            raise BadInput(
                "noise_multiplier is fixed: PLD and RDP hold for plans that do not depend on what "
                "comes out. Give noise_multiplier= a function of the step, or "
                "PrivacyEngine(accountant='odometer') (Mechanism(is_chosen=True)), which counts "
                "what is chosen on the way"
            )
        self._change({"noise_multiplier": value})

    @property
    def max_grad_norm(self) -> float | Schedule:
        """C as it stands now, or its schedule. Between steps a constant one may be set."""
        return self._settings["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if self._adaptive is not None:
            raise BadInput("max_grad_norm follows adaptive clipping and cannot be set")
        self._change({"max_grad_norm": value})

    def describe(self) -> dict[str, Any]:
        """The settings as values that JSON can hold: nothing private, no key."""
        return {
            "sampling": samplings.to_fields(self.sampling),
            **{name: describe(setting) for name, setting in self._settings.items()},
            "expected_batch_size": self.expected_batch_size,
            "adaptive": self._adaptive and asdict(self._adaptive),
            "rounded_elements": self._constants["rounded_elements"],
            "is_chosen": self._constants["is_chosen"],
        }

    def state_dict(self) -> dict[str, Any]:
        """What may have changed since the mechanism was made, as values that JSON can hold."""
        return {
            **{name: describe(setting) for name, setting in self._settings.items()},
            "made_with": dict(self._made_with),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            BadInput: In the middle of a step, or if the state is that of another mechanism: one
                that was made with another σ, C, sampling, divisor or adaptive clipping.
        """
        self._refuse_in_a_step()
        made_with = state.get("made_with")
        if made_with is None:
            raise BadInput(
                f"expected the state of a mechanism, which says what it was made with, found keys "
                f"{sorted(state)}"
            )
        for name, own in self._made_with.items():
            # How many elements there are is the model's, which may be cut in other ways now.
            # States of older versions do not say that nothing was chosen.
            known = made_with.get(name, False if name == "is_chosen" else None)
            if name != "rounded_elements" and known != own:
                raise BadInput(
                    f"the state is of a run with {name} {known!r}, and make_private was given "
                    f"{own!r}: a run goes on with what it began with. Give make_private the same"
                )
        # Schedules are functions of the step: the same ones give the same values.
        self._change(
            {name: state[name] for name, own in self._settings.items() if not callable(own)}
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.describe().items())
        return f"Mechanism({settings})"

    def _refuse_in_a_step(self) -> None:
        if self._current is not None:
            raise BadInput(
                f"step {self._current.step} has begun with its clip norm and noise; change the "
                "mechanism between two steps"
            )

    def _change(self, settings: Mapping[str, float]) -> None:
        """Change settings, all or none."""
        self._refuse_in_a_step()
        for name in settings:
            if callable(self._settings[name]):
                raise BadInput(f"{name} follows a schedule and cannot be set")
        before, self._settings = self._settings, {**self._settings, **settings}
        try:
            self.release(0)
        except BadInput:
            self._settings = before
            raise


# ---- clip rules ----------------------------------------------------------------------------------

# (norms of the used parameters, norms over all, C, names of all parameters) -> coefficients by name
ClipRule = Callable[
    [Mapping[str, SampleNorms], SampleNorms, float, Sequence[str]], Mapping[str, Tensor]
]


def _for_all(rule: Rule) -> ClipRule:
    """Give all parameters the coefficients that a rule makes of the norms over all of them."""
    return lambda _, total, clip_norm, names: dict.fromkeys(names, rule(total, clip_norm).values)


CLIP_RULES: dict[str, ClipRule] = {
    **{name: _for_all(rule) for name, rule in RULES.items()},
    "per_layer": lambda each, _, clip_norm, names: (
        {k: c.values for k, c in per_layer(each, clip_norm, num_parameters=len(names)).items()}
        if each
        else {}
    ),
}
