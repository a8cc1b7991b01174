"""Launchers over a real database: rounds are told at once, outlive restarts, end with leases."""

import asyncio
import time
from dataclasses import replace

import pytest

from holdfast.core.attempts import named_nonce
from holdfast.core.rounds import LauncherReport, LaunchRequest, RankFailure, Terms
from holdfast.errors import AlreadyExistsError, InvalidRequestError
from holdfast_services.metadata.usecases import launches

TERMS = Terms(command="c", nodes_min=2, nodes_max=2)
KILLED = RankFailure(rank=1, code=-9, reason="killed by SIGKILL", outside=True)


def report(name, **what):
    return LauncherReport(
        launcher=name * 16, job="gpt/small", **{"sequence": 1, "terms": TERMS, "port": 7000, **what}
    )


def request(name, version="", wait_s=0.0, gone=False, **what):
    said = report(name, **what)
    return LaunchRequest(
        report=said, version=version, wait_s=wait_s, node=name, address=name, gone=gone
    )


async def both(service):
    await service.ask(request("aa"))
    second = await service.ask(request("bb"))
    first = await service.ask(request("aa", sequence=2, port=7001))
    return first, second


def quick(kit, lease_s=30.0):
    return replace(kit.LIMITS, node_lease_s=lease_s)


async def test_who_waits_is_told_of_a_round_when_it_begins(database_url, kit):
    async with kit.running(database_url) as service:
        alone = await service.ask(request("aa"))
        assert alone.place is None
        waiting = asyncio.create_task(service.ask(request("aa", alone.version, 5.0)))
        second = await service.ask(request("bb"))
        first = await waiting

    assert first.place.nonce == second.place.nonce
    assert (first.place.first_rank, second.place.first_rank) == (0, 1)


async def test_a_death_is_told_to_the_others_at_once(database_url, kit):
    async with kit.running(database_url) as service:
        first, second = await both(service)
        waiting = asyncio.create_task(service.ask(request("bb", second.version, 5.0)))
        await asyncio.sleep(0)
        nonce = first.place.nonce
        await service.ask(request("aa", sequence=3, port=7001, round=nonce, failure=KILLED))
        told = await waiting

    assert told.place.round == 2


async def test_a_round_outlives_the_service(database_url, kit):
    async with kit.running(database_url) as service:
        before, _ = await both(service)
    async with kit.running(database_url, clock=True) as service:
        after = await service.ask(request("aa", sequence=3, port=7001, round=before.place.nonce))

    assert after == before


async def test_a_launcher_whose_lease_runs_out_ends_the_round(database_url, kit):
    async with kit.running(database_url, quick(kit, 0.5), clock=True) as service:
        _, second = await both(service)
        view = second
        while view.place is not None:
            view = await service.ask(request("bb", view.version, 1.0, sequence=2))

    assert "1 of 2" in view.waiting


async def test_a_launcher_whose_agent_saw_it_end_is_gone_at_once(database_url, kit):
    async with kit.running(database_url) as service:
        _, second = await both(service)
        waiting = asyncio.create_task(service.ask(request("bb", second.version, 5.0)))
        await service.ask(request("aa", gone=True))

        assert (await waiting).place is None


async def test_leases_outlive_a_catalogue_that_was_away(database_url, kit):
    async with kit.running(database_url, quick(kit, 2.0)) as service:
        await both(service)

        def away(catalogue):
            at_s, since_s = catalogue.pulse()
            catalogue.beat(at_s, at_s - 60.0, since_s)
            for name in ("aa", "bb"):
                catalogue.renew_launcher(name * 16, "gpt/small", at_s - 59.0)

        await service.write(lambda c: kit_tick(c, service))
        await service.write(away)
        await service.write(lambda c: kit_tick(c, service))
        await service.write(lambda c: launches.tick(c, service.limits))
        view = await service.ask(request("aa", sequence=3, port=7001))

    assert view.place is not None


async def test_a_short_absence_of_the_catalogue_is_none_of_the_launchers(database_url, kit):
    """With a lease of 3 s, renewed 0.74 s before the last pulse, 2.3 s ago."""
    async with kit.running(database_url, quick(kit, 3.0)) as service:
        await both(service)

        def away(catalogue):
            now_s = catalogue.now_s()
            at_s, since_s = catalogue.pulse()
            catalogue.beat(at_s, now_s - 2.3, since_s)
            for name in ("aa", "bb"):
                catalogue.renew_launcher(name * 16, "gpt/small", now_s - 2.3 - 0.74 + 3.0)

        await service.write(lambda c: kit_tick(c, service))
        await service.write(away)
        await service.write(lambda c: kit_tick(c, service))
        await service.write(lambda c: launches.tick(c, service.limits))
        view = await service.ask(request("aa", sequence=3, port=7001))

    assert view.place is not None


