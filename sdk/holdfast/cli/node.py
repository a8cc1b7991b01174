"""The name of this node, as its agent says it."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.core.retry import Waits
from holdfast.errors import UnavailableError
from holdfast.rpc.channel import call, sync_channel, unix_target
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1.agent_pb2_grpc import AgentStub

CALL_S_MAX = 5.0
WAITS = Waits(first_s=0.1, wait_s_max=1.0, tries_max=60)
"""An executor and its agent are started together, so the agent may take a while."""


def agent_node(agent: Path) -> str:
    """Return the node of the agent at a socket.

    Raises:
        UnavailableError: it does not answer for about a minute.
    """
    with sync_channel(unix_target(agent)) as channel:
        stub = AgentStub(channel)
        for wait_s in WAITS:
            try:
                return str(call(stub.Describe, pb.DescribeRequest(), timeout_s=CALL_S_MAX).node)
            except UnavailableError:
                time.sleep(wait_s)
    raise UnavailableError(f"no agent answers at {agent}: start it, or correct HOLDFAST_AGENT")
