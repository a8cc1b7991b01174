"""What a script may call in an order of its own, against a real agent: one process, no training."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from tests.e2e.stack import environment, running_stack
from tests.unit.state import worlds

import holdfast
from holdfast.errors import (
    CheckpointError,
    ExhaustedError,
    InvalidRequestError,
    PreconditionError,
)
from holdfast.training.save_machine import events as ev


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


@pytest.fixture
def make(stack, monkeypatch, request):
    """Checkpointers of jobs of their own."""
    monkeypatch.setenv("HOLDFAST_AGENT", stack.node(0)["agent"])
    made = []

    def start(*, state=None, restored=True, **options):
        state = state or {"weight": torch.ones(4)}
        name = request.node.name.replace("[", "-").replace("]", "")
        made.append(holdfast.Checkpointer(name[:60], state, replicas=0, **options))
        if restored:
            assert made[-1].restore() is None
        return made[-1]

    yield start
    for one in made:
        one._end(1.0)


@pytest.mark.parametrize(("goes_on", "level"), [(True, "WARNING"), (False, "ERROR")])
def test_at_exit_a_step_gone_on_from_is_no_error(make, caplog, goes_on, level):
    """Such as one without a free slot, where steps are shorter than saves: nobody has to act."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ck = make(state={"model": model, "optimizer": optimizer})
    ck.save(1).wait("local", timeout_s=30)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ck.save(2)
    ck._saver._handle(ev.Failed(2, "no free slot"))
    if goes_on:
        optimizer.step()
    caplog.clear()
    ck._end(20.0, in_order=True)

    (said,) = [r for r in caplog.records if "training ends" in r.getMessage()]
    assert said.levelname == level
    assert "training ends, but step 2 will not become" in said.getMessage()


def test_a_step_before_restore_is_refused(make):
    ck = make(restored=False)
    with pytest.raises(PreconditionError, match="call restore"):
        ck.step(1)


def test_a_restore_in_a_process_group_that_counts_ranks_otherwise_is_refused(make):
    checkpointer = make(restored=False)
    with worlds.becoming() as become:
        become(1, 4)
        with pytest.raises(InvalidRequestError, match="rank 1 of 4, but RANK and WORLD_SIZE say 0"):
            checkpointer.restore()


def test_a_second_restore_is_refused(make):
    ck = make()
    with pytest.raises(PreconditionError, match="called already"):
        ck.restore()


def test_a_model_that_came_into_the_state_after_the_checkpointer_was_made_is_restored(make):
    saved, late = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    first = make(state={"n": 1, "model": saved})
    first.save(1).wait("local", timeout_s=30)
    first.close()
    state = {"n": 0}
    second = make(state=state, restored=False)
    state["model"] = late

    assert second.restore().step == 1
    assert torch.equal(saved.weight, late.weight)
    assert state["n"] == 1


@pytest.mark.parametrize(
    ("late", "error", "text"),
    [
        (torch.nn.Linear(2**20, 2**20, device="meta"), ExhaustedError, "slots x"),
        (torch.optim.SGD([torch.ones(1)]).state_dict(), InvalidRequestError, "put the object"),
    ],
    ids=["too big", "a copy"],
)
def test_what_came_into_the_state_after_decide_is_checked_as_what_was_there(
    make, late, error, text
):
    """P8: before the first step, not at its save."""
    state = {"n": 0}
    ck = make(state=state, restored=False)
    assert ck.decide() is None
    state["late"] = late

    with pytest.raises(error, match=text):
        ck.restore()


def test_a_tensor_that_the_script_replaces_after_the_restore_is_gone_before_the_first_save(make):
    """Twice the memory of a model would be taken till then."""
    model = torch.nn.Linear(2, 3)
    make(state={"model": model})
    before = weakref.ref(model.weight)
    model.weight = torch.nn.Parameter(torch.ones(3, 2))

    assert before() is None


