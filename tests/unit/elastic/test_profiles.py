"""Step times by configuration: medians of the last ones, a bounded number (F96)."""

import pytest

from holdfast.core.hints import POINTS_COUNT_MAX, JobHints, check
from holdfast.elastic.profiles import TIMES_COUNT_MAX, Profiles

WHERE = (1, 4, 32)


def filled(times, **options):
    profiles = Profiles()
    for seconds in times:
        profiles.add(WHERE, seconds, **options)
    return profiles


def test_a_pause_moves_nothing():
    (point,) = filled([0.1] * 20 + [30.0, 0.1], synced=True, sync_s=0.04).points()

    assert (point.nodes, point.replicas, point.local_batch, point.count) == (1, 4, 32, 22)
    assert (point.step_s, point.compute_s) == (0.1, pytest.approx(0.06))


def test_micro_batches_without_the_network_tell_of_compute():
    profiles = filled([0.1, 0.1, 0.1], synced=False)
    assert profiles.points() == ()
    profiles.add(WHERE, 0.5, synced=True, sync_s=0.1)

    assert profiles.points()[0].compute_s == 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9, float("inf")])
def test_what_no_clock_shows_is_left_out(seconds):
    assert filled([seconds], synced=True).points() == ()
    assert filled([0.1], synced=True, sync_s=0.2).points() == ()


def test_the_last_times_of_the_last_configurations_are_kept():
    profiles = filled([9.0] * TIMES_COUNT_MAX + [1.0] * TIMES_COUNT_MAX, synced=True)
    for local in range(1, POINTS_COUNT_MAX):
        profiles.add((1, 1, local), 0.1, synced=True)
    assert profiles.points()[0].step_s == 1.0
    profiles.add(WHERE, 1.0, synced=True)
    profiles.add((1, 1, 999), 0.1, synced=True)

    assert len(profiles.points()) == POINTS_COUNT_MAX
    assert [p.local_batch for p in profiles.points()[-2:]] == [32, 999]
    check(JobHints(points=profiles.points()))


def test_times_go_on_after_a_restart():
    profiles = filled([0.1, 0.3], synced=True, sync_s=0.01)
    other = Profiles()
    other.load_state_dict(profiles.state_dict())

    assert other.points() == profiles.points()
    assert other.state_dict() == profiles.state_dict()
