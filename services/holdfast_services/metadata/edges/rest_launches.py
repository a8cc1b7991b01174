"""REST about launches: what rounds are on, and who takes part in the next."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request

from holdfast.core.allocations import Allocation
from holdfast.core.ids import job_name
from holdfast.core.records import from_record
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.calls.launches import Launches
from holdfast_services.metadata.domain import allocated, round_view
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.transactor import Transactor

BODY_BYTES_MAX = 8 << 20

Document = dict[str, Any]


def launches_router(transactor: Transactor, launches: Launches) -> APIRouter:
    """Return the paths of launches."""
    router = APIRouter()

    @router.get("/api/v1/launches")
    async def listed() -> list[Document]:
        """List the launches: their rounds, and the allocations that these are of."""
        found = await transactor.read(lambda c: c.launches())
        return [launch_doc(launch) for launch in found]

    @router.put("/api/v1/launches/{job:path}/allocation")
    async def allocate(job: str, request: Request) -> Document:
        """Say who takes part in the rounds of a launch; of two allocations the higher counts."""
        name = job_name(job)
        allocation = from_record(Allocation, _json(await request.body()))
        await launches.allocate(name, allocation)
        return launch_doc(await transactor.read(lambda c: c.launch(name)))

    return router


def _json(body: bytes) -> Any:
    if len(body) > BODY_BYTES_MAX:
        raise InvalidRequestError(f"the body is longer than {BODY_BYTES_MAX} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise InvalidRequestError(f"the body is no JSON: {cause}") from cause


def launch_doc(launch: Launch) -> Document:
    """Return what people, and the scheduler, see of a launch.

    ``allocation`` is the newest that was put, ``allocated`` the one that the round is of which is
    on, 0: none is; ``begun``: all its launchers run its ranks.
    """
    ending = launch.ending
    return {
        "job": launch.job,
        "launch": launch.id,
        "round": launch.number,
        "on": launch.on,
        "began_at": launch.began_at_s,
        "nodes": [{"node": one.node, "ranks": one.ranks} for one in launch.members]
        if launch.on
        else [],
        "launchers": [
            {"node": one.node, "holder": one.holder, "left_out": one.left_out}
            for one in launch.launchers
        ],
        "allocation": launch.allocation.number if launch.allocation else 0,
        "allocated": launch.allocated if launch.on else 0,
        "begun": allocated.begun(launch),
        "waiting": round_view.awaited(launch),
        "ending": {"code": ending.code, "reason": ending.reason} if ending else None,
    }
