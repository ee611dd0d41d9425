"""Settings are refused where they are made, with what to write instead."""

import pytest

from unison.errors import BadInput
from unison.kfac import KFACConfig


def test_the_defaults_are_those_that_paid():
    config = KFACConfig()
    assert (config.fisher, config.graft, config.policy) == ("mc", "adam", "auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"damping": -1e-3}, "damping must be 0 or more, found -0.001"),
        ({"damping": float("nan")}, "damping must be 0 or more"),
        ({"damping": (1e-3, -1.0), "damping_form": "factored"}, "damping_of_G must be 0 or more"),
        ({"damping": (1e-3, 1e-3)}, "pass damping_form='factored'"),
        ({"damping": (1e-3,), "damping_form": "factored"}, "a pair"),
        ({"fisher": "montecarlo"}, "fisher must be one of"),
        ({"fisher": "emprical"}, "did you mean 'empirical'"),
        ({"graft": "adm"}, "did you mean 'adam'"),
        ({"policy": "kroneker"}, "did you mean 'kronecker'"),
        ({"reduction": "gram"}, "curvature of nothing"),
        ({"reduction": "ring"}, "product of the ranks' inverses"),
        ({"reduction": "factors"}, "did you mean 'factor'"),
        ({"damping_form": "joint", "inverse": "cholesky"}, "needs eigenvectors"),
        ({"update_every": 0}, "update_every must be above 0"),
        ({"burn_in": -1}, "burn_in must be 0 or more"),
        ({"burn_in": 2.5}, "burn_in must be a whole number"),
        ({"update_every": 2.5}, "update_every must be a whole number"),
        ({"invert_every": -1}, "invert_every must be above 0"),
        ({"decay": 1.0}, "decay must be at least 0 and below 1"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"kl_clip": 0.0}, "kl_clip must be above 0"),
        ({"max_condition_number": 1.0}, "max_condition_number must be above 1"),
        ({"owner_fraction": 1.5}, "owner_fraction must lie between 0 and 1"),
        ({"eps": 0.0}, "eps must be above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, message):
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        KFACConfig(**changes)


def test_what_happens_by_itself_is_no_setting():
    with pytest.raises(BadInput, match="what a head with more than max_factor_size classes does"):
        KFACConfig(reduction="rows")
    with pytest.raises(BadInput, match="pass policy='all', 'hybrid' or 'auto' for sides"):
        KFACConfig(reduction="gather")


def test_schedules_are_checked_when_they_are_asked():
    config = KFACConfig()
    assert config.period(lambda step: 1 if step < 10 else 5, 12) == 5
    with pytest.raises(BadInput, match="period must be above 0"):
        config.period(lambda step: 0, 3)
    with pytest.raises(BadInput, match="whole number"):
        config.period(lambda step: 1.5, 3)  # type: ignore[arg-type,return-value]
