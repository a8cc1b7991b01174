"""Makes plans: by the policy that was chosen, in a thread, of what a turn has found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast_services.scheduler.domain.families import families, family_of
from holdfast_services.scheduler.domain.planned import subject, wishes
from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.plan import Policy, plan, plan_arrivals
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.domain.policies.sia import Sia
from holdfast_services.scheduler.domain.wishes import Wishes
from holdfast_services.scheduler.usecases.deciding import Learned, Turn

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "price": Price,
    "fifo": Fifo,
    "pollux": Pollux,
    "sia": Sia,
}
POLICY = "price"


class Planner:
    """Makes plans by the policy of this name.

    Args:
        policy: One of ``POLICIES``.
        quotas: The most GPUs of all jobs of an owner together; who is not named has no bound.
    """

    def __init__(self, policy: str, quotas: Mapping[str, int]) -> None:
        self._policy = POLICIES[policy]()
        self.quotas = quotas

    async def __call__(self, turn: Turn, learned: Learned, *, arrivals: bool) -> Wishes:
        """Return a plan without a number; with ``arrivals`` who has GPUs keeps them."""
        return await asyncio.to_thread(self._plan, turn, learned, arrivals=arrivals)

    def _plan(self, turn: Turn, learned: Learned, *, arrivals: bool) -> Wishes:
        began_s = time.monotonic()
        # Those of nobody who is to be planned would be most, and each is a fit.
        planned = {family_of(job.spec) for job in turn.jobs.values() if not job.over}
        said = (*learned.past, *learned.jobs.values())
        known = families(one for one in said if one.family in planned)
        about = subject(
            turn.jobs.values(), turn.cluster, learned.jobs, self.quotas, turn.now_s, known
        )
        make = plan_arrivals if arrivals else plan
        made = make(about.view, self._policy, turn.now_s)
        found = Wishes(
            policy=self._policy.name,
            by_job=wishes(made, about, turn.jobs),
            notes=about.notes,
            arrivals=arrivals,
        )
        return replace(found, took_s=time.monotonic() - began_s)
