"""A metadata service as users run it, and a stub that speaks to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
from tests.servers.services import SERVICES

from holdfast.core.decision import DecisionState
from holdfast.core.node_view import NodeView
from holdfast.rpc.channel import call, sync_channel
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast.v1.metadata_pb2_grpc import MetadataStub

ROOT = Path(__file__).parents[3]
START_S_MAX = 60.0
JOB = "gpt/small"


class Running:
    """The process and a stub that speaks to it."""

    def __init__(self, process, ready):
        self.process = process
        self.rest_url = ready["rest_url"]
        self.channel_address = ready["address"]
        self.channel = sync_channel(ready["address"])
        self.stub = MetadataStub(self.channel)
        self.http = httpx.Client(base_url=self.rest_url, timeout=30)

    def call(self, name, request):
        return call(getattr(self.stub, name), request, timeout_s=30)

    def register(self, rank, node, nonce=b"first", launcher="L"):
        return self.call(
            "RegisterRank",
            pb.RegisterRankRequest(
                spec={
                    "job": JOB,
                    "nonce": nonce,
                    "launcher": launcher,
                    "holder": "host:1",
                    "rank": rank,
                    "world_size": 2,
                    "replicas": 1,
                },
                node=node,
            ),
        ).seat

    def report(self, inventory):
        return from_message(self.call("Report", to_message(inventory, pb.Inventory)), NodeView)

    def save(self, kit):
        """Have a job of two ranks replicate step 10; return what a node hears then."""
        agents = [kit.Agent("a"), kit.Agent("b")]
        for rank, agent in enumerate(agents):
            seat = self.register(rank, agent.name)
            agent.serve(seat, rank)
        ends = time.monotonic() + START_S_MAX
        while self.report(agents[0].inventory()).runs[0].decision.state is DecisionState.PENDING:
            assert time.monotonic() < ends, "a catalogue that has just come listens for too long"
            self.report(agents[1].inventory())
        for agent in agents:
            for rank, owner in enumerate(agents):
                agent.hold(seat.run, 10, seat.generation, rank, owner=owner.name)
            view = self.report(agent.inventory())
        return view

    def stop(self):
        self.channel.close()
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def environment(folder):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'sdk'}{os.pathsep}{ROOT / 'services'}",
        "HOLDFAST_DATABASE_URL": f"sqlite:///{folder / 'catalogue.db'}",
        "HOLDFAST_LISTEN": "127.0.0.1:0",
        "HOLDFAST_REST_LISTEN": "127.0.0.1:0",
        "HOLDFAST_READY_FILE": str(folder / "ready.json"),
        "HOLDFAST_NODE_LEASE_S": "60",
    }


def start(folder):
    """Start one from nothing."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast_services.metadata"],
            env=environment(folder),
            stdout=log,
            stderr=log,
        )
    return ready(process, folder)


def fork(folder, **environ):
    """Fork one."""
    env = {**environment(folder), **environ}
    log = folder / "log"
    words = ("holdfast_services.metadata",)
    return ready(SERVICES.start(*words, env=env, log=log, folder=folder), folder)


def ready(process, folder):
    """Return a service once it serves."""
    ready = folder / "ready.json"
    ends = time.monotonic() + START_S_MAX
    while not ready.exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < ends, "not ready in time"
        time.sleep(0.05)
    return Running(process, json.loads(ready.read_text()))
