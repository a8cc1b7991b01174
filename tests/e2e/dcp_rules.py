"""One rank that breaks the rules of a job of DCP, one after the other; prints ``all well``."""

from __future__ import annotations

import logging.handlers
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.integrations.dcp import HoldfastJob


def first() -> None:
    """A new job: nothing to load; steps are counted, or named, and only grow."""
    with HoldfastJob("rules", replicas=0) as job:
        assert job.restores is None
        with pytest.raises(CheckpointException, match="no checkpoint"):
            dcp.load({"n": 0}, storage_reader=job.reader)
        dcp.save({"n": 1}, storage_writer=job.writer)
        dcp.save({"n": 7, "t": torch.ones(3)}, checkpoint_id="c/7", storage_writer=job.writer)
        dcp.save({"n": 8, "t": torch.ones(3)}, storage_writer=job.writer)
        assert job.newest is not None
        assert job.newest.step == 8
        with pytest.raises(CheckpointException, match="only grow"):
            dcp.save({"n": 9}, checkpoint_id="step-8", storage_writer=job.writer)
        with pytest.raises(CheckpointException, match=r"'bad\.f'"):
            dcp.save({"bad": {"f": first}}, storage_writer=job.writer)
        with pytest.raises(CheckpointException, match="before the first save"):
            dcp.load({"n": 0}, storage_reader=job.reader)
        with pytest.raises(InvalidRequestError, match="THREAD"):
            pickle.dumps(job.writer)
        dcp.save({"n": 10, "t": torch.ones(3)}, storage_writer=job.writer)


def second() -> None:
    """The same job once more: it is loaded first, whatever else is asked for."""
    with HoldfastJob("rules", replicas=0) as job:
        assert job.restores is not None
        newest = job.restores.step
        with pytest.raises(CheckpointException, match="was not loaded"):
            dcp.save({"n": 1}, storage_writer=job.writer)
        with pytest.raises(CheckpointException, match="goes on from step"):
            dcp.load({"n": 0}, checkpoint_id="step-7", storage_reader=job.reader)
        state = {"n": 0, "t": torch.zeros(3, dtype=torch.float64)}
        dcp.load(state, storage_reader=job.reader)
        assert state["n"] == 10
        assert torch.equal(state["t"], torch.ones(3, dtype=torch.float64))
        dcp.save(state, storage_writer=job.writer)
        assert job.newest is not None
        assert job.newest.step == newest + 1
    with pytest.raises(CheckpointException, match="closed"):
        dcp.save({"n": 1}, storage_writer=job.writer)


def third() -> None:
    """Start over."""
    with HoldfastJob("rules", replicas=0, fresh="once more") as job:
        assert job.restores is None
        dcp.save({"n": 1}, storage_writer=job.writer)
        job.close()
        with pytest.raises(PreconditionError, match="closed"):
            job.writer.set_up_storage_writer(True)


def refused() -> None:
    """A step that is refused gives up no other: what is committed is not said to be lost."""
    told = logging.handlers.BufferingHandler(1000)
    logging.getLogger("holdfast").addHandler(told)
    with HoldfastJob("refused", replicas=0) as job:
        dcp.save({"n": 5}, checkpoint_id="step-5", storage_writer=job.writer)
        with pytest.raises(CheckpointException, match="only grow"):
            dcp.save({"n": 5}, checkpoint_id="step-5", storage_writer=job.writer)
        with pytest.raises(CheckpointException, match="not within"):
            dcp.save({"n": 5}, checkpoint_id="run-" + "9" * 23, storage_writer=job.writer)
        dcp.save({"n": 6}, checkpoint_id="step-6", storage_writer=job.writer)
        with pytest.raises(CheckpointException, match="only grow"):
            dcp.save({"n": 6}, checkpoint_id="step-6", storage_writer=job.writer)
    with HoldfastJob("refused", replicas=0) as job:
        assert job.restores is not None
        assert job.restores.step == 6
    said = [record.getMessage() for record in told.buffer]
    assert not [text for text in said if "not saved" in text], said


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    first()
    second()
    third()
    refused()
    print("all well", flush=True)
