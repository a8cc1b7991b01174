"""Rolling a run back, in one transaction; and what the object store has yet to be told of it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import CheckpointId
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.format.rollback import TEXT_LENGTH_MAX
from holdfast_services.metadata.domain import rollback as rules
from holdfast_services.metadata.domain.believed_copies import gather, whole
from holdfast_services.metadata.domain.rollback import Rollback
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.usecases.users import At, find, locked


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Where a user wants a job to go back to.

    ``attempt``: only if the job's newest attempt is this one still, as the user has seen; None:
    whichever it is. ``force``: though it trains.
    """

    at: At
    attempt: int | None = None
    force: bool = False
    holder: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What has become of a wish; ``left`` could be restored by itself until then, newest first.

    ``repeated``: the same was asked for before, and nothing has begun since.
    """

    run: str
    rollback: Rollback
    left: tuple[CheckpointId, ...] = ()
    repeated: bool = False


def check(wish: Wish) -> None:
    """Do nothing if the texts of a wish can be kept.

    Raises:
        InvalidRequestError: says which cannot.
    """
    for name in ("holder", "reason"):
        text = getattr(wish, name)
        if len(text) > TEXT_LENGTH_MAX or not text.isprintable():
            raise InvalidRequestError(
                f"{name} must be at most {TEXT_LENGTH_MAX} printable characters"
            )


def roll_back(catalogue: Catalogue, wish: Wish) -> RolledBack:
    """Take a job back to one of its checkpoints; the next attempt restores it.

    A repeat changes nothing. Of two users at once the second is told of the first, if they say
    which attempt they have seen.

    Raises:
        NotFoundError: no such job or checkpoint.
        PreconditionError: see ``domain.rollback.check``; or another attempt, or rollback, is the
            newest by now.
    """
    run = locked(catalogue, wish.at.job)
    now_s = catalogue.now_s()
    item = find(catalogue, run, wish.at, now_s)
    before = catalogue.rollback(run.id, run.generation)
    if before is not None and before.to == item.id:
        return RolledBack(run=run.id, rollback=before, repeated=True)
    if wish.attempt not in (None, run.generation):
        raise PreconditionError(
            f"{run.job} is at attempt {run.generation} by now, not {wish.attempt}: "
            f"{_what(before)}; look again, and repeat",
            job=run.job,
        )
    live = gather(run.id, tuple(catalogue.nodes().values()), now_s).live
    in_memory = {key for key, copies in live.items() if whole(copies)}
    rules.check(run, item, now_s, in_memory=item.id in in_memory, force=wish.force)
    known = catalogue.with_rows(run, [item.id])
    outcome = rules.rolled_back(known, item.row)
    after = outcome.run
    made = Rollback(
        to=item.id,
        generation=after.generation,
        at_s=now_s,
        holder=wish.holder,
        reason=wish.reason,
    )
    catalogue.save_run(known, after)
    catalogue.put_rollback(made)
    events = rules.news(known, after, item.id, wish.holder, wish.reason)
    catalogue.add_events([*events, *outcome.events], "", now_s)
    there = [row.id for row in catalogue.listed(run.id, now_s)
             if row.row.stored or row.id in in_memory]  # fmt: skip
    left = tuple(key for key in there if run.usable(key) and not after.usable(key))
    return RolledBack(run=run.id, rollback=made, left=left)


def _what(before: Rollback | None) -> str:
    if before is None:
        return "it was started since"
    who = before.holder or "another user"
    return f"{who} has rolled it back to step {before.to.step} since"
