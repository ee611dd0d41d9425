"""`unison.check` and `unison.errors`, beyond their doctests."""

import math

import pytest
import torch

from unison import check
from unison.errors import BadInput, Diverged, UnisonError, UnsupportedOperation

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [0, -1, -0.0, math.nan, -math.inf])
def test_positive_refuses(value):
    with pytest.raises(BadInput, match=r"^lr must be above 0, found "):
        check.positive(lr=value)


@pytest.mark.parametrize("value", [-1e-30, math.nan, -math.inf])
def test_not_negative_refuses(value):
    with pytest.raises(BadInput, match=r"^noise must be 0 or more, found "):
        check.not_negative(noise=value)


def test_what_is_large_enough_is_told_what_else_is_wrong():
    with pytest.raises(BadInput, match=r"^lr must be finite and above 0, found inf$"):
        check.positive(lr=math.inf)
    with pytest.raises(BadInput, match=r"^seconds must be finite and 0 or more, found inf$"):
        check.not_negative(seconds=math.inf)
    with pytest.raises(BadInput, match=r"^lr must be a number, above 0, found '3'$"):
        check.positive(lr="3")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^noise must be a number, 0 or more, found tensor\(.*$"):
        check.not_negative(noise=torch.zeros(300, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1e-9, 1 + 1e-9, *NOT_FINITE])
def test_probability_refuses(value):
    with pytest.raises(BadInput, match=r"^rate must lie between 0 and 1, found "):
        check.probability(rate=value)


def test_bounds_that_belong_to_the_range_pass():
    check.positive(tiny=5e-324, count=1)
    check.not_negative(zero=0, negative_zero=-0.0)
    check.probability(never=0, always=1)


def test_the_first_bad_argument_is_named():
    with pytest.raises(BadInput, match=r"^steps must be above 0, found -3$"):
        check.positive(lr=0.1, steps=-3, width=-4)


def test_one_of_without_a_near_choice_suggests_nothing():
    with pytest.raises(BadInput, match=r"found 'zebra'$"):
        check.one_of(["adamw", "sgd"], optimizer="zebra")


def test_one_of_takes_an_iterator_once_for_several_values():
    check.one_of(iter(["a", "b"]), first="a", second="b")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (BadInput, ValueError),
        (UnsupportedOperation, NotImplementedError),
        (Diverged, ArithmeticError),
    ],
)
def test_errors_are_ours_and_python_s(error, builtin):
    assert issubclass(error, UnisonError)
    assert issubclass(error, builtin)
    # A plain exception of the builtin kind must not pass for one of ours.
    assert not issubclass(builtin, UnisonError)
