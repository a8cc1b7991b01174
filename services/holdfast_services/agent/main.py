"""Serves one node's agent."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict

from holdfast_services.agent.app import Agent
from holdfast_services.agent.settings import Settings
from holdfast_services.kit import runner
from holdfast_services.kit.ready import say_ready


async def serve(stop: asyncio.Event) -> None:
    """Run an agent until ``stop`` is set."""
    settings = Settings.from_env(os.environ)
    agent = Agent(settings)
    await agent.start()
    try:
        addresses = {
            "agent": str(settings.agent_socket),
            "rpc_address": agent.me.rpc_address,
            "endpoints": [asdict(endpoint) for endpoint in agent.me.endpoints],
            "metrics_url": agent.metrics_url,
        }
        say_ready(settings.ready_file, addresses)
        await agent.run(stop)
    finally:
        await agent.close()


def main() -> int:
    """Run the agent; returns the exit code."""
    return runner.run("agent", serve)
