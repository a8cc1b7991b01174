"""Asks the metadata service's REST, with the standard library and a deadline."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.cli.output import Json, Table
from holdfast.core.byte_sizes import format_bytes
from holdfast.embedded import home_folder, running_stack
from holdfast.errors import NotFoundError
from holdfast.rpc import rest

REBUILD_TIMEOUT_S = 600.0
ROLLBACK_TIMEOUT_S = 90.0
"""The object store is listed before, and written to after."""
PAGE_COUNT = 1000

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rest:
    """The REST of one metadata service; ``url`` has no trailing slash and is the dashboard too."""

    url: str

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Self:
        """Return the service at ``HOLDFAST_ADDRESS``, else that of the stack which runs here.

        Raises:
            NotFoundError: neither is there.
            UnavailableError: it does not answer.
        """
        home = home_folder(environ)
        stack = running_stack(home)
        address = environ.get("HOLDFAST_ADDRESS")
        if stack is not None and address in (None, "", stack.address):
            return cls(stack.rest_url.rstrip("/"))
        if not address:
            raise NotFoundError(
                f"no stack runs in {home} and HOLDFAST_ADDRESS is not set: run `holdfast up`"
            )
        return cls(rest.url_of_metadata(address))

    def jobs(self) -> list[Record]:
        """Return all jobs."""
        return list(self._get("/jobs"))

    def job(self, job: str) -> Record:
        """Return one job."""
        return dict(self.of_job("GET", job, ""))

    def checkpoints(self, job: str, *, durable: bool = False) -> list[Record]:
        """Return the checkpoints of a job, newest first; only those in the store if ``durable``."""
        found: list[Record] = []
        query = {"limit": PAGE_COUNT, "durable": str(durable).lower()}
        while True:
            path = f"/jobs/{urllib.parse.quote(job)}/checkpoints"
            page = list(self._get(f"{path}?{urllib.parse.urlencode(query)}"))
            found += page
            if len(page) < PAGE_COUNT:
                return found
            query["before"] = page[-1]["step"]
            query["before_generation"] = page[-1]["generation"]

    def checkpoint(self, job: str, step: int, generation: int | None = None) -> Record:
        """Return one checkpoint with its shards and where copies of them are."""
        query = "" if generation is None else f"?generation={generation}"
        return dict(self._get(f"/jobs/{urllib.parse.quote(job)}/checkpoints/{step}{query}"))

    def nodes(self) -> list[Record]:
        """Return all nodes."""
        return list(self._get("/nodes"))

    def store(self) -> Record:
        """Return the object store that the service uses: ``url``, ``ok``, ``error``."""
        return dict(self._get("/store"))

    def events(self, count: int) -> list[Record]:
        """Return the newest ``count`` events, the newest first."""
        return list(self._get(f"/events?limit={count}"))

    def of_checkpoint(
        self,
        method: str,
        checkpoint: Record,
        path: str = "",
        *,
        body: Json = None,
        **query: str | int,
    ) -> Any:
        """Return what the service answers to a request about one checkpoint."""
        query["generation"] = int(checkpoint["generation"])
        job = urllib.parse.quote(str(checkpoint["job"]))
        where = f"/jobs/{job}/checkpoints/{checkpoint['step']}{path}"
        return self._ask(method, f"{where}?{urllib.parse.urlencode(query)}", body)

    def roll_back(self, checkpoint: Record, wish: Record) -> Record:
        """Have a job's next start begin at a checkpoint; say what that leaves behind."""
        job = urllib.parse.quote(str(checkpoint["job"]))
        where = f"/jobs/{job}/checkpoints/{checkpoint['step']}/rollback"
        query = f"generation={int(checkpoint['generation'])}"
        answer = self._ask("POST", f"{where}?{query}", wish, timeout_s=ROLLBACK_TIMEOUT_S)
        return dict(answer)

    def of_job(self, method: str, job: str, path: str, body: Json = None) -> Any:
        """Return what the service answers to a request about one job."""
        return self._ask(method, f"/jobs/{urllib.parse.quote(job)}{path}", body)

    def read(self, method: str, lease: str, body: Json = None) -> Any:
        """Renew (PUT) or end (DELETE) a read lease."""
        return self._ask(method, f"/reads/{urllib.parse.quote(lease, safe='')}", body)

    def rebuild(self, job: str | None) -> Record:
        """Have the catalogue rebuilt from the store, for one job or all; say what was found."""
        return dict(self._ask("POST", "/rebuild", {"job": job}, timeout_s=REBUILD_TIMEOUT_S))

    def _get(self, path: str) -> Any:
        return self._ask("GET", path)

    def _ask(
        self, method: str, path: str, body: Json = None, *, timeout_s: float = rest.TIMEOUT_S
    ) -> Any:
        return rest.ask(method, f"{self.url}/api/v1{path}", body, timeout_s=timeout_s)


def nodes_table(nodes: list[Record]) -> Table:
    """Return nodes as a table."""
    return Table(
        ("node", "state", "ranks", "shards", "used", "budget", "address"),
        tuple(
            (
                str(node["node"]),
                "live" if node["live"] else "lost",
                str(node["ranks"]),
                str(node["shards"]),
                format_bytes(node["used_bytes"]),
                format_bytes(node["budget_bytes"]),
                str(node["rpc_address"]),
            )
            for node in nodes
        ),
    )
