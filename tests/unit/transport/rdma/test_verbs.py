"""Which devices are used, by what the machine shows of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.soft_card import soft_place

from holdfast.errors import NotFoundError, UnavailableError
from holdfast_services.transport.rdma import verbs


@pytest.fixture
def devices(monkeypatch, tmp_path):
    """Have the machine show devices, of which some can be opened."""

    def show(*names, opened=()):
        def ports_of(name):
            if name not in opened:
                raise UnavailableError(f"cannot open RDMA device {name}")
            return [soft_place(name).port]

        for name in names:
            (tmp_path / name).mkdir()
        listed = [SimpleNamespace(name=name.encode()) for name in names]
        monkeypatch.setattr(verbs, "MISSING", "")
        monkeypatch.setattr(verbs, "DEVICES", tmp_path)
        monkeypatch.setattr(verbs, "get_device_list", lambda: listed, raising=False)
        monkeypatch.setattr(verbs, "_ports_of", ports_of)

    return show


def test_a_machine_without_devices_has_none(devices):
    devices()
    with pytest.raises(NotFoundError):
        verbs.ports()


def test_a_device_that_cannot_be_opened_leaves_the_others(devices):
    """A container sees the devices of its host, and may open its own."""
    devices("mlx5_0", "mlx5_1", opened=("mlx5_1",))

    assert ["mlx5_1"] == [port.device for port in verbs.ports()]


def test_devices_of_which_none_can_be_opened_say_why(devices):
    devices("mlx5_0", "mlx5_1")
    with pytest.raises(UnavailableError, match="mlx5_0; cannot open RDMA device mlx5_1"):
        verbs.ports()
