"""The options of `unison train` that precondition gradients with K-FAC."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from unison import config as settings
from unison.errors import BadInput

# Typer turns an enum into a checked choice with completion; the names come from one place.
Fisher = StrEnum("Fisher", list(settings.FISHERS))
Graft = StrEnum("Graft", list(settings.GRAFTS))
DampingForm = StrEnum("DampingForm", list(settings.DAMPING_FORMS))

DEFAULT = settings.Kfac()

# Fields of `Kfac` whose option has another name, and what lies in another group of settings.
_OPTIONS = {
    "update_every": "--kfac-update-every",
    "invert_every": "--kfac-invert-every",
    "decay": "--factor-decay",
}
_ELSEWHERE = ("owner_fraction",)


def _option(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="K-FAC: natural gradient", **options)


KfacFlag = Annotated[
    bool,
    _option(
        "--kfac",
        help="Divide gradients by the curvature of what the model says (docs/kfac.md). The step is "
        "taken by SGD, with an --lr of AdamW's kind, to be tuned again. Not with --private.",
    ),
]
Damping = Annotated[
    float, _option("--damping", help="λ, added to the curvature before it is inverted.")
]
DampingFormName = Annotated[
    DampingForm,
    _option(
        "--damping-form",
        help="pi: λ divided between the two factors by their size. factored: evenly. joint: added "
        "to their product.",
    ),
]
MaxConditionNumber = Annotated[
    float | None,
    _option("--max-condition-number", help="Damp a factor more where it would pass this."),
]
UpdateEvery = Annotated[
    int, _option(_OPTIONS["update_every"], help="Steps between two updates of the factors.")
]
InvertEvery = Annotated[
    int | None,
    _option(
        _OPTIONS["invert_every"], help="Steps between two inversions; after every update otherwise."
    ),
]
Decay = Annotated[float, _option(_OPTIONS["decay"], help="β of the factors' moving average.")]
FisherKind = Annotated[
    Fisher,
    _option(
        "--fisher",
        help="Whose labels curvature is of. mc: drawn from the model. empirical: the data's. "
        "exact: all of them, for small vocabularies. forward: none, inputs only.",
    ),
]
GraftKind = Annotated[
    Graft,
    _option(
        "--graft",
        help="Whose step length is taken: adam, sgd, or none for K-FAC's own, best with --kl-clip.",
    ),
]
KLClip = Annotated[
    float | None, _option("--kl-clip", help="Shorten steps whose predicted change is larger.")
]
MaxFactorSize = Annotated[
    int, _option("--max-factor-size", help="Matrices with a longer side get a diagonal.")
]
OwnerFraction = Annotated[
    float,
    _option(
        "--owner-fraction",
        help="Part of the ranks that invert each layer: 0 one rank, least memory; 1 all, least "
        "traffic. Changes no bits.",
    ),
]


def said_of_kfac(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """What was said of K-FAC: `kfac`, and fields of `Kfac` by name."""
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in values.items()
        if name in given
    }


def make_kfac(said: Mapping[str, Any], given: set[str]) -> settings.Kfac | None:
    """The preconditioning that was asked for, if any.

    Raises:
        BadInput: If options are there that only K-FAC has, or a value is wrong.
    """
    fields = dict(said)
    if not fields.pop("kfac", False):
        names = [*fields, *given.intersection(_ELSEWHERE)]
        if names:
            listed = ", ".join(sorted(_option_of(name) for name in names))
            raise BadInput(
                f"only runs with --kfac have {listed}; add --kfac, or leave {listed} out"
            )
        return None
    return settings.Kfac(**fields)


def _option_of(field: str) -> str:
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}")
