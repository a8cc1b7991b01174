"""How a script ends, as far as its process can know: in order, or failed.

By the time of ``atexit`` an exception that nobody has caught is in ``sys.last_value``, but of an
exit by ``SystemExit`` nothing is left: only who runs the script hears its code. A rank of
``holdfast run`` is told so here; elsewhere ``sys.exit(1)`` looks like an end in order.
"""

from __future__ import annotations

import sys

exited_with_error = False
"""Whether the script has ended by an exit with an error; its launcher's ``rank_process`` sets it.

The exit itself is not kept: its frames would live on, and all that they hold.
"""


def has_failed(error: BaseException | None = None, *, asked: bool) -> bool:
    """Tell whether the script ends otherwise than in order, by ``error`` or by what is known.

    ``asked``: a signal has asked for the end, which is told by an exit code of its own.
    """
    error = error or getattr(sys, "last_value", None)
    if error is None:
        return exited_with_error and not asked
    if isinstance(error, SystemExit):
        return not asked and error.code is not None and error.code != 0
    return True
