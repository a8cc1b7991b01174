"""Cuts a plan down to what matters: the smallest that is found to break the same promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.simulation.plan import _OF_THE_STORE, NAMES, PARITY_GROUP, Plan, Trouble

TRIES_COUNT_MAX = 1000
CHANCES = ("lost", "doubled", "answer_lost", "slow")
SIMPLE_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Durations that a reader takes in at once."""

FIRST_AT_S = 2.0
"""When a job has settled: the first trouble need not come later."""

_DEFAULT = Plan(seed=-1)


def shrink(plan: Plan, breaks: Callable[[Plan], str | None]) -> Plan:
    """Return a plan that breaks what ``plan`` breaks, and of which nothing more can be taken.

    ``breaks`` says which promise a plan breaks, None: none. It is asked at most
    ``TRIES_COUNT_MAX`` times after the first.
    """
    promise = breaks(plan)
    assert promise is not None, "there is nothing to shrink: the plan breaks no promise"
    search = _Search(plan, lambda candidate: breaks(candidate) == promise)
    before = None
    while before != search.plan:
        before = search.plan
        _fewer_troubles(search)
        search.take_all(_calmer)
        search.take_all(_smaller)
        search.take_all(_plainer)
        for number in range(len(search.plan.troubles)):
            search.take_all(lambda found, number=number: _simpler(found, number))
    return search.plan


class _Search:
    """The smallest plan so far, and the tries that are left."""

    def __init__(self, plan: Plan, holds: Callable[[Plan], bool]) -> None:
        self.plan = plan
        self._holds = holds
        self._seen = {plan}  # each plan is tried once: so no two can replace each other for ever

    def take(self, candidate: Plan) -> bool:
        """Go on from ``candidate`` if it breaks the same; return whether it does."""
        if candidate in self._seen or not _possible(candidate):
            return False
        if len(self._seen) > TRIES_COUNT_MAX:
            return False
        self._seen.add(candidate)
        if not self._holds(candidate):
            return False
        self.plan = candidate
        return True

    def take_all(self, candidates: Callable[[Plan], Iterable[Plan]]) -> None:
        """Take candidates, made anew from each that was taken, until none is left to take."""
        while any(self.take(candidate) for candidate in candidates(self.plan)):
            pass


def _possible(plan: Plan) -> bool:
    """Return whether ``plan.draw`` could have drawn it: whom trouble befalls is there."""
    there = {
        "",
        *NAMES[: plan.nodes],
        *(f"metadata {number}" for number in range(plan.metadata)),
        *(f"worker {number}" for number in range(plan.workers)),
        *(f"rank {number}" for number in range(plan.world_size)),
    }
    return (
        plan.world_size <= plan.nodes + 1
        and (plan.nodes > 1 or plan.replicas == 0)
        and (plan.workers > 0 or plan.persist_steps == plan.keep_last == 0)
        and (plan.workers > 0 or not any(one.kind in _OF_THE_STORE for one in plan.troubles))
        and all({one.target, one.other} <= there for one in plan.troubles)
        and all(one.target != one.other or not one.other for one in plan.troubles)
    )


def _fewer_troubles(search: _Search) -> None:
    """Take away all, halves, quarters and so on, down to one at a time (ddmin)."""
    size = len(search.plan.troubles)
    while size:
        begin = 0
        while begin < len(search.plan.troubles):
            troubles = search.plan.troubles
            left = troubles[:begin] + troubles[begin + size :]
            if not search.take(replace(search.plan, troubles=left)):
                begin += size
        size //= 2


def _calmer(plan: Plan) -> Iterable[Plan]:
    """Yield the plan with messages that fare better."""
    yield replace(plan, **dict.fromkeys(CHANCES, 0.0))
    for name in CHANCES:
        for chance in (0.0, *_rounded(getattr(plan, name))):
            yield replace(plan, **{name: chance})


def _smaller(plan: Plan) -> Iterable[Plan]:
    """Yield the plan in smaller clusters."""
    for metadata in range(1, plan.metadata):
        yield replace(plan, metadata=metadata)
    yield replace(plan, workers=0, persist_steps=0, keep_last=0)
    for workers in range(1, plan.workers):
        yield replace(plan, workers=workers)
    for nodes in range(1, plan.nodes):
        yield replace(
            plan,
            nodes=nodes,
            world_size=min(plan.world_size, nodes + 1),
            replicas=plan.replicas if nodes > 1 else 0,
            parity=min(plan.parity, max(nodes - PARITY_GROUP, 0)),
        )
    for world_size in range(1, plan.world_size):
        yield replace(plan, world_size=world_size)
    for replicas in range(plan.replicas):
        yield replace(plan, replicas=replicas)
    if plan.parity:
        yield replace(plan, parity=0, replicas=1)
        for parity in range(1, plan.parity):
            yield replace(plan, parity=parity)
    for spare_slots in range(plan.spare_slots):
        yield replace(plan, spare_slots=spare_slots)


def _plainer(plan: Plan) -> Iterable[Plan]:
    """Yield the plan with a plainer job, and with all its trouble earlier."""
    for name in ("save_every", "saves_first", "step_s", "keep_last"):
        yield replace(plan, **{name: getattr(_DEFAULT, name)})
    yield replace(plan, persist_steps=min(plan.persist_steps, 1))
    first_s = min((one.at_s for one in plan.troubles), default=0.0)
    if first_s > FIRST_AT_S:
        early_s = first_s - FIRST_AT_S
        yield _timed(plan, [replace(t, at_s=round(t.at_s - early_s, 3)) for t in plan.troubles])


def _simpler(plan: Plan, number: int) -> Iterable[Plan]:
    """Yield the plan with one trouble that befalls the first of its kind, at a simple time."""
    one = plan.troubles[number]
    parties = [replace(one, target=name) for name in _earlier(one.target)]
    parties += [replace(one, other=name) for name in _earlier(one.other)]
    shorter = [s for s in (*SIMPLE_S, *_rounded(one.for_s)) if 0 < s < one.for_s]  # 0: for ever
    earlier = [s for s in SIMPLE_S if FIRST_AT_S <= s < one.at_s]
    lasting = [replace(one, for_s=s) for s in (*shorter, *_rounded(one.for_s)) if s]
    begun = [replace(one, at_s=s) for s in (*earlier, *_rounded(one.at_s))]
    for simpler in (*parties, *lasting, *begun):
        troubles = list(plan.troubles)
        troubles[number] = simpler
        yield _timed(plan, troubles)


def _timed(plan: Plan, troubles: list[Trouble]) -> Plan:
    return replace(plan, troubles=tuple(sorted(troubles, key=lambda one: one.at_s)))


def _earlier(party: str) -> list[str]:
    """Return the names that come before a party's in its own kind."""
    if party and party in NAMES:
        return list(NAMES[: NAMES.index(party)])
    kind, _, number = party.partition(" ")
    return [f"{kind} {earlier}" for earlier in range(int(number or 0))]


def _rounded(value: float) -> list[float]:
    """Return the value with fewer digits, the fewest first."""
    return [round(value, digits) for digits in range(3) if round(value, digits) != value]
