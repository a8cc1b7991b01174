"""The traces of Pollux are read as its simulator reads them; two files of them are made here."""

import pytest

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast_services.scheduler.simulator.pollux_traces import applications
from holdfast_services.scheduler.simulator.reading import read_trace

PLACEMENTS = ((1, 1), (2, 1), (4, 1), (22, 2), (24, 2), (44, 2))


@pytest.fixture
def folder(tmp_path):
    """Steps of bert that take 0.1 s and 0.01 s per sample, and 0.1 s for each further node."""
    bert = tmp_path / "traces/bert"
    bert.mkdir(parents=True)
    rows = [
        f"{placement},{batch},{0.1 + 0.01 * batch + 0.1 * (nodes - 1)},{0.02 * nodes}"
        for placement, nodes in PLACEMENTS
        for batch in (4, 8, 12)
    ]
    (bert / "placements.csv").write_text(
        "\n".join(("placement,local_bsz,step_time,sync_time", *rows))
    )
    rows = [
        f"{nodes},{4 * nodes},{batch},{0.1 + 0.01 * batch + 0.1 * (nodes - 1)},0.1"
        for nodes in (6, 16)
        for batch in (4, 8, 12)
    ]
    (bert / "scalability.csv").write_text(
        "\n".join(("num_nodes,num_replicas,local_bsz,step_time,sync_time", *rows))
    )
    for batch, var in ((12, 4.0), (384, 8.0)):
        (bert / f"validation-{batch}.csv").write_text(
            f"progress,iteration,metric,grad_sqr,grad_var\n{batch + 100},9,0,1.0,{var}\n"
            f"{batch + 200},9,0,2.0,{var}\n"
        )
    return tmp_path


def test_what_was_measured_is_true(folder):
    bert = applications(folder)["bert"]

    assert (0.12, 0.14) == pytest.approx(bert.times_s((1,), 4))
    assert (0.24, 0.28) == pytest.approx(bert.times_s((4, 4), 8))


def test_between_batches_and_beyond_them_it_is_linear(folder):
    bert = applications(folder)["bert"]

    assert 0.16 == pytest.approx(bert.times_s((2,), 6)[1])
    assert 0.24 == pytest.approx(bert.times_s((2,), 14)[1])


def test_a_placement_counts_in_whatever_order_of_nodes(folder):
    bert = applications(folder)["bert"]

    assert bert.times_s((4, 2), 7) == bert.times_s((2, 4), 7)


def test_between_placements_it_is_linear_and_outside_the_nearest(folder):
    bert = applications(folder)["bert"]

    assert 0.56 == pytest.approx(bert.times_s((4,) * 5, 6)[1], abs=1e-6)
    assert 0.64 < bert.times_s((4,) * 6, 40)[1] < 0.8


def test_limits_and_noise_are_those_of_the_files(folder):
    bert = applications(folder)["bert"]

    assert (12, 384, 4, 12) == (
        bert.limits.initial, bert.limits.maximum, bert.limits.local_min, bert.limits.local_max,
    )  # fmt: skip
    assert 64 == bert.replicas_max
    assert (112.0, 212.0) == (bert.ends_at(0), bert.ends_at(1))
    assert (2.0, 6.0) == (bert.noise(198, 1).sqr, bert.noise(198, 1).var)


def test_a_workload_is_read_with_the_traces_beside_it(folder):
    (folder / "workloads").mkdir()
    path = folder / "workloads/workload-1.csv"
    path.write_text("name,time,application,num_replicas,batch_size\nb,9,bert,2,24\na,3,bert,1,12\n")

    jobs = read_trace(path)

    assert [("a", 3.0, 1, 12), ("b", 9.0, 2, 24)] == [
        (job.name, job.submitted_s, job.asked_gpus, job.asked_batch) for job in jobs
    ]
    path.write_text("name,time,application,num_replicas,batch_size\nb,9,gpt,2,24\n")
    with pytest.raises(InvalidRequestError, match="b is a gpt, which has no traces"):
        read_trace(path)
    path.write_text("name,time\nb,9\n")
    with pytest.raises(InvalidRequestError, match="has no column 'application'"):
        read_trace(path)


def test_without_traces_nothing_is_read(tmp_path):
    with pytest.raises(NotFoundError, match="has no traces/APPLICATION"):
        applications(tmp_path)


def test_an_application_that_nobody_knows_is_refused(folder):
    (folder / "traces/bert").rename(folder / "traces/gpt")

    with pytest.raises(InvalidRequestError, match="gpt is not known"):
        applications(folder)
