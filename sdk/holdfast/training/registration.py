"""What a rank says of itself when it opens its session, and what it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.facts import PersistRule, Retention, Start
from holdfast.core.ids import CheckpointId
from holdfast.rpc.codec import to_message
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2, metadata_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a rank says of itself when it opens its session.

    ``retention`` None leaves the job the policy that it has.
    """

    job: str
    nonce: bytes
    launcher: str
    holder: str
    takeover: bool
    rank: int
    world_size: int
    local_world_size: int
    replicas: int
    replica_domain: str
    persist: PersistRule = field(default_factory=PersistRule)
    retention: Retention | None = None
    start: Start | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What the catalogue answered: the run, and this attempt's generation in it."""

    run: str
    generation: int
    node: str
    arena: Path


@dataclass(frozen=True, slots=True)
class Begun:
    """How an attempt that trains has begun: under which generation, from which checkpoint.

    ``generation`` 0: it does not train yet. ``restored`` None, while it trains: from step 0.
    """

    generation: int = 0
    restored: CheckpointId | None = None


def open_request(session: str, attempt: Attempt, begun: Begun) -> pb.OpenSessionRequest:
    """Return the request that opens ``session`` for ``attempt``, as far as that has ``begun``."""
    return pb.OpenSessionRequest(
        session=session,
        job=attempt.job,
        nonce=attempt.nonce,
        launcher=attempt.launcher,
        holder=attempt.holder,
        takeover=attempt.takeover,
        rank=attempt.rank,
        world_size=attempt.world_size,
        local_world_size=attempt.local_world_size,
        replicas=attempt.replicas,
        replica_domain=attempt.replica_domain,
        persist=to_message(attempt.persist, metadata_pb2.PersistRule)
        if attempt.persist.on
        else None,
        retention=to_message(attempt.retention, metadata_pb2.Retention)
        if attempt.retention
        else None,
        start=to_message(attempt.start, metadata_pb2.Start) if attempt.start else None,
        generation=begun.generation,
        restored=to_message(begun.restored, common_pb2.CheckpointId) if begun.restored else None,
    )
