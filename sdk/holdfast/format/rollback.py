"""The record of a rollback: that a user has taken a run back to one of its checkpoints.

``docs/reference/bucket-v1.md`` is normative; this module is that page as code. Without it a
cluster that has only the bucket would choose what the run was rolled back from, until something
that was saved since lies there too. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.ids import (
    GENERATION_MAX,
    STEP_MAX,
    CheckpointId,
    Generation,
    RunId,
    Step,
    job_name,
    run_id,
)
from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.format.canonical import (
    check_digest,
    number_of,
    strict_object,
    text_of,
    with_digest,
)
from holdfast.format.digest import ALGORITHM
from holdfast.format.manifest import TIME_S_MAX, check_format

FORMAT = "holdfast-rollback"
VERSION = 1
ROLLBACK_BYTES_MAX = 16 << 10
TEXT_LENGTH_MAX = 1000
"""Of holder and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A run was rolled back to the checkpoint ``to``, under ``generation``, which no attempt has.

    ``holder`` is who asked for it, ``reason`` what they said; both are for people.
    """

    job: str
    to: CheckpointId
    generation: int
    created_at_s: float
    holder: str = ""
    reason: str = ""


def encode(rollback: Rollback) -> bytes:
    """Return the canonical text: equal values, equal bytes.

    Raises:
        ManifestError: it breaks a rule of the format; it would not be read back.
    """
    _check(rollback)
    return with_digest(
        {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": ALGORITHM,
            "job": rollback.job,
            "run": rollback.to.run,
            "generation": rollback.generation,
            "to": [rollback.to.step, rollback.to.generation],
            "created_at_s": float(rollback.created_at_s),
            "holder": rollback.holder,
            "reason": rollback.reason,
        }
    )


def decode(data: bytes) -> Rollback:
    """Return the record in ``data``; every rule is checked before anything is believed.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
        UnsupportedFormatError: a version this code does not read.
    """
    raw = strict_object(data, what="rollback", bytes_max=ROLLBACK_BYTES_MAX)
    check_format(raw, what="rollback", name=FORMAT, version=VERSION)
    check_digest(data, what="rollback")
    try:
        rollback = _rollback(raw)
    except InvalidRequestError as cause:
        raise ManifestError(f"rollback is malformed: {cause}") from cause
    _check(rollback)
    return rollback


def _rollback(raw: Mapping[str, object]) -> Rollback:
    to, created = raw.get("to"), raw.get("created_at_s")
    if not (isinstance(to, list) and len(to) == 2 and all(type(n) is int for n in to)):
        raise ManifestError("to is not [step, generation]")
    if type(created) not in (int, float):
        raise ManifestError("created_at_s is not a time")
    run = run_id(text_of(raw, "run"))
    return Rollback(
        job=job_name(text_of(raw, "job")),
        to=CheckpointId(RunId(run), Step(to[0]), Generation(to[1])),
        generation=number_of(raw, "generation", GENERATION_MAX),
        created_at_s=float(created),  # type: ignore[arg-type]
        holder=text_of(raw, "holder"),
        reason=text_of(raw, "reason"),
    )


def _check(rollback: Rollback) -> None:
    try:
        run_id(rollback.to.run)
        job_name(rollback.job)
    except InvalidRequestError as cause:
        raise ManifestError(f"rollback is malformed: {cause}") from cause
    to = rollback.to
    if not (0 <= to.step <= STEP_MAX and 0 <= to.generation < rollback.generation):
        raise ManifestError("a rollback is to a step of an older generation")
    if rollback.generation > GENERATION_MAX:
        raise ManifestError("generation is out of range")
    # Written so that NaN is refused too.
    if not (math.isfinite(rollback.created_at_s) and 0 <= rollback.created_at_s <= TIME_S_MAX):
        raise ManifestError("created_at_s is not a time")
    for name in ("holder", "reason"):
        text = getattr(rollback, name)
        if len(text) > TEXT_LENGTH_MAX or not text.isprintable():
            raise ManifestError(f"{name} is too long, or not printable")
