"""P4: Ctrl-C, a handler of the user's and a copy that hangs cost one save, whatever the moment."""

import linecache
import logging
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from tests.unit.training.savers import Fails, saver_of, stepped

import holdfast
from holdfast.copying.copier import HostCopier
from holdfast.core.session import SessionView, StepLevels
from holdfast.snapshot import engine, optimizer_gate

ROOT = Path(holdfast.__file__).parent
WHERE = tuple(str(ROOT / room) for room in ("training", "snapshot"))
LINES_MAX = 2_000
WAIT_S = 20.0


class CtrlC:
    """Raises KeyboardInterrupt before the n-th line of ours that this thread runs.

    Not before a ``with``: Python comes back to that line to leave the block, and would leave it
    without doing so. A signal is never handled there.
    """

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _argument):
        if not frame.f_code.co_filename.startswith(WHERE):
            return None
        code = frame.f_code
        if event == "line" and "with " not in linecache.getline(code.co_filename, frame.f_lineno):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


class Slot:
    """The only slot of a rank; sealed and leased again as an agent would."""

    def __init__(self, saver) -> None:
        self.saver, self.incarnation, self.version = saver, 1, 0
        self.lease = saver.lease()

    def tell(self) -> None:
        """Lease the slot again if it was closed, and say that all that was closed is sealed."""
        if list(self.saver.arena.glob("s1.*.closed")):
            self.incarnation += 1
            for path in self.saver.arena.glob("s1.*.closed"):
                path.unlink()
            self.lease = self.saver.lease(self.incarnation)
        self.version += 1
        closed = [c.step for c in self.saver._state.saving if c.closed is not None]
        self.saver.on_view(
            SessionView(
                version=str(self.version),
                leases=(self.lease,),
                steps=tuple(StepLevels(step=s, sealed=True, local=True) for s in closed),
            )
        )


class Ended:
    """Knows when the copy thread has done all that follows a copy."""

    def __init__(self, saver) -> None:
        self._changed, self._on_end = threading.Condition(), saver._performer._on_end
        saver._performer._on_end = self._end

    def _end(self, event):
        self._on_end(event)
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition, timeout_s):
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)


@pytest.mark.parametrize("deferred", [True, False])
def test_ctrl_c_at_any_line_of_a_save_costs_that_save(tmp_path, deferred):
    """The slot is there for the next one, and nobody waits for the step for ever."""
    state = stepped(torch.nn.Parameter(torch.zeros(3)))
    with saver_of(tmp_path, state if deferred else {"seen": torch.zeros(3)}) as saver:
        slot, step, interrupted = Slot(saver), 10, 0
        ended = Ended(saver)
        for line in range(1, LINES_MAX):
            slot.tell()
            if deferred:
                state["optimizer"].step()
            step += 1
            try:
                with CtrlC(line):
                    saver.save(step)
            except KeyboardInterrupt as error:
                interrupted += 1
                at = traceback.extract_tb(error.__traceback__)[-2]
            else:
                break
            assert ended.wait_for(lambda: saver._state.copying is None, WAIT_S), at
            slot.tell()
            if deferred:
                state["optimizer"].step()
            step += 1
            saved = saver.save(step)
            assert saved.wait("staged", timeout_s=WAIT_S), at
            slot.tell()
            assert () == saver._state.saving, at

    assert interrupted > 100, "the sweep went through a whole save"


def test_ctrl_c_in_the_reservation_has_it_made_by_the_next_save(tmp_path):
    """Else the plan is there, its slots never, and no later save finds one."""
    with saver_of(tmp_path, {"value": Fails()}) as saver:
        asked = []

        def reserve(reservation):
            asked.append(reservation)
            if len(asked) == 1:
                raise KeyboardInterrupt

        saver.session.reserve = reserve
        saver._state = saver._state._replace(reserved=0, refused=None)
        with pytest.raises(KeyboardInterrupt):
            saver.save(5)
        saver.on_view(SessionView(version="1", leases=(saver.lease(),)))

        saver.save(6).wait("staged", timeout_s=WAIT_S)
    assert len(asked) == 2


class Broken(logging.Handler):
    """A log shipper that has lost its server."""

    def handle(self, record):
        raise RuntimeError(f"no connection: {record.getMessage()}")


def test_a_log_handler_that_raises_costs_nothing_more(tmp_path):
    """On no thread: training, and the one that hears the agent."""
    broken = Broken()
    value = Fails()
    logging.getLogger("holdfast").addHandler(broken)
    try:
        with saver_of(tmp_path, {"value": value}) as saver:
            value.error = ValueError("boom")
            assert saver.save(5).abandoned
            value.error = None
            saver.on_view(
                SessionView(version="1", leases=(saver.lease(),), degraded="out", shortage="few")
            )

            saver.save(6).wait("staged", timeout_s=WAIT_S)
            assert saver._state.outage
            assert [5] == [a.step for a in saver.session._outbox.abandoned if a.step == 5]
    finally:
        logging.getLogger("holdfast").removeHandler(broken)


def test_a_copy_that_hangs_holds_one_optimizer_step_up(tmp_path, monkeypatch):
    """P4: the gate gives it up once; later steps and saves do not wait for it at all."""
    state = stepped(torch.nn.Parameter(torch.zeros(3)))
    hangs, hang, waits = threading.Event(), threading.Event(), []
    wait = engine.CopyEngine.wait

    def later(*_):
        hangs.set()
        hang.wait(WAIT_S)

    monkeypatch.setattr(HostCopier, "later", later)
    for name in ("wait", "let_pass"):
        waiting = getattr(engine.CopyEngine, name)

        def briefly(self, s, waiting=waiting):
            waits.append(s)
            return waiting(self, min(s, 0.01))

        monkeypatch.setattr(engine.CopyEngine, name, briefly)
    with saver_of(tmp_path, state) as saver:
        slot = Slot(saver)
        saver._performer.gate._trusted = {id(state["optimizer"]): state["optimizer"]}
        slot.tell()
        first = saver.save(5)
        assert hangs.wait(WAIT_S), "a copy that is given up before it begins does not hang"
        waits.clear()
        for _ in range(3):
            state["optimizer"].step()
        assert [optimizer_gate.GATE_S_MAX] == waits

        handles = [saver.save(step) for step in (6, 7)]
        assert [optimizer_gate.GATE_S_MAX, 0.0, 0.0] == waits
        assert all(handle.abandoned for handle in (first, *handles))
        assert (5, 6, 7) == tuple(a.step for a in saver.session._outbox.abandoned if a.step > 1)
        hang.set()
        assert wait(saver._performer.engine, WAIT_S)
