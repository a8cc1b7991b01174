"""A GPU for the scenarios of ``tests.late_device``: its work is late because kernels wait first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.copying.cuda import CUDA, CudaDevice

CYCLES = 20_000_000
"""Some 10 ms before each kernel: whoever forgot a wait is far ahead of it."""


class SlowCuda:
    """What ``LateTraining`` asks of a ``LateDevice``, done by a GPU."""

    def __init__(self, cycles: int = CYCLES) -> None:
        found = CUDA.of(torch.zeros(1, device="cuda"))
        assert found is not None
        self.device: CudaDevice = found
        self.name = found.name
        self.faults: list[str] = []
        self.lost = ""
        self._cycles = cycles

    def of(self, tensor: torch.Tensor) -> CudaDevice | None:
        return CUDA.of(tensor)

    def capturing(self) -> bool:
        return CUDA.capturing()

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the GPU with these values and strides."""
        count = max(values.untyped_storage().nbytes() // values.itemsize, 1)
        memory = torch.empty(count, dtype=values.dtype, device="cuda")
        placed = memory.as_strided(values.shape, values.stride(), values.storage_offset())
        return placed.copy_(values)

    def launch(self, work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
        """Queue work on ``tensor``, late."""
        torch.cuda._sleep(self._cycles)
        with torch.no_grad():
            work(tensor.detach())

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def use(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        return torch.cuda.stream(stream)

    def sleep(self) -> None:
        """Kernels are late as it is."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def finish(self) -> None:
        torch.cuda.synchronize()

    def register(self, memory: torch.Tensor, *, writable: bool = True) -> None:
        self.device.register(memory, writable=writable)

    def unregister(self, memory: torch.Tensor) -> None:
        self.device.unregister(memory)
