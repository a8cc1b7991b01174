"""What an agent that starts makes of an arena in which others have been: it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.core.facts import Peer
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.recovery import adopt
from holdfast_services.transport import ServedSegments

PAGE = 4096
SESSION = "0" * 32
INFINITE = b'{"version":1,"algorithm":"xxh3-128","shard":"r1/5/1/0/0","job":"j","world_size":1e999}'


def old_session(arena: Path) -> None:
    """A folder where a lock file should be, not made just now."""
    (arena / "sessions" / SESSION).mkdir()
    os.utime(arena / "sessions" / SESSION, (1, 1))


ODD = {
    "a folder that looks like an interrupted write": lambda arena: (arena / "x.tmp").mkdir(),
    "a folder that looks like a session": old_session,
    "a folder for a sidecar": lambda arena: (arena / "s1.1.sum").mkdir(),
    "a pipe for a sidecar": lambda arena: os.mkfifo(arena / "s1.1.sum"),
    "a pipe for a slot": lambda arena: os.mkfifo(arena / "s2.1.seg"),
    "a link for a slot": lambda arena: (arena / "s2.1.seg").symlink_to("/etc/passwd"),
    "a deep sidecar": lambda arena: (arena / "s1.1.sum").write_bytes(b"[" * 100_000),
    "an infinite sidecar": lambda arena: (arena / "s1.1.sum").write_bytes(INFINITE),
    "half a sidecar": lambda arena: (arena / "s1.1.sum").write_bytes(INFINITE[:40]),
    "a name that is no text": lambda arena: (arena / os.fsdecode(b"s1.1.\xff")).touch(),
}


@pytest.mark.parametrize("put", ODD.values(), ids=ODD)
def test_an_agent_starts_whatever_lies_in_its_arena(tmp_path, put):
    """P4, P9: else no rank of this node is saved, and what its neighbours hold is not served."""
    folder = tmp_path / "arena"
    (folder / "sessions").mkdir(parents=True)
    (folder / "s1.1.seg").write_bytes(bytes(PAGE))
    put(folder)
    arena = Arena(folder, PAGE)
    peer = Peer(node="a", rpc_address="", data_address="", domain="")
    try:
        state = adopt(arena, ServedSegments(), peer)
    finally:
        arena.close()

    assert {"s1": "s1.1.free"} == {key: slot.name.file_name for key, slot in state.slots.items()}
