"""A user rolls a job back: the object store is asked first, and told afterwards."""

from __future__ import annotations

from holdfast.errors import CheckpointError, UnavailableError
from holdfast_services.metadata.calls import rollback_records
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import rollbacks
from holdfast_services.metadata.usecases.rollbacks import RolledBack, Wish


async def roll_back(
    transactor: Transactor, archive: BucketArchive | None, wish: Wish
) -> RolledBack:
    """Take a job back to one of its checkpoints, for good.

    What the store has is taken in first, as before an attempt: the generation must be above all
    that were. A repeat writes what an earlier try could not.

    Raises:
        NotFoundError, PreconditionError, InvalidRequestError: see ``usecases.rollbacks``.
        UnavailableError: the store does not answer; says whether anything has changed.
    """
    rollbacks.check(wish)
    job = wish.at.job
    if archive is None:
        return await transactor.change(lambda c: rollbacks.roll_back(c, wish))
    try:
        await archive.adopt(job)
    except UnavailableError as cause:
        text = f"{job} was not rolled back, since the object store does not answer: {cause.message}"
        raise UnavailableError(text, job=job) from cause
    done = await transactor.change(lambda c: rollbacks.roll_back(c, wish))
    try:
        await rollback_records.write_owed(transactor, archive.store, job)
    except (TimeoutError, CheckpointError) as cause:
        raise UnavailableError(
            f"{job} was rolled back, but the object store has no record of it yet ({cause}): "
            f"repeat this; until then a lost catalogue would not know",
            job=job,
        ) from cause
    return done
