"""Families: what the jobs of one command, or of one name, have measured counts for the next one."""

import math
from dataclasses import replace

import pytest

from holdfast.core.hints import JobHints, StepPoint
from holdfast.core.job_spec import JobSpec
from holdfast.goodput.efficiency import GradientNoise
from holdfast_services.scheduler.domain import families as module
from holdfast_services.scheduler.domain.cluster import Cluster, Node
from holdfast_services.scheduler.domain.families import families, family_of
from holdfast_services.scheduler.domain.job import Job, State
from holdfast_services.scheduler.domain.knowledge import Knowledge
from holdfast_services.scheduler.domain.planned import subject
from holdfast_services.scheduler.domain.policies.plan import plan
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.planning import Planner
from holdfast_services.scheduler.usecases.deciding import Learned, Turn

NOW_S = 100_000.0
NODES = {"a": Node(name="a", gpus=16, gpu_type="H100")}
SPEC = JobSpec(name="second", command=("x.py",), gpus_max=16)


def points(*replicas, step_s=0.11):
    return tuple(
        StepPoint(nodes=1, replicas=n, local_batch=32, compute_s=0.1, step_s=step_s, count=9)
        for n in replicas
    )


def past(*replicas, step_s=0.11, progress=100.0, **what):
    hints = JobHints(
        initial_batch=64, batch=64, batch_max=4096, local_min=8, local_max=64,
        points=points(*replicas, step_s=step_s), sqr=1.0, var=4e6, progress=progress,
    )  # fmt: skip
    return Knowledge(
        hints=hints, gpu_type="H100", family=family_of(SPEC), began=GradientNoise(sqr=1.0, var=9e5),
        **{"at_s": NOW_S - 5000.0, "ended": True, **what},
    )  # fmt: skip


def planned(*known, spec=SPEC):
    job = Job(spec=spec, id="id", submitted_at_s=NOW_S - 10.0)
    about = subject([job], Cluster(nodes=NODES), {}, {}, NOW_S, families(known))
    return about.view.jobs[0], plan(about.view, Price(), NOW_S)


def test_a_job_that_nobody_knows_begins_with_the_least():
    _, made = planned()

    assert made.allocations["second"] == (("a", 1),)


def test_the_next_job_of_a_family_begins_as_wide_as_twice_what_was_measured():
    """F100: it may grow by that; before it was on the page of the policy, and nowhere else."""
    job, made = planned(past(1, 2, 4))

    assert made.allocations["second"] == (("a", 8),)
    assert (job.batches.initial, job.batches.maximum) == (64, 4096)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, owner="other"),
        replace(SPEC, command=("y.py",)),
        replace(SPEC, family="x.py but faster"),
    ],
)
def test_other_commands_names_and_owners_are_other_families(spec):
    """What somebody says of his jobs is not believed of another's."""
    _, made = planned(past(1, 2, 4), spec=spec)

    assert made.allocations["second"] == (("a", 1),)


def test_no_two_of_these_are_one_family():
    """Two commands may differ in their spaces, or behind all that is kept of them."""
    specs = [
        replace(SPEC, owner=owner, command=command, family=family)
        for owner, command, family in (
            ("", ("x.py", "a b"), ""),
            ("", ("x.py", "a", "b"), ""),
            ("", ("x.py", 200 * "a", "--width", "1"), ""),
            ("", ("x.py", 200 * "a", "--width", "2"), ""),
            ("o/w", ("x.py",), ""),
            ("o", ("y.py",), "w/x.py"),
        )
    ]

    assert len({family_of(spec) for spec in specs}) == len(specs)
    assert max(len(family_of(spec)) for spec in specs) < 240


