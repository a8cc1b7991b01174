"""What the jobs of a family have measured, those that have ended too: with it the next one begins.

A family is an owner's jobs of one command, or of one declared name. Nothing is gathered for it: it
is made of what each of its jobs last said of itself, as long as that is kept.
"""

from __future__ import annotations

import hashlib
import shlex
import statistics
from collections.abc import Iterable

from holdfast.core.job_spec import JobSpec
from holdfast.goodput.fit import Measured
from holdfast_services.scheduler.domain.knowledge import (
    Knowledge,
    batches_of,
    measured,
    profile,
    samples,
)
from holdfast_services.scheduler.domain.policies.facts import Family

COMMAND_LENGTH_MAX = 200
"""Of a longer one the beginning and a digest: what tells two apart may stand at the end."""
DIGEST_BYTES = 8
POINTS_COUNT_MAX = 512
"""Of each type of GPU, those that were said last."""


def family_of(spec: JobSpec) -> str:
    """Return the name of a job's family, of which its owner is a part."""
    if spec.family:
        return f"{spec.owner}\n{spec.family}"
    command = shlex.join(spec.command)
    if len(command) > COMMAND_LENGTH_MAX:
        digest = hashlib.blake2b(command.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES)
        command = f"{command[:COMMAND_LENGTH_MAX]} {digest.hexdigest()}"
    return f"{spec.owner}\n{command}"  # no owner's name holds a line's end


def families(known: Iterable[Knowledge]) -> dict[str, Family]:
    """Return the families by name; of a configuration the newest word counts."""
    members: dict[str, list[Knowledge]] = {}
    for one in sorted(known, key=lambda one: one.at_s):
        if one.family and one.hints and one.hints.points:
            members.setdefault(one.family, []).append(one)
    return {name: _family(of) for name, of in members.items()}


def _family(members: list[Knowledge]) -> Family:
    by_type: dict[str, dict[tuple[int, int, int], Measured]] = {}
    for member in members:
        kept = by_type.setdefault(member.gpu_type or "gpu", {})
        for point in measured(member.hints):
            key = (point.nodes, point.replicas, point.local_batch)
            kept.pop(key, None)
            kept[key] = point
    profiles = {
        kind: profile(tuple(kept.values())[-POINTS_COUNT_MAX:])
        for kind, kept in sorted(by_type.items())
    }
    began = [member.began for member in members if member.began is not None]
    works = [work for member in members if member.ended and (work := samples(member.hints))]
    return Family(
        batches=batches_of(members[-1].hints) if members[-1].hints else None,
        profiles={kind: found for kind, found in profiles.items() if found is not None},
        noise=began[-1] if began else None,
        work=statistics.median(works) if works else None,
    )
