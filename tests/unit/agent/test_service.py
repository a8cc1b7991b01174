"""The agent's use cases over a real shell, performer and arena; each action is answered."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from tests.said import attempt_spec, tcp

from holdfast.core.attempts import Seat
from holdfast.core.budget import MemoryWish
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import Peer
from holdfast.core.protection import Parity
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import NotFoundError, PreconditionError, UnavailableError
from holdfast_services.agent import isal, service
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import State
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.next_actions import FETCHES_COUNT_MAX
from holdfast_services.agent.domain.state import Content, HoldWish, Slot, Tries
from holdfast_services.agent.performer import Performer
from holdfast_services.agent.service import AgentService
from holdfast_services.agent.shell import Shell
from holdfast_services.transport import ServedSegments

KIB = 1 << 10
ME = Peer(node="a", rpc_address="127.0.0.1:1", endpoints=tcp("127.0.0.1:2"))
SLOT = SlotName("s1", 1, SlotState.CLOSED)


class Broken:
    """Stands for whatever fails as nobody foresaw."""

    async def fetch(self, _):
        raise RuntimeError("can't start new thread")

    async def hold(self, *_):
        raise RuntimeError("can't start new thread")

    def stop(self) -> None:
        """Nothing moves."""


class Catalogue:
    """Gives every rank the same seat, and keeps what it was told."""

    address = "127.0.0.1:3"

    def __init__(self) -> None:
        self.told = []

    async def register(self, spec, *, node, generation_min):
        self.told.append((spec, node, generation_min))
        return Seat(run="r1", generation=3)


@pytest.fixture
def catalogue():
    return Catalogue()


@pytest.fixture
async def agent(tmp_path, catalogue):
    arena = Arena(tmp_path / "arena", 64 * KIB)
    performer = Performer(
        me=ME, arena=arena, served=ServedSegments(), fetcher=Broken(), peers=Broken()
    )
    shell = Shell(
        state=State(me=ME, budget_bytes=64 * KIB),
        arena=arena,
        performer=performer,
        clock=lambda: 0.0,
    )
    yield AgentService(shell, arena, catalogue)
    await performer.stop()
    arena.close()


def shard(step):
    return Shard(
        id=ShardId(RunId("r1"), Step(step), Generation(1), Rank(0)),
        job="job",
        world_size=1,
        plan_hash="p",
        length_bytes=KIB,
        root_digest=bytes(16),
    )


def spec(rank):
    return attempt_spec(rank=rank, world_size=2, local_world_size=2)


@contextmanager
def alive(folder, session):
    """Have another process hold the lock of a session, as a rank does."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
        "print(flush=True); sys.stdin.read()"
    )
    path = str(Path(folder) / "sessions" / session)
    with Popen([sys.executable, "-c", code, path], stdin=PIPE, stdout=PIPE) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


async def test_a_session_is_registered_with_what_this_node_adds(agent, catalogue):
    """The edge knows no node and no generation; both stand in what metadata is told."""
    with alive(agent.arena_folder, "1" * 32):
        opened = await agent.open_session("1" * 32, spec(0))
        again = await agent.open_session("1" * 32, spec(0))

    assert ("r1", 3) == (opened.run, opened.generation) == (again.run, again.generation)
    assert agent.session("1" * 32).generation == 3
    assert [(spec(0), "a", 0), (spec(0), "a", 3)] == catalogue.told, "the spec as it came"


async def test_a_session_whose_death_could_not_be_seen_is_not_opened(agent, catalogue):
    with pytest.raises(PreconditionError, match="holds no lock"):
        await agent.open_session("1" * 32, spec(0))
    with pytest.raises(NotFoundError):
        agent.session("1" * 32)
    assert [] == catalogue.told


async def test_a_node_says_how_big_it_is_and_what_does_not_fit(agent):
    wish = MemoryWish(
        own_bytes=40 * KIB, restored_bytes=80 * KIB, replicas=1, nodes_count=2, slots=2
    )

    told = agent.describe("job", wish)

    assert ("a", 64 * KIB, 0, 0) == (
        told.node, told.budget_bytes, told.used_bytes, told.reserved_bytes
    )  # fmt: skip
    assert "64 KiB" in told.refusal
    assert not told.metadata_reachable
    assert agent.describe("", wish).refusal == ""


