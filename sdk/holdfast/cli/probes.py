"""Who answers: short questions to the services that ``doctor`` was told of."""

from __future__ import annotations

import email.utils
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import CheckpointError

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataFacts:
    """A metadata service as it answered; ``skew_s`` is its clock minus ours, to about 1 s."""

    address: str
    error: str = ""
    version: str = ""
    protocols: tuple[int, int] = (0, 0)
    skew_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """An agent as it answered."""

    socket: Path
    error: str = ""
    node: str = ""
    budget_bytes: int = 0
    used_bytes: int = 0
    metadata_reachable: bool = False


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
    return MetadataFacts(
        address=address,
        version=answer.software_version,
        protocols=(answer.protocol_min, answer.protocol_max),
        skew_s=_skew_s(answer.rest_url) if answer.rest_url else None,
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
    )


def _skew_s(rest_url: str) -> float | None:
    """Return the service's clock minus ours, from the Date of an answer; None if unseen."""
    if not rest_url.startswith(("http://", "https://")):
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{rest_url.rstrip('/')}/healthz", timeout=TIMEOUT_S) as answer:
            theirs = email.utils.parsedate_to_datetime(answer.headers["Date"])
    except (OSError, TypeError, ValueError):
        return None
    return theirs.timestamp() - time.time()
