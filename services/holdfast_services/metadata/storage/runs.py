"""Jobs and runs, their newest attempt, ranks, decisions and pins.

Whoever changes a run holds its job's row, so all its changes come one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, and_, bindparam, delete, exists, insert, select, update

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.attempts import AttemptSpec
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.failure_record import FailureRecord
from holdfast.core.ids import CheckpointId
from holdfast.core.lines import Move
from holdfast.core.node_view import SupersedeRule
from holdfast.core.persistence_rules import Retention
from holdfast.core.reports import RankCosts
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import common_pb2 as common
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.kit.db import upsert
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.ledger import Cause, Ledger, Left, Month
from holdfast_services.metadata.domain.model import Attempt, Ended, RankFacts, Run
from holdfast_services.metadata.storage.base import checkpoint_id, is_named, key_of
from holdfast_services.metadata.storage.checkpoints import CheckpointStatements
from holdfast_services.metadata.storage.origins import OriginStatements

DECISIONS_PER_RUN_MAX = 16

_D = t.decisions.c
_FINAL = (int(DecisionState.CONFIRMED), int(DecisionState.LOST))
_OPEN = and_(*(_D.state != final for final in _FINAL))
_VALUES = ("spec", "costs", "allowed")
"""Fields of an attempt that are not columns as they are."""

_ATTEMPT = tuple(name for name in Attempt.__dataclass_fields__ if name not in _VALUES)
# A report reads these for each run: made once, as making one costs more than running it.
_RUN = select(t.runs).where(t.runs.c.run == bindparam("run"))
_ATTEMPTS = (
    select(t.attempts)
    .where(t.attempts.c.run == bindparam("run"))
    .order_by(t.attempts.c.generation.desc())
    .limit(1)
)
_RANKS = (
    select(t.attempt_ranks)
    .where(
        t.attempt_ranks.c.run == bindparam("run"),
        t.attempt_ranks.c.generation == bindparam("generation"),
    )
    .order_by(t.attempt_ranks.c.rank)
)
_FORGET_RANKS = delete(t.attempt_ranks).where(
    t.attempt_ranks.c.run == bindparam("run"),
    t.attempt_ranks.c.generation < bindparam("generation"),
)
_UNPIN = delete(t.pins).where(is_named(t.pins))
_DECISION = (
    select(t.decisions.c.body, t.decisions.c.rejected)
    .where(t.decisions.c.run == bindparam("run"))
    .order_by(t.decisions.c.number.desc())
    .limit(1)
)
_PINS = select(t.pins.c.step, t.pins.c.generation).where(t.pins.c.run == bindparam("run"))
_LOCK = select(t.jobs.c.run).where(t.jobs.c.name == bindparam("job")).with_for_update()
_DECIDING = (
    select(t.runs.c.job, t.runs.c.run)
    .join(t.decisions, t.decisions.c.run == t.runs.c.run)
    .join(
        t.attempts,
        and_(t.attempts.c.run == t.runs.c.run, t.attempts.c.generation == t.runs.c.generation),
    )
    .where(_OPEN, t.attempts.c.lease_until_s > bindparam("since_s"))
)
_R, _A = t.runs.c, t.attempts.c
_ACTIVE = (
    select(_R.job)
    .join(t.attempts, and_(_A.run == _R.run, _A.generation == _R.generation))
    .where(
        (_A.lease_until_s > bindparam("since_s"))
        | exists().where(t.decisions.c.run == _R.run, _OPEN)
        | exists().where(t.drains.c.run == _R.run)
    )
)
_RUN_OF = select(t.jobs.c.run).where(t.jobs.c.name == bindparam("job"))
_JOB_OF = select(t.runs.c.job).where(t.runs.c.run == bindparam("run"))
_GENERATION_OF = select(_A.generation).where(
    _A.job == bindparam("of_job"), _A.nonce == bindparam("of_nonce")
)
_SAVE_RUN = update(t.runs).where(
    _R.run == bindparam("of_run"), _R.generation <= bindparam("generation_max")
)
_PUT_ATTEMPT = upsert(
    t.attempts,
    ["run", "generation"],
    lambda new: {
        name: new[name] for name in ("lease_until_s", "replicas_allowed", "costs", "costs_at_s")
    },
)
_PUT_RANK = upsert(
    t.attempt_ranks,
    ["run", "generation", "rank"],
    lambda new: {
        name: new[name] for name in ("node", "registered_at_s", "live", "ready_decision", "loaded")
    },
)
_PUT_DECISION = upsert(
    t.decisions,
    ["run", "number"],
    lambda new: {name: new[name] for name in ("state", "body", "rejected")},
    lambda _: _OPEN,
)
_SAVE_REJECTED = (
    update(t.decisions)
    .where(_D.run == bindparam("of_run"), _D.number == bindparam("of_number"))
    .values(rejected=bindparam("tried"))
)
_CLOSE_OLDER = (
    update(t.decisions)
    .where(_D.run == bindparam("of_run"), _D.number < bindparam("before"))
    .where(_OPEN)
    .values(state=_FINAL[1])
)
_FORGET_OLDER = delete(t.decisions).where(
    _D.run == bindparam("of_run"), _D.number < bindparam("before")
)
_NEW_RUN = {
    "generation": 0,
    "announced_step": 0,
    "announced_reason": 0,
    "announced_at_s": 0.0,
    "rules": "[]",
    "moves": "[]",
    "abandoned": "[]",
    "persisted_step": 0,
    "persisted_at_s": 0.0,
    "persist_owed": False,
    "started": "[]",
    "failures": "{}",
}


class RunStatements(CheckpointStatements, OriginStatements):
    """Statements about runs: a run is read whole, and what differs is written."""

    # -- jobs and runs -------------------------------------------------------------------------

    def add_job(self, job: str, run: str, now_s: float) -> None:
        """Create job and run unless there is one; of racing creators the first one wins."""
        row = {"name": job, "run": run, "created_at_s": now_s}
        created = self._db.execute(self._insert(t.jobs).values(row).on_conflict_do_nothing())
        if created.rowcount == 1:
            self._db.execute(insert(t.runs).values(run=run, job=job, **_NEW_RUN))

    def lock_job(self, job: str) -> str | None:
        """Return the job's run and hold its row to the end: one change of a run at a time."""
        return self._db.execute(_LOCK, {"job": job}).scalar_one_or_none()

    def job_rows(self) -> Sequence[RowMapping]:
        """Return all jobs by name; a plain read."""
        return self._db.execute(select(t.jobs).order_by(t.jobs.c.name)).mappings().all()

    def active_jobs(self, since_s: float) -> Sequence[str]:
        """Return jobs with a lease after ``since_s``, a restore being decided or a drain.

        A plain read. What drains is watched though nobody trains any more: its last holder may go.
        """
        return sorted(self._db.execute(_ACTIVE, {"since_s": since_s}).scalars())

    def deciding_jobs(self, since_s: float) -> Mapping[str, str]:
        """Return job -> run of all whose restore is being decided; a plain read.

        Not of an attempt that was fenced meanwhile, nor of one without a lease after ``since_s``:
        nobody waits for these any more, and no later word closes what they left open.
        """
        rows = self._db.execute(_DECIDING, {"since_s": since_s})
        return {row.job: row.run for row in rows}

    def run_of(self, job: str) -> str | None:
        """Return the job's run without a lock; a plain read."""
        return self._db.execute(_RUN_OF, {"job": job}).scalar_one_or_none()

    def job_of(self, run: str) -> str | None:
        """Return the job of a run; a plain read, and the job of a run never changes."""
        return self._db.execute(_JOB_OF, {"run": run}).scalar_one_or_none()

    def generation_of(self, job: str, nonce: bytes) -> int | None:
        """Return the generation that a nonce has; (job, nonce) is unique in the table."""
        values = {"of_job": job, "of_nonce": nonce}
        return self._db.execute(_GENERATION_OF, values).scalar_one_or_none()

    def load_run(self, run: str) -> Run | None:
        """Return the run with its newest attempt; stable only while its job is locked."""
        row = self._db.execute(_RUN, {"run": run}).mappings().one_or_none()
        if row is None:
            return None
        attempt = self.newest_attempt(run)
        decision, rejected = self._decision(run)
        bare = Run(
            id=run,
            job=row["job"],
            generation=row["generation"],
            attempt=attempt,
            ranks=self._ranks(run, attempt.generation) if attempt else (),
            decision=decision,
            rejected=rejected,
            pins=self._pins(run),
            rules=tuple(_rule(*numbers) for numbers in json.loads(row["rules"])),
            moves=tuple(Move(*numbers) for numbers in json.loads(row["moves"])),
            abandoned=tuple(
                AbandonedStep(run=run, step=step, generation=generation, reason=reason)
                for step, generation, reason in json.loads(row["abandoned"])
            ),
            announcement=_announcement(row),
            announced_at_s=row["announced_at_s"],
            retention=Retention(**json.loads(row["retention"])) if row["retention"] else None,
            persisted_step=row["persisted_step"],
            persisted_at_s=row["persisted_at_s"],
            persist_owed=row["persist_owed"],
            started=tuple(json.loads(row["started"])),
            **_failures(row["failures"]),
        )
        return self._with_checkpoints(bare)

    def save_run(self, before: Run, after: Run) -> None:
        """Write what differs. Under the job's lock; generation and final decisions never go back.

        Raises:
            ConflictError: somebody wrote without the lock; redo the transaction.
        """
        if before == after:
            return
        self._save_run_row(after)
        if after.attempt and after.attempt != before.attempt:
            self._save_attempt(after, after.attempt)
            if _begun(after.attempt) != _begun(before.attempt):
                self.put_attempt(after.id, after.attempt)
        if after.attempt and _seats(after) != _seats(before):
            self._save_ranks(before, after, after.attempt.generation)
        if after.decision and after.decision != before.decision:
            self._save_decision(after, after.decision)
            if after.decision.state is DecisionState.CONFIRMED:
                self.note_parent(after.id, after.decision.generation, after.parent)
        elif after.decision and after.rejected != before.rejected:
            self._save_rejected(after, after.decision)
        self._save_pins(before, after)
        self._save_checkpoints(before, after)
        self.changes.append((before, after))

    def _save_run_row(self, run: Run) -> None:
        """Replace the row unless its generation is higher by now."""
        values = {
            "generation": run.generation,
            "announced_step": run.announcement.step if run.announcement else 0,
            "announced_reason": run.announcement.reason if run.announcement else 0,
            "announced_at_s": run.announced_at_s,
            "rules": json.dumps([_numbers(rule) for rule in run.rules]),
            "moves": json.dumps([[move.generation, move.step, move.of] for move in run.moves]),
            "abandoned": json.dumps([[s.step, s.generation, s.reason] for s in run.abandoned]),
            "retention": json.dumps(asdict(run.retention)) if run.retention else None,
            "persisted_step": run.persisted_step,
            "persisted_at_s": run.persisted_at_s,
            "persist_owed": run.persist_owed,
            "started": json.dumps(run.started),
            "failures": json.dumps(
                {
                    "record": asdict(run.record),
                    "ended": asdict(run.ended) if run.ended else None,
                    "ledger": asdict(run.ledger),
                }
            ),
        }
        which = {"of_run": run.id, "generation_max": run.generation}
        self._expect_one(self._db.execute(_SAVE_RUN, {**which, **values}).rowcount, run)

    # -- attempts ------------------------------------------------------------------------------

    def newest_attempt(self, run: str) -> Attempt | None:
        """Return the newest attempt; a plain read."""
        row = self._db.execute(_ATTEMPTS, {"run": run}).mappings().one_or_none()
        if row is None:
            return None
        spec = from_message(common.AttemptSpec.FromString(row["spec"]), AttemptSpec)
        costs = from_message(common.RankCosts.FromString(row["costs"]), RankCosts)
        allowed = spec.protection.cut(row["replicas_allowed"])
        return Attempt(
            **{name: row[name] for name in _ATTEMPT}, spec=spec, costs=costs, allowed=allowed
        )

    def _save_attempt(self, run: Run, attempt: Attempt) -> None:
        """Insert the attempt, or move what changes; (job, nonce) is unique, so one wins."""
        row: dict[str, Any] = {name: getattr(attempt, name) for name in _ATTEMPT}
        row["nonce"] = attempt.spec.nonce
        row["spec"] = to_message(attempt.spec, common.AttemptSpec).SerializeToString()
        row["costs"] = to_message(attempt.costs, common.RankCosts).SerializeToString()
        row["replicas_allowed"] = attempt.allowed.losses
        self._put(_PUT_ATTEMPT, {"run": run.id, "job": run.job, **row})

    def _ranks(self, run: str, generation: int) -> tuple[RankFacts, ...]:
        """Return the registered ranks of one attempt; a plain read."""
        rows = self._db.execute(_RANKS, {"run": run, "generation": generation}).mappings()
        names = RankFacts.__dataclass_fields__
        return tuple(RankFacts(**{name: row[name] for name in names}) for row in rows)

    def _save_ranks(self, before: Run, after: Run, generation: int) -> None:
        """Upsert changed ranks and drop those of older attempts; under the job's lock."""
        if before.attempt and before.attempt.generation != generation:
            self._db.execute(_FORGET_RANKS, {"run": after.id, "generation": generation})
        known = set(before.ranks) if before.generation == after.generation else set()
        changed = [rank for rank in after.ranks if rank not in known]
        if changed:
            fields = RankFacts.__dataclass_fields__
            rows = [{name: getattr(rank, name) for name in fields} for rank in changed]
            keys = {"run": after.id, "generation": generation}
            self._put(_PUT_RANK, [{**keys, **row} for row in rows])

    # -- decisions and pins --------------------------------------------------------------------

    def _decision(self, run: str) -> tuple[Decision | None, tuple[CheckpointId, ...]]:
        """Return the newest decision and what was tried before it; a plain read."""
        row = self._db.execute(_DECISION, {"run": run}).one_or_none()
        if row is None:
            return None, ()
        decision = from_message(pb.Decision.FromString(row.body), Decision)
        rejected = tuple(checkpoint_id(run, *pair) for pair in json.loads(row.rejected))
        return decision, rejected

    def _save_decision(self, run: Run, decision: Decision) -> None:
        """Insert or change the decision of this number, unless it is confirmed or lost."""
        row = {
            "run": run.id,
            "number": decision.number,
            "state": int(decision.state),
            "body": to_message(decision, pb.Decision).SerializeToString(),
            "rejected": _tried(run),
        }
        self._expect_one(self._put(_PUT_DECISION, row), run)
        # Only the newest decision of a run is ever read; older open ones are closed with it.
        self._db.execute(_CLOSE_OLDER, {"of_run": run.id, "before": decision.number})
        kept = decision.number - DECISIONS_PER_RUN_MAX + 1
        self._db.execute(_FORGET_OLDER, {"of_run": run.id, "before": kept})

    def _save_rejected(self, run: Run, decision: Decision) -> None:
        """Change what was tried in vain, which a confirmed decision may still turn out to be."""
        which = {"of_run": run.id, "of_number": decision.number}
        self._db.execute(_SAVE_REJECTED, {**which, "tried": _tried(run)})

    def _pins(self, run: str) -> tuple[CheckpointId, ...]:
        """Return what a restore holds; a plain read."""
        rows = self._db.execute(_PINS, {"run": run})
        return tuple(sorted(checkpoint_id(run, *row) for row in rows))

    def _save_pins(self, before: Run, after: Run) -> None:
        """Add and remove pins; in the transaction of the decision that needs them."""
        for key in set(before.pins) - set(after.pins):
            self._db.execute(_UNPIN, key_of(key))
        for key in set(after.pins) - set(before.pins):
            row = self._insert(t.pins).values(key_of(key))
            self._db.execute(row.on_conflict_do_nothing())

    def forget_leases(self) -> None:
        """End every attempt's lease: none of their processes can be there any more."""
        self._db.execute(update(t.attempts).values(lease_until_s=0.0))


