"""The environment of a rank: torchrun's variables, and ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.meshes import MESH, MESHES, required, text_of
from holdfast.core.rounds import Place
from holdfast.launcher.keeper import MARK
from holdfast.said import FOLDER

VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_LAUNCH = ("HOLDFAST_ATTEMPT", "HOLDFAST_LAUNCH", MESH, MESHES, FOLDER)


def own(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what ranks inherit: in a rank of another launch nothing that names that one."""
    if MARK not in environ:
        return environ
    return {name: value for name, value in environ.items() if name not in OF_LAUNCH}


def constant(
    environ: Mapping[str, str],
    *,
    agent: str,
    job: str,
    local_rank: int,
    ranks: int,
    restarts: int,
    said: str,
) -> dict[str, str]:
    """Return what a rank of this node has in every round; a standby begins with it."""
    made = {
        **environ,
        "HOLDFAST_AGENT": agent,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        FOLDER: said,
    }
    made.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if ranks > 1:
        made.setdefault("OMP_NUM_THREADS", "1")
    return made


def of_round(
    place: Place,
    environ: Mapping[str, str],
    *,
    launch: str,
    local_rank: int,
    error_file: str,
    meshes: Sequence[str] = (),
) -> dict[str, str]:
    """Return what a rank is told for one round; ranks of nodes go in order, those of one too.

    Raises:
        InvalidRequestError: there are meshes, and none is for so many ranks.
    """
    rank = str(place.first_rank + local_rank)
    world_size = str(place.world_size)
    made = {
        "RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": str(place.node_rank),
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(place.nodes_count),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.round - 1),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "HOLDFAST_ATTEMPT": place.nonce,
        "HOLDFAST_LAUNCH": environ.get("HOLDFAST_LAUNCH") or launch,
    }
    if meshes:
        made[MESH] = text_of(required(meshes, place.world_size))
    if place.ranks:
        made["LOCAL_WORLD_SIZE"] = str(place.ranks)
    if place.devices:
        made[VISIBLE] = _visible(place.devices, environ)
    return made


def _visible(devices: Sequence[int], environ: Mapping[str, str]) -> str:
    """Return the GPUs of a round: by their numbers among those that this process sees."""
    seen = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    return ",".join(seen[device] if device < len(seen) else str(device) for device in devices)
