"""Asks the metadata service's REST, with the standard library and a deadline."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast import errors
from holdfast.cli.output import Json, Table
from holdfast.core.byte_sizes import format_bytes
from holdfast.embedded import home_folder, running_stack
from holdfast.errors import CheckpointError, NotFoundError, UnavailableError

TIMEOUT_S = 10.0
REBUILD_TIMEOUT_S = 600.0
ANSWER_BYTES_MAX = 64 << 20
PAGE_COUNT = 1000

_BY_KIND: dict[str, type[CheckpointError]] = {
    cls.kind: cls for cls in (getattr(errors, name) for name in errors.__all__)
}

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
        return cls(_handshake_url(address).rstrip("/"))

    def jobs(self) -> list[Record]:
        """Return all jobs."""
        return list(self._get("/jobs"))

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
        self, method: str, path: str, body: Json = None, *, timeout_s: float = TIMEOUT_S
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        request = urllib.request.Request(  # noqa: S310 - http(s) only, checked below
            f"{self.url}/api/v1{path}", data=data, headers=headers, method=method
        )
        if request.type not in ("http", "https"):
            raise UnavailableError(f"{self.url} is not a web address")
        # Services are reached directly, as gRPC does: a proxy of the shell is not for them.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX) or b"null")
        except urllib.error.HTTPError as cause:
            raise _problem(cause) from cause
        except (OSError, ValueError) as cause:
            raise UnavailableError(f"no answer from {self.url}: {cause}") from cause


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


def _handshake_url(address: str) -> str:
    from holdfast.rpc.channel import call, sync_channel  # noqa: PLC0415 - grpc is slow to import
    from holdfast.v1 import common_pb2  # noqa: PLC0415
    from holdfast.v1.metadata_pb2_grpc import MetadataStub  # noqa: PLC0415

    with sync_channel(address) as channel:
        request = common_pb2.HandshakeRequest()
        try:
            answer = call(MetadataStub(channel).Handshake, request, timeout_s=TIMEOUT_S)
        except UnavailableError as cause:
            reason = cause.message.rpartition(": ")[2]
            raise UnavailableError(
                f"no metadata service answers at {address} ({reason}): "
                f"start it, or correct HOLDFAST_ADDRESS"
            ) from cause
    if not answer.rest_url:
        raise UnavailableError(f"the metadata service at {address} serves no REST")
    return str(answer.rest_url)


def _problem(answer: urllib.error.HTTPError) -> CheckpointError:
    """Return the error that a problem+json body names, or what the code means."""
    with answer:
        try:
            body = json.loads(answer.read(ANSWER_BYTES_MAX))
            return _BY_KIND[body["kind"]](str(body["detail"]))
        except (ValueError, KeyError, TypeError):
            cls = NotFoundError if answer.code == 404 else UnavailableError
            return cls(f"{answer.url} answered {answer.code}")
