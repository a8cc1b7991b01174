"""The REST edge of the object tier: what is kept, for how long, who reads it, where it lies."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from holdfast.core.ids import GENERATION_MAX, STEP_MAX, CheckpointId, job_name
from holdfast.core.persistence_rules import Retention
from holdfast.core.text import holds_nul
from holdfast_services.metadata.calls.health import waiting_count
from holdfast_services.metadata.calls.links import links
from holdfast_services.metadata.calls.rollbacks import roll_back
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.retention import METRIC_LENGTH_MAX, Verdict
from holdfast_services.metadata.edges.object_tier import ObjectTier, expect_archive
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.rollbacks import Wish
from holdfast_services.metadata.usecases.users import At

NOTE_LENGTH_MAX = 1000
HOLDER_LENGTH_MAX = 200
READ_S_MAX = 3600.0
LINK_S_MAX = 7 * 86400
LINK_S = 3600

Step = Annotated[int, Path(ge=0, le=STEP_MAX, description="Optimizer steps completed")]
OneOf = Annotated[
    int | None,
    Query(
        ge=0,
        le=GENERATION_MAX,
        description="Which one, where a step is there twice; else the one that counts",
    ),
]
Seconds = Annotated[float, Field(gt=0, le=READ_S_MAX, description="How long from now, seconds")]


def _without_nul(text: str) -> str:
    if holds_nul(text):
        raise ValueError("holds a NUL character")
    return text


Text = Annotated[str, AfterValidator(_without_nul)]
"""What a database takes."""
Lease = Annotated[Text, Path(max_length=64)]


class _Body(BaseModel):
    """The body of a request; unknown fields are refused, because they are mistakes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RetentionDoc(_Body):
    """What is kept in the object store: the union of the rules; no rule keeps everything."""

    last: int = Field(0, ge=0, description="The newest n that can be restored")
    every: int = Field(0, ge=0, description="Steps that are multiples")
    spaced_s: float = Field(0.0, ge=0, description="The first of each span of so many seconds")
    best: int = Field(0, ge=0, description="The n best by the metric")
    metric: str = Field("", max_length=METRIC_LENGTH_MAX, description="A key of the user's notes")
    maximize: bool = Field(False, description="The highest are best, not the lowest")
    age_s_min: float = Field(0.0, ge=0, description="Nothing younger goes, in seconds; no rule")


class PinDoc(_Body):
    """Why a checkpoint is kept, for people."""

    note: Text = Field("", max_length=NOTE_LENGTH_MAX)


class RollbackWishDoc(_Body):
    """Who wants a job to go back, and why, for people; and what they have seen of it."""

    attempt: int | None = Field(
        None, ge=0, description="Only if the job's newest attempt is still this one"
    )
    force: bool = Field(False, description="Though it trains: that attempt saves nothing any more")
    holder: str = Field("", max_length=HOLDER_LENGTH_MAX)
    reason: str = Field("", max_length=NOTE_LENGTH_MAX)


class ReadWishDoc(_Body):
    """Who is going to read a checkpoint out of the object store, and for how long."""

    holder: Text = Field(min_length=1, max_length=HOLDER_LENGTH_MAX)
    ttl_s: Seconds


class RenewDoc(_Body):
    """How much longer a reader needs."""

    ttl_s: Seconds


class RebuildWishDoc(_Body):
    """The job whose checkpoints are added from the object store; null: all jobs there."""

    job: str | None = None


class ReadDoc(BaseModel):
    """A reader's lease: until then, what it names is not deleted."""

    id: str
    until_s: float


class VerdictDoc(BaseModel):
    """Whether a durable checkpoint stays, and why."""

    step: int
    attempt: int
    generation: int
    keep: bool
    why: str
    expired: bool = Field(description="It was settled before: its objects are being deleted")


class DoneDoc(BaseModel):
    """The checkpoint that something was done to."""

    job: str
    run: str
    step: int
    attempt: int
    generation: int


class RollbackDoc(BaseModel):
    """Where a job's next start begins, and what it leaves behind."""

    job: str
    run: str
    step: int
    attempt: int = Field(description="That saved the step")
    generation: int = Field(description="The rollback's own: higher than all attempts before it")
    left: list[DoneDoc] = Field(description="Could be restored by itself until now; newest first")
    repeated: bool = Field(description="The same was asked for before, and nothing began since")


class RemovedDoc(BaseModel):
    """How many durable checkpoints of a removed job workers are going to delete."""

    durable: int


class SaveDoc(BaseModel):
    """The step that all ranks of a job save, and why: another reason may have been first."""

    step: int
    reason: str


class ScrubDoc(BaseModel):
    """How many checkpoints are going to be read back."""

    checkpoints: int


