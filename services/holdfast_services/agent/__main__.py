"""``python -m holdfast_services.agent``: one node's agent; see ``settings`` for its environment."""

from __future__ import annotations

import asyncio
import json
import logging
import os

from holdfast_services.agent.app import Agent
from holdfast_services.agent.settings import Settings
from holdfast_services.kit import runner
from holdfast_services.transport.tcp import TcpTransport


def _announce(settings: Settings, agent: Agent) -> None:
    """Say where this agent is reached, by rename: a reader sees all of it or nothing."""
    if settings.ready_file is None:
        return
    temporary = settings.ready_file.with_suffix(".tmp")
    temporary.write_text(
        json.dumps(
            {
                "agent": str(settings.agent_socket),
                "rpc_address": agent.me.rpc_address,
                "data_address": agent.me.data_address,
            }
        )
    )
    temporary.replace(settings.ready_file)


async def serve(stop: asyncio.Event) -> None:
    """Run an agent until ``stop`` is set."""
    settings = Settings.from_env(os.environ)
    agent = Agent(settings, TcpTransport(settings.listen_host, settings.data_port))
    await agent.start()
    try:
        _announce(settings, agent)
        await agent.run(stop)
    finally:
        await agent.close()


if __name__ == "__main__":
    code = runner.run("agent", serve)
    logging.shutdown()
    # Not sys.exit: that joins every thread, also one that hangs in a read of an object store.
    os._exit(code)
