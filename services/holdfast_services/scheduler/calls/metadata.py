"""What the scheduler asks of the metadata service, over its REST."""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core import hints
from holdfast.core.allocations import Allocation
from holdfast.core.hints import JobHints
from holdfast.core.records import from_record, to_record
from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.rpc import rest
from holdfast_services.scheduler.domain.cluster import Round
from holdfast_services.scheduler.domain.knowledge import Knowledge
from holdfast_services.scheduler.usecases.deciding import Agent

TIMEOUT_S = 5.0
CALLS_MAX = 8


class Metadata:
    """The metadata service at ``address``, by gRPC's ``host:port``; it says where its REST is.

    Calls block threads, of which there are at most ``CALLS_MAX`` at once. ``find`` asks it.
    """

    def __init__(self, address: str, find: Callable[[str], str] = rest.url_of_metadata) -> None:
        self._address = address
        self._find = find
        self._url = ""
        self._calls = asyncio.Semaphore(CALLS_MAX)

    async def rounds(self) -> dict[str, Round]:
        """Return what is known of the rounds of all launches, by job.

        Raises:
            UnavailableError: nobody answers.
        """
        return {str(one["job"]): _round(one) for one in await self._ask("GET", "/launches")}

    async def agents(self) -> dict[str, Agent]:
        """Return all agents by node; errors as in ``rounds``."""
        return {
            str(one["node"]): Agent(
                live=bool(one["live"]),
                domain=str(one["domain"]),
                silent_s=-float(one["lease_s"]) or math.inf,
            )
            for one in await self._ask("GET", "/nodes")
        }

    async def knowledge(self, now_s: float) -> dict[str, Knowledge]:
        """Return what is known of all jobs that have trained; errors as in ``rounds``.

        Args:
            now_s: Now by the caller's clock, by which ages become times.
        """
        documents = await self._ask("GET", "/jobs")
        return {str(one["job"]): _knowledge(one, now_s) for one in documents}

    async def allocate(self, job: str, allocation: Allocation) -> None:
        """Have the rounds of a launch be made of these nodes; errors as in ``rounds``."""
        path = f"/launches/{urllib.parse.quote(job)}/allocation"
        await self._ask("PUT", path, to_record(allocation))

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        async with self._calls:
            return await asyncio.to_thread(self._answer, method, path, body)

    def _answer(self, method: str, path: str, body: Any) -> Any:
        url = self._url or self._find(self._address)
        try:
            answer = rest.ask(method, f"{url}/api/v1{path}", body, timeout_s=TIMEOUT_S)
        except UnavailableError:
            self._url = ""  # it may have moved: asked anew the next time
            raise
        self._url = url
        return answer


def _knowledge(document: Mapping[str, Any], now_s: float) -> Knowledge:
    """Return what a job's document says; hints that cannot be so are refused by name."""
    try:
        costs = {str(name): float(value) for name, value in document["costs"].items()}
        step = int(document["step"])
        said, age_s = document.get("hints"), float(document.get("hints_age_s") or 0.0)
        found = None if said is None else hints_of(said)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise UnavailableError(f"the metadata service says what makes no sense: {cause}") from cause
    sound = {n: v for n, v in costs.items() if math.isfinite(v) and v >= 0}
    return Knowledge(step=step, hints=found, at_s=now_s - age_s, costs=sound)


def hints_of(said: Any) -> JobHints:
    """Return hints as a document has them, or in their place why they are refused."""
    try:
        return hints.checked(from_record(JobHints, said, "hints"))
    except InvalidRequestError as error:
        return JobHints(refused=error.message[: hints.REFUSED_LENGTH_MAX])


def _round(document: Mapping[str, Any]) -> Round:
    try:
        return Round(
            newest=int(document["allocation"]),
            number=int(document["allocated"]),
            ranks={str(one["node"]): int(one["ranks"]) for one in document["nodes"]},
            begun=bool(document["begun"]),
            waiting=str(document["waiting"]),
        )
    except (KeyError, TypeError, ValueError) as cause:
        raise UnavailableError(f"the metadata service says what makes no sense: {cause}") from cause
