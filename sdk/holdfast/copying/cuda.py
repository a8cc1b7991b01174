"""The CUDA devices of this process, by torch; also ROCm's, which torch gives the same name."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch

UNREGISTER_S_MAX = 30.0
"""Seconds: the driver may wait for all that the GPU has to do, and that may never end."""
_DRIVER = "libcuda.so.1"
_PORTABLE, _READ_ONLY = 1, 8
_RELAXED = 2
"""Of the modes in which a thread lives with the captures of others."""


class CudaDevice:
    """The ``port.Device`` with this index."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)

    def current_stream(self) -> torch.cuda.Stream:
        """See ``Device.current_stream``."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        """See ``Device.new_stream``."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See ``Device.record``; a thread that waits for the event uses no core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stream.record_event(event)
        return event

    def copy(
        self,
        stream: torch.cuda.Stream,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """See ``Device.copy``."""
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def register(self, memory: torch.Tensor, *, writable: bool = True) -> None:
        """See ``Device.register``; portable: for all devices of this process."""
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        self._call(lambda: _host_register(memory.data_ptr(), memory.nbytes, flags))

    def unregister(self, memory: torch.Tensor) -> None:
        """See ``Device.unregister``; waits ``UNREGISTER_S_MAX`` at most."""
        address = memory.data_ptr()
        if not self._call(lambda: _host_unregister(address), UNREGISTER_S_MAX):
            raise RuntimeError(f"{self.name} has not let go of memory in {UNREGISTER_S_MAX:g} s")

    def stand_aside(self) -> None:
        """See ``Device.stand_aside``; does nothing on ROCm."""
        exchange = _exchange()
        if exchange is not None:
            exchange(ctypes.byref(ctypes.c_int(_RELAXED)))

    def _call(self, call: Callable[[], None], timeout_s: float | None = None) -> bool:
        """Do ``call`` with this device's context, on a thread of its own; False: not in time.

        A call that failed leaves its error with its thread, and the next kernel that is launched
        there would raise it: that must not be training's.
        """
        failures: list[RuntimeError] = []

        def work() -> None:
            self.stand_aside()
            try:
                with torch.cuda.device(self._device):
                    call()
            except RuntimeError as failure:
                failures.append(failure)

        thread = threading.Thread(target=work, name="holdfast-register", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        if failures:
            raise failures[0]
        return True


class CudaDevices:
    """The ``port.Devices`` of CUDA; asks nothing of CUDA before a tensor is on it."""

    def of(self, tensor: torch.Tensor) -> CudaDevice | None:
        """See ``Devices.of``."""
        return _device(tensor.get_device()) if tensor.is_cuda else None

    def capturing(self) -> bool:
        """See ``Devices.capturing``."""
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return in_use and torch.cuda.is_current_stream_capturing()


CUDA = CudaDevices()


@cache
def _device(index: int) -> CudaDevice:
    return CudaDevice(index)


@cache
def _exchange() -> Callable[..., int] | None:
    """Return the driver's call, None: it has none, as ROCm's, and libraries in place of CUDA's."""
    try:
        return cast("Callable[..., int]", ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode)
    except (OSError, AttributeError):
        return None


def _host_register(address: int, length_bytes: int, flags: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _check("cudaHostRegister", runtime.cudaHostRegister(address, length_bytes, flags))


def _host_unregister(address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _check("cudaHostUnregister", runtime.cudaHostUnregister(address))


def _check(name: str, result: object) -> None:
    code = int(result)  # type: ignore[call-overload]
    if code:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(result)} ({code})")
