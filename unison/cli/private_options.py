"""The options of `unison train` that make a run private."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from unison import config as settings
from unison.errors import BadInput

# Typer turns an enum into a checked choice with completion; the names come from one place.
Clipping = StrEnum("Clipping", list(settings.CLIPPINGS))
ClipRule = StrEnum("ClipRule", list(settings.CLIP_RULES))
Sampling = StrEnum("Sampling", list(settings.SAMPLINGS))
Accountant = StrEnum("Accountant", list(settings.ACCOUNTANTS))

DEFAULT = settings.Privacy(epsilon=1.0, delta=0.5)


def _option(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Privacy: one row is one record", **options)


PrivateFlag = Annotated[
    bool,
    _option(
        "--private",
        help="Train with differential privacy (DP-SGD). What is protected is one row of the "
        "training data; with --layout documents that is one document. Held-out rows are not "
        "protected.",
    ),
]
Epsilon = Annotated[
    float | None,
    _option("--epsilon", help="ε that the run may spend; decides the noise for its --steps."),
]
NoiseMultiplier = Annotated[
    float | None,
    _option("--noise-multiplier", help="σ, instead of --epsilon: noise of σ·C on the sum."),
]
Delta = Annotated[float | None, _option("--delta", help="δ, below 1 / number of rows.")]
MaxGradNorm = Annotated[
    float, _option("--max-grad-norm", help="C: the bound on the gradient of each row.")
]
ClippingMode = Annotated[
    Clipping,
    _option("--clipping", help="How the clipping is computed; all give the same gradients."),
]
ClipRuleName = Annotated[
    ClipRule,
    _option(
        "--clip-rule",
        help="flat: longer gradients are scaled down to C. automatic: all are scaled to nearly C. "
        "per_layer: each parameter has its part of C.",
    ),
]
SamplingKind = Annotated[
    Sampling,
    _option(
        "--sampling",
        help="poisson: a step draws each row with probability --batch-size / rows. truncated: at "
        "most --capacity of these. shuffled: fixed batches, for which a larger ε is counted.",
    ),
]
Capacity = Annotated[
    int | None, _option("--capacity", help="Most rows in a batch of --sampling truncated.")
]
AccountantName = Annotated[
    Accountant, _option("--accountant", help="Whose bound on ε counts; all are upper bounds.")
]
SecureNoise = Annotated[
    bool,
    _option(
        "--secure-noise/--no-secure-noise",
        help="Without it noise and sampling come from --seed: for experiments, nothing is private.",
    ),
]
UnsafeDiagnostics = Annotated[
    bool,
    _option(
        "--unsafe-diagnostics",
        help="Also write what no ε covers to the run's files: training loss, norms, clipped "
        "fractions. A terminal shows them anyway.",
    ),
]

DataSalt = Annotated[
    str | None,
    _option(
        "--data-salt",
        metavar="FILE",
        help="A small secret file that stays beside the data, made if it is not there. With it the "
        "ledger commits to the rows, so that `unison account RUN RUN...` knows runs on one data "
        "set.",
    ),
]

_ELSEWHERE = ("clipping", "unsafe_diagnostics", "data_salt")  # in other groups of settings


def said_of_privacy(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """What was said of privacy: `private`, and fields of `Privacy` by name."""
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in values.items()
        if name in given
    }


def make_privacy(said: Mapping[str, Any], given: set[str]) -> settings.Privacy | None:
    """The privacy that was asked for, if any.

    Raises:
        BadInput: If options contradict each other, or one is missing.
    """
    fields = dict(said)
    if not fields.pop("private", False):
        names = sorted([*fields, *given.intersection(_ELSEWHERE)])
        if names:
            listed = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise BadInput(f"only private runs have {listed}; add --private, or leave {listed} out")
        return None
    if "delta" not in fields:
        raise BadInput("--private needs --delta, below 1 / number of rows, such as --delta 1e-6")
    return settings.Privacy(**fields)
