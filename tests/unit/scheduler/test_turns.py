"""What becomes of jobs, turn by turn: starts, rescales, failures, nodes that are lost (F105)."""

from dataclasses import replace

import pytest
from tests.unit.scheduler.world import World

from holdfast.core.executions import Outcome
from holdfast_services.scheduler.domain.job import State
from holdfast_services.scheduler.domain.orders import orders_by_node
from holdfast_services.scheduler.domain.retries import OUTSIDE_PER_HOUR_MAX


@pytest.fixture
def world():
    """Two nodes, and a job that trains on one GPU of each."""
    world = World(a=2, b=2)
    world.submit("gpt", 1, 4)
    world.wish("gpt", a=1, b=1)
    world.settle()
    assert world.jobs["gpt"].state is State.RUNNING
    return world


def start(world, node, job="gpt"):
    part = world.jobs[job].part(node)
    return job, part.start


def lose(world, node, silent_s=20.0, *, agent=False):
    known = world.reported[node]
    world.reported[node] = replace(known, silent_s=silent_s, agent_live=agent)


def test_a_job_goes_from_queue_to_round_to_end(world):
    states = [entry.state for entry in world.jobs["gpt"].history]
    world.end("a", start(world, "a"), Outcome.ENDED, 0)
    world.settle()

    assert [State.STARTING, State.RUNNING] == states
    assert world.jobs["gpt"].state is State.ENDED
    assert world.jobs["gpt"].settled
    assert world.jobs["gpt"].gpu_s == 0.0 or world.now_s > 1000.0


def test_growth_keeps_launchers_and_the_round_until_the_next_begins(world):
    before = start(world, "a")
    world.wish("gpt", a=2, b=2)
    world.turn()

    assert world.jobs["gpt"].state is State.RESCALING
    assert world.launches["gpt"].running == {"a": (0,), "b": (0,)}
    world.settle()
    assert world.launches["gpt"].running == {"a": (0, 1), "b": (0, 1)}
    assert start(world, "a") == before
    assert world.jobs["gpt"].state is State.RUNNING


def test_a_gpu_that_is_given_up_goes_to_nobody_before_the_next_round(world):
    world.submit("other", 3)
    world.wish("gpt", a=1)
    world.wish("other", b=2, a=1)
    world.turn()

    assert world.jobs["gpt"].shares == {"a": 1}
    assert world.jobs["other"].state is State.QUEUED, "all of it, or nothing"
    assert "of node b of gpt" in world.jobs["other"].waiting
    world.tell("gpt")
    world.begin_round("gpt")
    world.turn()
    assert world.jobs["other"].state is State.QUEUED, "the launcher on b is still there"
    world.settle()
    assert world.jobs["other"].shares == {"a": 1, "b": 2}
    assert world.jobs["other"].state is State.RUNNING


def test_jobs_that_wait_for_each_other_do_not_do_so_for_ever():
    """The one that comes last in the queue gives up what it has."""
    world = World(a=2, b=2)
    for name, node in (("first", "a"), ("last", "b")):
        world.submit(name, 2)
        world.wish(name, **{node: 2})
        world.now_s += 1.0
    world.settle()
    world.wish("first", b=2)
    world.wish("last", a=2)
    world.turn()

    assert world.jobs["last"].state is State.QUEUED
    assert world.jobs["first"].state is State.RUNNING
    world.settle()
    assert world.jobs["first"].shares == {"b": 2}
    assert world.jobs["last"].shares == {"a": 2}


def test_a_script_that_fails_is_tried_again_as_often_as_asked():
    world = World(a=1)
    world.submit("gpt", retries=1)
    world.wish("gpt", a=1)
    world.settle()
    world.end("a", start(world, "a"), Outcome.FAILED, 1, "rank 0: ValueError: bad batch")
    world.report("a")
    world.turn()

    job = world.jobs["gpt"]
    assert job.state is State.QUEUED
    assert "try 1 of 1 follows: rank 0: ValueError: bad batch" in job.message
    world.settle()
    assert world.jobs["gpt"].state is State.QUEUED, "there is a pause"
    world.now_s += 2.0
    world.settle()
    world.end("a", start(world, "a"), Outcome.FAILED, 1, "rank 0: ValueError: bad batch")
    world.settle()
    assert world.jobs["gpt"].state is State.FAILED
    assert world.jobs["gpt"].message == "rank 0: ValueError: bad batch"


