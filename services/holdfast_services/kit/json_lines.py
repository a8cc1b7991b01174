"""Logs for machines: a line of JSON for each record, with the ids that it is about."""

from __future__ import annotations

import datetime as dt
import json
import logging

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.errors import CheckpointError


class JsonLines(logging.Formatter):
    """``at`` (UTC), ``level``, ``service``, ``logger``, ``message``; ``kind`` of an error.

    What an error or an id among the arguments is about stands beside these under its own name, as
    text: ``job``, ``run``, ``step``, ``generation``, ``rank``, ``node``. ``traceback`` is that of a
    bug.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        told = {
            "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        arguments = record.args if isinstance(record.args, tuple) else ()
        for one in arguments:
            told = {**_about(one), **told}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def _about(one: object) -> dict[str, str]:
    """Return what an argument of a record names."""
    if isinstance(one, CheckpointError):
        return {**one.context, "kind": one.kind}
    if isinstance(one, ShardId):
        return {**_about(one.checkpoint), "rank": str(one.rank)}
    if isinstance(one, CheckpointId):
        return {"run": one.run, "step": str(one.step), "generation": str(one.generation)}
    return {}
