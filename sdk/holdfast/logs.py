"""Loggers for the threads of a training process: what a handler raises stays with the handler.

A handler of the user's own (a log shipper, a progress bar) may raise. On a thread that training
depends on that costs a line, not a save.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any


class SteadyLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that never raises."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as ``logging`` does; a handler that raises is passed over."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, stacklevel=2, **kwargs)


def steady_logger(name: str) -> SteadyLogger:
    """Return the logger of that name, which never raises."""
    return SteadyLogger(logging.getLogger(name), None)