def test_a_killed_launcher_is_started_again_and_the_others_stay(world):
    kept, lost = start(world, "a"), start(world, "b")
    world.end("b", lost, Outcome.KILLED, -9)
    world.report("b")
    world.turn()

    assert world.jobs["gpt"].state is State.RESCALING
    world.settle()
    assert start(world, "a") == kept
    assert start(world, "b") != lost
    assert world.jobs["gpt"].state is State.RUNNING
    assert world.jobs["gpt"].shares == {"a": 1, "b": 1}


def test_what_fails_from_outside_again_and_again_fails_for_good(world):
    for _ in range(OUTSIDE_PER_HOUR_MAX):
        world.now_s += 100.0
        world.settle()
        world.end("b", start(world, "b"), Outcome.KILLED, -9, "killed by SIGKILL")
    world.settle()
    assert world.jobs["gpt"].state is State.RUNNING

    world.end("b", start(world, "b"), Outcome.KILLED, -9, "killed by SIGKILL")
    world.settle()
    assert world.jobs["gpt"].state is State.FAILED
    assert "21 failures within an hour" in world.jobs["gpt"].message


def test_half_a_start_is_no_start_and_a_node_on_which_starts_fail_is_set_aside():
    world = World(a=1, b=1)
    world.submit("gpt", 2)
    world.wish("gpt", a=1, b=1)
    for _ in range(2):
        world.turn()
        world.tell("gpt")
        world.carry_out("a")
        world.carry_out("b")
        world.end("b", start(world, "b"), Outcome.KILLED, 1, "no such device")
        aside = world.reported["b"].aside
        world.report("b")
        world.reported["b"] = replace(world.reported["b"], aside=aside)
        world.turn()
        assert world.jobs["gpt"].state is State.QUEUED
        assert not world.jobs["gpt"].parts, "the other node must not keep its part"
        world.tell("gpt")
        world.carry_out("a")
        world.begin_round("gpt")
        world.leave("a")
        world.report("a")
        world.turn(3.0)

    assert "set aside after 2 failed starts: node b: no such device" in world.jobs["gpt"].waiting
    assert "node b: no such device" in world.jobs["gpt"].message
    world.now_s += 61.0
    world.settle()
    assert world.jobs["gpt"].state is State.RUNNING
    assert world.reported["b"].aside is None


def test_a_launcher_that_cannot_begin_is_the_scripts_fault_the_second_time():
    world = World(a=1)
    world.submit("gpt")
    world.wish("gpt", a=1)
    for _ in range(2):
        world.now_s += 5.0
        world.turn()
        world.tell("gpt")
        world.carry_out("a")
        world.end("a", start(world, "a"), Outcome.REFUSED, 1, "there is no script x.py")
        world.report("a")
        world.turn()

    assert world.jobs["gpt"].state is State.FAILED
    assert world.jobs["gpt"].message == "node a: there is no script x.py"


def test_what_does_not_begin_in_time_is_given_up_but_not_while_metadata_is_out():
    world = World(a=1)
    world.submit("gpt")
    world.wish("gpt", a=1)
    world.turn()
    world.metadata_up = False
    world.turn(400.0)
    assert world.jobs["gpt"].state is State.STARTING

    world.metadata_up = True
    world.turn()
    assert world.jobs["gpt"].state is State.QUEUED
    assert "did not begin within 300 s" in world.jobs["gpt"].message


def test_a_lost_node_leaves_the_rest_if_that_is_enough(world):
    lose(world, "b")
    world.turn()

    assert world.jobs["gpt"].shares == {"a": 1}
    assert world.jobs["gpt"].state is State.RESCALING
    lose(world, "a")
    world.turn()
    assert world.jobs["gpt"].state is State.QUEUED
    assert world.jobs["gpt"].message == "node a: lost"


def test_an_executor_that_is_silent_stops_no_training(world):
    """Its launchers live on; only what is to begin there has to wait."""
    lose(world, "b", 60.0, agent=True)
    world.wish("gpt", a=1, b=2)
    world.turn()

    assert world.jobs["gpt"].shares == {"a": 1, "b": 1}
    assert world.jobs["gpt"].state is State.RUNNING
    assert "node b: its executor is silent" in world.jobs["gpt"].waiting
    lose(world, "b", 121.0, agent=True)
    world.turn()
    assert world.jobs["gpt"].shares == {"a": 1}


