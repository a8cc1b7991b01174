"""The simulator runs the scheduler's own rules, and the same seed gives the same bytes."""

import json
from dataclasses import replace

import pytest
from tests.unit.scheduler.traces import JOBS, MODEL, line, write

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.step_time import StepTime
from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.domain.policies.sia import Sia
from holdfast_services.scheduler.simulator.alone import Alone, alone_s
from holdfast_services.scheduler.simulator.page import page
from holdfast_services.scheduler.simulator.reading import read_trace
from holdfast_services.scheduler.simulator.results import document, result_of
from holdfast_services.scheduler.simulator.scenario import Scenario
from holdfast_services.scheduler.simulator.simulation import simulate

SMALL = Scenario(nodes=4)
ALL = [Price(), Pollux(), Sia(), Fifo()]
each_policy = pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)


@pytest.fixture
def trace(tmp_path):
    return read_trace(write(tmp_path / "trace.jsonl"))


def result(trace, policy=None, scenario=SMALL):
    run = simulate(trace, policy or Price(), scenario)
    return result_of(run, Alone(scenario.gpus_per_node))


def written(results):
    return json.dumps(document(results)) + page("trace", "small", results)


@each_policy
def test_all_jobs_end(trace, policy):
    found = result(trace, policy)

    assert 10 == found.summary.jobs
    assert all(job.jct_s > 0 for job in found.jobs)
    assert max(one.gpus for one in found.run.rounds) <= 16
    assert 0 < found.summary.utilisation <= 1


def test_a_job_alone_takes_its_wait_its_start_and_its_work(tmp_path):
    """The contract: seen at the end of the round, then 30 s, then its speed, to whole seconds."""
    samples = 20_000.0
    only = line("a", "small", 70.0, gpus_max=1, noise=[[0.0, 1.0, 0.0]])
    [job] = result(read_trace(write(tmp_path / "one.jsonl", [only]))).jobs

    step_s = StepTime(**MODEL).step_s(1, 1, 32)
    assert 50 + 30 + round(samples / 32 * step_s) == pytest.approx(job.jct_s, abs=1)
    assert job.alone_s == pytest.approx(samples / 32 * step_s, abs=1)
    assert job.ftf == pytest.approx(job.jct_s / job.alone_s)


