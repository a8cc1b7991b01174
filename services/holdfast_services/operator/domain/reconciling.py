"""What is to be done about pods: pure, from orders and from the pods that there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.core.executions import Order, Orders
from holdfast_services.operator.domain.launchers import Launcher, Place


@dataclass(frozen=True, slots=True)
class Start:
    """Make the pod of an order on a node."""

    node: str
    order: Order


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a pod that can never begin, and note why."""

    launcher: Launcher


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell a pod to save and end; Kubernetes kills it after its grace."""

    launcher: Launcher


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody asks what became of a pod any more: let Kubernetes remove it."""

    launcher: Launcher


Action: TypeAlias = Start | Refuse | Stop | Forget


def reconcile(
    granted: Mapping[str, Orders],
    observed: Collection[Launcher],
    *,
    nodes: Collection[str],
    podless: Collection[Place] = (),
) -> Iterable[Action]:
    """Yield what is to be done now.

    A start of which there is a pod is never started again, whatever became of it.

    Args:
        granted: The orders of each node that has been told some; of others nothing is known.
        observed: All pods of ours, read after the orders.
        nodes: All nodes that there are. With one that has gone, so have its launchers.
        podless: Starts of which there can be no pod, or no other one.
    """
    known = {one.place for one in observed} | set(podless)
    ordered: dict[Place, Order] = {}
    for node in granted.keys() & set(nodes):
        orders = granted[node]
        ordered |= {(node, order.job, order.start): order for order in orders.orders}
    for place, order in ordered.items():
        if place not in known and not order.leaving:
            yield Start(place[0], order)
    for one in observed:
        yield from _about(one, ordered, granted, nodes)


def _about(
    one: Launcher,
    ordered: Mapping[Place, Order],
    granted: Mapping[str, Orders],
    nodes: Collection[str],
) -> Iterable[Action]:
    node = one.place[0]
    if node not in nodes:
        yield Forget(one)
    elif one.place in ordered:
        if one.alive and one.hopeless and not one.stopping:
            yield Refuse(one)
    elif node in granted:
        if not one.alive:
            yield Forget(one)
        elif not one.stopping:
            yield Stop(one)
