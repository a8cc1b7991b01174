"""An operator's turns one by one, between an API server and a scheduler that do as they are told.

The API server is kmock behind ``Front``, which answers in its place, or loses its answer; the
scheduler, ``Orderer``, keeps one executor for each node, says orders, and takes jobs on. Nothing
runs but what a test asks for, so each is a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import aiohttp
import kmock
import kopf
from aiohttp import web
from tests.integration.operator.cluster import CORE, KINDS, OURS, READ, WRITE
from tests.unit.operator.objects import example, node

from holdfast.core.executions import ExecutorRequest, Orders, check
from holdfast.core.records import from_record, to_record
from holdfast.errors import CheckpointError
from holdfast_services.operator.domain.names import PLURAL
from holdfast_services.operator.jobs import Jobs
from holdfast_services.operator.kubernetes import Kubernetes
from holdfast_services.operator.nodes import Nodes
from holdfast_services.operator.scheduler import Scheduler

LATE_S = 30.0
LOST = 0
"""In the place of a status: it is done, and the answer is lost."""


class Front:
    """kmock for its caller, but for ``faults``: (method, part of the path, status, body).

    In the place of a status there may be what happens first, once.
    """

    def __init__(self, url, session):
        self.url, self._session = url, session
        self.faults = []
        self.token = "old"
        self.asked = []

    async def answer(self, request):
        body = await request.read()
        what = (request.method, request.path_qs)
        self.asked.append((*what, body.decode()))
        if request.headers.get("Authorization", f"Bearer {self.token}") != f"Bearer {self.token}":
            return web.json_response({"message": "Unauthorized"}, status=401)
        fault = next((f for f in self.faults if f[0] == what[0] and f[1] in what[1]), None)
        if fault is not None and callable(fault[2]):
            self.faults.remove(fault)
            await fault[2]()
            fault = None
        if fault is not None and fault[2] != LOST:
            said = fault[3] if len(fault) > 3 else {"message": f"told to say {fault[2]}"}
            return web.json_response(said, status=fault[2])
        kind = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, self.url + request.path_qs, data=body, headers=kind
        ) as found:
            text = await found.text()
            if fault is not None:
                request.transport.abort()
            return web.Response(text=text, status=found.status, content_type="application/json")


class Orderer:
    """Says ``orders`` of each node to its executor, the first that asked unless ``leases`` says."""

    def __init__(self):
        self.orders = {}
        self.leases = {}
        self.reports = {}
        self.jobs = {}
        self.submitted = []
        self.cancelled = []
        self.refused = None
        self.away = False
        self.thinks_s = 0.0
        self.asked_at_s = []
        self._news = asyncio.Condition()

    def app(self):
        app = web.Application(middlewares=[self._refusing])
        app.router.add_post("/api/v1/executors/{node}", self._ask)
        app.router.add_delete("/api/v1/executors/{node}/{executor}", self._leave)
        app.router.add_get("/api/v1/jobs", self._listed)
        app.router.add_post("/api/v1/jobs", self._submit)
        app.router.add_get("/api/v1/jobs/{job}", self._job)
        app.router.add_post("/api/v1/jobs/{job}/cancel", self._cancel)
        return app

    @web.middleware
    async def _refusing(self, request, handler):
        if self.away:
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        try:
            return await handler(request)
        except CheckpointError as error:
            return web.json_response(refusal(error.kind, error.message), status=400)

    async def order(self, node, number, *orders, poll_s=0.2):
        async with self._news:
            self.orders[node] = Orders(
                version=str(number), number=number, orders=orders, poll_s=poll_s
            )
            self._news.notify_all()

    async def _ask(self, request):
        name, asked = request.match_info["node"], from_record(ExecutorRequest, await request.json())
        check(asked.report)
        self.asked_at_s.append(time.monotonic())
        await asyncio.sleep(self.thinks_s)
        executor = self.leases.setdefault(name, asked.report.executor)
        if executor != asked.report.executor:
            return web.json_response(refusal("already_exists", "another executor"), status=409)
        async with self._news:
            known = self.reports.get(name)
            if known is None or known.sequence < asked.report.sequence:
                self.reports[name] = asked.report
                self._news.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(asked.wait_s):
                    await self._news.wait_for(lambda: self._now(name).version != asked.version)
            return web.json_response(to_record(self._now(name)))

    def _now(self, name):
        return self.orders.get(name, Orders(version="none", poll_s=0.2))

    async def heard(self, node, met, what):
        """Wait until a node's report is as it should be."""
        try:
            async with asyncio.timeout(LATE_S), self._news:
                await self._news.wait_for(lambda: node in self.reports and met(self.reports[node]))
        except TimeoutError:
            raise AssertionError((what, self.reports.get(node))) from None

    async def _leave(self, request):
        self.leases.pop(request.match_info["node"], None)
        return web.json_response({})

    async def _listed(self, _):
        return web.json_response([one for one in self.jobs.values() if one["state"] != "ended"])

    async def _job(self, request):
        found = self.jobs.get(request.match_info["job"])
        return web.json_response(found or refusal("not_found", "no"), status=200 if found else 404)

    async def _submit(self, request):
        if self.refused is not None:
            return web.json_response(self.refused, status=400)
        spec = await request.json()
        known = self.jobs.get(spec["name"])
        if known is None or known["state"] == "ended":
            self.submitted.append(spec["name"])
            known = {**spec, "id": f"s-{len(self.submitted)}", "job": spec["name"],
                     "environment": sorted(spec["environment"]), "state": "queued", "message": "",
                     "why": "it waits", "gpus": 0, "nodes": {}, "allocation": 0}  # fmt: skip
            self.jobs[spec["name"]] = known
        return web.json_response(known)

    async def _cancel(self, request):
        self.cancelled.append(request.match_info["job"])
        return web.json_response({})


