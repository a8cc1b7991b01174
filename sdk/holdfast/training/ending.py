"""How a script ends, as far as its process can know: in order, or failed.

By the time of ``atexit`` an exception that nobody has caught is in ``sys.last_value``, but of an
exit by ``SystemExit`` nothing is left: only who runs the script hears its code. A rank of
``holdfast run`` is told so here; elsewhere ``sys.exit(1)`` looks like an end in order.
"""

from __future__ import annotations

import signal
import sys

CLOSE_S_MAX = 30.0
FAILED_CLOSE_S_MAX = 2.0
"""Where the script has failed: a launcher waits to start it again."""

exited_with_error = False
"""Whether the script has ended by an exit with an error; its launcher's ``rank_process`` sets it.

The exit itself is not kept: its frames would live on, and all that they hold.
"""

_WISHES = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_IN_ORDER = frozenset({0, *(128 + number for number in _WISHES)})


def has_failed(error: BaseException | None = None) -> bool:
    """Tell whether the script ends otherwise than in order, by ``error`` or by what is known."""
    error = error or getattr(sys, "last_value", None)
    if error is None:
        return exited_with_error
    return not isinstance(error, SystemExit) or is_error(error.code)


def is_error(code: object) -> bool:
    """Tell whether a script that exits so has failed.

    A code that tells of a signal is none: somebody wanted it to end, and it has made ready.

    >>> is_error(None), is_error(1), is_error("no data"), is_error(128 + signal.SIGTERM)
    (False, True, True, False)
    """
    return code is not None and not (isinstance(code, int) and code in _IN_ORDER)
