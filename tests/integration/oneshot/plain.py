"""Reads a checkpoint folder with PyTorch alone: Holdfast cannot be imported here (P7).

``python -I plain.py FOLDER EXPECTED RENDEZVOUS RANK WORLD``.
"""

import sys


class Blocked:
    """The first finder that is asked: for Holdfast it says that there is no such module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("holdfast", "holdfast_services"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def cannot_import(name):
    try:
        __import__(name)
    except ModuleNotFoundError:
        return True
    return False


sys.meta_path.insert(0, Blocked)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402


def main(folder, expected, rendezvous, rank, world_size):
    assert cannot_import("holdfast")
    assert cannot_import("holdfast_services")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (world_size,))
    wanted = torch.load(expected)
    target = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        if tensor.ndim
        else torch.zeros_like(tensor)
        for name, tensor in wanted.items()
    }
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(folder))
    resharded = 0
    for name, tensor in wanted.items():
        found = target[name]
        if tensor.ndim:
            resharded += found.to_local().shape != found.shape
            found = found.full_tensor()
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
    assert world_size == 1 or resharded > 10
    dist.destroy_process_group()
    assert not [name for name in sys.modules if name.startswith("holdfast")]
    print("read", len(wanted), "tensors")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
