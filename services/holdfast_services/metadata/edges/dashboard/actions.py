"""What people may do from a page: each is asked once more, on a page that says what follows.

A form is posted from that page alone: requests of other sites' pages are refused by their Origin
(``kit.visitors``). What is refused by the rules comes back on the same page, with the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import RedirectResponse, Response

from holdfast.core.ids import GENERATION_MAX, STEP_MAX, job_name
from holdfast.core.text import holds_nul
from holdfast.errors import CheckpointError, InvalidRequestError, NotFoundError
from holdfast.rpc.status import http_code
from holdfast_services.metadata.calls.links import links
from holdfast_services.metadata.calls.rollbacks import roll_back
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.edges.dashboard.pages import answer, render
from holdfast_services.metadata.edges.dashboard.texts import job_path
from holdfast_services.metadata.edges.object_tier import ObjectTier, expect_archive
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.rollbacks import Wish
from holdfast_services.metadata.usecases.users import At

FORM_BYTES_MAX = 16 << 10
FIELDS_COUNT_MAX = 10
NOTE_LENGTH_MAX = 1000
HOLDER_LENGTH_MAX = 200
LINK_HOURS_MAX = 7 * 24
LINKS_SHOWN_MAX = 200

DONE: Mapping[str, str] = {
    "pin": "Pinned: it is kept until it is unpinned.",
    "unpin": "Unpinned: the policy decides again.",
    "delete": "Given up: workers are going to delete its objects.",
    "rollback": "Rolled back: the next start restores this checkpoint.",
    "save": "Asked: all ranks save the same step in some seconds. The ladder below shows it.",
    "scrub": "Workers are going to read back all that the job has in the object store.",
}
"""What a page says after an action, by its name."""

Step = Annotated[int, Path(ge=0, le=STEP_MAX)]
Generation = Annotated[int, Query(ge=0, le=GENERATION_MAX)]
Name = Literal["pin", "unpin", "delete", "rollback", "links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What may be done: its title, what follows from it, the word on the button."""

    title: str
    follows: str
    button: str
    grave: bool = False


ACTIONS: Mapping[str, Action] = {
    "pin": Action(
        title="Pin",
        follows="It is kept whatever the policy says, until it is unpinned. If it is in memory "
        "only, it goes to the object store now.",
        button="Pin it",
    ),
    "unpin": Action(
        title="Unpin",
        follows="The policy decides about it again, and may give it up within a minute.",
        button="Unpin it",
    ),
    "delete": Action(
        title="Delete",
        follows="Its objects are deleted from the object store. This cannot be undone.",
        button="Delete it",
        grave=True,
    ),
    "rollback": Action(
        title="Roll back",
        follows="The next start of the job restores this checkpoint. Later ones are left behind: "
        "they are kept, and no restore chooses them by itself any more.",
        button="Roll back to it",
        grave=True,
    ),
    "links": Action(
        title="Export links",
        follows="Whoever has such a link can read the object until the time is over; a link "
        "cannot be taken back.",
        button="Make links",
    ),
    "save": Action(
        title="Save now",
        follows="All ranks save the same step, some seconds from now, besides those that the "
        "script saves. Training goes on.",
        button="Save it",
    ),
    "scrub": Action(
        title="Verify",
        follows="Workers read back all that the job has in the object store and compare digests. "
        "This reads every byte once.",
        button="Verify all",
    ),
}


def add_actions(router: APIRouter, transactor: Transactor, objects: ObjectTier) -> None:
    """Add the pages that ask, and what they post to."""
    _add_of_job(router, transactor, "save", users.ask_save)
    _add_of_job(router, transactor, "scrub", users.scrub)

    @router.get("/jobs/{job:path}/checkpoints/{step}/{action}")
    async def ask(job: str, step: Step, action: Name, generation: Generation) -> Response:
        at = At(job_name(job), step, generation)

        def seen(catalogue: Catalogue) -> int:
            run = _there(catalogue, at.job)
            users.find(catalogue, run, at, catalogue.now_s())
            return run.generation

        return _ask(action, at.job, at, attempt=await transactor.read(seen))

    @router.post("/jobs/{job:path}/checkpoints/{step}/{action}")
    async def act(
        job: str, step: Step, action: Name, generation: Generation, request: Request
    ) -> Response:
        at = At(job_name(job), step, generation)
        form = await _form(request)
        perform = _PERFORMERS[action]
        return await _tried(
            action, at.job, at, lambda: perform(transactor, objects, at, form), form=form
        )


def _add_of_job(
    router: APIRouter,
    transactor: Transactor,
    action: str,
    perform: Callable[[Catalogue, str], object],
) -> None:
    """Add an action on a whole job: the page that asks, and what it posts to."""
    path = f"/jobs/{{job:path}}/{action}"

    @router.get(path)
    async def ask(job: str) -> Response:
        name = job_name(job)
        await transactor.read(lambda c: _there(c, name))
        return _ask(action, name, None)

    @router.post(path)
    async def act(job: str) -> Response:
        name = job_name(job)

        async def do() -> Response:
            await transactor.change(lambda c: perform(c, name))
            return _done(job_path(name), action)

        return await _tried(action, name, None, do)


