"""Segment files are read straight into tensors: what torch and the user see of that."""

from __future__ import annotations

import os

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.errors import TruncatedShardError, UnavailableError
from holdfast.format.boxes import Box, whole
from holdfast.reading import transfer
from holdfast.reading.files import open_files
from holdfast.reading.reader import Want
from holdfast.state.capture import Capture

VALUES = torch.arange(64 * 8, dtype=torch.float32).reshape(64, 8)


@pytest.fixture
def located(tmp_path):
    model = nn.Module()
    model.w = nn.Parameter(VALUES.clone())
    saver = worlds.Saver(tmp_path)
    path, shard = saver.save(Capture({"m": model}, rank=0, world_size=1))
    assert saver.engine.close(worlds.WAIT_S)
    return path, shard


def test_autograd_hears_of_what_was_read(located):
    """A backward pass over values that a restore has replaced would be wrong, and says nothing."""
    weight = nn.Parameter(torch.ones(64, 8))
    squared = (weight * weight).sum()
    with open_files([located]) as segments:
        segments.read([Want(weight.detach(), "m.w", whole((64, 8)))])

    assert torch.equal(VALUES, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_a_file_that_became_shorter_is_refused(located):
    """It is nobody's affair to do that; a mapping would end the process."""
    with open_files([located]) as segments:
        (end,) = [e.end for e in segments._source.headers[0].entries if e.spec.fqn == "m.w"]
        os.truncate(located[0], end - 4)
        with pytest.raises(TruncatedShardError, match="by now"):
            segments.tensor("m.w")

        target = torch.zeros(64, 8)
        written = target._version
        with pytest.raises(TruncatedShardError, match="by now"):
            segments.read([Want(target, "m.w", whole((64, 8)))])
    assert target._version > written, "some of it was read"


def test_what_was_opened_is_read_though_another_file_has_its_name(located):
    with open_files([located]) as segments:
        located[0].unlink()
        located[0].write_bytes(b"\0" * located[1].length_bytes)

        assert torch.equal(VALUES, segments.tensor("m.w"))


@pytest.mark.parametrize("batch_bytes", [7, 64, 100, 1 << 20])
def test_reads_are_cut_into_batches_of_any_size(located, monkeypatch, batch_bytes):
    monkeypatch.setattr(transfer, "BATCH_BYTES_MAX", batch_bytes)
    boxes = [Box((row, 0), (rows, 8)) for row, rows in ((0, 1), (3, 0), (5, 40), (1, 2))]
    targets = [torch.full(box.lengths, -1.0) for box in boxes]
    with open_files([located]) as segments:
        segments.read([Want(t, "m.w", box) for t, box in zip(targets, boxes, strict=True)])

    for target, box in zip(targets, boxes, strict=True):
        assert torch.equal(VALUES[box.within(whole((64, 8)))], target)


def test_tensors_of_inference_are_filled(located):
    """They count no writes."""
    with torch.inference_mode():
        target = torch.zeros(64, 8)
    with open_files([located]) as segments:
        segments.read([Want(target, "m.w", whole((64, 8)))])

    assert torch.equal(VALUES, target)


def test_a_link_in_the_place_of_a_segment_is_not_followed(located):
    path, shard = located
    elsewhere = path.with_suffix(".elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)

    with pytest.raises(UnavailableError, match=f"segment {shard.id.key} cannot be opened at"):
        open_files([located])