def test_gpus_of_a_job_that_has_ended_are_free_at_the_end_of_the_round(tmp_path):
    """The contract: also those of who began later wait for it."""
    jobs = [line(name, "small", 0.0, gpus_max=1) for name in ("a", "b")]
    one = Scenario(nodes=1, gpus_per_node=1)

    found = result(read_trace(write(tmp_path / "two.jsonl", jobs)), scenario=one)

    first_s, second_s = sorted(job.jct_s for job in found.jobs)
    began_s = -(-first_s // 60) * 60
    assert first_s - 60 == pytest.approx(second_s - began_s, abs=2)


def test_the_same_seed_gives_the_same_bytes(trace):
    """Whatever the order of the jobs; with all that can go wrong."""
    rough = replace(
        SMALL, seed=7, noise=0.1, outliers=0.02, mtbf_s=20_000.0, spot_nodes=1,
        spot_mtbf_s=5_000.0, history=True, wrong_by=0.7,
    )  # fmt: skip

    first = written([result(trace, scenario=rough)])

    assert first == written([result(trace[::-1], scenario=rough)])
    assert first != written([result(trace, scenario=replace(rough, seed=8))])
    assert "<svg" in first


def test_a_lost_node_costs_its_jobs_a_start(trace):
    """Failures: all jobs end all the same."""
    found = result(trace, scenario=replace(SMALL, mtbf_s=800.0, away_s=300.0))

    assert found.summary.lost_nodes > 3
    assert found.summary.jct_mean_s > result(trace).summary.jct_mean_s
    assert min(one.gpus_up for one in found.run.rounds) < 16


def test_a_spot_node_is_left_before_it_goes(trace):
    """F104: within the notice, so that nothing is done twice."""
    spot = replace(SMALL, spot_nodes=2, spot_mtbf_s=600.0, notice_s=120.0, away_s=300.0)

    found = result(trace, scenario=spot)

    assert found.summary.lost_nodes > 3
    assert all(job.lost_s == 0 for job in found.run.jobs)
    assert found.summary.cost < sum(one.gpus for one in found.run.rounds) / 60


def test_who_arrives_is_placed_at_once_where_asked(tmp_path):
    """F101: a short job on an empty cluster saves the wait for the round."""
    trace = read_trace(write(tmp_path / "one.jsonl", [line("a", "small", 5.0)]))

    slow, fast = (
        result(trace, scenario=replace(SMALL, at_once=at_once)).jobs[0].jct_s
        for at_once in (False, True)
    )

    assert 50 < slow - fast < 60


def test_the_second_job_of_a_family_begins_wide(tmp_path):
    """History: it starts empty, and the first job fills it."""
    jobs = [line("a", "middle", 0.0), line("b", "middle", 6_000.0)]
    trace = read_trace(write(tmp_path / "two.jsonl", jobs))

    cold, warm = (
        {job.name: job for job in result(trace, scenario=replace(SMALL, history=known)).jobs}
        for known in (False, True)
    )

    assert cold["a"].starts == warm["a"].starts
    assert cold["b"].starts > warm["b"].starts == 1
    assert cold["b"].jct_s > warm["b"].jct_s


@pytest.mark.parametrize("told", [{"declares": False}, {"wrong_by": 1.0}])
def test_jobs_end_whatever_they_have_declared(trace, told):
    assert 10 == result(trace, scenario=replace(SMALL, **told)).summary.jobs


def test_noise_is_measured_by_its_median(trace):
    """F96: a tenth of noise and some slow steps cost little."""
    noisy = replace(SMALL, noise=0.1, outliers=0.02)

    steady_s, noisy_s = (result(trace, scenario=one).summary.jct_mean_s for one in (SMALL, noisy))

    assert noisy_s == pytest.approx(steady_s, rel=0.15)


def test_less_of_a_trace_is_drawn_by_the_seed(tmp_path):
    path = write(tmp_path / "trace.jsonl")

    half = [job.name for job in read_trace(path, keep=0.5, seed=3)]

    assert half == [job.name for job in read_trace(path, keep=0.5, seed=3)]
    assert 0 < len(half) < 10
    with pytest.raises(InvalidRequestError, match="has no jobs"):
        read_trace(path, keep=0.0)


def test_a_fixed_number_of_gpus_alone_is_faster_with_more(trace):
    large = trace[0].truth

    times = [alone_s(large, gpus, 4) for gpus in (1, 2, 4, 8)]

    assert sorted(times, reverse=True) == times
    assert Alone(4).best_s(large, 11) == times[-1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"submitted_s": -1.0}, "line 2: submitted_s is -1.0"),
        ({"submitted_s": "soon"}, "line 2: could not convert"),
        ({"samples": 1e300}, "noise begins at 0 and grows up to samples"),
        ({"noise": [[5.0, 1.0, 1.0]]}, "noise begins at 0"),
        ({"noise": [[0.0, -1.0, 1.0]]}, "sqr of gradients is -1.0"),
        ({"step_time": {**MODEL, "gamma": 99.0}}, "gamma of a step-time model is 99.0"),
        ({"batch": {"initial": 8, "maximum": 4}}, "minimum 8 is more than maximum 4"),
        ({"gpus_max": 0}, "gpus_max is 0"),
    ],
)
def test_a_recording_is_refused_by_the_line(tmp_path, wrong, said):
    path = write(tmp_path / "trace.jsonl", [{**JOBS[0], **wrong}])

    with pytest.raises(InvalidRequestError, match=said):
        read_trace(path)


def test_what_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    with pytest.raises(NotFoundError, match="does not exist"):
        read_trace(path)
    path.write_text("[]\n")
    with pytest.raises(InvalidRequestError, match="line 1 is no JSON object"):
        read_trace(path)
    path.write_text('{"format": "another/1"}\n')
    with pytest.raises(InvalidRequestError, match="does not begin with"):
        read_trace(path)
    write(path, [JOBS[0], JOBS[0]])
    with pytest.raises(InvalidRequestError, match="two jobs called large-0"):
        read_trace(path)
    write(path, [{key: value for key, value in JOBS[0].items() if key != "samples"}])
    with pytest.raises(InvalidRequestError, match="line 2: 'samples' is missing"):
        read_trace(path)


def test_noise_changes_where_the_recording_says(trace):
    large = trace[0].truth

    assert 2 == large.epochs
    assert GradientNoise(sqr=1.0, var=20.0) == large.noise(64, 0)
    assert GradientNoise(sqr=1.0, var=80.0) == large.noise(64, 1)
