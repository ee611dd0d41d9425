"""A backend of torch.compile that tells whether compiled code has run."""

from collections.abc import Callable

import torch

NUM_RUNS = [0]


def counting(graph: torch.fx.GraphModule, _: list) -> Callable:
    """Run graphs as they are, and count how often that happens."""

    def run(*args: object) -> object:
        NUM_RUNS[0] += 1
        return graph(*args)

    return run