def _there(catalogue: Catalogue, job: str) -> Run:
    """Return a job's run.

    Raises:
        NotFoundError: there is none, or it was removed.
    """
    run = catalogue.load_run(catalogue.run_of(job) or "")
    if run is None or run.removed:
        raise NotFoundError(f"no job {job}", job=job)
    return run


Form = Mapping[str, str]


async def _form(request: Request) -> Form:
    """Return the fields of a form.

    Raises:
        InvalidRequestError: it is no form, or too large a one.
    """
    body = bytearray()
    async for some in request.stream():
        body += some
        if len(body) > FORM_BYTES_MAX:
            raise InvalidRequestError(f"the form is longer than {FORM_BYTES_MAX} bytes")
    try:
        fields = parse_qs(bytes(body).decode("ascii"), max_num_fields=FIELDS_COUNT_MAX)
    except ValueError as cause:
        raise InvalidRequestError(f"the body is no form: {cause}") from cause
    return {name: values[-1] for name, values in fields.items()}


def _text(form: Form, name: str, length_max: int) -> str:
    text = form.get(name, "").strip()
    if holds_nul(text):
        raise InvalidRequestError(f"{name} holds a NUL character")
    if len(text) > length_max:
        raise InvalidRequestError(f"{name} is longer than {length_max} characters")
    return text


def _number(form: Form, name: str, most: int) -> int:
    text = form.get(name, "")
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > most:
        raise InvalidRequestError(f"{name} must be a number up to {most}")
    return int(text)


async def _tried(
    action: str,
    job: str,
    at: At | None,
    do: Callable[[], Awaitable[Response]],
    *,
    form: Form | None = None,
) -> Response:
    """Do it; what is refused comes back with what was asked, and the reason."""
    try:
        return await do()
    except CheckpointError as error:
        page = _page(action, job, at, form=form or {}, refused=error.message)
        return answer(page, http_code(error))


def _ask(action: str, job: str, at: At | None, *, attempt: int = 0) -> Response:
    return answer(_page(action, job, at, form={"attempt": str(attempt)}))


def _page(action: str, job: str, at: At | None, *, form: Form, refused: str = "") -> str:
    query = f"?generation={at.generation}" if at else ""
    back = f"{job_path(job)}/checkpoints/{at.step}{query}" if at else job_path(job)
    what = f"step {at.step} of attempt {at.generation} of {job}" if at else job
    path = f"{job_path(job)}/checkpoints/{at.step}/{action}{query}" if at else f"{back}/{action}"
    return render(
        "confirm.html",
        ACTIONS[action],
        name=action,
        what=what,
        path=path,
        back=back,
        form=form,
        refused=refused,
    )


def _done(path: str, action: str) -> Response:
    tail = f"{'&' if '?' in path else '?'}done={action}"
    return RedirectResponse(path + tail, status_code=HTTPStatus.SEE_OTHER)


def _checkpoint(at: At) -> str:
    return f"{job_path(at.job)}/checkpoints/{at.step}?generation={at.generation}"


async def _pin(transactor: Transactor, objects: ObjectTier, at: At, form: Form) -> Response:
    del objects
    note = _text(form, "note", NOTE_LENGTH_MAX)
    await transactor.change(lambda c: users.pin(c, at, note, transactor.limits))
    return _done(_checkpoint(at), "pin")


async def _unpin(transactor: Transactor, objects: ObjectTier, at: At, form: Form) -> Response:
    del objects, form
    await transactor.change(lambda c: users.unpin(c, at))
    return _done(_checkpoint(at), "unpin")


async def _delete(transactor: Transactor, objects: ObjectTier, at: At, form: Form) -> Response:
    del objects
    force = "force" in form
    await transactor.change(lambda c: users.remove(c, at, force=force))
    return _done(job_path(at.job), "delete")


async def _rollback(transactor: Transactor, objects: ObjectTier, at: At, form: Form) -> Response:
    wish = Wish(
        at=at,
        attempt=_number(form, "attempt", GENERATION_MAX),
        force="force" in form,
        holder=_text(form, "holder", HOLDER_LENGTH_MAX),
        reason=_text(form, "reason", NOTE_LENGTH_MAX),
    )
    await roll_back(transactor, objects.archive, wish)
    return _done(job_path(at.job), "rollback")


async def _links(transactor: Transactor, objects: ObjectTier, at: At, form: Form) -> Response:
    hours = max(1, _number(form, "hours", LINK_HOURS_MAX))
    found = await links(transactor, expect_archive(objects).store, at, hours * 3600)
    shown = sorted(found.items())[:LINKS_SHOWN_MAX]
    page = render(
        "links.html",
        shown,
        count=len(found),
        hours=hours,
        back=_checkpoint(at),
        rest=f"/api/v1{job_path(at.job)}/checkpoints/{at.step}/links"
        f"?generation={at.generation}&valid_s={hours * 3600}",
    )
    return answer(page)


_PERFORMERS: Mapping[str, Callable[[Transactor, ObjectTier, At, Form], Awaitable[Response]]] = {
    "pin": _pin,
    "unpin": _unpin,
    "delete": _delete,
    "rollback": _rollback,
    "links": _links,
}