class SkippedDoc(BaseModel):
    """An object that should be a manifest and was not taken, and why."""

    key: str
    reason: str


class RebuiltDoc(BaseModel):
    """What was new: jobs and checkpoints."""

    jobs: int
    checkpoints: int
    skipped: list[SkippedDoc]


class StoreDoc(BaseModel):
    """The object store; without one, ``url`` is null."""

    url: str | None
    ok: bool
    error: str
    durable: int = Field(description="Checkpoints that are there, of all jobs")
    durable_bytes: int
    draining: int = Field(description="On their way there")
    expired: int = Field(description="Their objects are being deleted")
    bad: int = Field(description="Objects were read back wrong")
    queue_waiting: int | None = Field(description="Items no worker does yet; null: no answer")


def users_router(transactor: Transactor, objects: ObjectTier) -> APIRouter:
    """Return the routes. They come before those of jobs, whose path takes everything."""
    router = APIRouter(prefix="/api/v1", tags=["object tier"])
    _add_policy(router, transactor)
    _add_save(router, transactor)
    _add_pins(router, transactor)
    _add_rollback(router, transactor, objects)
    _add_reads(router, transactor)
    _add_store(router, transactor, objects)
    _add_removal(router, transactor)
    return router


def _add_removal(router: APIRouter, transactor: Transactor) -> None:
    @router.delete("/jobs/{job:path}")
    async def remove_job(job: str) -> RemovedDoc:
        """Remove a job from memory, catalogue and object store; 412 while it trains."""
        name = job_name(job)
        return RemovedDoc(durable=await transactor.change(lambda c: users.remove_job(c, name)))


def _add_policy(router: APIRouter, transactor: Transactor) -> None:
    @router.get("/jobs/{job:path}/retention")
    async def retention(job: str) -> RetentionDoc:
        """Show what is kept of a job."""
        name = job_name(job)
        return RetentionDoc(**asdict(await transactor.read(lambda c: users.policy(c, name))))

    @router.put("/jobs/{job:path}/retention")
    async def set_retention(job: str, wish: RetentionDoc) -> RetentionDoc:
        """Set what is kept of a job, as a whole; it is carried out within a minute."""
        name, policy = job_name(job), Retention(**wish.model_dump())
        changed = await transactor.change(lambda c: users.set_policy(c, name, policy))
        return RetentionDoc(**asdict(changed))

    @router.get("/jobs/{job:path}/collect")
    async def dry_run(job: str) -> list[VerdictDoc]:
        """Show what the policy says of each durable checkpoint, newest first; change nothing."""
        name = job_name(job)
        return [_verdict(v) for v in await transactor.read(lambda c: users.verdicts(c, name))]

    @router.post("/jobs/{job:path}/collect")
    async def collect(job: str) -> list[VerdictDoc]:
        """Expire now what the policy does not keep, and show the verdicts."""
        name = job_name(job)
        return [_verdict(v) for v in await transactor.change(lambda c: users.expire(c, name))]

    @router.post("/jobs/{job:path}/scrub")
    async def scrub(job: str) -> ScrubDoc:
        """Have workers read back all that the job has in the object store."""
        name = job_name(job)
        return ScrubDoc(checkpoints=await transactor.change(lambda c: users.scrub(c, name)))


def _add_save(router: APIRouter, transactor: Transactor) -> None:
    @router.post("/jobs/{job:path}/save")
    async def save(job: str) -> SaveDoc:
        """Have all ranks save a step some two seconds ahead; 412 if not all of them train.

        The step is the same until it is done, however often it is asked for.
        """
        name = job_name(job)
        announced = await transactor.change(lambda c: users.ask_save(c, name))
        return SaveDoc(step=announced.step, reason=announced.reason.text)


def _verdict(verdict: Verdict) -> VerdictDoc:
    return VerdictDoc(
        step=verdict.id.step,
        attempt=verdict.id.generation,
        generation=verdict.id.generation,
        keep=verdict.keep,
        why=verdict.why,
        expired=verdict.expired,
    )


