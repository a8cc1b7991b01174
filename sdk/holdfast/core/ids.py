"""Names of jobs, nodes, runs and shards, and how they are spelled.

Names come from users and peers, so every one is checked here before anything is done with it.
``ShardId.key`` is the one text form of a shard: in messages, fetch requests and logs. It is a
lookup key, never a path.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import NewType, SupportsIndex

from holdfast.errors import InvalidRequestError

Generation = NewType("Generation", int)
Step = NewType("Step", int)
Rank = NewType("Rank", int)
RunId = NewType("RunId", str)
JobName = NewType("JobName", str)
NodeName = NewType("NodeName", str)

JOB_NAME_LENGTH_MAX = 128
NODE_NAME_LENGTH_MAX = 128
STEP_MAX = 10**15 - 1
GENERATION_MAX = 10**10 - 1
WORLD_SIZE_MAX = 1_000_000

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RUN = re.compile(r"[a-z0-9]{1,32}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_ROUTES = frozenset({"checkpoints", "collect", "ledger", "retention", "save", "scrub"})
"""What follows a job's name in the paths of REST, where a name may hold slashes."""
_SESSION = re.compile(r"[0-9a-f]{32}")


def job_name(text: str) -> JobName:
    """Return ``text`` as a job name: segments of letters, digits, ``. _ -`` joined by ``/``.

    Raises:
        InvalidRequestError: it is something else, longer than ``JOB_NAME_LENGTH_MAX``, or a part
            of it is a word that REST puts after a name.
    """
    if len(text) > JOB_NAME_LENGTH_MAX or not _JOB.fullmatch(text):
        raise InvalidRequestError(
            f"job name {text[:JOB_NAME_LENGTH_MAX]!r} must be letters, digits, '.', '_', '-' in "
            f"'/'-separated parts that begin with a letter or digit, "
            f"at most {JOB_NAME_LENGTH_MAX} characters"
        )
    if taken := _ROUTES.intersection(text.split("/")):
        raise InvalidRequestError(f"job name {text!r}: the part {min(taken)!r} is not to be used")
    return JobName(text)


def step_number(step: SupportsIndex) -> Step:
    """Return a caller's ``step`` as a plain number; NumPy's and torch's whole numbers are some.

    Raises:
        InvalidRequestError: no whole number, or one beyond ``STEP_MAX``.
    """
    try:
        number = operator.index(step)
    except TypeError as cause:
        raise InvalidRequestError(
            f"step {step!r:.80} is a {type(step).__name__}: pass a whole number of steps"
        ) from cause
    if not 0 <= number <= STEP_MAX:
        raise InvalidRequestError(f"step {number} is not within 0..{STEP_MAX}")
    return Step(number)


def node_name(text: str) -> NodeName:
    """Return ``text`` as a node name; the same alphabet as a job name, without ``/``."""
    if len(text) > NODE_NAME_LENGTH_MAX or not _NODE.fullmatch(text):
        raise InvalidRequestError(f"node name {text[:NODE_NAME_LENGTH_MAX]!r} is not usable")
    return NodeName(text)


def run_id(text: str) -> RunId:
    """Return ``text`` as a run id: at most 32 lower-case letters and digits."""
    if not _RUN.fullmatch(text):
        raise InvalidRequestError(f"run id {text[:40]!r} is not usable")
    return RunId(text)


def session_id(text: str) -> str:
    """Return ``text`` if it is 32 hex digits, the only form that may become a file name."""
    if not _SESSION.fullmatch(text):
        raise InvalidRequestError(f"session {text[:40]!r} is not 32 hex digits")
    return text


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """All shards of one run at one step, of one generation.

    Orders by (run, step, generation): within a run, the greatest is the newest.
    """

    run: RunId
    step: Step
    generation: Generation


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """One rank's segment of one checkpoint; ``volume`` is 0 unless a tensor has several boxes."""

    run: RunId
    step: Step
    generation: Generation
    rank: Rank
    volume: int = 0

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint this shard is part of."""
        return CheckpointId(self.run, self.step, self.generation)

    @property
    def key(self) -> str:
        """The text form ``run/step/generation/rank/volume``; see ``shard_id``."""
        return f"{self.run}/{self.step}/{self.generation}/{self.rank}/{self.volume}"


def shard_id(key: str) -> ShardId:
    """Parse ``ShardId.key``.

    Raises:
        InvalidRequestError: not five parts, or a number that is not one.
    """
    parts = key.split("/")
    if len(parts) != 5 or not all(_NUMBER.fullmatch(part) for part in parts[1:]):
        raise InvalidRequestError(f"shard key {key[:80]!r} is not run/step/generation/rank/volume")
    step, generation, rank, volume = map(int, parts[1:])
    return ShardId(run_id(parts[0]), Step(step), Generation(generation), Rank(rank), volume)
