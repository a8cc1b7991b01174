"""How near a verified fetch between two processes comes to bare sockets, both on loopback."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from tests.bench import engines
from tests.bench.bare import BARE, HOST, fetch_bare, send_bare, touched
from tests.bench.harness import Record, in_turn, share
from tests.bench.subject import PATIENCE_S, Saving, Subject
from tests.e2e.stack import Stack, running_stack

from holdfast.core.slot_names import SlotName, SlotState
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast_services.transport import Fetch, FetchRequest, ServedSegments
from holdfast_services.transport.tcp import TcpTransport

NAMES = ("fetch_tcp/bare", "fetch_tcp/mooncake", "fetch_tcp/nixl", "replicate/bare")
KEY = "bench/1/1/0/0"  # run, step, generation, rank, volume
RUNS = 9
REPLICATE_RUNS = 5
ENGINE_RUNS = 5
ENGINE_TIMES_MIN = {"mooncake": 2.0, "nixl": 0.0}


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the fractions of the bare speed: of a fetch alone, and of replicating a save."""
    length_bytes = (1 << 30) // (16 if quick else 1)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(there, length_bytes), daemon=True)
    server.start()
    endpoints, bare_port, digests = here.recv()
    destination = memoryview(touched(length_bytes))
    request = FetchRequest(key=KEY, incarnation=1, length_bytes=length_bytes, digests=digests)
    transport = TcpTransport(HOST)

    def ours() -> float:
        started_s = time.perf_counter()
        transport.fetch(endpoints, Fetch(request, destination))
        return time.perf_counter() - started_s

    def bare() -> float:
        return fetch_bare(bare_port, destination)

    ours_s, bare_s = in_turn(ours, bare, runs=RUNS)
    yield share(
        "fetch_tcp/bare",
        ours_s,
        bare_s,
        peer=BARE,
        length_bytes=length_bytes,
        note="two processes, loopback, every part verified",
        share_min=0.7,
    )
    yield from _engines(ours, length_bytes)
    with running_stack(2, forked=False) as stack:
        os.environ["HOLDFAST_AGENT"] = str(stack.node(0)["agent"])
        yield _replicate(stack, bare, length_bytes)
    server.terminate()
    server.join()


def _engines(ours: Callable[[], float], length_bytes: int) -> Iterator[Record]:
    """Yield how many times faster we are than the engines of others that run here."""
    for name in engines.ENGINES:
        with engines.running(name, length_bytes) as theirs:
            if theirs is None:
                continue
            ours_s, peer_s = in_turn(ours, theirs, runs=ENGINE_RUNS)
        yield share(
            f"fetch_tcp/{name}",
            ours_s,
            peer_s,
            peer=f"{engines.ENGINES[name]}, TCP, nothing verified",
            length_bytes=length_bytes,
            note="two processes each, loopback, ours verified",
            share_min=ENGINE_TIMES_MIN[name],
        )


def _replicate(stack: Stack, bare: Callable[[], float], length_bytes: int) -> Record:
    """Return how fast a sealed segment comes to be held on a second node.

    By the sidecars: a save's levels come in one message when the second node is quick.
    """
    saving = Saving(
        Subject(tensors_count=201, length_bytes=length_bytes), job="replicate", replicas=1
    )

    def ours() -> float:
        saving.subject.optimizer.step()  # every part changes; while copies are made nobody trains
        saving.subject.steps_done += 1
        handle = saving.ck.save(saving.subject.steps_done)
        handle.wait("replicated", timeout_s=PATIENCE_S)
        return _sealed_s(stack.arena(1)) - _sealed_s(stack.arena(0))

    ours_s, bare_s = in_turn(ours, bare, runs=REPLICATE_RUNS)
    saving.ck.close()
    return share(
        "replicate/bare",
        ours_s,
        bare_s,
        peer=BARE,
        length_bytes=saving.subject.length_bytes,
        note="from sealed to held on the second node, two agents, verified",
        share_min=0.0,
    )


def _sealed_s(arena: Path) -> float:
    """Return when the newest segment there was sealed, by the clock of the file system."""
    return max(sidecar.stat().st_mtime for sidecar in arena.rglob("*.sum"))


def _serve(there: Connection, length_bytes: int) -> None:
    """Serve the same bytes both ways until this process is ended."""
    view = memoryview(touched(length_bytes))
    segments = ServedSegments()
    segments.put(KEY, SlotName("s1", 1, SlotState.SEALED), view)
    endpoints = TcpTransport(HOST).serve(segments)
    begins = range(0, length_bytes, PART_BYTES)
    digests = tuple(part_digest(view[begin : begin + PART_BYTES]) for begin in begins)
    listener = socket.create_server((HOST, 0))
    there.send((endpoints, listener.getsockname()[1], digests))
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=send_bare, args=(connection, view), daemon=True).start()
