"""Checks of arguments that name what they check: `check.positive(lr=lr)`.

Each function takes keyword arguments only, so that the message can name the argument without the
caller writing it twice, and raises `BadInput` with what was expected and what was found.
"""

import math
import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real

from unison.errors import BadInput


def positive(**values: float) -> None:
    """Require every value to be a finite number above zero.

    >>> positive(lr=0.1, steps=3)
    >>> positive(lr=0.0)
    Traceback (most recent call last):
        ...
    unison.errors.BadInput: lr must be above 0, found 0.0
    """
    for name, value in values.items():
        if not (isinstance(value, Real) and 0 < value < math.inf):
            raise _misfit(name, value, "above 0")


def not_negative(**values: float) -> None:
    """Require every value to be a finite number of at least zero."""
    for name, value in values.items():
        if not (isinstance(value, Real) and 0 <= value < math.inf):
            raise _misfit(name, value, "0 or more")


def _misfit(name: str, value: object, wanted: str) -> BadInput:
    """What is wrong with a value, of which its size need not be the first thing."""
    if not isinstance(value, Real):
        return BadInput(f"{name} must be a number, {wanted}, found {reprlib.repr(value)}")
    kind = "finite and " if value == math.inf else ""
    return BadInput(f"{name} must be {kind}{wanted}, found {value!r}")


def probability(**values: float) -> None:
    """Require every value to lie in [0, 1].

    >>> probability(dropout=1.5)
    Traceback (most recent call last):
        ...
    unison.errors.BadInput: dropout must lie between 0 and 1, found 1.5
    """
    for name, value in values.items():
        if not (isinstance(value, Real) and 0 <= value <= 1):
            raise BadInput(f"{name} must lie between 0 and 1, found {value!r}")


def one_of(choices: Iterable[str], **values: str) -> None:
    """Require every value to be one of `choices`, and suggest the nearest one.

    >>> one_of(["adamw", "sgd"], optimizer="adam")
    Traceback (most recent call last):
        ...
    unison.errors.BadInput: optimizer must be one of 'adamw', 'sgd', found 'adam'; did you mean \
'adamw'?
    """
    choices = list(choices)
    for name, value in values.items():
        if value not in choices:
            near = get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(repr(choice) for choice in choices)
            raise BadInput(f"{name} must be one of {listed}, found {value!r}{hint}")
