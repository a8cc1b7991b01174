"""From what a turn has found to a policy's view, and from its plan to wishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast_services.scheduler.domain.first_come import first_come
from holdfast_services.scheduler.domain.wishes import Wished, Wishes
from holdfast_services.scheduler.usecases.deciding import Turn

POLICY = "fifo"

Policy = Callable[[Turn], Mapping[str, Wished]]

POLICIES: Mapping[str, Policy] = {
    "fifo": lambda turn: first_come(turn.jobs.values(), turn.cluster, turn.now_s),
}


class Planner:
    """Makes plans by the policy of this name, in a thread."""

    def __init__(self, policy: str) -> None:
        self._name = policy
        self._policy = POLICIES[policy]

    async def __call__(self, turn: Turn) -> Wishes:
        """Return a plan without a number."""
        return await asyncio.to_thread(self._plan, turn)

    def _plan(self, turn: Turn) -> Wishes:
        began_s = time.monotonic()
        plan = Wishes(policy=self._name, by_job=self._policy(turn))
        return replace(plan, took_s=time.monotonic() - began_s)
