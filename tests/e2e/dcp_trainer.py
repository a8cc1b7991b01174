"""A rank that saves with ``dcp.save`` or ``dcp.async_save`` into the memory of its node's agent.

Prints what ``mesh_trainer`` prints, and is killed as that is. ``--how``: ``sync``, ``async`` (our
stager), ``plain`` (torch's stager), ``cached`` (plans are kept), ``alone`` (without collectives).
``--fail-at``: one rank cannot write that step.
"""

from __future__ import annotations

import argparse
import os
import signal
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.mesh_trainer import build, digest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import holdfast
from holdfast.integrations.dcp import HoldfastJob, HoldfastStager

FAILING = 1


class FailingPlanner(DefaultSavePlanner):
    """Has no data on one rank."""

    def resolve_data(self, write_item: object) -> object:
        if dist.get_rank() == FAILING:
            raise RuntimeError("no data here")
        return super().resolve_data(write_item)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    """Return what is saved; the count is a value, which the coordinator has alone."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "steps": step, "names": ["a", {"b": 1}]}


def load(job: HoldfastJob, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the job's checkpoint, the model before the rest; return its step."""
    if job.restores is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load({"model": state["model"]}, storage_reader=job.reader)
    dcp.load(state, checkpoint_id=f"step-{job.restores.step}", storage_reader=job.reader)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert state["steps"] == job.restores.step, state["steps"]
    assert state["names"] == ["a", {"b": 1}]
    return job.restores.step


def save(how: str, job: HoldfastJob, stager: HoldfastStager, state: dict, step: int) -> object:
    """Begin a save; return what to wait for."""
    if how == "async":
        return dcp.async_save(state, storage_writer=job.writer, async_stager=stager)
    if how == "plain":
        return dcp.async_save(state, checkpoint_id=f"x/{step}", storage_writer=job.writer)
    if how == "alone":
        dcp.save(state, checkpoint_id=f"{step}", storage_writer=job.writer, use_collectives=False)
    elif how == "cached":
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=job.writer, planner=planner)
    else:
        dcp.save(state, storage_writer=job.writer)
    return None


def finish(saving: object) -> None:
    """Wait until a save is over."""
    if isinstance(saving, AsyncSaveResponse):
        saving.staging_completion.result(60)
        saving = saving.upload_completion
    if saving is not None:
        saving.result(60)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--mesh", default="fsdp")
    parser.add_argument("--how", default="sync")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--persist", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--fail-at", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stager = HoldfastStager()
    model, optimizer = build(options.mesh)
    persist = holdfast.EverySteps(options.persist) if options.persist else None
    with HoldfastJob(options.job, persist=persist) as job:
        begin = load(job, model, optimizer)
        sources = dict(job.restores.sources) if job.restores else {}
        print(f"restored {begin} {sources}", flush=True)
        print(f"loaded {begin} {digest(model, optimizer)}", flush=True)
        for step in range(begin + 1, options.steps + 1):
            torch.manual_seed(step)
            model(torch.randn(4, 7)).square().mean().backward()
            if step == options.kill_at and dist.get_rank() == FAILING:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            state = state_of(model, optimizer, step)
            if step == options.fail_at:
                try:
                    dcp.save(state, storage_writer=job.writer, planner=FailingPlanner())
                except CheckpointException as error:
                    print(f"failed on {list(error.failures)}", flush=True)
                continue
            finish(save(options.how, job, stager, state, step))
            assert job.newest is not None
            assert job.newest.step == step, job.newest.step
            job.newest.wait("durable" if step == options.persist else "replicated", timeout_s=60)
            print(f"step {step} {job.newest.level} {digest(model, optimizer)}", flush=True)
    print(f"final {digest(model, optimizer)}", flush=True)
    stager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