def test_who_comes_back_with_launchers_that_nobody_knows_gets_no_more(world):
    lose(world, "b", 500.0)
    world.turn()
    world.turn()
    world.report("b")
    world.submit("other")
    world.wish("gpt", a=1)
    world.wish("other", b=2 - 1)
    world.turn()

    assert "a launcher of gpt that was given up still runs there" in world.jobs["other"].waiting
    world.settle()
    assert world.jobs["other"].state is State.RUNNING


def test_a_notice_takes_a_node_out_of_a_job(world):
    world.executors["b"].launchers[start(world, "b")]
    world.end("b", start(world, "b"), Outcome.STOPPED, 143)
    world.report("b")
    world.reported["b"] = replace(world.reported["b"], leaving="spot instance")
    world.turn()

    assert world.jobs["gpt"].shares == {"a": 1}
    assert world.jobs["gpt"].outside_at_s == (), "it does not count as a failure"


def test_who_may_not_be_preempted_keeps_what_it_has():
    world = World(a=2)
    world.submit("pinned", 1, 2, preemptible=False)
    world.wish("pinned", a=2)
    world.settle()
    world.wish("pinned")
    world.settle()

    assert world.jobs["pinned"].shares == {"a": 2}


def test_a_cancelled_job_ends_at_once_and_frees_its_gpus_when_they_are_free(world):
    world.cancel("gpt")
    world.turn()

    job = world.jobs["gpt"]
    assert job.state is State.CANCELLED
    assert {held.node for held in job.held} == {"a", "b"}
    world.settle()
    assert world.jobs["gpt"].settled
    assert world.launches["gpt"].allocation.shares == ()


def test_after_a_loss_of_the_schedulers_database_its_numbers_go_on_above_metadatas(world):
    """As after a backup: metadata would take no allocation with an old number."""
    world.wish("gpt", a=2, b=2)
    world.settle()
    job = world.jobs["gpt"]
    world.jobs["gpt"] = replace(job, number=1, told=1)
    world.numbers.last = world.launches["gpt"].allocation.number
    world.turn()

    assert world.jobs["gpt"].number > world.launches["gpt"].allocation.number
    assert world.jobs["gpt"].parts == job.parts
    world.settle()
    assert world.launches["gpt"].allocation.number == world.jobs["gpt"].number


def test_a_plan_that_no_job_could_have_changes_nothing(world):
    for wish in ({"a": 3, "b": 2}, {"nowhere": 1}, {"a": -1}):
        world.wish("gpt", **wish)
        world.turn()

        assert world.jobs["gpt"].shares == {"a": 1, "b": 1}


def test_a_job_with_meshes_has_no_number_of_gpus_without_one():
    """G26: neither by a plan, nor by the loss of a node; metadata begins no round with less."""
    world = World(a=2, b=2)
    world.submit("gpt", 2, 4, meshes=("dp=1,tp=2", "dp=1,tp=4"))
    for wish, shares in (({"a": 2, "b": 1}, {}), ({"a": 2, "b": 2}, {"a": 2, "b": 2})):
        world.wish("gpt", **wish)
        world.settle()
        assert world.jobs["gpt"].shares == shares
    assert world.launches["gpt"].allocation.ranks_min == 0
    [order] = orders_by_node(world.jobs.values(), world.now_s)["a"].orders
    assert order.environment == {"HOLDFAST_MESHES": "dp=1,tp=2;dp=1,tp=4"}
    lose(world, "b")
    world.turn()
    assert world.jobs["gpt"].shares == {"a": 2}

    world = World(a=3, b=1)
    world.submit("wide", 2, 4, meshes=("tp=2", "tp=4"))
    world.wish("wide", a=3, b=1)
    world.settle()
    lose(world, "b")
    world.turn()
    assert world.jobs["wide"].state is State.QUEUED


def test_who_gives_way_keeps_no_number_of_gpus_without_a_mesh():
    """G26"""
    world = World(a=2, b=4)
    world.submit("first", 2)
    world.wish("first", a=2)
    world.now_s += 1.0
    world.submit("last", 2, 4, meshes=("tp=2", "tp=4"))
    world.wish("last", b=4)
    world.settle()
    world.wish("first", a=1, b=1)
    world.wish("last", a=1, b=3)
    world.turn()

    assert world.jobs["last"].state is State.QUEUED
    world.settle()
    assert world.jobs["last"].shares == {"a": 1, "b": 3}
    orders = orders_by_node(world.jobs.values(), world.now_s)["a"].orders
    assert {order.job: order.environment for order in orders} == {
        "first": {}, "last": {"HOLDFAST_MESHES": "tp=2;tp=4"},
    }  # fmt: skip