def kit_tick(catalogue, service):
    from holdfast_services.metadata.usecases import agents

    return agents.tick(catalogue, service.limits)


async def test_who_comes_late_is_taken_in_at_the_next_saved_step(database_url, kit, agents):
    terms = replace(TERMS, nodes_min=1, shrink_after_s=0.0)
    first_agent = agents[0]
    async with kit.running(database_url) as service:
        begun = await service.ask(request("aa", terms=terms))
        nonce = begun.place.nonce
        seat = await service.register(
            kit.wish(0, first_agent.name, named_nonce(nonce), world=1, replicas=0)
        )
        first_agent.serve(seat, 0)
        await service.report(first_agent.inventory())
        await service.ask(request("aa", sequence=2, terms=terms, port=7001, round=nonce))
        late = await service.ask(request("bb", terms=terms))
        await service.write(lambda c: launches.tick(c, service.limits))
        assert late.place is None

        first_agent.hold(seat.run, 10, seat.generation, 0, world=1)
        await service.report(first_agent.inventory())
        await service.write(lambda c: launches.tick(c, service.limits))
        taken = await service.ask(request("bb", sequence=2, terms=terms))

    assert taken.place.round == 2
    assert taken.place.world_size == 2


async def test_a_launch_that_is_over_leaves_no_row(database_url, kit):
    async with kit.running(database_url) as service:
        await both(service)
        await service.ask(request("aa", sequence=9, left=True))
        await service.ask(request("bb", sequence=9, left=True))

        assert await service.read(lambda c: c.launch_jobs()) == []
        assert not await service.read(lambda c: c.lost_launchers("gpt/small", 1e12))


async def test_launchers_that_were_killed_leave_no_row_after_their_lease(database_url, kit):
    """Also one that came and left within one transaction, and one that an agent tells of late."""
    async with kit.running(database_url, quick(kit, 0.5), clock=True) as service:
        said = [request("cc"), request("cc", sequence=2, left=True), request("dd")]
        await service.write(lambda c: launches.hear(c, said, service.limits))
        await service.ask(request("ee", gone=True))
        await both(service)
        while await service.read(lambda c: c.launch_jobs()):  # noqa: ASYNC110 - a lease ends
            await asyncio.sleep(0.05)

        assert not await service.read(lambda c: c.lost_launchers("gpt/small", 1e12))


async def test_what_makes_no_sense_is_refused_by_name(database_url, kit):
    async with kit.running(database_url) as service:
        for said, text in (
            ({"port": 70_000}, "port: 70000"),
            ({"ranks": 0}, "ranks of a node: 0"),
            ({"terms": Terms(nodes_min=3, nodes_max=2)}, "most nodes: 2"),
            ({"terms": Terms(shrink_after_s=float("nan"))}, "shrink after nan"),
            ({"holder": "\0"}, "NUL"),
        ):
            with pytest.raises(InvalidRequestError, match=text):
                await service.ask(request("aa", **said))
        await both(service)
        with pytest.raises(AlreadyExistsError, match="another command"):
            await service.ask(request("cc", terms=Terms(command="other")))


async def test_sixty_four_launchers_hear_of_a_round_soon(database_url, kit):
    """Figures: decided within 50 ms; measured from the last report to the last answer, so more."""
    terms = replace(TERMS, nodes_min=64, nodes_max=64)
    names = [f"{number:02x}" for number in range(64)]
    async with kit.running(database_url) as service:
        views = await asyncio.gather(*(service.ask(request(n, terms=terms)) for n in names[1:]))
        assert not any(view.place for view in views)
        views = [await service.ask(request(n, terms=terms)) for n in names[1:]]
        waiting = [
            asyncio.create_task(service.ask(request(n, view.version, 7.0, terms=terms)))
            for n, view in zip(names[1:], views, strict=True)
        ]
        await asyncio.sleep(0.5)
        began_s = time.perf_counter()
        await service.ask(request(names[0], terms=terms))
        told = await asyncio.gather(*waiting)
        print(f"64 launchers told within {(time.perf_counter() - began_s) * 1e3:.0f} ms")

    assert len({view.place.nonce for view in told}) == 1
