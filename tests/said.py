"""What ranks say, made of plain fields: tests name only those they are about."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.inventory import Endpoint, RankStatus
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.reports import RankReport
from holdfast.core.session import SessionUpdate
from holdfast_services.agent.domain import Session
from holdfast_services.metadata.domain.attempts import Registration


def tcp(address: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of a peer that serves there over TCP and over nothing else."""
    return (Endpoint(kind="tcp", address=address),)


def attempt_spec(**said: Any) -> AttemptSpec:
    """Return a spec of job ``job``, rank 0 of 1, unless said otherwise."""
    said["persist"] = said.get("persist") or PersistRule()
    plain = {"job": "job", "nonce": b"n", "launcher": "L", "holder": "h", "rank": 0}
    return AttemptSpec(**{**plain, "world_size": 1, **said})


def registration(*, node: str, generation_min: int = 0, **said: Any) -> Registration:
    """Return the wish of a rank on ``node``; ``said`` goes into its spec."""
    return Registration(spec=attempt_spec(**said), node=node, generation_min=generation_min)


def rank_status(**said: Any) -> RankStatus:
    """Return a status; what a rank says of itself goes into its report."""
    own, reported = _split(RankReport, said)
    return RankStatus(**own, report=RankReport(**reported))


def session_update(**said: Any) -> SessionUpdate:
    """Return an update; what a rank says of itself goes into its report."""
    own, reported = _split(RankReport, said)
    return SessionUpdate(**own, report=RankReport(**reported))


def agent_session(*, run: str = "r1", generation: int = 1, **said: Any) -> Session:
    """Return a session as an agent opens it; spec, report and the rest from plain fields."""
    rest, spec = _split(AttemptSpec, said)
    own, reported = _split(RankReport, rest)
    return Session(
        **own,
        spec=attempt_spec(**spec),
        seat=Seat(run=run, generation=generation),
        report=RankReport(**reported),
    )


def _split(cls: type[Any], said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is not and what is a field of ``cls``."""
    names = {spec.name for spec in fields(cls)}
    inside = {name: value for name, value in said.items() if name in names}
    return {name: value for name, value in said.items() if name not in names}, inside


def changed_status(status: RankStatus, **said: Any) -> RankStatus:
    """Return ``status`` with what is said now, of the rank or by it."""
    own, reported = _split(RankReport, said)
    return replace(status, **own, report=replace(status.report, **reported))


def changed_wish(wish: Registration, **said: Any) -> Registration:
    """Return ``wish`` of another spec."""
    return replace(wish, spec=replace(wish.spec, **said))


def changed_session(session: Session, **said: Any) -> Session:
    """Return ``session`` with what is said now, of the rank or by it."""
    rest, spec = _split(AttemptSpec, said)
    own, reported = _split(RankReport, rest)
    return replace(
        session,
        **own,
        spec=replace(session.spec, **spec),
        report=replace(session.report, **reported),
    )
