"""What a rank says of the attempt that it is part of, and what the catalogue answers.

One value from the training script to the catalogue's row: the rank makes it, its agent passes it
on as it came, the catalogue checks it and keeps that of the rank which began the attempt.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from holdfast.core.budget import checked_slots, saving_slots, slots_per_rank
from holdfast.core.decision import Start
from holdfast.core.failure_record import FailureRecord
from holdfast.core.ids import (
    GENERATION_MAX,
    STEP_MAX,
    WORLD_SIZE_MAX,
    CheckpointId,
    job_name,
    run_id,
)
from holdfast.core.origin import Origin
from holdfast.core.persistence_rules import PersistRule, Retention
from holdfast.core.protection import Copies, Parity, Protection
from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError

NONCE_BYTES = 16
NONCE_BYTES_MAX = 64
REPLICAS_MAX = 64
PARITY_GROUP_MIN = 2
PARITY_GROUP_MAX = 64
PARITY_MAX = 16
TEXT_LENGTH_MAX = 300
"""Of launcher, holder, failure domain, name of a start, metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """All that a rank says of its attempt when it opens its session.

    ``nonce`` names the launch and is the same on all its ranks. ``launcher`` tells a restart from
    a second trainer; ``holder`` names the process for people. ``retention`` None leaves the job
    the policy that it has; ``start`` None begins at the newest checkpoint. ``generation`` is that
    of the attempt if the rank trains already, and ``restored`` what it began with, None: at step 0.
    ``names_needs``: the rank says what it needs of a checkpoint; else it needs all of it.
    ``slots`` of memory are what each rank asks for, 0: as many as ``persist`` takes. ``origin`` is
    what rank 0 says the attempt was started with.
    """

    job: str
    nonce: bytes
    launcher: str
    holder: str
    rank: int
    world_size: int
    local_world_size: int = 1
    takeover: bool = False
    replicas: int = 0
    replica_domain: str = ""
    persist: PersistRule = field(default_factory=PersistRule)
    retention: Retention | None = None
    start: Start | None = None
    generation: int = 0
    restored: CheckpointId | None = None
    names_needs: bool = False
    slots: int = 0
    parity: Parity | None = None
    origin: Origin | None = None

    @property
    def slots_per_rank(self) -> int:
        """How many slots of memory each rank has."""
        return slots_per_rank(persist=self.persist.on, asked=self.slots)

    @property
    def saving_slots(self) -> int:
        """How many of them steps have that do not drain; as many steps of it lie on a backup."""
        return saving_slots(self.slots_per_rank, persist=self.persist.on)

    @property
    def protection(self) -> Protection:
        """What the attempt asks for against the loss of nodes."""
        return self.parity or Copies(self.replicas, self.replica_domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What the catalogue answers: the run, and the attempt's generation in it.

    ``record`` tells of the attempts before; it may have grown when a rank asks again.
    """

    run: str
    generation: int
    record: FailureRecord = field(default_factory=FailureRecord)


def named_nonce(name: str) -> bytes:
    """Return the nonce of an attempt that its launcher gave a name (``HOLDFAST_ATTEMPT``)."""
    return hashlib.blake2b(name.encode(), digest_size=NONCE_BYTES).digest()


def check(spec: AttemptSpec) -> None:
    """Refuse a spec that no attempt can have, whoever sent it.

    Raises:
        InvalidRequestError: names the field, its value and its limits.
    """
    job_name(spec.job)
    if not 0 < len(spec.nonce) <= NONCE_BYTES_MAX:
        raise InvalidRequestError(
            f"nonce has {len(spec.nonce)} bytes, must have 1 to {NONCE_BYTES_MAX}", job=spec.job
        )
    if not 0 < spec.world_size <= WORLD_SIZE_MAX or not 0 <= spec.rank < spec.world_size:
        raise InvalidRequestError(
            f"rank {spec.rank} of world size {spec.world_size} is not possible", job=spec.job
        )
    if not 0 <= spec.local_world_size <= spec.world_size:
        raise InvalidRequestError(
            f"local world size {spec.local_world_size} of {spec.world_size} is not possible",
            job=spec.job,
        )
    if not 0 <= spec.replicas <= REPLICAS_MAX:
        raise InvalidRequestError(
            f"replicas={spec.replicas} must be 0 to {REPLICAS_MAX}", job=spec.job
        )
    _check_parity(spec)
    rule = spec.persist
    times = (rule.seconds, rule.mtbf_s, rule.interval_s_min, rule.interval_s_max)
    if not (0 <= rule.steps <= STEP_MAX and all(0 <= seconds < math.inf for seconds in times)):
        raise InvalidRequestError(f"persist rule {rule} must not be negative", job=spec.job)
    checked_slots(spec.slots)
    _check_begun(spec)
    _check_texts(spec)


def _check_parity(spec: AttemptSpec) -> None:
    asked = spec.parity
    if asked is None:
        return
    if spec.replicas:
        raise InvalidRequestError(
            f"replicas={spec.replicas} and {asked} are two protections: ask for one", job=spec.job
        )
    if not (PARITY_GROUP_MIN <= asked.k <= PARITY_GROUP_MAX and 1 <= asked.m <= PARITY_MAX):
        raise InvalidRequestError(
            f"{asked} must have k of {PARITY_GROUP_MIN} to {PARITY_GROUP_MAX} and m of 1 to "
            f"{PARITY_MAX}; with k=1 it would be m copies: replicas=m",
            job=spec.job,
        )


def check_generation(generation: int, job: str) -> None:
    """Refuse a number that no attempt has.

    Raises:
        InvalidRequestError: names it.
    """
    if not 0 <= generation < GENERATION_MAX:
        raise InvalidRequestError(f"attempt {generation} is not possible", job=job)


def _check_begun(spec: AttemptSpec) -> None:
    check_generation(spec.generation, spec.job)
    past = spec.restored
    if past is not None:
        run_id(past.run)
        check_generation(past.generation, spec.job)
        if not 0 <= past.step <= STEP_MAX:
            raise InvalidRequestError(f"restored step {past.step} is not possible", job=spec.job)


def _check_texts(spec: AttemptSpec) -> None:
    texts = {
        "launcher": spec.launcher,
        "holder": spec.holder,
        "replica_domain": spec.replica_domain,
        "parity.domain": spec.parity.domain if spec.parity else "",
        "start.name": spec.start.name if spec.start else "",
        "retention.metric": spec.retention.metric if spec.retention else "",
    }
    for name, text in texts.items():
        if len(text) > TEXT_LENGTH_MAX or holds_nul(text):
            raise InvalidRequestError(
                f"{name} {text[:40]!r} must be at most {TEXT_LENGTH_MAX} characters, none of "
                f"them NUL",
                job=spec.job,
            )
