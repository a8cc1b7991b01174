"""Whether a service sends traces (``docs/howto/traces.md``); who sends none imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import InvalidRequestError
from holdfast_services.kit.settings import TraceSettings

if TYPE_CHECKING:
    from holdfast_services.kit.otlp import Traces


def open_traces(settings: TraceSettings, service: str, name: str) -> Traces | None:
    """Return what sends the traces of this process; None: nobody asked for them.

    Args:
        settings: Whether, and where to.
        service: The kind of this process.
        name: Which one of its kind: a node or a worker.

    Raises:
        InvalidRequestError: the packages of ``holdfast[traces]`` are missing.
    """
    if not settings.traces:
        return None
    try:
        from holdfast_services.kit.otlp import Traces  # noqa: PLC0415 - half a second of imports
    except ImportError as error:
        raise InvalidRequestError(
            f"HOLDFAST_TRACES is set, and {error.name} is not installed: pip install "
            f"'holdfast[traces]'"
        ) from error
    return Traces(settings.traces, service, name, settings.traces_share)
