"""F8, F31: a restore fills tensors of a device straight from the mapped segments."""

from __future__ import annotations

import pytest
import torch
from tests.late_device import LateDevice
from tests.unit.copying.late_training import start_values
from tests.unit.state import worlds
from torch import nn

from holdfast.copying import flight, stream_loader
from holdfast.errors import NotReadyError, UnavailableError
from holdfast.reading import files, registered
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

ORDERS = ("training first", "copies first", "at random")
KIB = 1024


def state_of(tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return {"m": model}


@pytest.fixture
def saved(tmp_path):
    """A segment with tensors of every layout, and one big enough to be registered."""
    values = {**start_values(), "big": torch.arange(600 * KIB, dtype=torch.int64).double()}
    capture = Capture(state_of(values), rank=0, world_size=1)
    saver = worlds.Saver(tmp_path)
    located = saver.save(capture)
    assert saver.engine.close(worlds.WAIT_S)
    return values, located


def blank(device, values):
    """Return the state on the device, whose tensors are about to be initialized there."""
    placed = {name: device.place(torch.full_like(value, -1)) for name, value in values.items()}
    for tensor in placed.values():
        device.launch(lambda raw: raw.fill_(-2), tensor)
    return placed


def loaded(device, saved):
    values, located = saved
    placed = blank(device, values)
    with open_files([located], devices=device) as segments:
        Capture(state_of(placed), rank=0, world_size=1).load(segments, step=1)
    return placed


@pytest.fixture(params=ORDERS)
def device(request):
    made = LateDevice(request.param, length_bytes=8 << 20)
    yield made
    assert [] == made.faults
    assert {} == made.registered, "nothing stays registered"


def test_what_was_saved_is_on_the_device(device, saved):
    """After what training had queued for it, before what training does next."""
    placed = loaded(device, saved)
    device.launch(lambda raw: raw.add_(1), placed["plain"])
    device.finish()

    for name, value in saved[0].items():
        expected = value + 1 if name == "plain" else value
        assert torch.equal(placed[name], expected), name


def test_a_long_range_is_read_from_memory_that_the_driver_knows(device, saved, monkeypatch):
    seen = []
    monkeypatch.setattr(device, "copy", watched(device, device.copy, seen))
    loaded(device, saved)

    assert any(seen)


def watched(device, copy, seen):
    def watching(stream, targets, sources):
        seen.append(all(device.is_pinned(s) for s in sources if s.nbytes > KIB * KIB))
        copy(stream, targets, sources)

    return watching


@pytest.mark.parametrize("reason", ["refused", "gone"])
def test_what_cannot_be_registered_is_read_all_the_same(device, saved, reason, caplog, monkeypatch):
    if reason == "refused":
        device.refuse = "cudaHostRegister: operation not supported (801)"
    else:
        known = registered.registered
        monkeypatch.setattr(
            files, "registered", lambda device, path, _, ranges: known(device, path, (0, 0), ranges)
        )
    placed = loaded(device, saved)

    assert torch.equal(placed["big"], saved[0]["big"])
    assert ("not supported" if reason == "refused" else "another file") in caplog.text


def test_bytes_under_way_are_bounded(device, saved):
    """And big tensors are cut."""
    target = device.place(torch.zeros(64 * KIB))
    source = torch.arange(64.0 * KIB)
    stream_loader.load(device, [(target, source)], bytes_max=KIB)

    assert torch.equal(target, source)


def test_a_device_that_hangs_is_not_waited_for_for_ever(saved, monkeypatch):
    device = LateDevice(length_bytes=8 << 20)
    device.sleep()
    monkeypatch.setattr(
        files, "load", lambda device, pairs: stream_loader.load(device, pairs, stalled_s_max=0.0)
    )
    with pytest.raises(UnavailableError, match="late:0 has not done a copy"):
        loaded(device, saved)
    assert device.registered, "copies are under way from there"
    device.wake()
    device.finish()

    assert [] == device.faults


@pytest.mark.parametrize("error", [RuntimeError("gone"), torch.OutOfMemoryError("full")])
def test_a_device_that_fails_fails_the_restore(device, saved, error):
    device.fail_copy = (3, error)
    with pytest.raises(type(error), match=str(error)):
        loaded(device, saved)


def test_bytes_that_are_not_in_the_file_are_refused(device, saved):
    """What a rank did not fetch is a hole, and nothing on the device is written."""
    values, (path, shard) = saved
    placed = blank(device, values)
    with open_files([(path, shard)], devices=device) as segments:
        (big,) = [e for e in segments._source.headers[0].entries if e.spec.fqn == "m.big"]
    here = [(0, big.begin), (big.end, shard.length_bytes)]
    held = {shard.id: tuple([files.ByteRange(begin=begin, end=end) for begin, end in here])}
    with (
        open_files([(path, shard)], held, devices=device) as segments,
        pytest.raises(NotReadyError, match=r"m\.big"),
    ):
        Capture(state_of(placed), rank=0, world_size=1).load(segments, step=1)
    device.finish()

    assert torch.equal(placed["plain"], torch.full_like(placed["plain"], -2))


def test_values_are_converted_on_the_way(device, saved):
    """``Want.converted``: another dtype."""
    target = device.place(torch.zeros(4, dtype=torch.float64))
    stream_loader.load(device, [(target, torch.arange(4.0))])

    assert torch.equal(target, torch.arange(4.0).double())


MUTANTS = {
    "copies wait for training": ("wait_event", lambda *_: None),
    "the end is waited for": ("land", lambda _: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_this_wait_wrong_values_are_loaded(saved, monkeypatch, mutant):
    name, value = MUTANTS[mutant]
    seen = []
    for order in ORDERS:
        device = LateDevice(order, length_bytes=8 << 20)
        with monkeypatch.context() as patched:
            if name == "land":
                patched.setattr(flight.Flight, "land", value)
            else:
                patched.setattr("tests.late_device.LateStream.wait_event", value)
            placed = loaded(device, saved)
        if name == "wait_event":
            device.finish()  # else copies are under way from what is not mapped any more
        wrong = [n for n, v in saved[0].items() if not torch.equal(placed[n], v)]
        seen.append(bool(wrong or device.faults))

    assert any(seen), f"nothing shows that {mutant}"
