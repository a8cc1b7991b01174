"""Figures of one agent for Prometheus (F110): what is known is read when they are asked for.

Only durations are counted as they end, and only where ``/metrics`` is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from holdfast.core.slot_names import SlotState
from holdfast_services.agent.domain import State, Work
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.reservation_admission import reserved_bytes
from holdfast_services.agent.performer import Performer
from holdfast_services.agent.reporter import Reporter
from holdfast_services.agent.shell import Shell
from holdfast_services.kit.exposition import counter, gauge
from holdfast_services.transport.preferred import Preferred

BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
SLOT_STATES = {
    SlotState.FREE: "free",
    SlotState.WRITING: "writing",
    SlotState.CLOSED: "closed",
    SlotState.SEALED: "sealed",
    SlotState.ELEMENT: "parity",
    SlotState.PARTIAL: "partial",
}
SOURCES = {"object": "object"}
"""By the tier of a copy the label of where it came from; of every other, a peer."""


class Durations:
    """How long what takes time took; ``ended`` is told of each action."""

    def __init__(self) -> None:
        self._seal = Histogram(
            "holdfast_agent_seal_seconds",
            "From the end of a rank's writing until its slot was hashed and sealed.",
            registry=None,
            buckets=BUCKETS_S,
        )
        self._fetch = Histogram(
            "holdfast_agent_fetch_seconds",
            "Time to bring a copy here, verified and sealed.",
            ["source"],
            registry=None,
            buckets=BUCKETS_S,
        )
        self._failures_count = 0

    def ended(self, happened: Sequence[ev.AgentEvent], seconds: float) -> None:
        """Count what came of an action that took ``seconds``."""
        for event in happened:
            if isinstance(event, ev.SlotSealed):
                self._seal.observe(seconds)
            elif isinstance(event, ev.FetchDone):
                source = SOURCES.get(event.content.source, "peer")
                self._fetch.labels(source).observe(seconds)
            elif isinstance(event, ev.FetchFailed):
                self._failures_count += 1

    def families(self) -> Iterator[Metric]:
        """Yield what Prometheus is told."""
        yield from self._seal.collect()
        yield from self._fetch.collect()
        yield counter(
            "holdfast_agent_fetch_failures", "Copies that no source gave.", self._failures_count
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """Where the figures of an agent are; reading them changes nothing, and waits for nobody."""

    shell: Shell
    performer: Performer
    reporter: Reporter
    transports: Preferred
    durations: Durations = field(default_factory=Durations)

    def families(self) -> Iterator[Metric]:
        """Yield all there is to tell."""
        state = self.shell.state
        yield from _memory(state)
        yield from _queues(state)
        yield gauge(
            "holdfast_agent_work_under_way",
            "Actions begun and not ended, those that wait for a thread too.",
            self.performer.under_way_count,
        )
        fetched = {one.kind: one.fetched_bytes for one in self.transports.states()}
        served = self.transports.served_bytes()
        yield _by_transport("holdfast_agent_fetched_bytes", "What came from other nodes.", fetched)
        yield _by_transport("holdfast_agent_served_bytes", "What other nodes were given.", served)
        yield from _reports(state, self.reporter)
        yield from self.durations.families()


def _memory(state: State) -> Iterator[Metric]:
    promised = reserved_bytes(state)
    live = sum(session.active for session in state.sessions.values())
    yield gauge("holdfast_agent_budget_bytes", "Most that slots may use.", state.budget_bytes)
    yield gauge("holdfast_agent_used_bytes", "Memory of all slots.", state.used_bytes)
    yield gauge("holdfast_agent_promised_bytes", "What ranks here have reserved.", promised)
    yield gauge("holdfast_agent_ranks", "Ranks that train on this node.", live)
    slots = GaugeMetricFamily("holdfast_agent_slots", "Slots by state.", labels=["state"])
    counts = Counter(slot.name.state for slot in state.slots.values())
    for each, label in SLOT_STATES.items():
        slots.add_metric([label], counts[each])
    yield slots


def _queues(state: State) -> Iterator[Metric]:
    working = GaugeMetricFamily(
        "holdfast_agent_slots_worked_on", "Slots that a thread has, or will.", labels=["work"]
    )
    counts = Counter(slot.work for slot in state.slots.values())
    for work in Work:
        if work is not Work.NONE:
            working.add_metric([work.value], counts[work])
    yield working
    waiting = sum(not (tries.under_way or tries.done) for tries in state.fetches.values())
    yield gauge("holdfast_agent_fetches_waiting", "Copies to be fetched again later.", waiting)
    yield gauge("holdfast_agent_holds", "Copies that other nodes asked for.", len(state.holds))


def _reports(state: State, reporter: Reporter) -> Iterator[Metric]:
    sent, failed = reporter.reports_count, reporter.failures_count
    waiting = reporter.events_count
    yield gauge("holdfast_agent_metadata_up", "Whether metadata answers.", not state.lost)
    yield counter("holdfast_agent_reports", "Heartbeats and reports begun.", sent)
    yield counter("holdfast_agent_report_failures", "Of these, without an answer.", failed)
    yield gauge("holdfast_agent_events_waiting", "Events not yet told.", waiting)


def _by_transport(name: str, about: str, bytes_by_kind: Mapping[str, int]) -> Metric:
    found = CounterMetricFamily(name, about, labels=["transport"])
    for kind, length_bytes in sorted(bytes_by_kind.items()):
        found.add_metric([kind], length_bytes)
    return found
