"""Speaks for the nodes: carries out orders with pods, and tells what becomes of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Mapping

from holdfast.core.executions import (
    REASON_LENGTH_MAX,
    ExecutorReport,
    LaunchState,
    Orders,
    Outcome,
)
from holdfast.core.text import tellable
from holdfast.errors import (
    AccessError,
    AlreadyExistsError,
    CheckpointError,
    InvalidRequestError,
    NotFoundError,
)
from holdfast_services.operator.conversation import Conversation
from holdfast_services.operator.domain.launchers import Launcher, Place, launcher_of
from holdfast_services.operator.domain.names import (
    FINALIZER,
    MANAGED_BY,
    MANAGER,
    PLURAL,
    REFUSED,
    Document,
    object_of,
)
from holdfast_services.operator.domain.nodes import Offer, offer_of
from holdfast_services.operator.domain.pods import pod_of
from holdfast_services.operator.domain.reconciling import (
    Action,
    Forget,
    Refuse,
    Start,
    Stop,
    reconcile,
)
from holdfast_services.operator.kubernetes import NODES, PODS, Kubernetes, path_of
from holdfast_services.operator.scheduler import Scheduler

ACTIONS_AT_ONCE_MAX = 16
LEAVE_S_MAX = 2.0
SELECTOR = f"{MANAGED_BY}={MANAGER}"

log = logging.getLogger(__name__)


class Nodes:
    """One executor for all nodes that Kubernetes offers; ``turn`` again and again, ``leave`` after.

    Args:
        kubernetes: Where nodes and pods are.
        scheduler: Whose orders are carried out.
        on_orders: Runs when a turn should come.
    """

    def __init__(
        self, kubernetes: Kubernetes, scheduler: Scheduler, on_orders: Callable[[], None]
    ) -> None:
        self._kubernetes = kubernetes
        self._scheduler = scheduler
        self._on_orders = on_orders
        self._executor = secrets.token_hex(16)
        self._sequences = itertools.count(1)
        self._conversations: dict[str, Conversation] = {}
        self._podless: dict[Place, LaunchState] = {}
        self._seen: set[Place] = set()
        self._at_once = asyncio.Semaphore(ACTIONS_AT_ONCE_MAX)

    async def turn(self) -> None:
        """Do what is to be done now, and tell it.

        Pods are read after the orders: what is not among them is not there.

        Raises:
            CheckpointError: Kubernetes does not say what there is.
        """
        heard = {n: one.orders for n, one in self._conversations.items() if one.orders}
        offers = {one.node: one for one in map(offer_of, await self._kubernetes.list(NODES))}
        launchers = await self._launchers()
        # That may have taken so long that another operator has been told since.
        granted = {n: orders for n, orders in heard.items() if self._conversations[n].orders}
        self._note_podless(granted, offers, launchers)
        actions = list(reconcile(granted, launchers.values(), nodes=offers, podless=self._podless))
        done = await asyncio.gather(*(self._carry_out(one, launchers) for one in actions))
        behind = {node for node, well in done if not well}
        self._seen = set(launchers)
        await self._speak(offers, launchers)
        for node, conversation in self._conversations.items():
            applied = conversation.report.applied
            if node in granted and node not in behind:
                applied = granted[node].number
            conversation.say(self._report(offers[node], launchers, applied))

    async def leave(self) -> None:
        """Speak for nobody any more; pods train on."""
        conversations, self._conversations = self._conversations, {}
        for conversation in conversations.values():
            await conversation.stop()
        leaving = [self._scheduler.leave(node, self._executor) for node in conversations]
        try:
            async with asyncio.timeout(LEAVE_S_MAX):
                await asyncio.gather(*leaving, return_exceptions=True)
        except TimeoutError:
            log.info("the scheduler does not hear that this operator ends")

    async def _launchers(self) -> dict[Place, Launcher]:
        pods = await self._kubernetes.list(PODS, SELECTOR)
        found = (launcher_of(pod) for pod in pods)
        return {one.place: one for one in found if one is not None}

    def _note_podless(
        self, granted: Mapping[str, Orders], nodes: Collection[str], launchers: Collection[Place]
    ) -> None:
        """Note pods that have gone untold; forget starts without a pod that nobody orders.

        Such a pod was torn out with our finalizer. It may run still, so it is not made again.
        """
        for place in self._seen - set(launchers):
            self._podless[place] = _podless(place, Outcome.KILLED, "somebody has torn its pod out")
        ordered = {(n, o.job, o.start) for n, orders in granted.items() for o in orders.orders}
        self._podless = {
            place: one
            for place, one in self._podless.items()
            if place in ordered or place[0] in set(nodes) - granted.keys()
        }

    async def _speak(
        self, offers: Mapping[str, Offer], launchers: Mapping[Place, Launcher]
    ) -> None:
        """Speak for the nodes that are ready, and are offered or have pods of ours."""
        used = {place[0] for place in launchers}
        spoken = {n for n, one in offers.items() if one.ready and (one.asked or n in used)}
        for node in sorted(self._conversations.keys() - spoken):
            log.info("node %s is not ready, or gone: nobody speaks for it", node)
            await self._conversations.pop(node).stop()
        for node in sorted(spoken - self._conversations.keys()):
            log.info("node %s offers %d GPUs", node, offers[node].gpus)
            report = self._report(offers[node], launchers, 0)
            conversation = Conversation(
                self._scheduler, node, report, self._sequences, self._on_orders
            )
            conversation.start()
            self._conversations[node] = conversation

    def _report(
        self, offer: Offer, launchers: Mapping[Place, Launcher], applied: int
    ) -> ExecutorReport:
        states = {place: one.state for place, one in launchers.items()} | self._podless
        here = sorted(place for place in states if place[0] == offer.node)
        return ExecutorReport(
            executor=self._executor,
            sequence=0,
            gpus=offer.gpus,
            gpu_type=offer.gpu_type,
            spot=offer.spot,
            leaving=offer.leaving,
            applied=applied,
            launches=tuple(states[place] for place in here),
        )

    async def _carry_out(
        self, action: Action, launchers: dict[Place, Launcher]
    ) -> tuple[str, bool]:
        """Return a node, and whether what was to be done there is done."""
        async with self._at_once:
            try:
                match action:
                    case Start(node, _):
                        await self._start(action, launchers)
                    case Refuse(one):
                        node = one.place[0]
                        change = {"metadata": {"annotations": {REFUSED: one.hopeless}}}
                        await self._kubernetes.patch(_path(one), change)
                        await self._kubernetes.delete(_path(one))
                    case Stop(one):
                        node = one.place[0]
                        log.info("ending pod %s/%s", one.namespace, one.pod)
                        await self._kubernetes.delete(_path(one))
                    case Forget(one):
                        node = one.place[0]
                        await self._forget(one)
                        launchers.pop(one.place, None)
            except NotFoundError:
                return node, True  # it has gone by itself
            except CheckpointError as error:
                log.warning("node %s: %s", node, error)
                return node, False
        return node, True

    async def _start(self, action: Start, launchers: dict[Place, Launcher]) -> None:
        node, order = action.node, action.order
        place = (node, order.job, order.start)
        try:
            namespace, name = object_of(order.job)
            job = await self._kubernetes.get(path_of(namespace, PLURAL, name))
            pod = pod_of(order, node, job)
            log.info("starting %s, start %d, on node %s", order.job, order.start, node)
            made = launcher_of(await self._made(namespace, pod))
        except (InvalidRequestError, NotFoundError) as error:
            reason = f"no pod can be made: {error.message}"
            self._podless[place] = _podless(place, Outcome.REFUSED, reason)
            return
        except AccessError as error:  # a quota: there may be room later
            reason = f"no pod may be made: {error.message}"
            self._podless[place] = _podless(place, Outcome.KILLED, reason)
            return
        if made is None:
            reason = f"pod {namespace}/{pod['metadata']['name']} is there, and is somebody else's"
            self._podless[place] = _podless(place, Outcome.REFUSED, reason)
            return
        launchers[place] = made

    async def _made(self, namespace: str, pod: Document) -> Document:
        """Return a pod that is made now, or was if an answer was lost.

        Raises:
            AlreadyExistsError: it is not there either: two have written a quota at once.
        """
        try:
            return await self._kubernetes.create(path_of(namespace, "pods"), pod)
        except AlreadyExistsError as error:
            try:
                return await self._kubernetes.get(
                    path_of(namespace, "pods", pod["metadata"]["name"])
                )
            except NotFoundError:
                raise error from None

    async def _forget(self, one: Launcher) -> None:
        """Let Kubernetes remove a pod; others may keep it for reasons of their own."""
        metadata = (await self._kubernetes.get(_path(one)))["metadata"]
        kept = [f for f in metadata.get("finalizers") or () if f != FINALIZER]
        change = {"finalizers": kept, "resourceVersion": metadata.get("resourceVersion")}
        await self._kubernetes.patch(_path(one), {"metadata": change})
        if not metadata.get("deletionTimestamp"):
            await self._kubernetes.delete(_path(one))


def _podless(place: Place, outcome: Outcome, reason: str) -> LaunchState:
    """Return what is told of a start of which there is no pod."""
    said = tellable(reason)[:REASON_LENGTH_MAX]  # what Kubernetes says may be of any length
    return LaunchState(job=place[1], start=place[2], outcome=outcome, code=1, reason=said)


def _path(one: Launcher) -> str:
    return path_of(one.namespace, "pods", one.pod)
