"""The agent's shell: each action is answered, whatever becomes of it."""

from __future__ import annotations

import pytest

from holdfast.core.facts import Peer, Shard
from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.slots import SlotName, SlotState
from holdfast.errors import UnavailableError
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import State
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.decide import FETCHES_COUNT_MAX
from holdfast_services.agent.domain.state import Content
from holdfast_services.agent.service import AgentService
from holdfast_services.transport import ServedSegments

KIB = 1 << 10
ME = Peer(node="a", rpc_address="127.0.0.1:1", data_address="127.0.0.1:2")
SLOT = SlotName("s1", 1, SlotState.CLOSED)


class Broken:
    """Stands for whatever fails as nobody foresaw."""

    async def fetch(self, _):
        raise RuntimeError("can't start new thread")

    async def hold(self, *_):
        raise RuntimeError("can't start new thread")

    def stop(self) -> None:
        """Nothing moves."""


@pytest.fixture
async def agent(tmp_path):
    arena = Arena(tmp_path / "arena", 64 * KIB)
    service = AgentService(
        state=State(me=ME, budget_bytes=64 * KIB),
        arena=arena,
        served=ServedSegments(),
        fetcher=Broken(),
        peers=Broken(),
        clock=lambda: 0.0,
    )
    yield service
    await service.stop()
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


async def test_fetches_that_fail_unforeseen_are_answered_and_take_no_place(agent):
    """P4: four of them, and this agent would never fetch again, for copies and for restores."""
    for step in range(FETCHES_COUNT_MAX + 1):
        with pytest.raises(UnavailableError, match="new thread"):
            await agent.hold(shard(step), ME)

    assert not any(attempt.under_way for attempt in agent.state.fetches.values())


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
