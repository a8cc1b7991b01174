"""What a slot held before and a copy has too does not travel; what rotted there does."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.agent.test_machine import KIB, kinds, run_view, sealed, session, shard, state, view

from holdfast.core.budget import Reservation
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import Endpoint, HeldState, Peer
from holdfast.core.node_view import Want, WantReason
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Object
from holdfast.errors import UnavailableError
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast.format.segment import SegmentIdentity, blob_spec, header_template
from holdfast_services.agent import sealer
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import Content, Slot, Work, handle
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.fetcher import Fetcher
from holdfast_services.agent.store_source import ObjectTier
from holdfast_services.agent.unchanged_parts import unchanged_parts
from holdfast_services.kit.pace import Pace
from holdfast_services.transport import ServedSegments
from holdfast_services.transport.located import Located
from holdfast_services.transport.memory import MemoryNetwork, MemoryTransport
from holdfast_services.transport.paced import Paced

PARTS = 4
LENGTH = PARTS * PART_BYTES - 1000
NODES = ("a", "c")


def segment(step, changed=(), *, run="r1", rank=0):
    """A segment whose parts differ from those of all others only where ``changed`` says."""
    identity = SegmentIdentity(
        id=ShardId(RunId(run), Step(step), Generation(1), Rank(rank)),
        job="job",
        world_size=8,
        plan_hash="p" * 32,
    )
    room = LENGTH - len(header_template(identity, [blob_spec("data", LENGTH)]).data)
    header = header_template(identity, [blob_spec("data", room)]).fill(
        step=step, generation=1, parent=None
    )
    data = bytearray(header.ljust(LENGTH, b"."))
    for part in changed:
        data[part * PART_BYTES + PART_BYTES // 2] = step
    assert len(data) == LENGTH
    return bytes(data)


@dataclass
class Counted:
    """The transport, and which parts came over it; ``broken`` sources give only ``gives``."""

    inner: MemoryTransport
    came: list[int] = field(default_factory=list)
    broken: str = ""

    def fetch(self, endpoints, fetch):
        before = set(fetch.done)
        if endpoints[0].address == self.broken:
            first = fetch.missing[0]
            rest = set(fetch.missing) - {first}
            self.inner.fetch(endpoints, replace(fetch, done=(some := fetch.done | rest)))
            fetch.done.update(some - rest)
            self.came += sorted(fetch.done - before)
            raise UnavailableError("the cable is out")
        try:
            self.inner.fetch(endpoints, fetch)
        finally:
            self.came += sorted(fetch.done - before)


class NoWait(Pace):
    """A rate so low that parts come one by one, and nobody waits for it."""

    def promise(self, length_bytes):
        return 0.0


class Peers:
    """Other agents that hold what is put here."""

    def __init__(self):
        self.contents = {}
        self.network = MemoryNetwork()
        self.served = {node: ServedSegments() for node in NODES}
        for node, served in self.served.items():
            MemoryTransport(self.network, node).serve(served)

    def put(self, data):
        view = memoryview(bytearray(data))
        content = sealer.describe(view, owner="a")
        for served in self.served.values():
            served.put(content.shard.id.key, SlotName("s9", 1, SlotState.SEALED), view)
        self.contents[content.shard.id] = content
        return content

    async def locate(self, _peer, key):
        content = self.contents[key]
        return Located(shard=content.shard, slot_incarnation=1, part_digests=content.digests)

    async def suspect(self, *_):
        return False


def peer(node):
    return Peer(node=node, rpc_address=node, endpoints=(Endpoint(kind="memory", address=node),))


class Backup:
    """A node with one slot, whose agent's state machine is played by the test."""

    def __init__(self, folder, store_url="", pace=None):
        self.arena = Arena(folder, LENGTH)
        self.peers = Peers()
        self.transport = Counted(MemoryTransport(self.peers.network, "b"))
        self.tier = ObjectTier(store_url)
        self.fetcher = Fetcher(
            node="b",
            arena=self.arena,
            transport=Paced(self.transport, pace or Pace(0)),
            peers=self.peers,
            tier=self.tier,
        )
        self.slot = Slot(name=SlotName("s1", 0, SlotState.FREE), length_bytes=LENGTH)
        self.arena.create(self.slot.name, LENGTH)
        self.fills = False

    @property
    def view(self):
        return self.arena.file("s1").view

    def hold(self, data, *, sources=None):
        """Fetch a copy into the slot as the machine would; return which parts came."""
        content = self.peers.put(data)
        self.transport.came.clear()
        opened = self.slot.name.to(SlotState.WRITING)
        assert self.arena.rename(self.slot.name, opened)
        self.slot = replace(self.slot, name=opened)
        givers = sources or tuple(map(peer, NODES))
        fetch = ev.Fetch(
            opened, content.shard, givers, "a", last=self.slot.last, filled=self.fills
        )  # fmt: skip
        [happened] = asyncio.run(self.fetcher.fetch(fetch))
        if isinstance(happened, ev.FetchDone):
            name = opened.to(SlotState.CLOSED).to(SlotState.SEALED)
            self.slot = Slot(name=name, length_bytes=LENGTH, content=happened.content)
        return happened, list(self.transport.came)

    def free(self):
        freed = self.slot.freed()
        assert self.arena.rename(self.slot.name, freed.name)
        self.slot = freed

    def close(self):
        self.fetcher.stop()
        self.arena.close()


