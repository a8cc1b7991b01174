"""Submits HoldfastJobs, ends those that are deleted, and writes into each what becomes of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import logging
from typing import Any

from holdfast.errors import (
    AlreadyExistsError,
    CheckpointError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast_services.operator.domain.attending import (
    Attention,
    Cancel,
    Hold,
    Release,
    Submit,
    Tell,
    attend,
    is_over,
    refused_status,
    status_of,
)
from holdfast_services.operator.domain.job_specs import spec_of
from holdfast_services.operator.domain.launchers import launcher_of
from holdfast_services.operator.domain.names import (
    FINALIZER,
    GROUP,
    KIND,
    MANAGER,
    PLURAL,
    VERSION,
    Document,
    job_of,
    object_of,
)
from holdfast_services.operator.kubernetes import JOBS, PODS, Kubernetes, path_of
from holdfast_services.operator.nodes import SELECTOR
from holdfast_services.operator.scheduler import Scheduler

EVENT_LENGTH_MAX = 1_000
WARNINGS = ("failed", "refused")

log = logging.getLogger(__name__)


class Jobs:
    """All HoldfastJobs; ``turn`` again and again.

    Args:
        kubernetes: Where they are.
        scheduler: Who decides about them.
    """

    def __init__(self, kubernetes: Kubernetes, scheduler: Scheduler) -> None:
        self._kubernetes = kubernetes
        self._scheduler = scheduler
        self._unnoted: dict[str, str] = {}
        """Ids of submissions by uids of objects in which they could not be noted yet."""

    async def turn(self) -> None:
        """Do what is to be done now, for each object whatever becomes of the others.

        Raises:
            CheckpointError: Kubernetes or the scheduler does not answer.
        """
        objects = await self._kubernetes.list(JOBS)
        if not objects:
            return
        documents = await self._scheduler.jobs()
        used = await self._used() if any(map(_is_deleted, objects)) else set()
        known = {_uid(one) for one in objects}
        self._unnoted = {uid: i for uid, i in self._unnoted.items() if uid in known}
        silent: list[UnavailableError] = []
        for one in objects:
            try:
                await self._about(one, documents, used)
            except UnavailableError as error:
                silent.append(error)
            except NotFoundError:
                continue  # it has gone meanwhile
            except CheckpointError as error:
                log.warning("%s/%s: %s", *_key(one), error)
        if silent:
            raise silent[0]

    async def _used(self) -> set[tuple[str, str]]:
        """Return the objects of which there are pods."""
        found = map(launcher_of, await self._kubernetes.list(PODS, SELECTOR))
        return {object_of(one.place[1]) for one in found if one is not None}

    async def _about(
        self, one: Document, documents: dict[str, Document], used: set[tuple[str, str]]
    ) -> None:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        noted = self._noted(one)
        known = await self._known(noted, documents)
        for attention in attend(noted, known, pods=_key(one) in used, now=now):
            await self._pay(attention, one, now)

    def _noted(self, one: Document) -> Document:
        """Return an object with the submission that it would name if that could be noted."""
        status = one.get("status") or {}
        unnoted = self._unnoted.get(_uid(one))
        return (
            one if status.get("id") or not unnoted else {**one, "status": {**status, "id": unnoted}}
        )

    async def _known(self, one: Document, documents: dict[str, Document]) -> Document | None:
        """Return what the scheduler says of an object's job."""
        try:
            name = job_of(*_key(one))
        except InvalidRequestError:
            return None  # it was never submitted
        found = documents.get(name)
        if found is None and (
            _is_deleted(one) or ((one.get("status") or {}).get("id") and not is_over(one))
        ):
            return await self._scheduler.job(name)
        return found

    async def _pay(self, attention: Attention, one: Document, now: str) -> None:
        namespace, name = _key(one)
        finalizers = [f for f in one["metadata"].get("finalizers") or () if f != FINALIZER]
        match attention:
            case Hold():
                await self._change(one, {"finalizers": [*finalizers, FINALIZER]})
            case Release():
                await self._change(one, {"finalizers": finalizers})
            case Cancel():
                log.info("%s/%s is deleted: its job is cancelled", namespace, name)
                await self._scheduler.cancel(job_of(namespace, name))
            case Submit():
                await self._tell(one, await self._submitted(one, now))
            case Tell(status):
                await self._tell(one, status)

    async def _submitted(self, one: Document, now: str) -> dict[str, Any]:
        try:
            document = await self._scheduler.submit(spec_of(one))
            self._unnoted[_uid(one)] = document["id"]
            return status_of(one, document, now)
        except UnavailableError:
            raise
        except CheckpointError as error:
            final = isinstance(error, InvalidRequestError)
            return refused_status(one, error.message, now, final=final)

    async def _change(self, one: Document, metadata: dict[str, Any]) -> None:
        version = one["metadata"].get("resourceVersion")
        guarded = {**metadata, "resourceVersion": version} if version else metadata
        await self._kubernetes.patch(
            path_of(_key(one)[0], PLURAL, _key(one)[1]), {"metadata": guarded}
        )

    async def _tell(self, one: Document, status: dict[str, Any]) -> None:
        before = one.get("status") or {}
        if status == before:
            return
        namespace, name = _key(one)
        gone = dict.fromkeys(before.keys() - status.keys())
        nodes = dict.fromkeys((before.get("nodes") or {}).keys() - status.get("nodes", {}).keys())
        change: dict[str, Any] = {**gone, **status}
        if nodes and "nodes" in status:
            change["nodes"] = {**nodes, **status["nodes"]}
        path = f"{path_of(namespace, PLURAL, name)}/status"
        await self._kubernetes.patch(path, {"status": change})
        if before.get("state") != status["state"]:
            with contextlib.suppress(AlreadyExistsError):
                await self._kubernetes.create(path_of(namespace, "events"), _event(one, status))


def _key(one: Document) -> tuple[str, str]:
    return one["metadata"]["namespace"], one["metadata"]["name"]


def _uid(one: Document) -> str:
    return str(one["metadata"].get("uid") or "/".join(_key(one)))


def _is_deleted(one: Document) -> bool:
    return bool(one["metadata"].get("deletionTimestamp"))


def _event(one: Document, status: Document) -> dict[str, Any]:
    """Return the event that tells of a new state; its name is of its content: told once."""
    namespace, name = _key(one)
    when = max(condition["lastTransitionTime"] for condition in status["conditions"])
    said = f"{one['metadata'].get('uid')} {status['state']} {when} {status.get('why')}"
    message = status.get("message") or status.get("why") or status["state"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{name}.{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}",
            "namespace": namespace,
        },
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": one["metadata"].get("uid", ""),
        },
        "type": "Warning" if status["state"] in WARNINGS else "Normal",
        "reason": status["state"].capitalize(),
        "message": str(message)[:EVENT_LENGTH_MAX],
        "source": {"component": MANAGER},
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
