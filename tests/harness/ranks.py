"""`@ranks(1, 2, 4)` and `run_on_ranks`: test bodies on real gloo processes."""

import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import pool, worker
from tests.harness.report import Answer, Outcome, RanksFailed

DEFAULT_TIMEOUT = 60.0


def ranks(*sizes: int, timeout: float = DEFAULT_TIMEOUT) -> Callable[[Callable], Callable]:
    """Turn a function into a test that runs on every rank of a world, once per world size.

    The body takes a `World` as its first parameter, called `world`; any other parameter is an
    ordinary pytest one (a fixture such as `tmp_path`, a parametrisation) whose value can be
    pickled. The process group is initialised, every rank has one thread and the test's seed, and
    warnings are errors as they are in the parent.

    Args:
        sizes: the world sizes.
        timeout: seconds for one world size, after which the ranks that hang are shown and cut.

    Returns:
        The decorator.

    Example:
        >>> @ranks(1, 2, 4)
        ... def test_sum(world):
        ...     assert sum(world.gather(1)) == world.size
    """
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"ranks(...) takes one or more world sizes above 0, found {sizes}")

    def decorate(body: Callable) -> Callable:
        name = getattr(body, "__qualname__", repr(body))
        parameters = list(inspect.signature(body).parameters.values())
        if not parameters or parameters[0].name != "world":
            raise TypeError(
                f"{name} must take `world` as its first parameter; @ranks works on plain functions"
            )

        @functools.wraps(body)
        def test(*, world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            call = _pickled(worker.Body(body.__module__, name), (), kwargs)
            failure = None
            try:
                _skip_together(pool.pool_of(world_size).call(call, timeout))
            except RanksFailed as error:
                failure = error
            if failure is not None:
                # The ranks' tracebacks are the message: the harness's own frames, and the chain
                # of exceptions that failing inside `except` would show, only hide it.
                pytest.fail(str(failure), pytrace=False)

        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        others = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters[1:]]
        test.__signature__ = inspect.Signature([size, *others])  # type: ignore[attr-defined]
        # `wraps` shares the list of marks with the body; parametrize would write into both.
        test.pytestmark = list(getattr(body, "pytestmark", []))  # type: ignore[attr-defined]
        test.ranks_body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes, ids=lambda n: f"{n}ranks")(test)

    return decorate


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
) -> list[Any]:
    """Run `fn(world, *args)` on every rank of a world and return the results.

    All calls of one test have one seed, so results of several world sizes can be compared.

    Args:
        world_size: the number of ranks.
        fn: a function at module level, or a `functools.partial` of one.
        args: what it takes after the world; anything that can be pickled.
        timeout: seconds after which ranks that hang are shown and cut.

    Returns:
        One result per rank, in rank order.

    Raises:
        RanksFailed: if any rank raised, died or hung.
        TypeError: if the function or an argument cannot be pickled.
    """
    __tracebackhide__ = True
    if hasattr(fn, "ranks_body"):
        fn = worker.Body(fn.__module__, fn.__qualname__)
    answers = pool.pool_of(world_size).call(_pickled(fn, args, {}), timeout)
    _skip_together(answers)
    return [pickle.loads(answer.value) for answer in answers]


def _skip_together(answers: list[Answer]) -> None:
    """Skip the running test if every rank skipped, and fail it if only some did."""
    skipped = [answer for answer in answers if answer.outcome is Outcome.SKIPPED]
    if len(skipped) == len(answers):
        pytest.skip(skipped[0].headline)
    if skipped:
        some = [answer.rank for answer in skipped]
        pytest.fail(f"ranks {some} skipped and the others did not", pytrace=False)


def _pickled(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{fn} and its arguments must be picklable to reach the ranks ({error}): define the "
            "function at module level, and make what cannot be pickled inside the body"
        ) from error
