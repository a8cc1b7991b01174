"""What a pod says of its launcher: whether it runs, how it has ended, that it can never begin."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.core.executions import CODE_MAX, REASON_LENGTH_MAX, LastWord, LaunchState, Outcome
from holdfast.core.records import from_record
from holdfast.core.text import tellable
from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.names import (
    JOB,
    MANAGED_BY,
    MANAGER,
    NODE,
    REFUSED,
    START,
    Document,
    job_of,
    pod_name,
)

Place: TypeAlias = tuple[str, str, int]
"""A node, a job, and the number of the start of its launcher there."""

USAGE_CODE = 2
"""What a command line that argparse refuses ends with."""
HOPELESS = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
    }
)
"""What a container waits for that does not come by itself."""
NOT_BEGUN = frozenset({"ContainerCannotRun", "StartError"})
"""Reasons of an end without a beginning: the image has no such program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A pod that is the launcher of a start on a node.

    ``stopping``: it was told to end. ``hopeless``: why it never begins; empty: it may.
    """

    place: Place
    namespace: str
    pod: str
    state: LaunchState
    stopping: bool = False
    hopeless: str = ""

    @property
    def alive(self) -> bool:
        """Whether something of it runs, or may come to."""
        return self.state.outcome is Outcome.RUNNING


def launcher_of(pod: Document) -> Launcher | None:
    """Return the launcher that a pod is; None: it is none of ours."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    node = (metadata.get("annotations") or {}).get(NODE, "")
    start = labels.get(START, "")
    if labels.get(MANAGED_BY) != MANAGER or not node or not _is_number(start):
        return None
    try:
        job = job_of(metadata["namespace"], labels.get(JOB, ""))
    except InvalidRequestError:
        return None
    word = _last_word(pod)
    if metadata["name"] != pod_name(job, int(start), node):
        return None  # a copy that somebody has made
    reason = tellable(word.reason if word else _waits(pod))[-REASON_LENGTH_MAX:]
    state = LaunchState(
        job=job,
        start=int(start),
        outcome=word.outcome if word else Outcome.RUNNING,
        code=max(-CODE_MAX, min(word.code, CODE_MAX)) if word else 0,
        reason=reason,
    )
    return Launcher(
        place=(node, job, int(start)),
        namespace=metadata["namespace"],
        pod=metadata["name"],
        state=state,
        stopping=bool(metadata.get("deletionTimestamp")),
        hopeless=_hopeless(pod),
    )


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= 15


def _last_word(pod: Document) -> LastWord | None:
    """Return how a launcher has ended; None: it has not."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    ranks = _ranks(pod)
    ended = ((ranks.get("state") or {}).get("terminated")) if ranks else None
    over = status.get("phase") in ("Succeeded", "Failed")
    never = metadata.get("deletionTimestamp") and not (pod.get("spec") or {}).get("nodeName")
    if not (ended or over or never):
        return None
    if REFUSED in annotations:
        return LastWord(outcome=Outcome.REFUSED, code=1, reason=annotations[REFUSED])
    if ended:
        return _terminated(ended, status)
    why = _why(status)
    return LastWord(outcome=Outcome.KILLED, reason=f"its pod has ended before it began{why}")


def _terminated(ended: Document, status: Document) -> LastWord:
    message, code = str(ended.get("message") or ""), int(ended.get("exitCode") or 0)
    try:
        return from_record(LastWord, json.loads(message))
    except (ValueError, RecursionError):
        pass  # it left no word: it was killed, or never began
    if ended.get("reason") in NOT_BEGUN or code == USAGE_CODE:
        reason = f"the launcher cannot be started: {message}"
        return LastWord(outcome=Outcome.REFUSED, code=code, reason=reason)
    how = f" with {ended['reason']}" if ended.get("reason") else ""
    reason = f"its launcher has ended{how}, exit code {code}{_why(status)}"
    said = f"{reason}: {message.strip()}" if message.strip() else reason
    return LastWord(outcome=Outcome.KILLED, code=code, reason=said)


def _why(status: Document) -> str:
    """Return what Kubernetes says of the end of a pod: evicted, preempted, not admitted."""
    told = [one for one in status.get("conditions") or () if one.get("type") == "DisruptionTarget"]
    texts = [status.get("reason"), status.get("message"), *(one.get("message") for one in told)]
    said = ": ".join(str(text) for text in texts if text)
    return f", {said}" if said else ""


def _ranks(pod: Document) -> Document | None:
    """Return the status of the container in which the launcher runs."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    first = containers[0]["name"] if containers else ""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((one for one in statuses if one["name"] == first), None)


def _hopeless(pod: Document) -> str:
    status = pod.get("status") or {}
    every = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    for one in every:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in HOPELESS:
            message = waiting.get("message") or ""
            return f"container {one['name']}: {waiting['reason']}: {message}".rstrip(": ")
    return ""


def _waits(pod: Document) -> str:
    """Return for what a pod waits that no node takes; empty: for nothing."""
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return f"its pod waits: {one.get('message') or one.get('reason') or 'not scheduled'}"
    return ""
