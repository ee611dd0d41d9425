"""Recurrent modules, which keep a second list of their parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import ref

from torch import nn


@contextmanager
def flat_weights_renewed(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Let recurrent modules see the parameters that lie in their attributes now.

    They notice that their parameters are others, and would flatten them for cuDNN.
    """
    found = [child for _, child in modules if isinstance(child, nn.RNNBase)]
    kept = [(child._flat_weights, child._flat_weight_refs) for child in found]
    for child in found:
        weights = [getattr(child, name, None) for name in child._flat_weights_names]
        child._flat_weights = weights
        child._flat_weight_refs = [each if each is None else ref(each) for each in weights]
    try:
        yield
    finally:
        for child, (weights, refs) in zip(found, kept, strict=True):
            child._flat_weights, child._flat_weight_refs = weights, refs
