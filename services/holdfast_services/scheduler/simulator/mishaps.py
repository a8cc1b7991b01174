"""What goes wrong with nodes: drawn in advance from the seed, the same whatever a policy does."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_services.scheduler.domain.policies.facts import Node, NodeState
from holdfast_services.scheduler.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """A node is away from ``gone_s`` until ``back_s``; told of at ``told_s``, at once if equal."""

    node: str
    told_s: float
    gone_s: float
    back_s: float

    @property
    def by_surprise(self) -> bool:
        """Whether nobody was told before."""
        return self.told_s == self.gone_s


class Mishaps:
    """All that will go wrong, drawn as time goes on."""

    def __init__(self, scenario: Scenario, nodes: tuple[Node, ...]) -> None:
        self._streams = {node.name: _of_node(scenario, node) for node in nodes}
        self._next = {name: next(stream, None) for name, stream in self._streams.items()}
        self._past: dict[str, list[Mishap]] = {name: [] for name in self._streams}

    def between(self, begin_s: float, end_s: float) -> list[Mishap]:
        """Return the nodes that go in ``(begin_s, end_s]``, in the order in which they do."""
        found = []
        for name in self._streams:
            while (mishap := self._next[name]) and mishap.told_s <= end_s:
                self._past[name].append(mishap)
                self._next[name] = next(self._streams[name], None)
            found += [one for one in self._past[name][-2:] if begin_s < one.gone_s <= end_s]
        return sorted(found, key=lambda one: (one.gone_s, one.node))

    def nodes(self, nodes: tuple[Node, ...], now_s: float) -> tuple[Node, ...]:
        """Return the nodes in the states that they have now."""
        return tuple(replace(node, state=self._state(node.name, now_s)) for node in nodes)

    def _state(self, name: str, now_s: float) -> NodeState:
        past = self._past[name]
        at = bisect_right(past, now_s, key=lambda one: one.told_s) - 1
        if at < 0 or now_s >= past[at].back_s:
            return NodeState.UP
        return NodeState.LOST if now_s >= past[at].gone_s else NodeState.DRAINING


def _of_node(scenario: Scenario, node: Node) -> Iterator[Mishap]:
    mean_s = scenario.spot_mtbf_s if node.spot else scenario.mtbf_s
    notice_s = scenario.notice_s if node.spot else 0.0
    drawn = random.Random(f"{scenario.seed}:{node.name}")  # noqa: S311 - no secret
    now_s = 0.0
    while mean_s > 0:
        now_s += drawn.expovariate(1 / mean_s)
        back_s = now_s + notice_s + scenario.away_s
        yield Mishap(node=node.name, told_s=now_s, gone_s=now_s + notice_s, back_s=back_s)
        now_s = back_s
