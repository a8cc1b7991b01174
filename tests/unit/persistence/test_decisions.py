"""Verdicts, rests and rates: the worker's small rules."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from holdfast.core.byte_rate import BURST_S, Bucket, take
from holdfast.core.ids import ShardId
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError
from holdfast_services.persistence.domain.existing_object import Verdict, judge
from holdfast_services.persistence.settings import Settings

SHARD = Shard(
    id=ShardId("r1", 10, 1, 0),
    job="j",
    world_size=1,
    plan_hash="p",
    length_bytes=100,
    root_digest=b"\1" * 16,
)
ENVIRON = {
    "HOLDFAST_ADDRESS": "h:1",
    "HOLDFAST_STORE": "file:///s",
    "HOLDFAST_QUEUE": "sqlite:////q.db",
}


@pytest.mark.parametrize(
    ("length", "sidecar", "repair", "verdict"),
    [
        (None, None, False, Verdict.WRITE),
        (99, SHARD, False, Verdict.WRITE),
        (100, SHARD, False, Verdict.DONE),
        (100, None, False, Verdict.PROVE),
        (100, replace(SHARD, root_digest=b"\2" * 16), False, Verdict.PROVE),
        (100, SHARD, True, Verdict.WRITE),
    ],
)
def test_an_object_is_believed_only_with_its_length_and_its_sidecar(
    length, sidecar, repair, verdict
):
    """G10: done, proven, or written again; what is known to be bad is written again."""
    assert verdict is judge(SHARD, length, sidecar, repair=repair)


def test_a_rate_holds_over_any_span_whatever_is_asked_for():
    """F88: 100 bytes/s are 100 bytes/s, also when more is taken at once than a second gives."""
    bucket, now_s, moved = Bucket(rate_bytes_per_s=100.0), 0.0, 0
    for length in (1, 500, 3, 40, 40, 250):
        bucket, wait_s = take(bucket, length, now_s)
        now_s, moved = now_s + wait_s, moved + length

        assert moved <= 100.0 * (now_s + BURST_S) + 1e-6
    assert moved / 100.0 == pytest.approx(now_s)


def test_what_is_not_used_is_saved_up_for_a_moment_only():
    bucket, _ = take(Bucket(rate_bytes_per_s=100.0), 0, 1000.0)
    bucket, wait_s = take(bucket, 100, 1000.0)

    assert 1.0 - BURST_S == pytest.approx(wait_s)


def test_a_clock_that_steps_back_fills_nothing():
    bucket, _ = take(Bucket(rate_bytes_per_s=100.0, at_s=50.0), 100, 50.0)
    bucket, wait_s = take(bucket, 0, 10.0)

    assert 1.0 == pytest.approx(wait_s)
    _, wait_s = take(bucket, 0, 50.5)
    assert 0.5 == pytest.approx(wait_s)


def test_settings_are_read_with_units_and_defaults():
    settings = Settings.from_env({**ENVIRON, "HOLDFAST_PERSIST_RATE": "200MiB"})

    assert 200 << 20 == settings.persist_bytes_per_s
    assert (8, 64 << 20, 30.0) == (
        settings.parts_in_flight,
        settings.scrub_bytes_per_s,
        settings.queue_lease_s,
    )
    assert settings.worker


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOLDFAST_ADDRESS", ""),
        ("HOLDFAST_STORE", ""),
        ("HOLDFAST_QUEUE", ""),
        ("HOLDFAST_WORKER", "a/b"),
        ("HOLDFAST_PERSIST_PARTS", "0"),
        ("HOLDFAST_PERSIST_PARTS", "1000"),
        ("HOLDFAST_PERSIST_RATE", "fast"),
        ("HOLDFAST_SCRUB_RATE", "-1"),
        ("HOLDFAST_QUEUE_LEASE_S", "nan"),
        ("HOLDFAST_QUEUE_LEASE_S", "0"),
    ],
)
def test_a_setting_that_is_missing_or_makes_no_sense_is_refused(name, value):
    with pytest.raises(InvalidRequestError):
        Settings.from_env({**ENVIRON, name: value})


@pytest.mark.parametrize(("text", "rate"), [("", 192 << 20), ("0", 0), ("1GiB/s", 1 << 30)])
def test_a_worker_is_paced_unless_told_otherwise(monkeypatch, text, rate):
    """P4: with the defaults a drain leaves training its speed; see ``train/while_draining``."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    environ = {
        "HOLDFAST_ADDRESS": "h:1",
        "HOLDFAST_STORE": "memory:",
        "HOLDFAST_QUEUE": "memory:",
        "HOLDFAST_PERSIST_RATE": text,
    }

    assert rate == Settings.from_env(environ).persist_bytes_per_s
