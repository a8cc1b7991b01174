"""Where attempts came from: what a restore decided and why, and the line of a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.origin import Tree
from holdfast_services.metadata.domain.ancestry import Ancestor
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.edges.dashboard.texts import clock

COMMIT_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What the newest attempt was to restore: a sentence, the reason, what was tried in vain."""

    state: str
    sentence: str
    reason: str
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forebear:
    """One attempt of a line."""

    attempt: int
    began: str
    parent: str
    rollback: str
    holder: str
    code: str
    command: str
    user: str
    ranks: str


def decided(run: Run) -> Decided | None:
    """Return the newest restore decision of a run; None: there was none."""
    decision = run.decision
    if decision is None:
        return None
    return Decided(
        state=decision.state.name.lower(),
        sentence=_sentence(decision),
        reason=decision.reason,
        rejected=tuple(map(_named, run.rejected)),
    )


def _sentence(decision: Decision) -> str:
    who = f"Attempt {decision.generation}"
    if decision.state is DecisionState.LOST:
        return f"{who} cannot begin as it asked to."
    to = "step 0" if decision.fresh else "a checkpoint that is still being looked for"
    if decision.checkpoint is not None:
        to = _named(decision.checkpoint)
    verbs = {DecisionState.CONFIRMED: "began at", DecisionState.PROPOSED: "is about to begin at"}
    return f"{who} {verbs.get(decision.state, 'waits for')} {to}."


def _named(key: CheckpointId) -> str:
    return f"step {key.step:,} of attempt {key.generation}"


def forebears(line: Sequence[Ancestor]) -> tuple[Forebear, ...]:
    """Return the attempts that led to a checkpoint, the last first."""
    return tuple(map(_forebear, line))


def _forebear(one: Ancestor) -> Forebear:
    began, back = one.beginning, one.rollback
    origin = began.origin
    changed = {Tree.DIRTY: ", files changed", Tree.CLEAN: ""}.get(
        origin.tree, ", not known if clean"
    )
    why = ""
    if back is not None:
        by = f" by {back.holder}" if back.holder else ""
        why = f"rolled back{by}, {clock(back.at_s)}" + (f": {back.reason}" if back.reason else "")
    return Forebear(
        attempt=began.generation,
        began="unknown" if began.at_s is None else clock(began.at_s),
        parent=_named(began.parent) if began.parent else "step 0",
        rollback=why,
        holder=began.holder,
        code=f"{origin.commit[:COMMIT_SHOWN]}{changed}" if origin.commit else "",
        command=origin.command,
        user=origin.user,
        ranks=f"{began.world_size:,}" if began.world_size else "unknown",
    )