async def test_nothing_is_fitted_for_a_family_of_which_no_job_is_to_be_planned():
    """A thousand jobs are kept, mostly of as many families; to fit them all takes seconds."""
    jobs = {
        name: Job(spec=replace(SPEC, name=name, command=(name,)), id=name, submitted_at_s=NOW_S)
        for name in ("live", "over")
    }
    jobs["over"] = replace(jobs["over"], state=State.ENDED)
    pasts = [
        replace(past(1, 2, 4, step_s=step_s), family=family_of(replace(SPEC, command=(name,))))
        for name, step_s in (("live", 0.11), ("over", 0.12), ("gone", 0.13))
    ]
    turn = Turn(jobs=jobs, cluster=Cluster(nodes=NODES), changed=False, news=False, now_s=NOW_S)
    module.profile.cache_clear()

    made = await Planner("price", {})(turn, Learned(jobs={}, past=tuple(pasts)), arrivals=False)

    assert dict(made.by_job["live"].gpus) == {"a": 8}
    assert module.profile.cache_info().misses == 1


def test_a_declared_family_counts_whatever_the_command():
    spec = replace(SPEC, family="gpt")
    other = replace(spec, command=("y.py", "--lr", "1"))

    _, made = planned(replace(past(1, 2, 4), family=family_of(spec)), spec=other)

    assert made.allocations["second"] == (("a", 8),)


def test_of_a_configuration_the_newest_word_counts():
    older, newer = past(2, step_s=0.2), past(2, step_s=0.4, at_s=NOW_S)

    (family,) = families([newer, older]).values()

    assert family.profiles["H100"].step_time.step_s(1, 2, 32) == pytest.approx(0.4, rel=0.05)


def test_the_work_of_the_next_is_the_median_of_those_that_ended():
    """One that was cancelled, or runs, says nothing of how much it takes in all."""
    known = [past(1, progress=n) for n in (10.0, 20.0, 90.0)]
    known.append(past(1, progress=9e9, ended=False))

    (family,) = families(known).values()

    assert family.work == 20.0 * 64


def test_the_noise_of_the_next_is_what_one_began_with():
    later = replace(past(1, at_s=NOW_S), began=None)

    (family,) = families([past(1), later]).values()

    assert family.noise == GradientNoise(sqr=1.0, var=9e5)


def test_steps_that_were_declared_count_from_the_start():
    """``work`` is in steps of the initial batch, which the family knows before the job says it."""
    spec = replace(SPEC, work=1000.0)

    job, _ = planned(past(1), spec=spec)
    unknown, _ = planned(spec=spec)

    assert job.work.declared == 64_000.0
    assert unknown.work.declared is None


def test_batches_that_allow_not_even_the_least_are_those_of_nobody():
    job, made = planned(past(1), spec=replace(SPEC, gpus_min=16))
    narrow = replace(past(1).hints, batch_max=64, local_min=64)
    forced, forced_made = planned(replace(past(1), hints=narrow), spec=replace(SPEC, gpus_min=16))

    assert job.batches.initial == 64
    assert forced.batches.initial == 1
    assert made.allocations == forced_made.allocations == {"second": (("a", 16),)}


@pytest.mark.parametrize(
    "hints",
    [None, JobHints(), JobHints(refused="no"), replace(past(1).hints, points=())],
)
def test_who_said_nothing_that_can_be_so_is_no_member(hints):
    assert families([replace(past(1), hints=hints)]) == {}


def test_what_an_older_release_has_kept_is_of_no_family():
    assert families([replace(past(1), family="")]) == {}


def test_points_that_cannot_be_so_make_no_profile():
    (family,) = families([past(1, step_s=0.0)]).values()

    assert family.profiles == {}


def test_as_many_points_as_the_bound_are_fitted_and_no_more(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "POINTS_COUNT_MAX", 3)
    monkeypatch.setattr(module, "profile", seen.append)

    families([past(1, 2), past(4, at_s=NOW_S - 10.0), past(1, 8, at_s=NOW_S)])

    assert [[point.replicas for point in of] for of in seen] == [[4, 1, 8]]
    assert all(math.isfinite(point.step_s) for of in seen for point in of)
