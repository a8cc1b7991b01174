"""The gate: no optimizer may write what a background copy still reads.

It is torch's global optimizer-step pre-hook, which fires for every ``torch.optim.Optimizer``,
fused and in-backward ones too. It holds a step up for ``gate_s_max`` at most; then the save is
given up, not the step (P4).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Devices
from holdfast.untraced import untraced

GATE_S_MAX = 30.0


class Copying(Protocol):
    """What copies behind the trainer's back; ``busy``: a copy has not ended or been given up."""

    busy: bool

    def let_pass(self, timeout_s: float) -> bool:
        """Have what this thread does next to the state come after the copy; False: not in time.

        For tensors in host memory that is a wait for the end of the copy. Work for a device may be
        queued at once: it waits there.
        """
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being copied; False if it still is."""
        ...

    def abandon(self, reason: str) -> None:
        """Give up the copy that goes on."""
        ...


class Gate:
    """Holds optimizer steps while ``engine`` is busy.

    Deferral is trusted once every captured optimizer was seen to fire the hook between two saves:
    ``trusts`` is asked once per save, and answers for that save. ``steps_count`` counts the
    steps of any optimizer, ``updates_count`` explicit gates as well; ``waited_s`` adds up all that
    was waited. ``blind``: a step was captured in a graph, and no hook tells of its replays.
    So it is with a step that was captured before there was a gate, which ``sees`` knows.
    """

    def __init__(
        self, engine: Copying, *, gate_s_max: float = GATE_S_MAX, devices: Devices = CUDA
    ) -> None:
        self.blind = False
        self.waited_s = 0.0
        self.steps_count = 0
        self.updates_count = 0
        self._engine = engine
        self._gate_s_max = gate_s_max
        self._devices = devices
        self._watching = False
        self._seen: set[int] = set()
        self._trusted: dict[int, Optimizer] = {}
        self._known: WeakSet[Optimizer] = WeakSet()
        self._handle: Any = register_optimizer_step_pre_hook(self._before_step)
        self._pid = os.getpid()

    def trusts(self, optimizers: Iterable[Optimizer]) -> bool:
        """Tell whether this save may defer; call it once per save, before it begins."""
        captured = {id(optimizer): optimizer for optimizer in optimizers}
        if self.blind and captured:
            return False
        if captured.keys() <= self._trusted.keys():
            return True
        trusted = self._watching and captured.keys() <= self._seen
        if trusted:
            self._trusted = captured
        self._watching = not trusted
        self._seen.clear()
        return trusted

    def sees(self, optimizers: Iterable[Optimizer]) -> bool:
        """Tell whether ``updates_count`` has all updates of what these train.

        Each of it is a parameter of an optimizer that was seen to step, and none was captured.
        """
        return not self.blind and _trained(optimizers) <= _trained(self._known)

    def before_update(self) -> None:
        """Have what this thread does next come after the copy; waits ``gate_s_max`` at most."""
        if self._devices.capturing():
            self._see_capture()
            return
        self._hold_up()

    def uninstall(self) -> None:
        """Take the hook out of torch again. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._watching = False
        self._trusted = {}

    @untraced
    def _before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if self._devices.capturing():
            self._see_capture()
            return
        self.steps_count += 1
        if self._watching:
            self._seen.add(id(optimizer))
        self._known.add(optimizer)
        self._hold_up()

    def _hold_up(self) -> None:
        self.updates_count += 1
        if self._engine.busy and os.getpid() == self._pid:
            self._wait(self._engine.let_pass)

    def _see_capture(self) -> None:
        """Have the copy end before a replay can come: a graph cannot wait for it."""
        self.blind = True
        if self._engine.busy and os.getpid() == self._pid:
            self._wait(self._engine.wait)

    def _wait(self, wait: Callable[[float], bool]) -> None:
        begun_s = time.perf_counter()
        if not wait(self._gate_s_max):
            self._engine.abandon(f"the copy held an optimizer step up for {self._gate_s_max} s")
        self.waited_s += time.perf_counter() - begun_s


def _trained(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
