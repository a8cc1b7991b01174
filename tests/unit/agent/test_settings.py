"""The agent's environment."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidRequestError
from holdfast_services.agent.settings import Settings, default_budget_bytes

MIB = 1 << 20
BASE = {
    "HOLDFAST_NODE": "n1",
    "HOLDFAST_ADDRESS": "127.0.0.1:7300",
    "HOLDFAST_AGENT": "/run/a.sock",
    "HOLDFAST_ARENA": "/dev/shm/a",
}


def test_sizes_and_ports_are_read():
    made = Settings.from_env({**BASE, "HOLDFAST_BUDGET": "2GiB", "HOLDFAST_DATA_PORT": "7"})
    assert (2 << 30, 7, 0) == (made.budget_bytes, made.data_port, made.rpc_port)


@pytest.mark.parametrize(
    ("said", "devices"),
    [
        ("auto", ()),
        ("off", None),
        ("m0", ("m0",)),
        ("m0, m1", ("m0", "m1")),
    ],
)
def test_rdma_is_on_off_or_of_named_devices(said, devices):
    assert devices == Settings.from_env({**BASE, "HOLDFAST_RDMA": said}).rdma_devices


@pytest.mark.parametrize(
    ("said", "rate"), [("", 0), ("0", 0), ("1MiB", 1 << 20), ("2GiB/s", 2 << 30)]
)
def test_copies_have_no_rate_unless_one_is_set(said, rate):
    made = Settings.from_env({**BASE, "HOLDFAST_REPLICATE_RATE": said})
    assert rate == made.replicate_bytes_per_s


def test_a_rate_at_which_no_copy_would_be_whole_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="HOLDFAST_REPLICATE_RATE='1000K' is less than 1"):
        Settings.from_env({**BASE, "HOLDFAST_REPLICATE_RATE": "1000K"})


@pytest.mark.parametrize("key", ["HOLDFAST_ADDRESS", "HOLDFAST_AGENT", "HOLDFAST_ARENA"])
def test_what_is_missing_is_named(key):
    with pytest.raises(InvalidRequestError, match=key):
        Settings.from_env({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("HOLDFAST_NODE", "../x"),
        ("HOLDFAST_BUDGET", "lots"),
        ("HOLDFAST_RPC_PORT", "65536"),
        ("HOLDFAST_RPC_PORT", "x"),
        ("HOLDFAST_REPLICATE_RATE", "fast"),
    ],
)
def test_what_cannot_be_is_refused(key, value):
    with pytest.raises(InvalidRequestError):
        Settings.from_env({**BASE, key: value})


def test_the_default_budget_is_half_of_what_is_free(tmp_path):
    assert 0 < default_budget_bytes(tmp_path / "arena")
