"""Launches, one row each, and the leases of their launchers.

Whoever changes a launch holds its row, so its decisions are taken one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import bindparam, delete, select

from holdfast.core.allocations import Allocation
from holdfast.core.records import from_record
from holdfast.core.rounds import Ending, RankFailure, Terms
from holdfast_services.kit.db import upsert
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.launch import (
    EndReason,
    Launch,
    Launcher,
    Member,
    RoundEnd,
)
from holdfast_services.metadata.storage.base import Statements

_L, _O = t.launches.c, t.launchers.c
_BODY = select(_L.body).where(_L.job == bindparam("job"))
_LOCK = _BODY.with_for_update()
_PUT = upsert(t.launches, ["job"], lambda new: {"body": new.body})
_JOBS = select(_O.job).distinct()
_ALL = select(_L.body).order_by(_L.job)
_FORGET = delete(t.launches).where(_L.job == bindparam("job"))
_BEAT = upsert(t.launchers, ["launcher"], lambda new: {"lease_until_s": new.lease_until_s})
_LOST = select(_O.launcher).where(
    _O.job == bindparam("job"), _O.lease_until_s <= bindparam("now_s")
)
_END = delete(t.launchers).where(_O.launcher == bindparam("of_launcher"))
_OF_ATTEMPT = (
    select(t.attempts.c.job)
    .join(
        t.runs,
        (t.runs.c.run == t.attempts.c.run) & (t.runs.c.generation == t.attempts.c.generation),
    )
    .where(t.attempts.c.nonce == bindparam("of_nonce"))
)


class LaunchStatements(Statements):
    """Statements about launches: one is read whole, and written whole if it has changed."""

    def lock_launch(self, job: str) -> Launch:
        """Return a job's launch and hold its row to the end; a new one if there is none."""
        fresh = {"job": job, "body": _body(Launch(job=job))}
        self._db.execute(self._insert(t.launches).values(fresh).on_conflict_do_nothing())
        return _launch(self._db.execute(_LOCK, {"job": job}).scalar_one())

    def launch(self, job: str) -> Launch:
        """Return a job's launch; a plain read."""
        body = self._db.execute(_BODY, {"job": job}).scalar_one_or_none()
        return Launch(job=job) if body is None else _launch(body)

    def launch_jobs(self) -> Sequence[str]:
        """Return the jobs that have launchers, in the order in which they are locked."""
        return sorted(self._db.execute(_JOBS).scalars())

    def launches(self) -> list[Launch]:
        """Return all launches; a plain read."""
        return [_launch(body) for body in self._db.execute(_ALL).scalars()]

    def save_launch(self, before: Launch, after: Launch) -> None:
        """Write a launch that has changed, forget one that nobody is or should be in."""
        gone = {one.id for one in before.launchers} - {one.id for one in after.launchers}
        for launcher in sorted(gone):
            self._db.execute(_END, {"of_launcher": launcher})
        if not after.launchers and not (after.allocation and after.allocation.shares):
            self._db.execute(_FORGET, {"job": after.job})
        elif after != before:
            self._put(_PUT, {"job": after.job, "body": _body(after)})

    def renew_launcher(self, launcher: str, job: str, until_s: float) -> None:
        """Give a launcher its lease until ``until_s``."""
        self._put(_BEAT, {"launcher": launcher, "job": job, "lease_until_s": until_s})

    def lost_launchers(self, job: str, now_s: float) -> frozenset[str]:
        """Return the launchers of a job whose leases have run out."""
        return frozenset(self._db.execute(_LOST, {"job": job, "now_s": now_s}).scalars())

    def jobs_of_attempt(self, nonce: bytes) -> Sequence[str]:
        """Return the jobs that a launch trains now, in the order in which they are locked."""
        return sorted(self._db.execute(_OF_ATTEMPT, {"of_nonce": nonce}).scalars())


def _body(launch: Launch) -> str:
    return json.dumps(asdict(launch))


def _launch(body: str) -> Launch:
    values: dict[str, Any] = json.loads(body)
    failure, ending, end = values["failure"], values["ending"], values.get("end")
    allocation = values.get("allocation")
    return Launch(
        **{
            **values,
            "terms": Terms(**values["terms"]),
            "launchers": tuple(Launcher(**one) for one in values["launchers"]),
            "members": tuple(
                Member(**{**one, "devices": tuple(one.get("devices", ()))})
                for one in values["members"]
            ),
            "restarts_at_s": tuple(values["restarts_at_s"]),
            "failure": failure and RankFailure(**failure),
            "ending": ending and Ending(**ending),
            "allocation": allocation and from_record(Allocation, allocation),
            "end": end and RoundEnd(**{**end, "reason": EndReason(end["reason"])}),
        }
    )
