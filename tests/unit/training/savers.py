"""Savers with slots to lease, on real files and threads; nobody answers on the agent's socket."""

import os
from contextlib import contextmanager

import torch

from holdfast.copying.cuda import CUDA
from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.session import SessionView, SlotLease
from holdfast.state.capture import Capture
from holdfast.training.saver import Saver
from holdfast.training.session import AgentSession


def attempt(**fields):
    plain = {"job": "j", "nonce": os.urandom(16), "launcher": "l", "holder": "h", "rank": 0}
    return AttemptSpec(**{**plain, "world_size": 1, **fields})


class Fails:
    """A value whose own saving raises, once it is told to."""

    def __init__(self):
        self.error = None
        self.n = 1

    def state_dict(self):
        if self.error is not None:
            raise self.error
        return {"n": self.n}

    def load_state_dict(self, state):
        """Take nothing."""


@contextmanager
def saver_of(folder, state, world_size=1, devices=CUDA, guard=None, at_exit=False):
    """A saver with slots of its plan to lease; nobody answers on the agent's socket."""
    session = AgentSession(folder / "nobody.sock")
    capture = Capture(state, rank=0, world_size=world_size)
    spec, seat = attempt(world_size=world_size), Seat(run="r", generation=1)
    saver = Saver(
        capture=capture,
        session=session,
        spec=spec,
        seat=seat,
        arena=folder,
        devices=devices,
        guard=guard,
        at_exit=at_exit,
    )
    saver.save(1)  # makes the plan; there is no agent to reserve its slots
    plan = saver._performer.plan
    saver._state = saver._state._replace(refused=None, reserved=1, patience_s=0.0)

    def lease(incarnation=1, slot="s1"):
        path = folder / f"{slot}.{incarnation}.open"
        path.write_bytes(bytes(plan.length_bytes))
        return SlotLease(
            slot=slot,
            incarnation=incarnation,
            length_bytes=plan.length_bytes,
            plan_hash=plan.plan_hash,
        )

    saver.lease, saver.session = lease, session
    yield saver
    saver.close(0.0)
    session.close(timeout_s=1.0)


def stepped(weight):
    """A state with an optimizer, ready to step."""
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    return {"model": torch.nn.ParameterList([weight]), "optimizer": optimizer}


def outcome(saver, step, notes=None, *, slot="s1", incarnation=1):
    """Save ``step`` into a leased slot; return why it failed, None if its slot was closed."""
    lease = saver.lease(slot=slot, incarnation=incarnation)
    saver.on_view(SessionView(version=f"{step}", leases=(lease,)))
    made = saver.save(step, notes)
    assert saver._performer.engine.wait(30)
    saver._performer.engine.close(30)  # the thread has done all that it was given
    saver.await_kept(30)
    return made._failure
