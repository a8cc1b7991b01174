"""How long training waits for a free slot. Pure. Unit: seconds."""

from __future__ import annotations

from holdfast.training.save_machine.state import SaveState

RETURN_S_MAX = 1.0


def slot_wait_s(state: SaveState, step: int, *, agent_lost: bool) -> float:
    """Return how long the training thread waits for a slot that is not there.

    When all copies of the save before are made, the slot before that is only a report and its
    answer away (4.7). While copies are missing nobody knows how long it takes.
    """
    if agent_lost or not state.patience_s:
        return 0.0
    before = state.newest if state.newest < step else state.before
    copied = state.local_step if state.shortage else state.copied_step
    returning = 0 <= before <= max(copied, state.copied_step) and not state.outage
    return max(state.patience_s, RETURN_S_MAX) if returning else state.patience_s
