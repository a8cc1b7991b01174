"""A catalogue that has just come, or come back, listens to agents before it decides anything."""

from dataclasses import replace

from tests.said import changed_wish

from holdfast.core.decision import DecisionState
from holdfast_services.metadata.usecases.agents import LISTEN_S, PULSE_GAP_S_MAX, pulse


def listening(kit):
    return replace(kit.LIMITS, listen_s=LISTEN_S)


async def grow_old(service, seconds):
    """Let the catalogue have been there for ``seconds``, without a gap."""

    def shift(catalogue):
        at_s, _ = catalogue.pulse()
        return catalogue.beat(at_s, at_s, at_s - seconds)

    assert await service.write(shift)


async def decided(service, agent):
    view = await service.report(agent.inventory())
    return view.runs[0].decision


async def test_a_lost_catalogue_does_not_call_a_job_new_before_its_agents_have_reported(
    database_url, agents, kit
):
    """P6: the rank comes back on b at once; a, which has step 10 and reports later, is unknown."""
    holder, fresh = agents
    async with kit.running(database_url, listening(kit)) as service:
        wish = kit.wish(0, fresh.name, world=1)
        seat = await service.register(wish)
        fresh.serve(seat, 0)
        assert DecisionState.PENDING is (await decided(service, fresh)).state

        holder.hold(seat.run, 10, seat.generation, 0, world=1)
        await service.report(holder.inventory())
        await grow_old(service, LISTEN_S)
        again = await service.register(changed_wish(wish, nonce=b"second"))
        fresh.serve(again, 0)
        await service.report(fresh.inventory())
        await service.report(holder.inventory())
        found = await decided(service, fresh)

    assert again.generation > seat.generation
    assert (DecisionState.PROPOSED, 10) == (found.state, found.checkpoint.step)


async def test_one_that_has_been_there_for_a_while_decides_at_once(database_url, agents, kit):
    async with kit.running(database_url, listening(kit)) as service:
        await service.write(lambda c: pulse(c, c.now_s(), service.limits))
        await grow_old(service, LISTEN_S)
        await kit.launch(service, agents)

        assert (await decided(service, agents[0])).fresh


async def test_after_a_gap_it_listens_again_and_a_clock_set_back_is_no_reason_to(database_url, kit):
    """P5, B2: what counts is when it began to hear, never a time that is still to come."""
    async with kit.running(database_url, listening(kit)) as service:

        def beat(after_s):
            return service.write(lambda c: pulse(c, c.pulse()[0] + after_s, service.limits))

        began_s = await service.write(lambda c: c.now_s())
        first = await beat(began_s)
        assert await beat(PULSE_GAP_S_MAX - 0.5) == first
        assert await beat(kit.LIMITS.node_lease_s - 0.5) == first, "all who live are known"
        later = await beat(PULSE_GAP_S_MAX + 3600.0)
        assert later > first + 3600.0

        now_s = await service.write(lambda c: c.now_s())
        back = await service.write(lambda c: pulse(c, now_s, service.limits))

        assert now_s <= back <= now_s + LISTEN_S + 1.0
        at_s, since_s = await service.read(lambda c: c.pulse())
        assert since_s <= at_s
