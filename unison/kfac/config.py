"""What a user may choose about K-FAC, checked when it is chosen; which optimizers may follow."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unison import check
from unison.config import check_curvature
from unison.errors import BadInput

_CHOICES = {
    "reduction": ("auto", "factor"),
    "policy": (
        *("auto", "all", "hybrid", "small_only", "blocked", "one_sided"),
        *("kronecker", "diagonal", "identity"),
    ),
    "head": ("sampled", "exact"),
    "storage_device": ("auto", "cuda", "cpu"),
    "storage_dtype": ("auto", "float32", "bfloat16", "float16"),
    "likelihood": ("categorical", "gaussian", "bernoulli"),
    "sharing": ("expand", "reduce"),
    "inverse": ("auto", "eigen", "cholesky"),
    "loss_reduction": ("mean", "sum"),
}
_WRONG = {
    "gram": (
        "reduction='gram' sums the Gram matrices UᵀU of each rank's own tokens. Entry (t, s) then "
        "adds products of unrelated pairs of tokens, and the result is the curvature of nothing: "
        "its error was 0.6 to 2.2, and ranks even disagreed with one another. Use "
        "reduction='factor', which sums UUᵀ and is exact"
    ),
    "ring": (
        "reduction='ring', one rank's Woodbury update after the other's, gives the product of the "
        "ranks' inverses, not the inverse of their sum: its error was 0.3 to 0.6. Use "
        "reduction='factor', which is exact"
    ),
    "gather": (
        "reduction='gather' is what columns of tokens do, and no setting of its own: pass "
        "policy='all', 'hybrid' or 'auto' for sides that are held so, and reduction='factor' for "
        "the others"
    ),
    "rows": (
        "reduction='rows' is what a head with more than max_factor_size classes does where it is "
        "held as columns, and no setting of its own: pass policy='all' or 'hybrid', or "
        "head='exact', and reduction='factor'"
    ),
}

_WITHOUT_EFFECT = ("reduction", "owner_fraction", "storage_device")  # on any result
_TUNED = (  # which a state does not depend on, only what comes after it
    *("damping", "max_condition_number", "update_every", "invert_every"),
    *("burn_in", "decay", "kl_clip"),
)

Every = int | Callable[[int], int]
"""How many steps lie between two updates: a number, or a function of the step."""


@dataclass(frozen=True, kw_only=True)
class KFACConfig:
    """Settings of `KFAC`: all change the result but `reduction` and where things are computed.

    Attributes:
        damping: λ, added to the curvature before it is inverted; 0 or more. A pair (λ_A, λ_G) with
            `damping_form="factored"` damps the two sides apart.
        damping_form: How λ enters a Kronecker product. `"pi"`: A + π√λ I and G + √λ/π I, where π²
            is the ratio of the factors' mean eigenvalues. `"factored"`: A + √λ I and G + √λ I, or
            the pair's two numbers. `"joint"`: A ⊗ G + λI, exactly; needs eigenvectors.
        max_condition_number: Damp each factor more where its condition number would pass this.
        inverse: `"eigen"`, `"cholesky"`, or `"auto"`: eigenvectors for joint damping, else
            Cholesky.
        update_every: Steps between two updates of the factors; a function of the step for a
            schedule.
        burn_in: Over so many steps at the beginning, the time between two updates grows from 1 to
            `update_every` (and `invert_every`): curvature changes fastest there, and averages are
            of few tokens. 0 for none; functions of the step are taken as they are.
        invert_every: The same of the inverses; None inverts whenever factors were updated.
        decay: β of the factors' moving average; 0 keeps the last ones only.
        fisher: `"mc"` draws labels from the model, `"empirical"` takes the gradients of the loss
            itself, `"exact"` takes the expectation over all labels (one backward pass per output),
            `"forward"` has G = I and looks at inputs only.
        likelihood: What the model's outputs say about a label: `"categorical"` (logits, cross
            entropy), `"bernoulli"` (logits, one yes or no each), `"gaussian"` (means, half the
            squared error).
        sharing: How tokens that share a weight count: `"expand"`, each for itself, or `"reduce"`,
            one per sample.
        head: G of the layer that makes the outputs: `"sampled"` like that of any other, or
            `"exact"`, the mean of diag(p) - pp' over tokens, whatever labels are.
        policy: What of a layer is factored, and which sides are held as the columns of tokens
            (low rank, inverted by Woodbury's identity) rather than as a matrix. `"auto"` takes
            whatever costs least; where a side is too long for both, blocks on its diagonal, or a
            diagonal for the layer; `"all"` holds G of every layer as columns; `"hybrid"` holds long
            sides and the head so; `"small_only"` none, with a diagonal for layers with a long side;
            `"blocked"` cuts long sides into blocks; `"one_sided"` takes sides that are too long as
            the identity; `"kronecker"` makes matrices of all sides; `"diagonal"` factors nothing;
            `"identity"` leaves everything to the grafted optimizer.
        min_layer_size: Matrices of fewer elements get a diagonal, but under `"kronecker"`.
        max_factor_size: The longest side that is held as a matrix, but under `"kronecker"`.
        max_rank: Columns that a low-rank side keeps over updates. With `decay`, more are compressed
            to so many, and the mean of what is left out is added to the damping.
        graft: Whose step length is taken: `"adam"`, `"sgd"`, or `"none"` for K-FAC's own.
        betas: Of Adam, where it is grafted. The first one averages gradients before they are
            preconditioned.
        eps: Of Adam.
        kl_clip: Shorten a step whose predicted change lr²·⟨step, gradient⟩ is larger; needs the
            optimizer. None does not.
        loss_reduction: What the loss does with its terms. Of use to `"empirical"`, which needs the
            gradients of the sum.
        reduction: How ranks add their factors up: `"factor"` (and `"auto"`, which is that today).
        owner_fraction: Share of the ranks that invert and apply each layer: 0 for one rank each, 1
            for all of them.
        storage_device: Where factors lie between updates: `"auto"`, with the model; `"cpu"`, in the
            host's memory, pinned if there is a GPU; `"cuda"`.
        storage_dtype: And in which dtype; `"auto"` for that of the sums. Values are divided by the
            largest one first: float16 has no room for small ones. An approximation.
        seed: Of the labels that `"mc"` draws.

    Raises:
        BadInput: Naming the setting, what was found, and the nearest name there is.
    """

    damping: float | tuple[float, float] = 1e-3
    damping_form: str = "pi"
    max_condition_number: float | None = None
    inverse: str = "auto"
    update_every: Every = 10
    burn_in: int = 40
    invert_every: Every | None = None
    decay: float = 0.95
    fisher: str = "mc"
    likelihood: str = "categorical"
    sharing: str = "expand"
    head: str = "sampled"
    policy: str = "auto"
    min_layer_size: int = 64
    max_factor_size: int = 8192
    max_rank: int = 256
    graft: str = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    kl_clip: float | None = None
    loss_reduction: str = "mean"
    reduction: str = "auto"
    owner_fraction: float = 0.0
    storage_device: str = "auto"
    storage_dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.reduction in _WRONG:
            raise BadInput(_WRONG[self.reduction])
        for name, choices in _CHOICES.items():
            check.one_of(choices, **{name: getattr(self, name)})
        self._check_damping()
        self._check_head()
        check_curvature(self)
        for name in ("update_every", "invert_every"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                _check_steps(**{name: value})
                check.positive(**{name: value})
        _check_steps(burn_in=self.burn_in)
        check.not_negative(min_layer_size=self.min_layer_size, burn_in=self.burn_in)
        check.positive(eps=self.eps, max_rank=self.max_rank)
        check.probability(owner_fraction=self.owner_fraction)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise BadInput(f"betas must be two numbers in [0, 1), found {self.betas!r}")

    def _check_head(self) -> None:
        if self.head != "exact":
            return
        if self.policy in ("diagonal", "identity"):
            raise BadInput(f"head='exact' is G of a matrix, and policy={self.policy!r} makes none")
        fisher = ("fisher", ("mc", "empirical", "exact"))
        for name, choices in (("likelihood", ("categorical",)), ("sharing", ("expand",)), fisher):
            if (found := getattr(self, name)) not in choices:
                raise BadInput(
                    f"head='exact' is of class probabilities, one for each token: pass {name}="
                    f"{' or '.join(map(repr, choices))}, found {found!r}"
                )

    def _check_damping(self) -> None:
        if not isinstance(self.damping, tuple | list):
            check.not_negative(damping=self.damping)
        elif len(self.damping) != 2:
            raise BadInput(f"damping must be λ or a pair (λ_A, λ_G), found {self.damping!r}")
        else:
            check.not_negative(damping_of_A=self.damping[0], damping_of_G=self.damping[1])
            if self.damping_form != "factored":
                raise BadInput(
                    f"a pair of dampings (λ_A, λ_G) = {self.damping!r} is added to each side as it "
                    f"is: pass damping_form='factored', found {self.damping_form!r}"
                )
        if self.damping_form == "joint" and self.inverse == "cholesky":
            raise BadInput(
                "damping_form='joint' needs eigenvectors of both factors; pass inverse='eigen' or "
                "'auto', found 'cholesky'"
            )

    def period(self, every: Every, step: int) -> int:
        """Steps between two updates, of the factors or of the inverses, at a step.

        >>> config = KFACConfig(update_every=10, burn_in=40)
        >>> [config.period(config.update_every, step) for step in (0, 8, 20, 40, 1000)]
        [1, 2, 5, 10, 10]

        Raises:
            BadInput: If a schedule gives anything but a whole number above 0.
        """
        if not callable(every):  # which was looked at when the settings were made
            return every if step >= self.burn_in else max(1, every * step // self.burn_in)
        period = every(step)
        _check_steps(period=period)
        check.positive(period=period)
        return period

    def stored(self) -> dict[str, Any]:
        """All settings as plain values, for a checkpoint; a schedule is None."""
        values = {name: None if callable(each) else each for name, each in vars(self).items()}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def compare(self, stored: Mapping[str, Any]) -> None:
        """Compare with the settings of a state that is about to be taken over.

        Those that a state is made of must be the same; a warning tells of others that change what
        comes after it.

        Raises:
            BadInput: Naming the setting, and both values.
        """
        own = self.stored()
        others = [name for name in own if name in stored and stored[name] != own[name]]
        changed = []
        for name in others:
            if name in _TUNED:
                changed.append(f"{name}={own[name]!r} (was {stored[name]!r})")
            elif name not in _WITHOUT_EFFECT:
                raise BadInput(
                    f"the state is of a run with {name}={stored[name]!r}, and this one has "
                    f"{name}={own[name]!r}: its factors mean something else. Pass "
                    f"KFACConfig({name}={stored[name]!r}), or begin without the state"
                )
        if changed:
            warnings.warn(
                f"the run goes on with other settings than it stopped with: {', '.join(changed)}",
                stacklevel=4,
            )

    @property
    def dampings(self) -> tuple[float, float]:
        """λ for A and for G: the pair, or √λ twice."""
        if isinstance(self.damping, tuple | list):
            return self.damping[0], self.damping[1]
        return self.damping**0.5, self.damping**0.5

    @property
    def has_rank(self) -> bool:
        """Whether `max_rank` bounds columns: those of one update alone are all kept.

        Joint damping knows no tail, and keeps as many as a side has rows.
        """
        return self.decay > 0 and self.damping_form != "joint"

    @property
    def joint_damping(self) -> float:
        """λ of the whole block, also where a pair was given."""
        if isinstance(self.damping, tuple | list):
            return self.damping[0] * self.damping[1]
        return self.damping


def _check_steps(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadInput(f"{name} must be a whole number of steps, found {value!r}")


# --- optimizers -----------------------------------------------------------------------------------

_ADAPTIVE = ("betas", "eps", "rho", "etas", "lambd")  # settings that only adaptive optimizers have


def refuse_adaptive(optimizer: Optimizer, graft: str) -> None:
    """Refuse an optimizer that scales elements again by what it has seen of their gradients.

    Raises:
        BadInput: With what to use instead.
    """
    is_adaptive = any(name in optimizer.defaults for name in _ADAPTIVE)
    if graft != "none" and is_adaptive and not isinstance(optimizer, SGD):
        raise BadInput(
            f"graft={graft!r} gives the step its length and direction, and "
            f"{type(optimizer).__name__} would scale every element of it again: use "
            "torch.optim.SGD (momentum and weight decay are fine), with the learning rate that the "
            "grafted optimizer would have"
        )


def loss_scale(scaler: GradScaler | None) -> float:
    """What the loss was multiplied with, once gradients are no longer.

    Raises:
        BadInput: If they still are.
    """
    if scaler is None or not scaler.is_enabled():
        return 1.0
    states = scaler._per_optimizer_states.values()
    if not any(each["stage"] is OptState.UNSCALED for each in states):
        raise BadInput(
            "the gradients are still multiplied with the scale of the loss: call "
            "scaler.unscale_(optimizer), then kfac.step(grad_scaler=scaler), then "
            "scaler.step(optimizer)"
        )
    return scaler.get_scale()


def watch_optimizers(parameters: Iterable[Tensor], graft: str) -> RemovableHandle:
    """Refuse an adaptive optimizer when it is about to step any of the parameters."""
    ids = {id(each) for each in parameters}

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(each) in ids for group in optimizer.param_groups for each in group["params"]):
            refuse_adaptive(optimizer, graft)

    return register_optimizer_step_pre_hook(refuse)