@pytest.fixture
def backup(tmp_path):
    made = Backup(tmp_path / "arena")
    yield made
    made.close()


def test_only_the_parts_that_changed_come(backup):
    """G16: by bytes moved; the header's part differs always, since it names the step."""
    _, first = backup.hold(segment(1))
    backup.free()
    data = segment(2, changed=(2,))

    _, second = backup.hold(data)

    assert [0, 1, 2, 3] == first
    assert [0, 2] == second
    assert data == bytes(backup.view)
    assert LENGTH - 2 * PART_BYTES == backup.fetcher.unchanged_bytes
    assert sealer.intact(backup.arena, backup.slot.name, backup.slot.content)


def test_what_rotted_in_the_slot_comes_again(backup):
    """P3: equal digests say where to look, and the bytes decide."""
    backup.hold(segment(1))
    backup.free()
    backup.view[PART_BYTES + 5] ^= 1
    data = segment(2)

    _, came = backup.hold(data)

    assert [0, 1] == came
    assert data == bytes(backup.view)


def test_it_matters_to_nobody_whose_segment_the_slot_held(backup):
    """Another job's, another rank's: equal bytes at the same place are equal bytes."""
    backup.hold(segment(1, changed=(1,), run="r2", rank=7))
    backup.free()
    data = segment(2)

    _, came = backup.hold(data)

    assert [0, 1] == came
    assert data == bytes(backup.view)


def test_a_wrong_word_of_what_the_slot_held_costs_a_look_and_no_more(backup):
    """Digests of a segment that never lay there: nothing is believed."""
    other = backup.peers.put(segment(1))
    backup.slot = replace(backup.slot, last=other)
    data = segment(2)

    _, came = backup.hold(data)

    assert [0, 1, 2, 3] == came
    assert data == bytes(backup.view)


def test_of_a_copy_that_failed_half_way_the_next_try_keeps_what_is_right(backup):
    """Old parts and new ones lie side by side then; each is what its digest says."""
    backup.hold(segment(1))
    backup.free()
    backup.transport.broken = "a"
    data = segment(2, changed=(1, 3))
    failed, came = backup.hold(data, sources=(peer("a"),))
    assert isinstance(failed, ev.FetchFailed)
    assert [0] == came
    backup.free()

    _, came = backup.hold(data)

    assert 2 not in came
    assert data == bytes(backup.view)


def test_a_second_source_gives_only_what_is_left(backup):
    backup.hold(segment(1))
    backup.free()
    backup.transport.broken = "a"
    data = segment(2, changed=(1,))

    happened, came = backup.hold(data)

    assert isinstance(happened, ev.FetchDone)
    assert [0, 1] == came
    assert data == bytes(backup.view)


