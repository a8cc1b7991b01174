"""What to reserve of a Ray cluster: pure, from what its nodes have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.errors import InvalidRequestError

GPU, CPU = "GPU", "CPU"


def bundles(
    nodes: Sequence[Mapping[str, float]], gpus: int | None, count: int | None
) -> list[dict[str, float]]:
    """Return a bundle for each node that is to be reserved.

    Args:
        nodes: The resources of each node that is there.
        gpus: Of each node; None: all that a node has. Without GPUs anywhere, CPUs.
        count: Nodes; None: all that are there and have so many.

    Raises:
        InvalidRequestError: no number follows from that.
    """
    kind = GPU if any(node.get(GPU) for node in nodes) else CPU
    if gpus is not None:
        fit = sum(node.get(kind, 0) >= gpus for node in nodes)
        if not (count or fit):
            raise InvalidRequestError(
                f"--gpus {gpus}: none of the {len(nodes)} nodes of the Ray cluster has so many; "
                "--nodes N waits for N that have"
            )
        return [{kind: float(gpus)}] * (count or fit)
    if kind == CPU:
        raise InvalidRequestError(
            "--gpus auto: no node of the Ray cluster has GPUs; --gpus N offers N places of each"
        )
    sizes = sorted((float(int(node.get(GPU, 0))) for node in nodes), reverse=True)
    found = [size for size in sizes if size >= 1]
    if count and count > len(found):
        raise InvalidRequestError(
            f"--nodes {count}: of the Ray cluster's nodes {len(found)} have GPUs; "
            "--gpus N waits for others"
        )
    return [{GPU: size} for size in found[: count or len(found)]]


def described(reserved: Sequence[Mapping[str, float]]) -> str:
    """Return bundles for people: ``2 nodes with 8 GPUs``, ``2 nodes with 8 GPUs, 1 with 4``."""
    sizes = [(kind, int(n)) for bundle in reserved for kind, n in bundle.items()]
    parts: list[str] = []
    for kind, size in sorted(set(sizes), key=lambda one: -one[1]):
        count = sizes.count((kind, size))
        nodes = "" if parts else (" node" if count == 1 else " nodes")
        parts.append(f"{count}{nodes} with {size} {kind}{'' if size == 1 else 's'}")
    return ", ".join(parts)
