"""Spans of a checkpoint's life for a collector of OpenTelemetry.

All that belongs to a checkpoint is one trace. Its number, and that of its root span, are made from
the checkpoint's name: each process knows them, so nothing about traces travels between processes,
and all of them keep or leave out the same checkpoints. Only who sends some imports this.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread, local

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from holdfast.core.ids import CheckpointId

EXPORT_S_MAX = 5.0
"""For one batch; a collector that is out gets nothing, and nobody waits for it."""
CLOSE_S_MAX = 5.0
SPANS_COUNT_MAX = 4_096
"""Spans that wait to be sent; the oldest go."""
PATH = "/v1/traces"


class Traces:
    """Sends spans to a collector, from a thread of its own; ``ended`` may be called from any.

    Args:
        url: The collector's address for OTLP over HTTP, ``http://host:4318``.
        service: What this process is; its spans are those of ``holdfast-<service>``.
        name: Which one of them: a node or a worker.
        ratio: The share of checkpoints that are traced.
    """

    def __init__(self, url: str, service: str, name: str, ratio: float) -> None:
        self._numbers = _Numbers()
        who = {"service.name": f"holdfast-{service}", "service.instance.id": name}
        self._provider = TracerProvider(
            sampler=TraceIdRatioBased(ratio),
            resource=Resource.create(who),
            id_generator=self._numbers,
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(url.rstrip("/") + PATH, timeout=EXPORT_S_MAX)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=SPANS_COUNT_MAX)
        )
        self._tracer = self._provider.get_tracer("holdfast")

    def began(self, of: CheckpointId, at_s: float, **about: str | int) -> None:
        """Send the root span of a checkpoint, which all its others name as their parent."""
        with self._numbers.named(*_numbers_of(of)):
            span = self._tracer.start_span(
                "checkpoint", attributes=_told(of, about), start_time=_ns(at_s)
            )
        span.end(_ns(at_s))

    def ended(
        self,
        what: str,
        of: CheckpointId,
        seconds: float,
        *,
        end_s: float | None = None,
        error: str = "",
        **about: str | int,
    ) -> None:
        """Send a span of a checkpoint: ``what`` took so many seconds, until now or ``end_s``.

        ``error`` says with what it failed; empty: it was done.
        """
        end_s = time.time() if end_s is None else end_s
        number, root = _numbers_of(of)
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        parent = trace.SpanContext(number, root, is_remote=True, trace_flags=sampled)
        span = self._tracer.start_span(
            what,
            trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            attributes=_told(of, about),
            start_time=_ns(end_s - seconds),
        )
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(_ns(end_s))

    def close(self) -> None:
        """Send what waits, for ``CLOSE_S_MAX`` at most; nothing is sent after."""
        ending = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(CLOSE_S_MAX)  # to a collector that is out it would go on batch by batch


class _Numbers(IdGenerator):
    """Numbers of spans: random, but for a root."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._root = local()

    @contextmanager
    def named(self, trace: int, span: int) -> Iterator[None]:
        """Have the span that this thread starts inside be that root."""
        self._root.numbers = trace, span
        try:
            yield
        finally:
            self._root.numbers = None

    def generate_trace_id(self) -> int:
        """See OpenTelemetry."""
        numbers = getattr(self._root, "numbers", None)
        return numbers[0] if numbers else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        """See OpenTelemetry."""
        numbers = getattr(self._root, "numbers", None)
        return numbers[1] if numbers else self._random.generate_span_id()


def _numbers_of(of: CheckpointId) -> tuple[int, int]:
    """Return the numbers of a checkpoint's trace and of its root span; neither is zero."""
    name = f"{of.run}/{of.step}/{of.generation}".encode()
    digest = hashlib.blake2b(name, digest_size=24, person=b"holdfast").digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


def _told(of: CheckpointId, about: Mapping[str, str | int]) -> dict[str, str | int]:
    named = {"run": of.run, "step": of.step, "generation": of.generation, **about}
    return {f"holdfast.{name}": value for name, value in named.items()}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
