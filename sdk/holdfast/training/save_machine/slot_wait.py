"""How long training waits for a free slot. Pure. Unit: seconds."""

from __future__ import annotations

from holdfast.training.save_machine.state import SaveState

RETURN_S_MAX = 1.0
LOOK_S = 1.0
"""How long it waits at once: then it is looked whether there is still something to wait for."""


def slot_wait_s(state: SaveState, step: int, *, agent_lost: bool) -> float:
    """Return how long the training thread waits for a slot that is not there.

    When all copies of the save before are made, the slot before that is only a report and its
    answer away (4.7). While copies are missing nobody knows how long it takes.
    """
    if agent_lost or state.fenced or state.hindrance or not state.patience_s:
        return 0.0
    before = state.newest if state.newest < step else state.before
    copied = state.local_step if state.shortage else state.copied_step
    returning = 0 <= before <= max(copied, state.copied_step) and not state.outage
    return max(state.patience_s, RETURN_S_MAX) if returning else state.patience_s


def wait_left_s(state: SaveState, *, agent_lost: bool, lost_s_max: float) -> float:
    """Return how much of that is left after one look without a slot.

    Nothing, once the agent has said why none comes. One that is away may come back, but whatever
    memory it was touching for this rank is waited for no more.
    """
    if state.fenced or state.hindrance:
        return 0.0
    return min(state.waits_s, lost_s_max) if agent_lost else state.waits_s