def test_a_slot_that_is_filled_again_looks_whole_to_nobody_before_it_is(backup):
    """A4: what it held has no sidecar any more, and its name is that of an open slot."""
    backup.hold(segment(1))
    backup.free()
    seen = []

    def look(endpoints, fetch):
        seen.extend(sorted(path.name for path in backup.arena.folder.glob("s*") if path.is_file()))
        raise UnavailableError("died here")

    backup.transport.fetch = look
    failed, _ = backup.hold(segment(2), sources=(peer("a"),))

    assert isinstance(failed, ev.FetchFailed)
    assert ["s1.2.open"] == seen


@pytest.mark.parametrize("rate", [0, 1 << 20], ids=["at no rate", "part by part"])
def test_the_object_store_gives_only_what_is_not_there(tmp_path, rate):
    """A restore after the copy was freed, from the bucket: by parts read."""
    backup = Backup(tmp_path / "arena", pace=NoWait(rate))
    backup.hold(segment(1))
    backup.free()
    data = segment(2, changed=(3,))
    content = backup.peers.put(data)
    read = []

    def fetch(_shard, view, *, done, stop, prepare):
        prepare([content.digests[at : at + 16] for at in range(0, 64, 16)])
        for part in sorted(set(range(PARTS)) - done):
            read.append(part)
            begin, end = part * PART_BYTES, min((part + 1) * PART_BYTES, LENGTH)
            view[begin:end] = data[begin:end]
            done.add(part)
        return content.digests

    backup.tier.fetch = fetch
    backup.hold(data, sources=(Object(),))

    assert [0, 3] == read
    assert data == bytes(backup.view)
    backup.close()


def test_the_search_ends_when_the_agent_stops():
    data = bytes(3 * PART_BYTES)
    digests = [part_digest(data[:PART_BYTES])] * 3
    stop = threading.Event()
    assert {0, 1, 2} == unchanged_parts(memoryview(data), digests, b"".join(digests), stop)
    stop.set()

    assert set() == unchanged_parts(memoryview(data), digests, b"".join(digests), stop)


# ------------------------------------------------------------------------------- the machine


def last_steps(made):
    return {s.name.slot: s.last.shard.id.step for s in made.slots.values() if s.last}


def test_a_freed_slot_remembers_what_it_held_until_it_is_sealed_again():
    free_before = run_view(free_before=CheckpointId("r1", 3, 1))
    held, _ = handle(
        state(sealed("s1", 1, owner="b"), sealed("s2", 3, owner="b")), view(free_before)
    )
    assert {"s1": 1} == last_steps(held)

    wants = (Want(shard=shard(4), sources=(Memory("b"),), reason=WantReason.REPAIR, owner="b"),)
    held, actions = handle(held, view(free_before, wants, version="2"))
    [fetch] = kinds(actions, ev.Fetch)
    assert ("s1", 1) == (fetch.name.slot, fetch.last.shard.id.step)

    failed, _ = handle(held, ev.FetchFailed(fetch.name, shard(4).id, "silence"))
    assert {"s1": 1} == last_steps(failed)

    content = Content(shard=shard(4), owner="b", digests=b"", source="peer")
    done, _ = handle(held, ev.FetchDone(fetch.name, content))
    assert {} == last_steps(done)


def test_of_free_slots_that_of_the_same_plan_is_filled():
    """Ranks of one node, and copies of others, have slots of one length and other bytes."""

    def free(name, plan):
        content = Content(shard=replace(shard(1), plan_hash=plan), owner="b", digests=b"")
        return Slot(name=SlotName(name, 0, SlotState.FREE), length_bytes=KIB, last=content)

    wants = (Want(shard=shard(4), sources=(Memory("b"),), reason=WantReason.REPAIR, owner="b"),)
    slots = free("s1", "q"), free("s2", "p"), free("s3", "r")
    _, actions = handle(state(*slots), view(run_view(), wants))
    assert ["s2"] == [fetch.name.slot for fetch in kinds(actions, ev.Fetch)]

    asking = session(
        reservation=Reservation(plan_hash="r", length_bytes=KIB, slots=2, restored_bytes=KIB)
    )
    held, _ = handle(state(*slots), ev.SessionOpened(asking))
    leased = [s.name.slot for s in held.slots.values() if s.name.state is SlotState.WRITING]
    assert "s3" in leased