@pytest.mark.parametrize("call", ["decide", "restore"])
@pytest.mark.parametrize("decided", [True, False], ids=["after", "before"])
def test_what_is_closed_restores_nothing(make, call, decided):
    """Nobody holds any more what was decided: its bytes may be replaced while they are read."""
    ck = make(restored=False)
    if decided:
        ck.decide()
    ck.close()

    with pytest.raises(PreconditionError, match="closed"):
        getattr(ck, call)()


@pytest.mark.parametrize("call", ["step", "save"])
def test_what_is_closed_saves_nothing_and_says_so(make, call):
    """P8: a loop that goes on after ``close`` would train without a checkpoint."""
    ck = make()
    ck.close()

    with pytest.raises(PreconditionError, match=r"closed.*make another one"):
        getattr(ck, call)(1)


def test_a_script_that_handles_a_signal_itself_may_go_on_after_the_last_save(make):
    """P8: its last save was made, and the script ends when it likes."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        ck = make(save=holdfast.OnPreemption(grace_s=30))
        os.kill(os.getpid(), signal.SIGTERM)
        assert "replicated" == ck.step(1).level
        assert ck.step(2) is None
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_repeated_step_and_a_repeated_save_do_nothing(make):
    ck = make()
    first = ck.step(1)
    first.wait("local", timeout_s=30)
    assert ck.step(1) is None
    assert ck.save(1) is first


def test_nothing_is_saved_between_pause_and_resume(make):
    ck = make()
    ck.pause()
    assert ck.step(1) is None
    ck.resume()
    ck.step(2).wait("local", timeout_s=30)


class Broken:
    """A value that cannot be saved any more."""

    broken = False

    def state_dict(self):
        if self.broken:
            raise ValueError("boom")
        return {"n": 1}

    def load_state_dict(self, state):
        """Take nothing."""


@pytest.mark.parametrize("policy", ["degrade", "warn"])
def test_a_failed_save_costs_that_save(make, policy):
    """P4, S4, B4"""
    value = Broken()
    ck = make(state={"value": value}, on_failure=policy)
    value.broken = True
    assert "'value'" in str(ck.step(1).error)
    value.broken = False
    ck.step(2).wait("local", timeout_s=30)


def test_a_failed_save_raises_at_the_next_call_if_asked(make):
    value = Broken()
    ck = make(state={"value": value}, on_failure="raise")
    value.broken = True
    assert ck.step(1).abandoned
    value.broken = False
    with pytest.raises(CheckpointError, match="boom"):
        ck.step(2)
    ck.step(3).wait("local", timeout_s=30)


def test_leaving_a_block_waits_for_the_last_save(make):
    with make() as ck:
        handle = ck.step(1)

    assert handle.level in ("local", "replicated")


def test_leaving_a_block_raises_what_is_not_safe_unless_an_error_flies(make):
    """X0: the user's own exception comes first."""
    value = Broken()

    def run(*, fails):
        value.broken = False
        with make(state={"value": value}, restored=False, takeover=True) as ck:
            ck.restore()
            value.broken = True
            ck.step(1)
            if fails:
                raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(fails=True)
    with pytest.raises(CheckpointError, match="training ends, but step 1 "):
        run(fails=False)


@pytest.mark.parametrize("counted", [1, 3], ids=["epoch", "from0"])
def test_steps_counted_anew_are_warned_of_once(make, counted):
    """Each step of it would be lost, or counted one too low, and nobody would know."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = {"model": torch.nn.ParameterList([weight]), "optimizer": optimizer}
    before = make(state=state)
    before.step(3).wait("local", timeout_s=30)
    before.close()
    ck = make(state=state, restored=False)
    assert ck.restore().step == 3
    weight.grad = torch.ones(4)
    optimizer.step()

    with pytest.warns(UserWarning, match=rf"step\({counted}\) does nothing after step 3") as warned:
        ck.step(counted)
    ck.step(counted)

    assert len(warned) == 1


@pytest.mark.parametrize("trains", [True, False], ids=["own", "other"])
def test_who_never_calls_step_is_warned_at_the_end(make, trains):
    """Else all is lost, and nobody has said a word; who only restores has nothing to save."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ck = make(state={"optimizer": optimizer} if trains else None)
    weight.grad = torch.ones(4)
    optimizer.step()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ck.close()

    said = [str(one.message) for one in warned]
    assert [text.startswith("nothing was saved: step() was never") for text in said] == [
        True
    ] * trains