async def test_parity_is_refused_with_its_own_sum(agent):
    """G4, P8: three elements for four shards, as the fullest of up to eight nodes has them."""
    wish = MemoryWish(
        own_bytes=16 * KIB, restored_bytes=16 * KIB, replicas=0, nodes_count=8, slots=2,
        parity=Parity(4, 2), shards_count=4,
    )  # fmt: skip
    assert agent.describe("job", wish).refusal == ""

    refusal = agent.describe("job", replace(wish, own_bytes=20 * KIB)).refusal
    assert "2 slots x 20 KiB own + 2 slots x 15 KiB incoming parity elements" in refusal


async def test_parity_without_its_library_is_refused_before_a_step_is_saved(agent, monkeypatch):
    def missing():
        raise PreconditionError("parity takes ISA-L")

    monkeypatch.setattr(isal, "check", missing)
    with pytest.raises(PreconditionError, match="ISA-L"):
        await agent.open_session("1" * 32, replace(spec(0), parity=Parity(2, 1)))


async def test_a_job_that_the_budget_has_room_for_and_the_file_system_has_not_is_refused(
    agent, monkeypatch
):
    """P8: a budget is a limit; others may have filled the tmpfs since the agent began."""
    wish = MemoryWish(own_bytes=8 * KIB, restored_bytes=8 * KIB, replicas=0, nodes_count=1, slots=2)
    assert agent.describe("job", wish).refusal == ""

    monkeypatch.setattr(Arena, "free_bytes", 15 * KIB)
    told = agent.describe("job", wish).refusal
    assert "2 slots x 8 KiB own = 16 KiB, but the arena's file system has only 15 KiB free" in told
    assert "remove what else fills it" in told

    monkeypatch.setattr(Arena, "free_bytes", 16 * KIB)
    assert agent.describe("job", wish).refusal == ""


async def test_slots_that_are_there_are_room_for_the_job_whose_they_were(agent, monkeypatch):
    """P1: a restart on a full file system has its slots already."""
    wish = MemoryWish(own_bytes=8 * KIB, restored_bytes=8 * KIB, replicas=0, nodes_count=1, slots=2)
    for number in range(2):
        name = SlotName(f"s{number}", 1, SlotState.FREE)
        agent._state.slots[name.slot] = Slot(name=name, length_bytes=8 * KIB)
    monkeypatch.setattr(Arena, "free_bytes", 0)

    assert agent.describe("job", wish).refusal == ""


async def test_fetches_that_fail_unforeseen_are_answered_and_take_no_place(agent):
    """P4: four of them, and this agent would never fetch again, for copies and for restores."""
    for step in range(FETCHES_COUNT_MAX + 1):
        with pytest.raises(UnavailableError, match="new thread"):
            await agent.hold(shard(step), ME)

    assert '"under_way": true' not in json.dumps(agent.dump()["fetches"])


@pytest.mark.parametrize("fetching", [True, False])
async def test_a_copy_that_is_slow_by_order_is_not_given_up(agent, monkeypatch, fetching):
    """Nor is one that waits for another; where nothing moves the owner hears of it."""
    monkeypatch.setattr(service, "deadline_s", lambda _: 0.0)
    agent._state.fetches[shard(2).id] = Tries(under_way=fetching)
    monkeypatch.setattr(agent, "begin_hold", lambda wanted, source, _: agent._state.holds.update(
        {wanted.id: HoldWish(shard=wanted, source=source)}
    ))  # fmt: skip

    if fetching:
        assert not await agent.hold(shard(1), ME)
    else:
        with pytest.raises(UnavailableError, match="takes too long"):
            await agent.hold(shard(1), ME)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (ev.CreateSlot(SLOT, 1), ev.SlotRefused("s1", "why")),
        (ev.SealSlot(SLOT, None), ev.SealBlocked(SLOT, "why")),
        (
            ev.VerifySlot(SLOT, Content(shard=shard(1), owner="a", digests=b""), 1),
            ev.WorkBlocked(SLOT),
        ),
        (ev.ReclaimSlot(SLOT, replace=True), ev.WorkBlocked(SLOT)),
        (ev.Fetch(SLOT, shard(1), (), ""), ev.FetchFailed(SLOT, shard(1).id, "why")),
        (ev.AskHold(shard(1), ME), ev.HoldAnswered(shard(1).id, ME, "unavailable", "why")),
    ],
)
def test_the_machine_hears_of_each_action_that_failed(action, answer):
    assert ev.gave_up(action, "why") == [answer]
