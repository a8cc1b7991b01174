"""What an agent that starts makes of an arena in which others have been: it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.said import tcp

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import Peer
from holdfast.format.boxes import whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast_services.agent import sealer
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
    peer = Peer(node="a", rpc_address="", endpoints=tcp(""), domain="")
    try:
        state = adopt(arena, ServedSegments(), peer)
    finally:
        arena.close()

    assert {"s1": "s1.1.free"} == {key: slot.name.file_name for key, slot in state.slots.items()}


def segment(step):
    """The bytes of a real segment, header included."""
    key = ShardId(RunId("r1"), Step(step), Generation(1), Rank(0))
    specs = [TensorSpec(fqn="w", dtype="U8", shape=(PAGE,), box=whole((PAGE,)))]
    identity = SegmentIdentity(id=key, job="j", world_size=1, plan_hash="0" * 32, parent=None)
    head = header_template(identity, specs).fill(step=step, generation=1, parent=None)
    return head + bytes(PAGE)


ME = Peer(node="a", rpc_address="", endpoints=tcp(""), domain="")
SIDECARS = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "of other digests": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"parts": "', b'"parts": "00')
    ),
}


@pytest.mark.parametrize("harm", SIDECARS.values(), ids=SIDECARS)
def test_an_agent_starts_beside_a_segment_whose_sidecar_is_gone_or_torn(tmp_path, harm):
    """P6: the segment says itself what it is; it is hashed again, served, and noted once more."""
    folder = tmp_path / "arena"
    (folder / "sessions").mkdir(parents=True)
    (folder / "s1.1.seg").write_bytes(segment(7))
    for life in range(3):
        arena, served = Arena(folder, 64 * PAGE), ServedSegments()
        try:
            held = adopt(arena, served, ME).slots["s1"]
            known = sealer.recall(arena, held.name, held.length_bytes)
            assert segment(7) == bytes(served.lookup("r1/7/1/0/0", 1) or b"")
        finally:
            arena.close()

        assert held.content is not None
        assert held.content.shard.id.key == "r1/7/1/0/0"
        assert held.content == known
        if life == 0:
            harm(folder / "s1.1.sum")


def test_of_two_copies_in_equal_incarnations_the_one_that_is_kept_is_served(tmp_path):
    """A3: the machine frees the other one in its first turn; what that withdraws is its own."""
    folder = tmp_path / "arena"
    (folder / "sessions").mkdir(parents=True)
    for slot in ("s1", "s2"):
        (folder / f"{slot}.1.seg").write_bytes(segment(7))
    served = ServedSegments()
    arena = Arena(folder, 64 * PAGE)
    try:
        state = adopt(arena, served, ME)
        held = state.held(ShardId(RunId("r1"), Step(7), Generation(1), Rank(0)))
        assert held is not None
        other = next(slot for slot in state.slots.values() if slot is not held)
        served.withdraw(other.name)
        assert served.lookup("r1/7/1/0/0", 1) is not None
        served.withdraw(held.name)
        assert served.lookup("r1/7/1/0/0", 1) is None
    finally:
        arena.close()


def test_no_rank_finds_another_file_under_the_name_of_parts_that_it_was_shown(tmp_path):
    """P3: its view may be older than the agent; the parts of the next are not there yet."""
    folder = tmp_path / "arena"
    (folder / "sessions").mkdir(parents=True)
    (folder / "s1.1.free").write_bytes(bytes(PAGE))
    (folder / "s7.0.part").write_bytes(bytes(PAGE))
    arena = Arena(folder, 64 * PAGE)
    try:
        state = adopt(arena, ServedSegments(), ME)
    finally:
        arena.close()

    assert not (folder / "s7.0.part").exists()
    assert state.next_slot == 8
