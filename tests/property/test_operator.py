"""Pods under any orders and any mishaps: what always holds of ``reconcile``, and what comes of it.

A start is begun once whatever becomes of its pod, nothing that is ordered is ended, and once
everything is quiet there runs what is ordered and nothing else (F95, F105, ADR 0069).
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.executions import LaunchState, Order, Orders, Outcome
from holdfast_services.operator.domain.launchers import Launcher
from holdfast_services.operator.domain.reconciling import Forget, Refuse, Start, Stop, reconcile

NODES = ("a", "b", "c")
JOBS = ("d.x", "d.y")
STEPS_COUNT = 60
ENDS = [one for one in Outcome if one is not Outcome.RUNNING]


class World:
    """Nodes with pods, a scheduler that orders, and an operator that is now and then restarted."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.nodes = set(NODES)
        self.number = 0
        self.told = {}
        self.orders = {node: Orders() for node in NODES}
        self.pods = {}
        self.begun = []

    def live(self):
        things = (self.order, self.tell, self.end, self.spoil, self.delete, self.restart, self.lose)
        weights = (6, 8, 4, 1, 2, 1, 0.2)
        for _ in range(STEPS_COUNT):
            self.random.choices(things, weights)[0]()
            if self.random.random() < 0.6:
                self.reconcile()

    def order(self):
        """Have a node run other starts: one more, one less, or one that leaves."""
        node = self.random.choice(NODES)
        self.number += 1
        kept = [one for one in self.orders[node].orders if self.random.random() < 0.7]
        kept = [replace(one, leaving=self.random.random() < 0.2) for one in kept]
        if self.random.random() < 0.7:
            job = self.random.choice(JOBS)
            made = Order(job=job, start=self.number, gpus=1, nodes_max=1, command=("x",))
            kept.append(made)
        self.orders[node] = Orders(number=self.number, orders=tuple(kept))

    def tell(self):
        node = self.random.choice(NODES)
        self.told[node] = self.orders[node]

    def restart(self):
        self.told = {}

    def lose(self):
        """Take a node away."""
        if len(self.nodes) > 1:
            self.nodes.discard(self.random.choice(NODES))

    def _some(self):
        alive = [one for one in self.pods.values() if one.alive]
        return self.random.choice(alive) if alive else None

    def end(self):
        if (one := self._some()) is not None:
            self._put(one, state=replace(one.state, outcome=self.random.choice(ENDS)))

    def spoil(self):
        if (one := self._some()) is not None:
            self._put(one, hopeless="no such image")

    def delete(self):
        """Have somebody else, or its node, end a pod."""
        if (one := self._some()) is not None:
            self._put(one, stopping=True)

    def _put(self, one, **what):
        self.pods[one.place] = replace(one, **what)

    def reconcile(self):
        actions = list(reconcile(self.told, self.pods.values(), nodes=self.nodes))
        self.random.shuffle(actions)
        for action in actions[: self.random.randint(0, len(actions))]:  # others fail
            self.carry_out(action)
        return actions

    def carry_out(self, action):
        match action:
            case Start(node, order):
                place = (node, order.job, order.start)
                assert place not in self.begun, "a start is begun once"
                assert not order.leaving
                self.begun.append(place)
                state = LaunchState(job=order.job, start=order.start)
                self.pods[place] = Launcher(place=place, namespace="d", pod="p", state=state)
            case Stop(one):
                assert one.place not in self._ordered(self.told)
                assert one.place[0] in self.told, "orders are known"
                self._put(one, stopping=True)
            case Refuse(one):
                assert one.hopeless
                self._put(one, stopping=True)
            case Forget(one):
                assert not one.alive or one.place[0] not in self.nodes
                assert one.place not in self._ordered(self.told) or one.place[0] not in self.nodes
                del self.pods[one.place]

    def _ordered(self, orders):
        return {
            (node, one.job, one.start): one for node, what in orders.items() for one in what.orders
        }

    def settle(self):
        """Have everything happen that is under way."""
        self.told = {node: self.orders[node] for node in self.nodes}
        for _ in range(10):
            for action in list(reconcile(self.told, self.pods.values(), nodes=self.nodes)):
                self.carry_out(action)
            for one in list(self.pods.values()):
                if one.stopping and one.alive:
                    self._put(one, state=replace(one.state, outcome=Outcome.STOPPED))


@settings(max_examples=400)
@given(st.integers(0, 2**32))
def test_a_start_begins_once_and_in_the_end_there_is_what_is_ordered(seed):
    world = World(seed)
    world.live()
    world.settle()
    ordered = world._ordered(world.told)

    assert not list(reconcile(world.told, world.pods.values(), nodes=world.nodes)), "all is quiet"
    assert world.pods.keys() <= ordered.keys(), "nothing else is there"
    missing = ordered.keys() - world.pods.keys()
    assert all(ordered[place].leaving for place in missing), "all that is ordered was begun"


def test_without_orders_nothing_is_ended():
    """A restarted operator that has not heard of the scheduler yet does no harm."""
    place = ("a", "d.x", 1)
    state = LaunchState(job="d.x", start=1)
    running = Launcher(place=place, namespace="d", pod="p", state=state)
    ended = replace(running, state=replace(state, outcome=Outcome.FAILED))

    assert not list(reconcile({}, [running, ended], nodes={"a"}))
    assert list(reconcile({"a": Orders()}, [running], nodes={"a"})) == [Stop(running)]
    assert list(reconcile({"a": Orders()}, [ended], nodes={"a"})) == [Forget(ended)]


def test_what_could_not_be_made_is_not_tried_again():
    order = Order(job="d.x", start=1, gpus=1, nodes_max=1, command=("x",))
    granted = {"a": Orders(orders=(order,))}

    assert list(reconcile(granted, [], nodes={"a"})) == [Start("a", order)]
    assert not list(reconcile(granted, [], nodes={"a"}, podless={("a", "d.x", 1)}))
