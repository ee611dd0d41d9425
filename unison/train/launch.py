"""Several local ranks from one command, through torch's own launcher."""

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from unison.errors import BadInput, UnisonError
from unison.shard import CollectiveMismatch, RankLost

Config = TypeVar("Config")
Result = TypeVar("Result")


MONITOR_INTERVAL = 0.1  # seconds between two looks at the ranks


class RankFailed(RuntimeError):
    """A rank ended with an error that is not the user's: a bug, or a killed process."""


def was_launched() -> bool:
    """Whether this process is itself a rank that torchrun or a like launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_local_ranks(
    work: Callable[[Config], Result], config: Config, *, num_ranks: int
) -> Result:
    """Run `work(config)` on `num_ranks` new processes of this machine and return rank 0's result.

    Args:
        work: A module-level function; it joins the world by itself.
        config: Its argument; must be picklable.
        num_ranks: How many processes to start.

    Raises:
        BadInput: If the ranks cannot be started from here.
        UnisonError: What the ranks met, if a user can mend it.
        RankFailed: If a rank failed otherwise, with that rank's traceback.
    """
    if was_launched():
        raise BadInput(
            "--nproc starts ranks, but this process is already a rank (torchrun started it); "
            "leave --nproc out"
        )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="unison",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        outcomes = elastic_launch(launch, _run_one)(work, config, num_ranks)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankFailed(f"rank {rank} failed:\n{_traceback_of(failure)}") from None
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():  # the launcher leaves its own behind
            signal.signal(number, handler)
    result, met = outcomes[0]
    if met is not None:
        raise met
    return result


def _run_one(
    work: Callable[[Config], Result], config: Config, num_ranks: int
) -> tuple[Result | None, UnisonError | None]:
    """The life of one rank; an error that every rank agreed on comes back as a value."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        return work(config), None
    except (CollectiveMismatch, RankLost):
        raise  # after these a process cannot end in peace, so no value would come back
    except UnisonError as error:
        return None, error
    except Exception:
        # When this process ends, the others lose their connections to it and break too. The
        # launcher tells of the rank that it finds ended, so it must find this one alone.
        time.sleep(5 * MONITOR_INTERVAL)
        raise


def _traceback_of(failure) -> str:
    details = failure.error_file_data.get("message", {})
    if isinstance(details, dict):
        return details.get("extraInfo", {}).get("py_callstack", "") or failure.message
    return f"{details} (exit code {failure.exitcode})"