def _begun(attempt: Attempt | None) -> object:
    """Return what tells how an attempt began."""
    return (attempt.generation, attempt.spec.origin) if attempt else None


def _failures(text: str) -> dict[str, Any]:
    """Return what became of attempts, as a run has it; of an old row nothing is known."""
    said = json.loads(text)
    ended = said.get("ended")
    return {
        "record": FailureRecord(**said.get("record", {})),
        "ended": Ended(**ended) if ended else None,
        "ledger": _ledger(said.get("ledger", {})),
    }


def _ledger(said: dict[str, Any]) -> Ledger:
    months, left = said.get("months", ()), said.get("left")
    return Ledger(
        months=tuple(Month(**{**row, **_by_cause(row)}) for row in months),
        since_s=said.get("since_s"),
        heard_s=said.get("heard_s", 0.0),
        left=Left(**{**left, "cause": Cause(left["cause"])}) if left else None,
    )


def _by_cause(row: dict[str, Any]) -> dict[str, dict[Cause, float]]:
    return {
        name: {Cause(cause): seconds for cause, seconds in row[name].items()}
        for name in ("lost_s", "down_s")
    }


def _rule(after_step: int, below_generation: int, from_generation: int = 0) -> SupersedeRule:
    return SupersedeRule(
        after_step=after_step, below_generation=below_generation, from_generation=from_generation
    )


def _numbers(rule: SupersedeRule) -> tuple[int, int, int]:
    return (rule.after_step, rule.below_generation, rule.from_generation)


def _announcement(row: RowMapping) -> Announcement | None:
    """Return what a run's row says is announced; step 0: nothing is."""
    step, reason = row["announced_step"], SaveReason(row["announced_reason"])
    return Announcement(step=step, reason=reason) if step else None


def _tried(run: Run) -> str:
    """Return what was tried in vain as its column has it."""
    return json.dumps([[key.step, key.generation] for key in run.rejected])


def _seats(run: Run) -> object:
    """Return the ranks with the attempt they are of: of two attempts they may look the same."""
    return (run.attempt.generation if run.attempt else None, run.ranks)
