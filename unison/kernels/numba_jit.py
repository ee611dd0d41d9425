"""What kernels compiled by numba share: how they are compiled, and the threads they run in.

Threads are plain Python threads running compiled code without the interpreter lock: no threading
layer to configure, and nothing that breaks in a forked process.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba as nb
import torch

MIN_PER_THREAD = 1 << 15  # elements below which another thread costs more than it saves


def jit(function: Any = None, *, fastmath: Iterable[str] = ()) -> Any:
    """Compile without the interpreter lock, and keep the result on disk where that is possible.

    Args:
        function: What to compile.
        fastmath: Names of LLVM's liberties. Without any, it keeps every product and sum apart.
    """
    if function is None:
        return lambda each: jit(each, fastmath=fastmath)
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
    try:
        return nb.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return nb.njit(**options)(function)


def num_pieces(num_elements: int) -> int:
    """Into how many pieces work is cut: one for each of torch's threads that it can occupy."""
    return max(1, min(torch.get_num_threads(), num_elements // MIN_PER_THREAD))


def run_pieces(function: Callable[..., None], pieces: Sequence[tuple]) -> None:
    """Call a compiled function with each tuple of arguments, in threads if there are several."""
    if len(pieces) <= 1:
        for piece in pieces:
            function(*piece)
        return
    with ThreadPoolExecutor(len(pieces), thread_name_prefix="unison-kernel") as pool:
        for job in [pool.submit(function, *piece) for piece in pieces]:
            job.result()
