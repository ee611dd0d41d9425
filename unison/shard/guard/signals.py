"""Raising in the training thread from another one, and being told to end.

`PyThreadState_SetAsyncExc` would wait for the next bytecode; a real signal also ends a sleep, a
read or a lock. `SIGURG` is ignored by default, so that one which comes late does no harm.
"""

import os
import signal
import threading
from collections.abc import Callable

_INTERRUPT = signal.SIGURG


class Interrupts:
    """Signal handlers of the main thread, while a guard is on.

    Args:
        on_interrupt: Called in the main thread after `interrupt`; may raise.
        on_terminate: Called in the main thread on SIGTERM (a launcher ends the ranks when one of
            them fails); may raise instead of ending the process.
    """

    def __init__(self, on_interrupt: Callable[[], None], on_terminate: Callable[[], None]) -> None:
        self._on_interrupt = on_interrupt
        self._on_terminate = on_terminate
        self._before: dict[int, object] = {}

    def attach(self) -> None:
        """Install the handlers; nothing outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._install(_INTERRUPT, lambda *_: self._on_interrupt())
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._install(signal.SIGTERM, lambda *_: self._terminate())

    def detach(self) -> None:
        """Put the handlers before back."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def interrupt(self) -> None:
        """Make the main thread call `on_interrupt` as soon as it runs Python."""
        if self._before:
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, _INTERRUPT)

    def _install(self, number: int, handler: Callable) -> None:
        before = signal.getsignal(number)
        # None: a handler that was not installed from Python, and cannot be put back from here.
        if before is not None:
            self._before[number] = before
            signal.signal(number, handler)

    def _terminate(self) -> None:
        self._on_terminate()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
