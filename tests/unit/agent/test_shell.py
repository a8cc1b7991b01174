"""The agent's shell: what is kept is served, whichever copy of it went."""

from __future__ import annotations

import asyncio
import errno

import pytest
from tests.said import tcp

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.node_view import NodeView
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import Content, Slot, State, Work
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.performer import Performer
from holdfast_services.agent.shell import Shell
from holdfast_services.transport import ServedSegments

PAGE = 4096
ME = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
SHARD = Shard(
    id=ShardId(RunId("r1"), Step(7), Generation(1), Rank(0)), job="job", world_size=1,
    plan_hash="p", length_bytes=PAGE, root_digest=bytes(16),
)  # fmt: skip


class Nothing:
    """Neither fetches nor asks."""

    def stop(self) -> None:
        """Nothing moves."""


@pytest.fixture
async def agent(tmp_path):
    """(shell, served) over two slots, s1 and s2, of one shard and one incarnation; s1 is served."""
    folder = tmp_path / "arena"
    (folder / "sessions").mkdir(parents=True)
    for name in ("s1", "s2"):
        (folder / f"{name}.1.seg").write_bytes(name.encode() * (PAGE // 2))
    arena = Arena(folder, 4 * PAGE)
    content = Content(shard=SHARD, owner="a", digests=b"")
    slots = {
        name.slot: Slot(name=name, length_bytes=PAGE, content=content, work=Work.VERIFYING)
        for name, _ in arena.adopt()
    }
    served = ServedSegments()
    served.put(SHARD.id.key, slots["s1"].name, arena.file("s1").view)
    performer = Performer(me=ME, arena=arena, served=served, fetcher=Nothing(), peers=Nothing())
    shell = Shell(
        state=State(me=ME, budget_bytes=4 * PAGE, slots=slots), arena=arena, performer=performer,
        clock=lambda: 0.0,
    )  # fmt: skip
    yield shell, served
    await performer.stop()
    arena.close()


def bytes_of(served):
    return bytes(served.lookup(SHARD.id.key, 1) or b"")[:2]


async def test_the_second_copy_is_served_once_the_first_is_quarantined(agent):
    """Else it is listed and located, and no fetch finds it as long as this agent runs."""
    shell, served = agent
    assert bytes_of(served) == b"s1"

    shell.dispatch(ev.SlotVerified(SlotName("s1", 1, SlotState.SEALED), intact=False, decision=1))

    assert HeldState.QUARANTINED is shell.state.slots["s1"].content.held
    assert bytes_of(served) == b"s2"


async def test_the_first_copy_is_served_once_the_second_is_freed(agent):
    shell, served = agent
    name = SlotName("s2", 1, SlotState.SEALED)
    served.put(SHARD.id.key, name, memoryview(b"s2"))

    shell.dispatch(ev.SlotVerified(name, intact=True, decision=1))

    assert SlotState.FREE is shell.state.slots["s2"].name.state
    assert bytes_of(served) == b"s1"


async def test_an_element_is_served_no_more_once_its_slot_is_free(agent):
    """A3: the next one may write there while a peer still reads."""
    shell, served = agent
    name = SlotName("s1", 1, SlotState.ELEMENT)
    shell._arena.rename(SlotName("s1", 1, SlotState.SEALED), SlotName("s1", 1, SlotState.FREE))
    shell._arena.rename(SlotName("s1", 1, SlotState.FREE), name)
    served.put("an element", name, memoryview(b"sum"))

    shell._performer.rename(ev.RenameSlot(name, name.to(SlotState.FREE)))

    assert served.lookup("an element", 1) is None


async def test_an_agent_that_could_not_do_all_it_decided_ends(agent, monkeypatch):
    """P6: the next one adopts what is in the folder. This one would wait for ever for the rest."""
    shell, _ = agent

    def fails(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as once:
        once.setattr(Arena, "rename", fails)
        with pytest.raises(OSError, match="allocate"):
            shell.dispatch(
                ev.SlotVerified(SlotName("s2", 1, SlotState.SEALED), intact=True, decision=1)
            )

    with pytest.raises(OSError, match="allocate"):
        await asyncio.wait_for(shell.scan(), 10)


async def test_a_seal_that_fails_for_good_is_logged_once_per_reason(agent, monkeypatch, caplog):
    """It is tried again each tick, 600 times a minute; the machine hears of each try."""
    shell, _ = agent
    answers = asyncio.Queue()
    slot = SlotName("s1", 1, SlotState.CLOSED)

    async def sealing(reason):
        def fails(*_, **__):
            raise OSError(errno.EIO, reason)

        monkeypatch.setattr("holdfast_services.agent.sealer.seal", fails)
        shell._performer.begin(ev.SealSlot(slot, None), answers.put_nowait)
        answer = await asyncio.wait_for(answers.get(), 10)
        assert reason in answer.reason

    for reason in ("bad sector", "bad sector", "worse sector", "bad sector"):
        await sealing(reason)

    logged = [record.message for record in caplog.records if "SealSlot failed" in record.message]
    assert ["bad" in text for text in logged] == [True, False]


def view(*attempts, sequence=1):
    return NodeView(version="1", awaited_by=attempts, taken_sequence=sequence)


async def test_an_agent_reports_at_once_and_once_for_each_attempt_that_waits_for_its_word(agent):
    """4.8: a restore waits for all agents' words, and the next heartbeat may be a second away."""
    shell, _ = agent
    reports = []
    shell.view_arrived(view())
    shell.on_inventory = reports.append

    asked = []
    for attempts in ([b"1"], [b"1"], [b"1", b"2"], [b"2"], [], [b"3"]):
        shell.view_arrived(view(*attempts))
        asked.append(len(reports))

    assert [1, 1, 2, 2, 2, 3] == asked
    assert [True] * 3 == reports


async def test_an_agent_answers_no_question_of_a_view_that_it_refuses(agent):
    """M4: what an older view asks for was answered by the report that a newer one knows."""
    shell, _ = agent
    reports = []
    shell.view_arrived(view(sequence=5))
    shell.on_inventory = reports.append

    shell.view_arrived(view(b"1", sequence=4))

    assert [] == reports
