"""Ctrl-C and SIGTERM end a command that writes files as errors do: nothing half is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_SIGNAL = 128
"""What the exit code is more than the signal's number, as in shells."""


class _Stop(KeyboardInterrupt):
    """Passes what catches errors."""


@contextmanager
def stoppable(what: str) -> Iterator[None]:
    """Have a signal end the block; outside of the main thread it does nothing.

    Args:
        what: What is not there if the block is stopped.

    Raises:
        StoppedError: a signal came; its ``signal`` is in the context.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _stop) for number in SIGNALS}
    try:
        yield
    except _Stop as cause:
        number = signal.Signals(cause.args[0])
        raise StoppedError(f"stopped by {number.name}: {what}", signal=number.value) from cause
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Stop(number)
