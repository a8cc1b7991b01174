"""What the jobs of a family have measured, those that have ended too: with it the next one begins.

A family is an owner's jobs of one command, or of one declared name. Nothing is gathered for it: it
is made of what each of its jobs last said of itself, as long as that is kept.
"""

from __future__ import annotations

import hashlib
import shlex
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from holdfast.core.hints import JobHints
from holdfast.core.job_spec import JobSpec
from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import BATCH_MAX, BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured
from holdfast.goodput.profile import Profile, profile_of
from holdfast_services.scheduler.domain.policies.facts import Family

COMMAND_LENGTH_MAX = 200
"""Of a longer one the beginning and a digest: what tells two apart may stand at the end."""
DIGEST_BYTES = 8
POINTS_COUNT_MAX = 512
"""Of each type of GPU, those that were said last."""
PROFILES_COUNT_MAX = 512
"""Fits that are remembered: most families have said nothing new since the last plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the metadata service has of a job: what its rank 0 said, and what saves have cost.

    ``at_s``: when that was said, by the database's clock. ``costs``: as measured, in seconds.
    ``step``: the last that it has done. ``family``: ``family_of`` its spec. ``began``: the noise of
    its gradients when that was first known. ``ended``: it has done all that it wanted.
    """

    step: int = 0
    hints: JobHints | None = None
    at_s: float = 0.0
    gpu_type: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)
    family: str = ""
    began: GradientNoise | None = None
    ended: bool = False


NOTHING = Knowledge()


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


def measured(hints: JobHints | None) -> list[Measured]:
    """Return the step times that a job has said."""
    return [
        Measured(
            nodes=point.nodes,
            replicas=point.replicas,
            local_batch=point.local_batch,
            compute_s=point.compute_s,
            step_s=point.step_s,
        )
        for point in (hints.points if hints is not None else ())
    ]


def samples(hints: JobHints | None) -> float:
    """Return how many samples of the initial batch a job has done by its own word."""
    return hints.progress * hints.initial_batch if hints is not None else 0.0


def batches_of(hints: JobHints) -> BatchLimits | None:
    """Return the batches that a job allows; without bounds the batch is as it is."""
    fixed = not hints.batch_max
    maximum = hints.batch or hints.initial_batch if fixed else hints.batch_max
    try:
        return BatchLimits(
            initial=hints.initial_batch,
            maximum=min(maximum, BATCH_MAX),
            local_min=max(1, hints.local_min),
            local_max=hints.local_max or None,
            minimum=maximum if fixed else None,
            accumulation=hints.accumulates,
        )
    except InvalidRequestError:
        return None


def noise(hints: JobHints | None) -> GradientNoise | None:
    """Return the noise of a job's gradients; None: not known yet."""
    if hints is None or (hints.sqr == 0 and hints.var == 0):
        return None
    return GradientNoise(sqr=hints.sqr, var=hints.var)


@lru_cache(PROFILES_COUNT_MAX)
def profile(points: tuple[Measured, ...]) -> Profile | None:
    """Return what ``points`` say; None: nothing that can be so."""
    try:
        return profile_of(points)
    except InvalidRequestError:
        return None
