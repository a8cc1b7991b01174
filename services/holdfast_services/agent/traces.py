"""What one agent knows of a checkpoint's life, as spans of its trace."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_services.agent.domain import events as ev
from holdfast_services.kit.otlp import Traces


def tell(traces: Traces, happened: Sequence[ev.AgentEvent], seconds: float) -> None:
    """Send what came of an action that took so long, until now."""
    for event in happened:
        if isinstance(event, ev.SlotSealed | ev.FetchDone):
            shard = event.content.shard
            traces.ended(
                "seal" if isinstance(event, ev.SlotSealed) else "fetch",
                shard.id.checkpoint,
                seconds,
                job=shard.job,
                rank=shard.id.rank,
                bytes=shard.length_bytes,
                source=event.content.source,
            )
        elif isinstance(event, ev.FetchFailed):
            of, rank = event.shard.checkpoint, event.shard.rank
            traces.ended("fetch", of, seconds, error=event.reason, rank=rank)
