"""Short calls by which ``doctor`` learns which services answer."""

from __future__ import annotations

import email.utils
import http.client
import json
import time
import urllib.error
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import CheckpointError
from holdfast.rpc import rest

TIMEOUT_S = 3.0
DETAIL_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataFacts:
    """A metadata service as it answered.

    ``skew_s`` is its clock minus ours, to about 1 s; None: not seen. ``unready`` says why its
    catalogue cannot be written or read, empty: it can, or nobody was asked.
    """

    address: str
    error: str = ""
    version: str = ""
    protocols: tuple[int, int] = (0, 0)
    skew_s: float | None = None
    unready: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFacts:
    """How a kind of transport fares at an agent; ``problem`` empty: it has none."""

    kind: str
    place: str = ""
    fetched_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """An agent as it answered.

    ``free_bytes``: in the file system of its arena, of which slots still need ``wanted_bytes``.
    """

    socket: Path
    error: str = ""
    node: str = ""
    budget_bytes: int = 0
    used_bytes: int = 0
    metadata_reachable: bool = False
    metadata_address: str = ""
    transports: tuple[TransportFacts, ...] = ()
    unchanged_bytes: int = 0
    replicate_bytes_per_s: int = 0
    arena: str = ""
    free_bytes: int = 0
    wanted_bytes: int = 0


def probe_metadata(address: str) -> MetadataFacts:
    """Return what the service at ``address`` says; its silence is in ``error``."""
    from holdfast.rpc.channel import call, sync_channel  # noqa: PLC0415 - grpc is slow to import
    from holdfast.v1 import common_pb2  # noqa: PLC0415
    from holdfast.v1.metadata_pb2_grpc import MetadataStub  # noqa: PLC0415

    try:
        with sync_channel(address) as channel:
            request = common_pb2.HandshakeRequest()
            stub = MetadataStub(channel)
            answer = call(stub.Handshake, request, timeout_s=TIMEOUT_S, address=address)
    except CheckpointError as error:
        return MetadataFacts(address=address, error=str(error))
    skew_s, unready = _ask_rest(answer.rest_url)
    return MetadataFacts(
        address=address,
        version=answer.software_version,
        protocols=(answer.protocol_min, answer.protocol_max),
        skew_s=skew_s,
        unready=unready,
    )


def probe_agent(socket: Path) -> AgentFacts:
    """Return what the agent at ``socket`` says; its silence is in ``error``."""
    from holdfast.rpc.channel import (  # noqa: PLC0415 - grpc is slow to import
        call,
        sync_channel,
        unix_target,
    )
    from holdfast.v1 import agent_pb2  # noqa: PLC0415
    from holdfast.v1.agent_pb2_grpc import AgentStub  # noqa: PLC0415

    try:
        with sync_channel(unix_target(socket)) as channel:
            request = agent_pb2.DescribeRequest()
            answer = call(AgentStub(channel).Describe, request, timeout_s=TIMEOUT_S)
    except CheckpointError as error:
        return AgentFacts(socket=socket, error=str(error))
    return AgentFacts(
        socket=socket,
        node=answer.node,
        budget_bytes=answer.budget_bytes,
        used_bytes=answer.used_bytes,
        metadata_reachable=answer.metadata_reachable,
        metadata_address=answer.metadata_address,
        transports=tuple(
            TransportFacts(
                kind=one.kind, place=one.place, fetched_bytes=one.fetched_bytes, problem=one.problem
            )
            for one in answer.transports
        ),
        unchanged_bytes=answer.unchanged_bytes,
        replicate_bytes_per_s=answer.replicate_bytes_per_s,
        arena=answer.arena,
        free_bytes=answer.free_bytes,
        wanted_bytes=answer.wanted_bytes,
    )


def _ask_rest(rest_url: str) -> tuple[float | None, str]:
    """Return the service's clock minus ours, None if unseen, and why it is not ready, if so."""
    if not rest_url.startswith(("http://", "https://")):
        return None, ""
    try:
        with rest.opener().open(f"{rest_url.rstrip('/')}/readyz", timeout=TIMEOUT_S) as answer:
            return _skew_s(answer.headers["Date"]), ""
    except urllib.error.HTTPError as refused:
        with refused:
            return _skew_s(refused.headers["Date"]), _detail(refused)
    except TimeoutError:
        return None, f"{rest_url} does not say within {TIMEOUT_S:.0f} s whether it is ready"
    except (OSError, http.client.HTTPException):
        return None, ""  # REST may be closed to this machine, and another server stand there


def _skew_s(date: str | None) -> float | None:
    """Return the clock of an answer's Date minus ours; None if it has none."""
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp() - time.time()
    except (TypeError, ValueError):
        return None


def _detail(refused: urllib.error.HTTPError) -> str:
    """Return what the problem+json of an error says."""
    try:
        return str(json.loads(refused.read(DETAIL_BYTES_MAX))["detail"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return str(refused)
