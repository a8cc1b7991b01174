"""Takes an attempt in again that trained on while the catalogue was lost, under its own number.

Its ranks are the only witnesses of it. Each brings the generation and what it had restored, in a
registration that the lost catalogue has answered once; the first one makes the attempt, the
others find it. Source: architecture, section 4.0.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core import lines
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.user_events import Event
from holdfast.errors import InvalidRequestError, StaleGenerationError
from holdfast_services.metadata.domain.attempt_start import made
from holdfast_services.metadata.domain.attempts import Registration, begin, register
from holdfast_services.metadata.domain.model import Limits, Outcome, Run
from holdfast_services.metadata.domain.restore_decision import moved


def seat(run: Run, wish: Registration, known: int | None, now_s: float, limits: Limits) -> Outcome:
    """Register a rank as ``attempts.register`` does, after taking a forgotten attempt in again.

    So is one of which the catalogue does not know any more what it had restored: it is from a
    backup that was taken before.

    Raises:
        AlreadyExistsError: as ``attempts.register`` does.
        StaleGenerationError: as ``readmit`` and ``attempts.register`` do.
        InvalidRequestError: so too.
    """
    trains = wish.spec.generation
    if not trains or not (known is None or run.deciding):
        return register(run, wish, known, now_s, limits)
    back = readmit(run, wish, now_s, limits) if known is None else _resume(run, wish)
    seated = register(back.run, wish, trains, now_s, limits)
    return replace(seated, events=back.events)


def readmit(run: Run, wish: Registration, now_s: float, limits: Limits) -> Outcome:
    """Return the run with the attempt that ``wish`` is of, its restore confirmed as it was.

    Of two attempts that live the higher number wins, whoever says it first (P2).

    Raises:
        StaleGenerationError: a higher generation is known, or another attempt has this one.
        InvalidRequestError: what it had restored is not of this run and before it.
    """
    generation = wish.spec.generation
    if generation < run.generation or (run.current and run.generation == generation):
        raise StaleGenerationError(
            f"attempt {generation} is not known to this catalogue, but attempt "
            f"{run.generation} is: "
            f"start the job again",
            job=run.job,
            run=run.id,
            rank=wish.spec.rank,
        )
    return _resume(begin(run, wish, generation, now_s, limits), wish)


def _resume(run: Run, wish: Registration) -> Outcome:
    """Return the run with what the rank had restored confirmed, whatever was to be chosen.

    Raises:
        InvalidRequestError: it is not of this run and before the attempt.
    """
    past, generation = wish.spec.restored, wish.spec.generation
    if past and (past.run != run.id or past.generation >= generation):
        raise InvalidRequestError(f"attempt {generation} cannot have restored {past}", job=run.job)
    attempt, before = run.attempt, run.decision
    assert attempt is not None
    assert before is not None
    decided = Decision(
        number=before.number + 1,
        state=DecisionState.CONFIRMED,
        generation=generation,
        checkpoint=past,
        fresh=past is None,
    )
    changed = made(replace(run, decision=decided, rejected=(), pins=()), attempt)
    changed = moved(changed, lines.to(past, generation))
    event = Event(
        kind="attempt_readmitted",
        severity="warning",
        message=f"the catalogue had lost attempt {generation} of {run.job}; the attempt goes on",
        job=run.job,
        context={"run": run.id, "attempt": str(generation)},
    )
    return Outcome(run=changed, events=(event,))
