"""Starting over and going back through the database: what is asked, what was made, old rows."""

from tests.integration.metadata.test_returning import made_durable
from tests.integration.metadata.tier import tier_over
from tests.said import changed_wish

from holdfast.core.decision import DecisionState, Start

BACK = Start(name="step 20 launch:L", step=20)
FRESH = Start(name="fresh launch:L", fresh=True)


async def begin(tier, agents, nonce, start):
    """Another attempt of the same launcher; both agents report until it is decided."""
    for rank, agent in enumerate(agents):
        wish = changed_wish(tier.kit.wish(rank, agent.name, nonce), start=start)
        seat = await tier.service.register(wish)
        agent.serve(seat, rank)
    for agent in agents:
        await tier.service.report(agent.inventory())
    decision = (await tier.run()).decision
    for rank, agent in enumerate(agents):
        agent.serve(seat, rank, ready_decision=decision.number)
    for agent in agents:
        await tier.service.report(agent.inventory())
    return seat, (await tier.run()).decision


async def test_a_step_older_than_a_run_remembers_is_gone_back_to(database_url, agents, kit):
    """F20: from the object store, however many durable steps are newer; then once only."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        keys = [await made_durable(tier, agents, seat, step, 0.5) for step in range(10, 130, 10)]

        again, decision = await begin(tier, agents, b"second", BACK)

        assert DecisionState.CONFIRMED is decision.state
        assert keys[1] == decision.checkpoint
        assert 20 in {row.id.step for row in (await tier.run()).checkpoints}
        await tier.commit(agents, again, 25)
        for agent in agents:
            agent.shards = [held for held in agent.shards if held.shard.id.step == 25]
        _, third = await begin(tier, agents, b"third", BACK)
        assert 25 == third.checkpoint.step
        assert "start_repeated" in await tier.kinds()


async def test_a_fresh_start_is_made_once(database_url, agents, kit):
    """F20: what was made stands in the catalogue, not in the memory of a process."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await made_durable(tier, agents, seat, 10, 0.5)
        again, decision = await begin(tier, agents, b"second", FRESH)
        assert decision.fresh
        await tier.commit(agents, again, 5)

    async with tier_over(database_url, kit, offers=False) as tier:
        _, third = await begin(tier, agents, b"third", FRESH)

        assert 5 == third.checkpoint.step