def _add_pins(router: APIRouter, transactor: Transactor) -> None:
    @router.post("/jobs/{job:path}/checkpoints/{step}/pin")
    async def pin(job: str, step: Step, wish: PinDoc, generation: OneOf = None) -> DoneDoc:
        """Keep a checkpoint until it is unpinned; one in memory goes to the object store now."""
        at = At(job_name(job), step, generation)
        limits = transactor.limits
        return _done(await transactor.change(lambda c: users.pin(c, at, wish.note, limits)), job)

    @router.delete("/jobs/{job:path}/checkpoints/{step}/pin")
    async def unpin(job: str, step: Step, generation: OneOf = None) -> DoneDoc:
        """Let the policy decide about a checkpoint again."""
        at = At(job_name(job), step, generation)
        return _done(await transactor.change(lambda c: users.unpin(c, at)), job)

    @router.delete("/jobs/{job:path}/checkpoints/{step}")
    async def remove(
        job: str,
        step: Step,
        generation: OneOf = None,
        force: Annotated[
            bool,
            Query(
                description="Though it is pinned, or the newest that can be restored; one that is "
                "on its way there goes no further"
            ),
        ] = False,
    ) -> DoneDoc:
        """Expire one checkpoint: workers delete its objects, then it is gone from here."""
        at = At(job_name(job), step, generation)
        return _done(await transactor.change(lambda c: users.remove(c, at, force=force)), job)


def _add_rollback(router: APIRouter, transactor: Transactor, objects: ObjectTier) -> None:
    @router.post("/jobs/{job:path}/checkpoints/{step}/rollback")
    async def rollback(
        job: str, step: Step, wish: RollbackWishDoc, generation: OneOf = None
    ) -> RollbackDoc:
        """Have the job's next start begin at this checkpoint; what came after it is kept."""
        at = At(job_name(job), step, generation)
        done = await roll_back(transactor, objects.archive, Wish(at=at, **wish.model_dump()))
        to = done.rollback.to
        return RollbackDoc(
            job=at.job,
            run=done.run,
            step=to.step,
            attempt=to.generation,
            generation=done.rollback.generation,
            left=[_checkpoint_doc(at.job, key) for key in done.left],
            repeated=done.repeated,
        )


def _done(item: Listed, job: str) -> DoneDoc:
    return _checkpoint_doc(job, item.id)


def _checkpoint_doc(job: str, key: CheckpointId) -> DoneDoc:
    attempt = key.generation
    return DoneDoc(job=job, run=key.run, step=key.step, attempt=attempt, generation=attempt)


def _add_reads(router: APIRouter, transactor: Transactor) -> None:
    @router.post("/jobs/{job:path}/checkpoints/{step}/reads")
    async def begin(job: str, step: Step, wish: ReadWishDoc, generation: OneOf = None) -> ReadDoc:
        """Protect a checkpoint in the object store while a reader reads it."""
        at, number = At(job_name(job), step, generation), secrets.token_hex(16)
        lease = await transactor.write(
            lambda c: users.begin_read(c, at, number=number, holder=wish.holder, ttl_s=wish.ttl_s)
        )
        return ReadDoc(id=lease.id, until_s=lease.until_s)

    @router.put("/reads/{lease}")
    async def renew(lease: Lease, wish: RenewDoc) -> ReadDoc:
        """Let a reader's lease hold longer; 412 when it has run out."""
        found = await transactor.write(lambda c: users.renew_read(c, lease, wish.ttl_s))
        return ReadDoc(id=found.id, until_s=found.until_s)

    @router.delete("/reads/{lease}")
    async def end(lease: Lease) -> None:
        """End a reader's lease; repeats are harmless."""
        await transactor.write(lambda c: users.end_read(c, lease))


def _add_store(router: APIRouter, transactor: Transactor, objects: ObjectTier) -> None:
    @router.get("/jobs/{job:path}/checkpoints/{step}/links")
    async def show_links(
        job: str,
        step: Step,
        generation: OneOf = None,
        valid_s: Annotated[int, Query(ge=1, le=LINK_S_MAX)] = LINK_S,
    ) -> dict[str, str]:
        """Show a URL per object of a checkpoint; whoever has one can read it so long (F90)."""
        at, store = At(job_name(job), step, generation), expect_archive(objects).store
        return await links(transactor, store, at, valid_s)

    @router.get("/store")
    async def store() -> StoreDoc:
        """Show the object store and whether it answers."""
        state = await objects.health.state()
        counts = await transactor.read(lambda c: c.tier_counts())
        return StoreDoc(
            url=state.url,
            ok=state.ok,
            error=state.error,
            durable=counts.durable,
            durable_bytes=counts.durable_bytes,
            draining=counts.draining,
            expired=counts.expired,
            bad=counts.bad,
            queue_waiting=await waiting_count(objects.queue),
        )

    @router.post("/rebuild")
    async def rebuild(wish: RebuildWishDoc) -> RebuiltDoc:
        """Take in from the object store what the catalogue does not know; changes nothing else."""
        job = job_name(wish.job) if wish.job is not None else None
        found = await expect_archive(objects).rebuild(job)
        return RebuiltDoc(
            jobs=found.jobs,
            checkpoints=found.checkpoints,
            skipped=[SkippedDoc(key=item.key, reason=item.reason) for item in found.skipped],
        )
