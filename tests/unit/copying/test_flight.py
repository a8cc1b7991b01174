"""Copies that are under way once somebody waits for them, when no event is made for each."""

from __future__ import annotations

import pytest
import torch
from tests.late_device import LateDevice

from holdfast.copying.flight import Flight
from holdfast.copying.stream_copier import StreamCopier


@pytest.fixture
def device():
    return LateDevice("training first")


def copied(device, take, length=8):
    """Have ``take`` copy ones from the device; return where they go, and what holds them there."""
    target, source = torch.zeros(length), device.place(torch.ones(length))
    device.register(target)
    take([target], [source])
    return target, source


def test_what_was_queued_on_two_streams_is_waited_for(device):
    flight, side = Flight(device), device.new_stream()
    flight.hurry()
    first, _held = copied(device, lambda *both: flight.copy(side, *both))
    second, _held_too = copied(device, lambda *both: flight.copy(device.training, *both))
    flight.land()

    assert [8.0, 8.0] == [first.sum().item(), second.sum().item()]


def test_a_copy_without_an_event_is_under_way(device):
    flight = Flight(device)
    flight.hurry()
    copied(device, lambda *both: flight.copy(device.training, *both))
    assert flight.under_way
    flight.land()

    assert not flight.under_way


def test_nothing_is_under_way_on_a_device_that_was_lost(device):
    flight = Flight(device)
    flight.hurry()
    copied(device, lambda *both: flight.copy(device.training, *both))
    device.lose("an illegal access")
    with pytest.raises(RuntimeError, match="illegal"):
        flight.land()

    assert not flight.under_way


def test_bytes_are_counted_once(device):
    """Else there would be room for more than there is."""
    flight = Flight(device, bytes_max=32)
    flight.hurry()
    for _ in range(2):
        copied(device, lambda *both: flight.copy(device.training, *both))
        flight.mark()
    flight.land()
    flight.hurry(on=False)
    last, _held = copied(device, lambda *both: flight.copy(device.training, *both))
    flight.make_room(1)

    assert 8.0 == last.sum()


def test_what_is_copied_at_once_has_an_event_before_what_training_does_next(device, monkeypatch):
    copier, events = StreamCopier(device), []
    record = device.record
    monkeypatch.setattr(device, "record", lambda on: (events.append(on), record(on))[1])
    copier.hurry()  # of the state before
    copied(device, copier.now)

    assert [device.training] == events