def test_bad_bytes_are_no_less_looked_at_when_their_slot_is_filled_again():
    """What was right of a quarantined copy is of use; what was not has not its digest."""
    bad = sealed("s1", 1, owner="b", held=HeldState.QUARANTINED)
    assert 1 == bad.freed().last.shard.id.step


def test_parts_that_are_to_be_others_are_not_looked_at(monkeypatch):
    """Hashing the whole slot to find that all of it has changed would cost as much as a seal."""
    data = memoryview(bytes(3 * PART_BYTES))
    seen = []

    def digest(part):
        seen.append(len(part))
        return b"x" * 16

    monkeypatch.setattr("holdfast_services.agent.unchanged_parts.part_digest", digest)
    digests = [b"x" * 16, b"y" * 16, b"x" * 16]

    assert {0} == unchanged_parts(data, digests, b"x" * 32 + b"z" * 16, threading.Event())
    assert [PART_BYTES] == seen


def filled_in(backup, data, wrong=()):
    """Put ``data`` into the slot as a rank would that has most of it alike; it has no head."""
    backup.view[:] = data
    backup.view[:8] = bytes(8)
    for part in wrong:
        backup.view[part * PART_BYTES + 9] ^= 1
    backup.fills = True


def test_what_a_rank_has_filled_in_does_not_come(backup):
    """4.5: whatever the slot held before; what is not alike comes, the head always."""
    data = segment(2, changed=(1, 2, 3))
    filled_in(backup, data, wrong=(2,))

    happened, came = backup.hold(data)

    assert [0, 2] == came
    assert LENGTH - 2 * PART_BYTES == happened.alike_bytes == backup.fetcher.unchanged_bytes
    assert data == bytes(backup.view)
    assert sealer.intact(backup.arena, backup.slot.name, backup.slot.content)


def test_of_a_filling_of_another_step_nothing_is_believed(backup):
    data = segment(2, changed=(1, 2, 3))
    filled_in(backup, segment(1, changed=(1, 2, 3)))

    happened, came = backup.hold(data)

    assert [0, 1, 2, 3] == came
    assert 0 == happened.alike_bytes
    assert data == bytes(backup.view)


def test_who_has_closed_a_slot_is_given_the_time_to_let_go_of_its_lock(backup):
    """A slot that is taken from under its writer is lost; this one has written its last byte."""
    data = segment(2)
    filled_in(backup, data)
    file, taken = backup.arena.file("s1"), iter([False, False, True])
    backup.arena.file = lambda _: file
    file.lock = lambda: next(taken)

    happened, came = backup.hold(data)

    assert [0] == came
    assert isinstance(happened, ev.FetchDone)


def test_a_slot_without_a_head_is_no_failure_of_whoever_closed_it(backup):
    """Its agent was restarted, and knows nothing of what it was lent for."""
    closed = backup.slot.name.to(SlotState.WRITING).to(SlotState.CLOSED)
    backup.arena.rename(backup.slot.name, closed)

    with pytest.raises(sealer.HeadlessError):
        sealer.seal(backup.arena, closed, owner="b", expected=None)
    slot = Slot(name=closed, length_bytes=LENGTH, work=Work.SEALING)
    now, actions = handle(state(slot), ev.SealFailed(closed, ""))

    assert [closed.to(SlotState.FREE)] == [a.new for a in kinds(actions, ev.RenameSlot)]
    assert [] == kinds(actions, ev.Emit)
    assert SlotState.FREE is now.slots["s1"].name.state
