"""Who this process is: rank, world, and the identity of its launch.

An attempt is one launch of the process group, named by a *nonce* that all its ranks share and no
other launch does. torchrun's environment identifies nothing (two nodes of one round show
different restart counts), so the nonce comes from the process group itself. The *launcher* tells
a restart from a second trainer under the same name.

Source: architecture 4.0; measured in the notes on torchrun restarts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.attempts import NONCE_BYTES, named_nonce
from holdfast.core.decision import Start
from holdfast.errors import InvalidRequestError, PreconditionError

# Not RAY_JOB_ID: it is 01000000 for the first job of every cluster.
_LAUNCH_VARIABLES = ("SLURM_JOB_ID", "KUBERNETES_JOB_UID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where this process stands in its launch, as torchrun's variables say."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def nodes_count(self) -> int:
        """Nodes of the job, when ranks are spread evenly; at least 1."""
        return max(1, -(-self.world_size // self.local_world_size))


def place(environ: Mapping[str, str]) -> RankPlace:
    """Return this process's place; a process without torchrun is the only rank.

    Raises:
        InvalidRequestError: a variable is not a number, or they contradict each other.
    """
    try:
        rank = int(environ.get("RANK", "0"))
        world_size = int(environ.get("WORLD_SIZE", "1"))
        local = int(environ.get("LOCAL_WORLD_SIZE", "1" if "WORLD_SIZE" in environ else "0"))
    except ValueError as cause:
        raise InvalidRequestError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE: {cause}") from cause
    local = local or world_size
    if not (0 <= rank < world_size and 1 <= local <= world_size):
        raise InvalidRequestError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={local} contradict each other"
        )
    return RankPlace(rank=rank, world_size=world_size, local_world_size=local)


def check_group(where: RankPlace) -> None:
    """Do nothing unless a process group calls this process another rank than its launcher does.

    Boxes and groups of a state count by the one, segments by the other: they would be mixed up.

    Raises:
        InvalidRequestError: it does; names both.
    """
    import torch.distributed as dist  # noqa: PLC0415 - who has no group need not import it

    if not (dist.is_available() and dist.is_initialized()):
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (where.rank, where.world_size):
        raise InvalidRequestError(
            f"the process group calls this rank {rank} of {world_size}, but RANK and WORLD_SIZE "
            f"say {where.rank} of {where.world_size}: set them in each process, as torchrun does"
        )


def nonce(environ: Mapping[str, str], where: RankPlace) -> bytes:
    """Return the 16 bytes that name this attempt; collective when there is a process group.

    ``HOLDFAST_ATTEMPT`` wins; else rank 0 of the process group draws and broadcasts; else a
    process that is alone draws its own.

    Raises:
        PreconditionError: several ranks and no process group yet: called too early.
    """
    named = environ.get("HOLDFAST_ATTEMPT")
    if named:
        return named_nonce(named)
    if where.world_size == 1:
        return os.urandom(NONCE_BYTES)
    import torch.distributed as dist  # noqa: PLC0415 - only ranks of a group need it

    if not (dist.is_available() and dist.is_initialized()):
        raise PreconditionError(
            f"call restore() after init_process_group: without it, the {where.world_size} ranks "
            f"cannot agree on the name of this launch"
        )
    return _broadcast_nonce()


def _broadcast_nonce() -> bytes:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    on_gpu = dist.get_backend() == "nccl"
    drawn = torch.frombuffer(bytearray(os.urandom(NONCE_BYTES)), dtype=torch.uint8)
    shared = drawn.cuda() if on_gpu else drawn
    dist.broadcast(shared, src=0)
    return bytes(shared.cpu().tolist())


def launcher(environ: Mapping[str, str]) -> str:
    """Return the id of what launched this process: the same after a restart by the same launcher.

    ``HOLDFAST_LAUNCH``, else torchrun's run id unless it is the default, else the id of the batch
    job, else the parent process.
    """
    named = environ.get("HOLDFAST_LAUNCH")
    if named:
        return f"launch:{named}"
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return f"torchrun:{run}"
    for variable in _LAUNCH_VARIABLES:
        if environ.get(variable):
            return f"{variable}:{environ[variable]}"
    if "TORCHELASTIC_RUN_ID" in environ:
        return f"parent:{socket.gethostname()}:{os.getppid()}:{_started(os.getppid())}"
    return f"process:{holder()}"


def start(
    environ: Mapping[str, str], where: RankPlace, *, fresh: bool | str, step: int | None
) -> Start | None:
    """Return where this attempt asks to begin; None: at the newest checkpoint.

    It is made once per name: that of the launch, or the one that ``fresh`` gives it.

    Raises:
        InvalidRequestError: both are asked for, or the step is none.
        PreconditionError: the launch has no name that all ranks share and a restart keeps.
    """
    if not fresh and step is None:
        return None
    if fresh and step is not None:
        raise InvalidRequestError(
            f"fresh={fresh!r} and restore(step={step}) contradict each other: pass only one"
        )
    if step is not None and (type(step) is not int or step < 0):
        raise InvalidRequestError(f"restore(step={step!r}): pass a number of optimizer steps")
    name = f"named:{fresh}" if isinstance(fresh, str) else launcher(environ)
    own = name.startswith("process:") and where.world_size > 1
    if own or (name.startswith("parent:") and where.nodes_count > 1):
        raise PreconditionError(
            "restore(step=...) and fresh=True act once per launch, but this launch has no name: "
            'set HOLDFAST_LAUNCH, give torchrun an --rdzv-id, or pass fresh="a name"'
        )
    if fresh:
        return Start(name=f"fresh {name}", fresh=True)
    assert step is not None
    return Start(name=f"step {step} {name}", step=step)


def holder() -> str:
    """Return this process as people and leases name it: host, pid and start time."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks, so that a reused pid is another one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[19]
