"""A comparison that was never run, for tests of what is made of one."""

from bench.memory import Category
from bench.parity import Experiment, Parity, Trained


def trained(**changes) -> Trained:
    fields = {
        "num_ranks": 1,
        "losses": [7.25, 7.125],
        "digest_before": "aa" * 32,
        "digest_after": "bb" * 32,
        "parameter_sum": 2286.522772,
        "largest_difference": None,
        "model_state": dict.fromkeys(Category, 4096),
        "memory": dict.fromkeys(Category, 8192),
        "seconds": 1.5,
        "fingerprint": {"threads": 1, "torch": "2.13.0"},
    }
    return Trained(**(fields | changes))


def parity(*, reducer: str = "ordered", **changes) -> Parity:
    """One process, and eight ranks that differ from it in `changes`."""
    small = dict.fromkeys(Category, 1024)
    fields = {"num_ranks": 8, "largest_difference": 0.0, "model_state": small, "memory": small}
    return Parity(
        experiment=Experiment(preset="small", steps=2, reducer=reducer),
        num_parameters=7_252_480,
        alone=trained(),
        together=trained(**(fields | changes)),
    )
