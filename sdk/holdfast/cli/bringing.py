"""Brings a checkpoint that is only in memory into the object store, for a command that reads it.

It is pinned meanwhile, with a note that says so: a command that is killed leaves the pin, and
nothing is lost. Afterwards the policy decides about the checkpoint as about any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from holdfast.cli.catalogue import Target, find_checkpoint, is_stored
from holdfast.cli.output import waiting
from holdfast.cli.rest import Record, Rest
from holdfast.errors import CheckpointError, NotFoundError, PreconditionError, UnavailableError

POLL_S = 0.2
BRING_S_MIN = 60.0
BRING_BYTES_PER_S_MIN = 20 << 20
NOTE = "while it is exported"


@contextmanager
def in_store(place: Target | str, environ: Mapping[str, str]) -> Iterator[Target | str]:
    """Yield ``place``, whole in the object store, and kept there until the block ends.

    Without a step that is the job's newest durable checkpoint, else the newest in memory.

    Raises:
        NotFoundError: no such checkpoint.
        PreconditionError: it is only in memory and cannot be uploaded; says why.
        UnavailableError: the upload takes longer than it may; it goes on.
    """
    if isinstance(place, str):
        yield place
        return
    rest = Rest.find(environ)
    found = _find(rest, place)
    exact = Target(place.job, int(found["step"]), int(found["generation"]))
    if is_stored(found):
        yield exact
        return
    rest.of_checkpoint("POST", found, "/pin", body={"note": found["pin_note"] or NOTE})
    try:
        with waiting(f"bringing step {exact.step} into the object store"):
            _wait(rest, exact)
        yield exact
    finally:
        if not found["pinned"]:
            with suppress(CheckpointError):  # it stays pinned, and `ls` shows it
                rest.of_checkpoint("DELETE", found, "/pin")


def _find(rest: Rest, place: Target) -> Record:
    if place.step is None:
        with suppress(NotFoundError):
            return find_checkpoint(rest, place, durable=True)
    return find_checkpoint(rest, place)


def _wait(rest: Rest, exact: Target) -> None:
    begin_s = time.monotonic()
    while True:
        assert exact.step is not None
        found = rest.checkpoint(exact.job, exact.step, exact.generation)
        if is_stored(found):
            return
        name = f"step {exact.step} of {exact.job}"
        if not found["draining"]:
            raise PreconditionError(
                f"the upload of {name} was given up: `holdfast doctor` says why"
            )
        length_bytes = int(found["length_bytes"])
        if time.monotonic() - begin_s > BRING_S_MIN + length_bytes / BRING_BYTES_PER_S_MIN:
            raise UnavailableError(
                f"the upload of {name} is slow or no worker runs: `holdfast status` tells; it goes "
                f"on, so try again later"
            )
        time.sleep(POLL_S)