def test_a_repeated_step_is_not_warned_of(make):
    """Another optimizer of the process may have stepped."""
    ck = make()
    ck.step(1)
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    torch.optim.SGD([weight], lr=0.1).step()

    assert ck.step(1) is None


@pytest.mark.parametrize(
    ("code", "saved"), [(None, 2), (0, 2), (143, 2), (1, None), ("error", None)]
)
def test_an_exit_without_error_in_a_block_is_in_order(make, code, saved):
    """G7: ``AtExit`` saves the step that was done last; 143 tells that SIGTERM has asked for it."""

    def script():
        with make(save=holdfast.AtExit()) as first:
            first.step(2)
            sys.exit(code)

    with pytest.raises(SystemExit):
        script()

    restored = make(restored=False).restore()

    assert (restored and restored.step) == saved


def test_under_the_launcher_an_exit_with_an_error_is_a_failure_without_a_block_too(
    make, stack, tmp_path, request
):
    """G7: nothing is saved at exit, and ``Auto()`` counts it; the next start is no first one."""
    job = request.node.name[:60]
    (tmp_path / "train.py").write_text(
        "import sys, torch, holdfast\n"
        "state = {'weight': torch.ones(4)}\n"
        f"ck = holdfast.Checkpointer('{job}', state, replicas=0, save=holdfast.AtExit())\n"
        "ck.restore()\n"
        "ck.step(2)\n"
        "sys.exit(3)\n"
    )
    command = ["run", "--no-standby", "--max-restarts", "0", "--job", job, "train.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *command], cwd=tmp_path, check=False,
        env=environment(HOLDFAST_AGENT=stack.node(0)["agent"]), capture_output=True, text=True,
    )  # fmt: skip
    again = make()

    assert ended.returncode == 3, ended.stderr
    assert again._saver.record.failures_count == 1


def test_saves_go_on_after_the_optimizer_was_given_other_tensors(make, stack, request):
    """4.2: a new plan of the same layout keeps the slots that the agent goes on leasing."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    ck = make(state={"m": model, "o": optimizer})
    for step in range(1, 9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ck.step(step).wait("local", timeout_s=20)
    ck.close()

    rows = stack.rest(f"jobs/{request.node.name[:60]}/checkpoints")
    assert set(range(1, 9)) == {row["step"] for row in rows}


ALONE = """
import sys
import holdfast, torch
from holdfast.errors import PreconditionError

model = torch.nn.Linear(4, 4)
ck = holdfast.Checkpointer(sys.argv[1], {"model": model})
ck.restore()
handle = ck.save(1).wait("local", timeout_s=30)
try:
    handle.wait("replicated")
except PreconditionError as error:
    print("refused:", error)
print("error:", handle.error)
for step in range(2, 8):
    ck.save(step).wait("local", timeout_s=30)
ck.close()
"""


def test_a_job_on_one_node_is_told_that_nothing_is_replicated(stack, job, tmp_path):
    """F54, P1; defect X9: no wait without an end, saves go on, one warning, one event."""
    script = tmp_path / "train.py"
    script.write_text(ALONE)

    [output] = stack.ranks(job, script=script).succeed()

    shown = stack.rest(f"jobs/{job}")
    rows = stack.rest(f"jobs/{job}/checkpoints")
    kinds = [event["kind"] for event in stack.rest("events") if event["job"] == job]
    lack = "replicas=1 needs 2 live nodes, but only 1 is there"
    assert f"refused: step 1 does not become replicated: {lack}" in output
    assert f"error: step 1 stays local: {lack}" in output
    assert output.count("steps stay local") == 1
    assert (shown["replicas_allowed"], shown["shortage"]) == (0, lack)
    assert {row["level"] for row in rows} == {"local"}
    assert max(row["step"] for row in rows) == 7
    assert kinds.count("replication_cut") == 1
