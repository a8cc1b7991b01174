"""The REST edge of the object tier: what is kept, for how long, who reads it, where it lies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.facts import Retention
from holdfast.core.ids import GENERATION_MAX, STEP_MAX, job_name
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.retention import METRIC_LENGTH_MAX, Verdict
from holdfast_services.metadata.loops.keeper import Keeper
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
Lease = Annotated[str, Path(max_length=64)]


class _Body(BaseModel):
    """What a caller sends: a field that nobody knows is a mistake, and is refused."""

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

    note: str = Field("", max_length=NOTE_LENGTH_MAX)


class ReadWishDoc(_Body):
    """Who is going to read a checkpoint out of the object store, and for how long."""

    holder: str = Field(min_length=1, max_length=HOLDER_LENGTH_MAX)
    ttl_s: Seconds


class RenewDoc(_Body):
    """How much longer a reader needs."""

    ttl_s: Seconds


class RebuildWishDoc(_Body):
    """Which job is taken in from the object store; null: all that lie there."""

    job: str | None = None


class ReadDoc(BaseModel):
    """A reader's lease: until then, what it names is not deleted."""

    id: str
    until_s: float


class VerdictDoc(BaseModel):
    """Whether a durable checkpoint stays, and why."""

    step: int
    generation: int
    keep: bool
    why: str
    expired: bool = Field(description="It was settled before: its objects are being deleted")


class DoneDoc(BaseModel):
    """The checkpoint that something was done to."""

    job: str
    run: str
    step: int
    generation: int


class RemovedDoc(BaseModel):
    """How many durable checkpoints of a removed job workers are going to delete."""

    durable: int


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


def keep_router(keeper: Keeper) -> APIRouter:
    """Return the routes. They come before those of jobs, whose path takes everything."""
    router = APIRouter(prefix="/api/v1", tags=["object tier"])
    _add_policy(router, keeper)
    _add_pins(router, keeper)
    _add_reads(router, keeper)
    _add_store(router, keeper)
    _add_removal(router, keeper)
    return router


def _add_removal(router: APIRouter, keeper: Keeper) -> None:
    @router.delete("/jobs/{job:path}")
    async def remove_job(job: str) -> RemovedDoc:
        """Remove a job from memory, catalogue and object store; 412 while it trains."""
        return RemovedDoc(durable=await keeper.remove_job(job_name(job)))


def _add_policy(router: APIRouter, keeper: Keeper) -> None:
    @router.get("/jobs/{job:path}/retention")
    async def retention(job: str) -> RetentionDoc:
        """Show what is kept of a job."""
        return RetentionDoc(**asdict(await keeper.policy(job_name(job))))

    @router.put("/jobs/{job:path}/retention")
    async def set_retention(job: str, wish: RetentionDoc) -> RetentionDoc:
        """Set what is kept of a job, as a whole; it is carried out within a minute."""
        changed = await keeper.set_policy(job_name(job), Retention(**wish.model_dump()))
        return RetentionDoc(**asdict(changed))

    @router.get("/jobs/{job:path}/collect")
    async def dry_run(job: str) -> list[VerdictDoc]:
        """Show what the policy says of each durable checkpoint, newest first; change nothing."""
        return [_verdict(verdict) for verdict in await keeper.verdicts(job_name(job))]

    @router.post("/jobs/{job:path}/collect")
    async def collect(job: str) -> list[VerdictDoc]:
        """Expire now what the policy does not keep, and show the verdicts."""
        return [_verdict(verdict) for verdict in await keeper.collect(job_name(job))]

    @router.post("/jobs/{job:path}/scrub")
    async def scrub(job: str) -> ScrubDoc:
        """Have workers read back all that the job has in the object store."""
        return ScrubDoc(checkpoints=await keeper.scrub(job_name(job)))


def _verdict(verdict: Verdict) -> VerdictDoc:
    return VerdictDoc(
        step=verdict.id.step,
        generation=verdict.id.generation,
        keep=verdict.keep,
        why=verdict.why,
        expired=verdict.expired,
    )


def _add_pins(router: APIRouter, keeper: Keeper) -> None:
    @router.post("/jobs/{job:path}/checkpoints/{step}/pin")
    async def pin(job: str, step: Step, wish: PinDoc, generation: OneOf = None) -> DoneDoc:
        """Keep a checkpoint until it is unpinned; one in memory goes to the object store now."""
        at = At(job_name(job), step, generation)
        return _done(job, await keeper.pin(at, wish.note))

    @router.delete("/jobs/{job:path}/checkpoints/{step}/pin")
    async def unpin(job: str, step: Step, generation: OneOf = None) -> DoneDoc:
        """Let the policy decide about a checkpoint again."""
        return _done(job, await keeper.unpin(At(job_name(job), step, generation)))

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
        return _done(job, await keeper.remove(At(job_name(job), step, generation), force=force))


def _done(job: str, item: Listed) -> DoneDoc:
    key = item.id
    return DoneDoc(job=job, run=key.run, step=key.step, generation=key.generation)


def _add_reads(router: APIRouter, keeper: Keeper) -> None:
    @router.post("/jobs/{job:path}/checkpoints/{step}/reads")
    async def begin(job: str, step: Step, wish: ReadWishDoc, generation: OneOf = None) -> ReadDoc:
        """Hold a checkpoint in the object store while somebody reads it."""
        at = At(job_name(job), step, generation)
        lease = await keeper.begin_read(at, wish.holder, wish.ttl_s)
        return ReadDoc(id=lease.id, until_s=lease.until_s)

    @router.put("/reads/{lease}")
    async def renew(lease: Lease, wish: RenewDoc) -> ReadDoc:
        """Let a reader's lease hold longer; 412 when it has run out."""
        found = await keeper.renew_read(lease, wish.ttl_s)
        return ReadDoc(id=found.id, until_s=found.until_s)

    @router.delete("/reads/{lease}")
    async def end(lease: Lease) -> None:
        """End a reader's lease; repeats are harmless."""
        await keeper.end_read(lease)


def _add_store(router: APIRouter, keeper: Keeper) -> None:
    @router.get("/jobs/{job:path}/checkpoints/{step}/links")
    async def links(
        job: str,
        step: Step,
        generation: OneOf = None,
        valid_s: Annotated[int, Query(ge=1, le=LINK_S_MAX)] = LINK_S,
    ) -> dict[str, str]:
        """Show a URL per object of a checkpoint; whoever has one can read it so long (F90)."""
        return await keeper.links(At(job_name(job), step, generation), valid_s)

    @router.get("/store")
    async def store() -> StoreDoc:
        """Show the object store and whether it answers."""
        state, counts = await keeper.store_state(), await keeper.counts()
        return StoreDoc(
            url=state.url,
            ok=state.ok,
            error=state.error,
            durable=counts.durable,
            durable_bytes=counts.durable_bytes,
            draining=counts.draining,
            expired=counts.expired,
            bad=counts.bad,
            queue_waiting=await keeper.queue_waiting(),
        )

    @router.post("/rebuild")
    async def rebuild(wish: RebuildWishDoc) -> RebuiltDoc:
        """Take in from the object store what the catalogue does not know; changes nothing else."""
        found = await keeper.rebuild(job_name(wish.job) if wish.job is not None else None)
        return RebuiltDoc(
            jobs=found.jobs,
            checkpoints=found.checkpoints,
            skipped=[SkippedDoc(key=item.key, reason=item.reason) for item in found.skipped],
        )
