"""What is to be done about a HoldfastJob: pure, from the object and what the scheduler says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.core.records import to_record
from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.job_specs import spec_of
from holdfast_services.operator.domain.names import FINALIZER, Document

OVER = {"ended": "Ended", "failed": "Failed", "cancelled": "Cancelled"}
"""States of a job that is over, and the reasons of conditions."""
TRAINING = ("running", "rescaling")
SEEN = ("command", "environment", "folder", "gpus_min", "gpus_max", "meshes", "owner", "priority")
"""Fields of a job's spec that the scheduler shows; of its environment names."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Have Kubernetes keep the object until we let go of it."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Ask the scheduler to take the job on."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ask the scheduler to end the job."""


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of the object."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Set the object's status."""

    status: dict[str, Any]


Attention: TypeAlias = Hold | Submit | Cancel | Release | Tell


def is_over(job: Document) -> bool:
    """Tell whether nothing more becomes of the submission that the object stands for."""
    return (job.get("status") or {}).get("state") in OVER


def attend(
    job: Document, document: Document | None, *, pods: bool, now: str
) -> Iterable[Attention]:
    """Yield what is to be done now.

    Args:
        job: The HoldfastJob.
        document: What the scheduler says of the job of this name; None: it knows none.
        pods: Whether pods of it are there.
        now: The time, as Kubernetes writes it.
    """
    metadata, status = job["metadata"], job.get("status") or {}
    held = FINALIZER in (metadata.get("finalizers") or ())
    ours = document is not None and document["id"] == status.get("id")
    if metadata.get("deletionTimestamp"):
        if held:
            ours = ours or (not is_over(job) and _would_be(job, document))
            yield from _deleted(document if ours else None, pods=pods)
    elif not held:
        yield Hold()
    elif not status.get("id"):
        if status.get("refusedGeneration", -1) != metadata.get("generation", 0):
            yield Submit()
    elif document is not None and ours:
        told = status_of(job, document, now)
        if told != status:
            yield Tell(told)
    elif not is_over(job):
        # The scheduler has lost its database, or another submission has taken the name.
        yield Submit()


def _would_be(job: Document, document: Document | None) -> bool:
    """Tell whether a job is what would be submitted: it may have been, and nobody noted it."""
    try:
        spec = to_record(spec_of(job))
    except InvalidRequestError:
        return False
    spec["environment"] = sorted(spec["environment"])
    return document is not None and all(document.get(key) == spec[key] for key in SEEN)


def _deleted(document: Document | None, *, pods: bool) -> Iterable[Attention]:
    if document is not None and document["state"] not in OVER:
        yield Cancel()
    elif not pods:
        yield Release()


def status_of(job: Document, document: Document, now: str) -> dict[str, Any]:
    """Return the status of an object whose job the scheduler has taken on."""
    before = job.get("status") or {}
    state, why, message = document["state"], str(document["why"]), str(document["message"])
    over = state in OVER
    end = (message if over else "") or state
    conditions = [
        _condition("Accepted", True, "Submitted", "the scheduler has taken it on"),
        _condition("Running", state in TRAINING, state.capitalize(), why or state),
        _condition("Finished", over, OVER.get(state, "NotYet"), end),
    ]
    texts = {"message": message, "why": why}
    return {
        "id": document["id"],
        "state": state,
        **{key: text for key, text in texts.items() if text},
        "gpus": document["gpus"],
        "nodes": dict(document["nodes"]),
        "allocation": document["allocation"],
        "observedGeneration": job["metadata"].get("generation", 0),
        "conditions": _dated(conditions, before, now),
    }


def refused_status(job: Document, why: str, now: str, *, final: bool) -> dict[str, Any]:
    """Return the status of an object that the scheduler does not take on.

    ``final``: it never does, until the object is changed.
    """
    generation = job["metadata"].get("generation", 0)
    reason = "Refused" if final else "Waiting"
    conditions = [_condition("Accepted", False, reason, why)]
    status = {
        "state": reason.lower(),
        "why": why,
        "observedGeneration": generation,
        "conditions": _dated(conditions, job.get("status") or {}, now),
    }
    return {**status, "refusedGeneration": generation} if final else status


def _condition(kind: str, holds: bool, reason: str, message: str) -> dict[str, Any]:
    return {"type": kind, "status": str(bool(holds)), "reason": reason, "message": message}


def _dated(conditions: list[dict[str, Any]], before: Document, now: str) -> list[dict[str, Any]]:
    """Return conditions with the time at which each became what it is."""
    known = {one["type"]: one for one in before.get("conditions") or ()}
    dated = []
    for one in conditions:
        old = known.get(one["type"])
        same = old is not None and old["status"] == one["status"]
        since = old["lastTransitionTime"] if old is not None and same else now
        dated.append({**one, "lastTransitionTime": since})
    return dated
