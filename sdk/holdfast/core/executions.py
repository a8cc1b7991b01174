"""What executors say, and what they are told: launches of a node, orders for it.

A report and orders are levels: whole, replaced by the next, so that a repeat or a loss is harmless.
An executor starts the launcher of one *start* once, whatever becomes of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from holdfast.core.ids import job_name, session_id
from holdfast.errors import InvalidRequestError

GPUS_PER_NODE_MAX = 64
LAUNCHES_MAX = 10_000
REASON_LENGTH_MAX = 4_000
CODE_MAX = 255
LEASE_S = 15.0
"""So long after its last report an executor counts as there, and what it was told as its own."""
_TYPE = re.compile(r"[A-Za-z0-9._-]{0,64}")


class Outcome(Enum):
    """How the launcher of a start has ended; RUNNING: it has not."""

    RUNNING = "running"
    ENDED = "ended"  # the script has ended well, on all nodes
    FAILED = "failed"  # the script has failed, for good
    OUTSIDE = "outside"  # what has failed was not the script
    STOPPED = "stopped"  # it was told to end by a signal
    RELEASED = "released"  # it was told to end, as the launch goes on, or ends, without it
    REFUSED = "refused"  # it could not begin
    KILLED = "killed"  # it left no word


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """How a launcher has ended: its exit code, and why, for people; that it runs is no end."""

    outcome: Outcome
    code: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if self.outcome is Outcome.RUNNING:
            raise InvalidRequestError("outcome: running is no end")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchState:
    """A launcher of this node, or what became of it; ``code`` is of its exit.

    ``reason`` is for people, one line and, of a failed script, its traceback.
    """

    job: str
    start: int
    outcome: Outcome = Outcome.RUNNING
    code: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorReport:
    """All that an executor says of its node; of two, the one with the higher ``sequence`` counts.

    ``executor`` names this process. ``applied``: the number of the newest orders that it has
    carried out. ``leaving``: the node will be taken away.
    """

    executor: str
    sequence: int
    gpus: int
    gpu_type: str = ""
    spot: bool = False
    leaving: str = ""
    applied: int = 0
    launches: tuple[LaunchState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launcher that this node is to have.

    ``gpus`` ranks at first; each round says how many it has then. ``leaving``: it is told to end by
    the metadata service, so it is neither started nor stopped. ``nodes_max`` is the same on all
    nodes. What is not ordered is ended: by SIGTERM, and ``grace_s`` later by SIGKILL.
    """

    job: str
    start: int
    gpus: int
    nodes_max: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    grace_s: float = 30.0
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All that an executor should have; ``poll_s``: ask again so often, or count as lost."""

    version: str = ""
    number: int = 0
    orders: tuple[Order, ...] = ()
    poll_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRequest:
    """A report, and how long it waits for other orders than those of ``version``."""

    report: ExecutorReport
    version: str = ""
    wait_s: float = 0.0


def check(report: ExecutorReport) -> None:
    """Refuse a report whose names or numbers make no sense.

    Raises:
        InvalidRequestError: names the field.
    """
    session_id(report.executor)
    if not 0 <= report.gpus <= GPUS_PER_NODE_MAX:
        raise InvalidRequestError(f"gpus: {report.gpus} is not within 0..{GPUS_PER_NODE_MAX}")
    if not _TYPE.fullmatch(report.gpu_type):
        raise InvalidRequestError(f"gpu_type {report.gpu_type[:80]!r} is no name of a type")
    if len(report.launches) > LAUNCHES_MAX:
        raise InvalidRequestError(f"launches: {len(report.launches)} are more than {LAUNCHES_MAX}")
    if len(report.leaving) > REASON_LENGTH_MAX:
        raise InvalidRequestError("leaving: the reason is too long")
    if report.sequence < 0 or report.applied < 0:
        raise InvalidRequestError("sequence and applied must not be negative")
    for launch in report.launches:
        job_name(launch.job)
        if launch.start < 0 or not -CODE_MAX <= launch.code <= CODE_MAX:
            raise InvalidRequestError(f"launch of {launch.job}: start or code makes no sense")
        if len(launch.reason) > REASON_LENGTH_MAX:
            raise InvalidRequestError(f"launch of {launch.job}: its reason is too long")