def refusal(kind, message):
    return {"kind": kind, "detail": message}


class World:
    """One API server, one scheduler, and as many operators as a test starts."""

    def __init__(self, front, url, orderer, scheduler_url, session):
        self.front, self.url, self.orderer = front, url, orderer
        self._scheduler_url, self._session = scheduler_url, session
        self.token = "old"
        self._operators = []

    async def ask(self, method, path, body=None):
        kind = "merge-patch+json" if method == "PATCH" else "json"
        async with self._session.request(
            method, self.front.url + path, data=None if body is None else json.dumps(body),
            headers={"Content-Type": f"application/{kind}"},
        ) as answer:  # fmt: skip
            assert answer.ok or answer.status == 404, await answer.text()
            return await answer.json() if answer.ok else None

    async def add_node(self, name, **what):
        await self.ask("POST", f"{CORE}/nodes", node(name, **what))

    async def add_job(self, name="gpt", namespace="default", status=None, **spec):
        job = example(**spec)
        job["metadata"] |= {"name": name, "namespace": namespace, "uid": f"u-{namespace}-{name}"}
        path = f"{OURS}/namespaces/{namespace}/{PLURAL}"
        await self.ask("POST", path, {**job, **({"status": status} if status else {})})
        return f"{path}/{name}"

    def made(self):
        """Return where objects were made, or tried to."""
        return [path for method, path, _ in self.front.asked if method == "POST"]

    async def alive(self):
        """Return the pods that are not deleted."""
        pods = (await self.ask("GET", f"{CORE}/pods"))["items"]
        return [one for one in pods if not one["metadata"].get("deletionTimestamp")]

    async def say(self, pod, **status):
        path = f"{CORE}/namespaces/default/pods/{pod}"
        await self.ask("PATCH", f"{path}/status", {"status": status})

    async def tear_out(self, pod):
        """Delete a pod by hand, and its finalizer before."""
        path = f"{CORE}/namespaces/default/pods/{pod}"
        await self.ask("PATCH", path, {"metadata": {"finalizers": None}})
        await self.ask("DELETE", path)

    async def until(self, met):
        async with asyncio.timeout(LATE_S):
            while not met():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    def operator(self):
        kubernetes = Kubernetes(lambda: kopf.ConnectionInfo(server=self.url, token=self.token))
        made = Operator(kubernetes, Scheduler(self._scheduler_url), self.orderer)
        self._operators.append(made)
        return made

    async def close(self):
        for one in self._operators:
            await one.close()


class Operator:
    """Turns of nodes and of jobs, each when it is called."""

    def __init__(self, kubernetes, scheduler, orderer):
        self.kubernetes, self.scheduler, self._orderer = kubernetes, scheduler, orderer
        self._news = asyncio.Event()
        self.nodes = Nodes(kubernetes, scheduler, self._news.set)
        self.jobs = Jobs(kubernetes, scheduler)

    async def hears(self, turns=1):
        """Take turns until it has heard of orders, and then some more."""
        await self.nodes.turn()
        async with asyncio.timeout(LATE_S):
            await self._news.wait()
        self._news.clear()
        for _ in range(turns):
            await self.nodes.turn()

    async def close(self):
        await self.nodes.leave()
        await self.scheduler.close()
        await self.kubernetes.close()


@contextlib.asynccontextmanager
async def world():
    async with contextlib.AsyncExitStack() as stack:
        emulator = await stack.enter_async_context(kmock.KubernetesEmulator())
        server = await stack.enter_async_context(kmock.Server(emulator))
        for name, (kind, namespaced, singular) in KINDS.items():
            emulator.resources[name] = {
                "kind": kind, "namespaced": namespaced, "singular": singular,
                "verbs": READ | WRITE, "subresources": {"status"},
            }  # fmt: skip
        session = await stack.enter_async_context(aiohttp.ClientSession())
        front = Front(str(server.url).rstrip("/"), session)
        behind = web.Application(client_max_size=1 << 24)
        behind.router.add_route("*", "/{path:.*}", front.answer)
        orderer = Orderer()
        urls = [await _served(stack, app) for app in (behind, orderer.app())]
        made = World(front, urls[0], orderer, urls[1], session)
        stack.push_async_callback(made.close)
        yield made


async def _served(stack, app):
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
