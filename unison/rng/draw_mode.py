"""The torch function mode that gives a model's draws to samples, and the contexts it runs in.

What the numbers are: [Note: draws] in draws.py.

[Note: draws run again] Activation checkpointing runs a part of the forward pass again, during the
backward pass, in another thread on CUDA. A draw notices which checkpoint it is in, and lets the
recompute begin with the numbers that its forward began with.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from unison.errors import UnsupportedOperation
from unison.rng.draws import (
    BatchDraws,
    SeedOperations,
    are_equal_states,
    attend,
    drop,
    dropout_arguments,
    generator_states,
)
from unison.rng.streams import Key
from unison.torch_internals import FunctionMode, pushed_lowest, taken_away


@dataclass(frozen=True)
class _Place:
    """The place of the running code among draws: a granule, or the root of all."""

    draws: BatchDraws
    granule: int | None = None  # None: of all, and values are joined
    is_training: bool = True


# One per process and not per thread: on CUDA the recompute runs in a thread of the autograd engine.
_place: _Place | None = None


@contextmanager
def _at(place: _Place | None) -> Iterator[None]:
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def current_draws() -> BatchDraws | None:
    """Return the draws of the running pass; None if they are torch's own."""
    return None if _place is None else _place.draws


def draws_of_granule() -> BatchDraws | None:
    """Return the draws of the running granule; None if there is none, or they are torch's."""
    if _place is None or _place.granule is None:
        return None
    return _place.draws.granules[_place.granule]


def unwatched() -> AbstractContextManager[None]:
    """Let compiled code run in this block: Dynamo leaves code to Python that a mode looks at.

    Its draws must be rewritten, or there must be none.
    """
    return taken_away(_MODE)


def count_draws(num_rows: int, num_shared: int) -> None:
    """Count draws that compiled code is about to make for the running granule.

    Args:
        num_rows: Of rows of samples.
        num_shared: Of values that all samples share.
    """
    draws = draws_of_granule()
    assert _place is not None
    assert draws is not None
    (before,) = draws.state()
    draws.counts = [before[0] + num_rows, before[1] + num_shared]
    _note_checkpoint(_place, before)


@contextmanager
def draws_by_sample(
    key: Key, step: int, sample_ids: Tensor | Sequence[int]
) -> Iterator[BatchDraws]:
    """Say which step this is and which samples the rows of the batch are.

    Enter it once for each micro-batch, around the forward pass; the backward pass may run inside or
    after it. Sharded models that are fed from `unison.deal(loader, granule=...)` need none: the
    batch knows.

    Args:
        key: Root key.
        step: Training step.
        sample_ids: Global index of the sample in each row of the batch.
    """
    draws = BatchDraws(key, step, sample_ids)
    with following(draws):
        yield draws


@contextmanager
def drawing_again(draws: BatchDraws | None, state: list[tuple[int, int]] | None) -> Iterator[None]:
    """Let a block draw what was drawn from an earlier `state` on; None leaves it to torch."""
    if draws is None or state is None:
        with outside_draws():
            yield
        return
    now = draws.state()
    draws.set_state(state)
    try:
        with following(draws):
            yield
    finally:
        draws.set_state(now)


def outside_draws() -> AbstractContextManager[None]:
    """Let passes in this block be nobody's batch: a module is tried out with other rows."""
    return _at(None)


@contextmanager
def following(draws: BatchDraws | None) -> Iterator[None]:
    """Let the draws of this block be these; None leaves them to torch."""
    if draws is None:
        with _at(None):
            yield
        return
    granule = None if draws.join is not None else 0
    with _at(_Place(draws, granule, torch.is_grad_enabled())), pushed_lowest(_MODE):
        yield


def of_granule(index: int, draws: BatchDraws | None = None) -> AbstractContextManager[None]:
    """Let the draws of this block be one granule's, of the running pass or of these."""
    if _place is None:
        if draws is None:
            return nullcontext()
        return _at(_Place(draws, index, torch.is_grad_enabled()))
    return _at(_Place(draws or _place.draws, index, _place.is_training))


