"""Memory of a slot on the NUMA node of the rank that writes it.

A page of a slot comes from the node of the processor that *allocates* it, and that is a thread of
the agent: who writes it first does not matter (``posix_fallocate`` on tmpfs; checked on a machine
with two nodes by ``tests/rdma/test_numa.py``). So the thread runs on the rank's processors
meanwhile, if these are all of one node. Machines with one node, and ranks that may run anywhere,
are left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NODES = Path("/sys/devices/system/node")

log = logging.getLogger(__name__)


def bound_cpus(
    cpus: Collection[int], nodes: Mapping[int, Collection[int]]
) -> frozenset[int] | None:
    """Return ``cpus`` if they are all of one of several ``nodes``, else None.

    >>> bound_cpus({2, 3}, {0: {0, 1}, 1: {2, 3}}), bound_cpus({1, 2}, {0: {0, 1}, 1: {2, 3}})
    (frozenset({2, 3}), None)
    """
    held = [node for node, each in nodes.items() if not set(cpus).isdisjoint(each)]
    return frozenset(cpus) if len(nodes) > 1 and len(held) == 1 else None


def cpus_of(text: str) -> frozenset[int]:
    """Return the processors of a list as the kernel writes it.

    >>> sorted(cpus_of("0-2,5")), cpus_of("")
    ([0, 1, 2, 5], frozenset())
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def memory_nodes(nodes: Path = NODES) -> dict[int, frozenset[int]]:
    """Return the processors of each NUMA node; empty: this machine does not say."""
    files = nodes.glob("node*/cpulist")
    return {int(path.parent.name[4:]): cpus_of(path.read_text()) for path in files}


@contextmanager
def on_node_of(pid: int | None, nodes: Path = NODES) -> Iterator[None]:
    """Have this thread run on the node of a process meanwhile; None: wherever it likes.

    Where that cannot be, as in a container without these processors, it runs where it did.
    """
    before = os.sched_getaffinity(0)
    moved = _move(pid, nodes)
    try:
        yield
    finally:
        if moved:
            os.sched_setaffinity(0, before)


def _move(pid: int | None, nodes: Path) -> bool:
    if not pid:
        return False
    try:
        cpus = bound_cpus(os.sched_getaffinity(pid), memory_nodes(nodes))
        if cpus is None:
            return False
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        log.info("slots of process %d are not on its NUMA node: %s", pid, error)
        return False
    return True
