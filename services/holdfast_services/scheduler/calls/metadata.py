"""What the scheduler asks of the metadata service, over its REST."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Mapping
from typing import Any

from holdfast.core.allocations import Allocation
from holdfast.core.records import to_record
from holdfast.errors import UnavailableError
from holdfast.rpc import rest
from holdfast_services.scheduler.domain.cluster import Round

TIMEOUT_S = 5.0
CALLS_MAX = 8


class Metadata:
    """The metadata service at ``address``, by gRPC's ``host:port``; it says where its REST is.

    Calls block threads, of which there are at most ``CALLS_MAX`` at once.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._url = ""
        self._calls = asyncio.Semaphore(CALLS_MAX)

    async def rounds(self) -> dict[str, Round]:
        """Return what is known of the rounds of all launches, by job.

        Raises:
            UnavailableError: nobody answers.
        """
        return {str(one["job"]): _round(one) for one in await self._ask("GET", "/launches")}

    async def agents(self) -> dict[str, bool]:
        """Return of all agents by node whether they live; errors as in ``rounds``."""
        return {str(one["node"]): bool(one["live"]) for one in await self._ask("GET", "/nodes")}

    async def allocate(self, job: str, allocation: Allocation) -> None:
        """Have the rounds of a launch be made of these nodes; errors as in ``rounds``."""
        path = f"/launches/{urllib.parse.quote(job)}/allocation"
        await self._ask("PUT", path, to_record(allocation))

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        async with self._calls:
            return await asyncio.to_thread(self._answer, method, path, body)

    def _answer(self, method: str, path: str, body: Any) -> Any:
        url = self._url or rest.url_of_metadata(self._address)
        try:
            answer = rest.ask(method, f"{url}/api/v1{path}", body, timeout_s=TIMEOUT_S)
        except UnavailableError:
            self._url = ""  # it may have moved: asked anew the next time
            raise
        self._url = url
        return answer


def _round(document: Mapping[str, Any]) -> Round:
    try:
        return Round(
            number=int(document["allocated"]),
            begun=bool(document["begun"]),
            waiting=str(document["waiting"]),
        )
    except (KeyError, TypeError, ValueError) as cause:
        raise UnavailableError(f"the metadata service says what makes no sense: {cause}") from cause