@contextmanager
def paused() -> Iterator[None]:
    """Leave draws to torch for a block that must make none.

    Raises:
        UnsupportedOperation: If it makes one.
    """
    if _place is None:
        yield
        return
    before = generator_states()
    with outside_draws():
        yield
    if not are_equal_states(before, generator_states()):
        raise UnsupportedOperation(
            "compiled code draws random numbers (dropout?), which cannot be given to samples: "
            "leave the block uncompiled, or set its dropout to 0"
        )


@contextmanager
def nothing_else_drawn(name: str) -> Iterator[None]:
    """Make sure that a pass leaves torch's generators alone: its draws are counted here.

    Raises:
        UnsupportedOperation: If it does not.
    """
    before = generator_states()
    yield
    if _place is not None and not are_equal_states(before, generator_states()):
        raise UnsupportedOperation(
            f"{name} drew random numbers in a way that cannot be given to samples, so that they "
            "would be others at another number of ranks; draw with torch.rand, torch.bernoulli, "
            "F.dropout and the like"
        )


def other_generator_states() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - models that draw so
    return random.getstate(), kind, words.tobytes(), *rest  # type: ignore[union-attr]


# --- the mode -------------------------------------------------------------------------------------


def draw(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function of a pass; one that draws, with the numbers of the pass."""
    place = _place
    if place is None or func not in DRAWING or not draws_now(func, args, kwargs):
        return func(*args, **kwargs)
    for each in (*args, *kwargs.values()):
        if type(each) is Tensor or not isinstance(each, Tensor):
            continue
        if hasattr(each, "parts"):  # a value per granule maps itself
            return func(*args, **kwargs)
        if hasattr(each, "listener"):  # private training follows it, and calls what it is made of
            with _MODE:
                return type(each).__torch_function__(func, (type(each),), args, kwargs)
    if place.granule is None:
        return _draw_at_root(place.draws, func, args, kwargs)
    draws = place.draws.granules[place.granule]
    (before,) = draws.state()
    result = _draw_in_granule(draws, func, args, kwargs)
    if draws.state() != [before]:
        _note_checkpoint(place, before)
    return result


_MODE = FunctionMode(draw)


def _draw_in_granule(draws: BatchDraws, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if func in DROPOUTS:
        x, p, _, is_in_place = dropout_arguments(*args, **kwargs)
        result = drop(x, p, draws=draws)
        return x.copy_(result) if is_in_place else result
    if func is F.scaled_dot_product_attention:
        return attend(*args, **kwargs, draws=draws)
    if isinstance(func, FunctionType) and func.__closure__ is None:
        with _MODE:  # it is written in Python, of functions that are seen here
            return _opened(func)(*args, **kwargs)
    # What torch does inside is seen one level lower, where each draw is an operation of its own.
    is_time_first = func in _RECURRENT and args[0].dim() == 3
    with SeedOperations(draws, 1 if is_time_first else None):
        return func(*args, **kwargs)


def draws_now(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a function draws with these arguments."""
    if func in DROPOUTS:
        _, p, is_training, _ = dropout_arguments(*args, **kwargs)
        return is_training and p > 0.0
    if func is F.scaled_dot_product_attention:
        return (kwargs.get("dropout_p") or (args[4] if len(args) > 4 else 0.0)) > 0.0
    if func in _RECURRENT:
        flags = [each for each in args if isinstance(each, float | bool)]
        place = next(index for index, each in enumerate(flags) if type(each) is float)
        is_drawing = flags[place] > 0.0 and bool(flags[place + 1])
        if is_drawing and args[0].is_cuda:
            raise UnsupportedOperation(
                f"{func.__name__}: cuDNN draws the dropout between layers itself, and its numbers "
                "cannot be given to samples; stack single layers with nn.Dropout between them"
            )
        return is_drawing
    return True


def _draw_at_root(draws: BatchDraws, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Draw where one line of code stands for all granules: a value each, or one for all."""
    first, *others = draws.granules
    count, shared_count = first.counts
    with of_granule(0):
        result = draw(func, args, kwargs)
    if first.counts[0] == count:
        if any(rows.counts[1] != shared_count for rows in others):
            raise UnsupportedOperation(
                f"{func.__name__}: granules have drawn different numbers of values that all "
                "samples share (torch.rand([]) and the like), so that this one would not be the "
                "same on every rank; draw them outside of branches that depend on data"
            )
        for rows in others:
            rows.counts[1] = first.counts[1]
        return result
    if any(result is each for each in args):
        raise UnsupportedOperation(
            f"{func.__name__} draws into a tensor that all granules share, of shape "
            f"{list(result.shape)}: make a new one with torch.rand, torch.bernoulli or the like, "
            "or draw inside of a block"
        )
    results = [result]
    for index in range(1, len(draws.granules)):
        with of_granule(index):
            results.append(draw(func, args, kwargs))
    assert draws.join is not None
    return draws.join(results)


@cache
def _opened(func: FunctionType) -> FunctionType:
    """A Python function of torch's that goes on by itself where modes would be asked first.

    It is asked for once, and what it calls is to be seen.
    """
    hooks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    unasked = dict.fromkeys(hooks, lambda *_: False)
    made = FunctionType(func.__code__, {**func.__globals__, **unasked}, func.__name__)
    made.__defaults__, made.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    return made


# --- activation checkpointing --------------------------------------------------------------------


def _note_checkpoint(place: _Place, before: tuple[int, int]) -> None:
    """Let the checkpoint around a draw begin its recompute with the numbers of its forward.

    Args:
        place: Where the draw was made.
        before: How many draws its granule had made before it.
    """
    if place.is_training and not torch.is_grad_enabled():
        _refuse_reentrant()
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    frame = None if hooks is None else _checkpoint_around(hooks[0])
    if frame is None or getattr(frame, "_unison_resumes", False):
        return
    frame._unison_resumes = True
    state, run = place.draws.state(), frame.recompute_fn
    assert place.granule is not None
    state[place.granule] = before

    def resume(*args: Any) -> None:
        with drawing_again(place.draws, state), _at(place):
            run(*args)

    frame.recompute_fn = resume


def _checkpoint_around(pack: Any) -> Any:
    """Return the checkpoint that the running code is in, by torch's own notes of it; or None."""
    for cell in getattr(pack, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.utils.checkpoint._CheckpointFrame):
            return cell.cell_contents
    # Another hook is on top (activations offloaded to the host, say): look among the callers.
    caller = sys._getframe(1)
    while caller is not None:
        if caller.f_code in _CHECKPOINTS:
            frame, generator = caller.f_locals.get("new_frame"), caller.f_locals.get("gen")
            if frame is None and generator is not None and generator.gi_frame is not None:
                frame = generator.gi_frame.f_locals.get("new_frame")
            if frame is not None:
                return frame
        caller = caller.f_back
    return None


def _refuse_reentrant() -> None:
    caller: Any = sys._getframe(1)
    while caller is not None:
        if caller.f_code is _REENTRANT:
            raise UnsupportedOperation(
                "random numbers are drawn under reentrant checkpointing, whose second run could "
                "not be given the same ones; pass use_reentrant=False to torch.utils.checkpoint"
            )
        caller = caller.f_back


_CHECKPOINTS = {unwrap(torch.utils.checkpoint.checkpoint).__code__}
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__

# --- which functions draw ------------------------------------------------------------------------

DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_IN_TORCH = """rand rand_like randn randn_like randint randint_like randperm bernoulli binomial
normal multinomial poisson native_dropout alpha_dropout alpha_dropout_ feature_dropout
feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ pca_lowrank svd_lowrank
_standard_gamma _sample_dirichlet"""
_IN_FUNCTIONAL = """scaled_dot_product_attention multi_head_attention_forward gumbel_softmax rrelu
dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
fractional_max_pool2d fractional_max_pool3d"""
_IN_TENSOR = """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_
random_ uniform_"""
DRAWING: set[Callable] = {
    *DROPOUTS,
    *_RECURRENT,
    *(getattr(torch, name) for name in _IN_TORCH.split()),
    *(getattr(F, name) for name in _IN_FUNCTIONAL.split()),
    *(getattr(torch.Tensor, name) for name in _IN_TENSOR.split()),
}
"""Torch functions that may draw random numbers."""
