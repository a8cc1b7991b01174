"""What is asked of the scheduler: a command, and how many GPUs it may have.

A spec is a value that does not change while its job lives. The command is what ``holdfast run``
gets behind the options that the scheduler sets: ``--auto train.py --lr 1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core import meshes
from holdfast.core.ids import job_name
from holdfast.errors import InvalidRequestError

GPUS_MAX = 65_536
PRIORITY_MAX = 100
RETRIES_MAX = 1_000
WORDS_MAX = 4_096
WORDS_LENGTH_MAX = 100_000
"""Of a command, and of an environment: less than what the kernel takes for one process."""
TEXT_LENGTH_MAX = 200
FOLDER_LENGTH_MAX = 4_000
GRACE_S_MAX = 7 * 86_400.0
WORK_MAX = 1e15

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = frozenset(
    f"--{name}"
    for name in (
        *("job", "nnodes", "nproc-per-node", "nproc_per_node", "standalone", "grace"),
        *("allocated", "ending", "warm-cuda", "notice", "mesh"),
    )
)
"""Options of ``holdfast run`` that are not a job's to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job.

    ``gpus_min``, ``gpus_max``: it trains on any number of GPUs between them. A higher ``priority``
    goes first. ``preemptible``: it may be taken off its GPUs again. ``epochs`` of ``samples``, or
    ``work`` steps at the initial batch size, are how much there is to do; 0: not said.
    ``family``: jobs that scale alike, such as the same model; empty: those of the same command.
    ``gpu_types``: where it may run, empty: anywhere. ``folder``: where the command runs, the same
    on all nodes. ``grace_s``: how long ranks have to end. ``retries``: how often it begins again
    after its script has failed. ``meshes``: it trains only on numbers of GPUs for which there is
    one of these; empty: on any. See ``core.meshes``.
    """

    name: str
    command: tuple[str, ...]
    gpus_min: int = 1
    gpus_max: int = 1
    priority: int = 0
    owner: str = ""
    preemptible: bool = True
    epochs: int = 0
    samples: int = 0
    work: float = 0.0
    family: str = ""
    gpu_types: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    grace_s: float = 30.0
    retries: int = 0
    meshes: tuple[str, ...] = ()

    def runs_on(self, gpus: int) -> bool:
        """Tell whether it trains on so many GPUs."""
        fits = not self.meshes or meshes.mesh_for(self.meshes, gpus) is not None
        return fits and self.gpus_min <= gpus <= self.gpus_max


def check(spec: JobSpec) -> None:
    """Refuse a spec that no cluster could run.

    Raises:
        InvalidRequestError: names the field, its value and what it should be.
    """
    job_name(spec.name)
    numbers: dict[str, tuple[float, float, float]] = {
        "gpus_min": (spec.gpus_min, 1, GPUS_MAX),
        "gpus_max": (spec.gpus_max, 1, GPUS_MAX),
        "priority": (spec.priority, -PRIORITY_MAX, PRIORITY_MAX),
        "epochs": (spec.epochs, 0, WORK_MAX),
        "samples": (spec.samples, 0, WORK_MAX),
        "work": (spec.work, 0, WORK_MAX),
        "grace_s": (spec.grace_s, 0, GRACE_S_MAX),
        "retries": (spec.retries, 0, RETRIES_MAX),
    }
    for name, (number, low, high) in numbers.items():
        if not low <= number <= high:
            raise InvalidRequestError(f"{name} is {number:g}, and must be {low:g} to {high:g}")
    if spec.gpus_min > spec.gpus_max:
        raise InvalidRequestError(
            f"gpus_min {spec.gpus_min} is more than gpus_max {spec.gpus_max}: write MIN:MAX"
        )
    _check_meshes(spec)
    for name, text in (("owner", spec.owner), ("family", spec.family)):
        if len(text) > TEXT_LENGTH_MAX or not text.isprintable():
            raise InvalidRequestError(f"{name} must be {TEXT_LENGTH_MAX} printable characters")
    if spec.folder and not (spec.folder.startswith("/") and len(spec.folder) <= FOLDER_LENGTH_MAX):
        raise InvalidRequestError(f"folder {spec.folder[:TEXT_LENGTH_MAX]!r} is no absolute path")
    _check_command(spec.command)
    _check_environment(spec.environment)


def _check_meshes(spec: JobSpec) -> None:
    meshes.check(spec.meshes)
    for name, gpus in (("gpus_min", spec.gpus_min), ("gpus_max", spec.gpus_max)):
        if not spec.runs_on(gpus):
            raise InvalidRequestError(
                f"{name} is {gpus}, for which there is no mesh among {'; '.join(spec.meshes)}"
            )


def _check_command(words: tuple[str, ...]) -> None:
    if not words:
        raise InvalidRequestError("command is empty: write -- train.py and its arguments")
    if len(words) > WORDS_MAX or sum(map(len, words)) > WORDS_LENGTH_MAX:
        raise InvalidRequestError(
            f"command has more than {WORDS_MAX} words or {WORDS_LENGTH_MAX} characters"
        )
    for word in words:
        if not word.startswith("-"):
            return  # the script, or an option's value: what follows may be the script's own
        if word.partition("=")[0] in _OURS:
            raise InvalidRequestError(f"command: {word} is the scheduler's to say; leave it out")


def _check_environment(environment: Mapping[str, str]) -> None:
    length = sum(len(name) + len(value) for name, value in environment.items())
    if len(environment) > WORDS_MAX or length > WORDS_LENGTH_MAX:
        raise InvalidRequestError(
            f"environment has more than {WORDS_MAX} variables or {WORDS_LENGTH_MAX} characters"
        )
    for name in environment:
        if not _VARIABLE.fullmatch(name):
            raise InvalidRequestError(f"environment: {name[:TEXT_LENGTH_MAX]!r} is no variable")
        if name in (meshes.MESH, meshes.MESHES):
            raise InvalidRequestError(f"environment: {name} is the scheduler's to say; pass meshes")
