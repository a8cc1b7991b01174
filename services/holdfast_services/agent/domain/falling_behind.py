"""Tells people, once, that copies at the rate of a node take longer than the next save does."""

from __future__ import annotations

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.node_view import Committed
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.next_actions import say
from holdfast_services.agent.domain.state import Session, State


def say_behind(state: State, session: Session) -> list[ev.Action]:
    """Say so where a rank finds no slot, since its newest step has no copies yet.

    Other nodes receive what this one saves. That they keep the same rate is not known here, but is
    what a site sets; a network that is slower still makes it no less true.
    """
    rate, view = state.copies_bytes_per_s, state.run(session.run)
    if not (rate and session.wants_slot and session.sealed_steps and view) or view.shortage:
        return []
    newest = session.sealed_steps[-1]
    levels: dict[int, Committed] = {c.checkpoint.step: c for c in view.committed}
    if newest not in levels or levels[newest].replicated or state.lost:
        return []
    protection = session.spec.protection
    moved = protection.losses * _saved_bytes(state, session)
    if moved <= rate * (state.now_s - session.sealed_s):
        return []
    message = (
        f"copies fall behind what job {session.spec.job} saves, so steps are passed: one save of "
        f"this node with {protection} is {format_bytes(moved)} to receive elsewhere, which takes "
        f"{moved / rate:.0f} s at HOLDFAST_REPLICATE_RATE={format_bytes(rate)}, and the next save "
        f"comes sooner: raise the rate, or save less often"
    )
    return say(state, "copies_fall_behind", "warning", message, job=session.spec.job)


def _saved_bytes(state: State, session: Session) -> int:
    """Return what the ranks of one attempt on this node save at one step."""
    attempt = session.run, session.generation
    of_attempt = (s for s in state.sessions.values() if (s.run, s.generation) == attempt)
    return sum(s.reservation.length_bytes for s in of_attempt if s.reservation and s.active)
