"""Which tier a copy counts as when it is restored. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast_services.agent.domain.fetch_wishes import is_restoring
from holdfast_services.agent.domain.state import Content, State


def as_asked_for(state: State, content: Content) -> Content:
    """Return the content of a copy that its owner asks for: memory, unless a restore brought it.

    Metadata plans the copies of each committed step too, and may be quicker than the owner: such a
    copy was here as well before anything failed.
    """
    if is_restoring(state, content.shard.id.run):
        return content
    return replace(content, source="memory")
