"""From jobs and nodes to the facts of a policy and back: what is believed, and what is left out."""

from dataclasses import replace

import pytest

from holdfast.core.hints import JobHints, StepPoint
from holdfast.core.job_spec import JobSpec
from holdfast_services.scheduler.calls.metadata import hints_of
from holdfast_services.scheduler.domain.cluster import Aside, Cluster, Node
from holdfast_services.scheduler.domain.job import Job, Part, State
from holdfast_services.scheduler.domain.knowledge import Knowledge
from holdfast_services.scheduler.domain.planned import (
    SILENT_S,
    STALE_S,
    refusal,
    subject,
    wishes,
    with_defaults,
)
from holdfast_services.scheduler.domain.policies.facts import NodeState
from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.plan import plan

NOW_S = 100_000.0
NODES = {name: Node(name=name, gpus=4, gpu_type="H100") for name in ("a", "b")}
POINT = StepPoint(nodes=1, replicas=2, local_batch=32, compute_s=0.1, step_s=0.12, count=9)
HINTS = JobHints(
    initial_batch=64, batch=64, batch_max=1024, local_min=8, local_max=64, points=(POINT,),
    sqr=1.0, var=4.0, progress=100.0,
)  # fmt: skip


def job(name="gpt", low=1, high=8, **what):
    spec = JobSpec(name=name, command=("x.py",), gpus_min=low, gpus_max=high)
    return replace(Job(spec=spec, id=f"id-{name}", submitted_at_s=NOW_S - 1000.0), **what)


def running(name="gpt", node="a", gpus=2, **what):
    part = Part(node=node, devices=tuple(range(gpus)), start=1)
    began = {"began_at_s": NOW_S - 1000.0, "starts": 1, "state": State.RUNNING}
    return job(name, parts=(part,), **{**began, **what})


def facts_of(known, one=None, cluster=None):
    one = one or running()
    about = subject([one], cluster or Cluster(nodes=NODES), {"gpt": known}, {}, NOW_S)
    return about.view.jobs[0], about.notes


def test_hints_become_batches_profile_and_noise():
    told, notes = facts_of(Knowledge(hints=HINTS, at_s=NOW_S - 10.0, gpu_type="H100"))

    assert notes == ()
    assert (64, 1024, 8) == (told.batches.initial, told.batches.maximum, told.batches.local_min)
    assert told.profiles["H100"].replicas_max == 2
    assert told.noise.ratio == 4.0
    assert told.work.done == 6400.0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"sqr": float("nan")}, "sqr must be a finite number"),
        ({"var": -1.0}, "var is -1.0"),
        ({"progress": 1e300}, "progress is 1e"),
        ({"batch": -5}, "batch is -5"),
        ({"points": [{"nodes": 1}]}, r"replicas is missing"),
        ({"nonsense": 1}, "nonsense is not known"),
        ("text", "must be an object"),
    ],
)
def test_absurd_hints_are_refused_by_name_and_the_job_is_planned_as_if_it_had_said_nothing(
    said, why
):
    hints = hints_of(said)
    told, notes = facts_of(Knowledge(hints=hints, at_s=NOW_S))

    assert why in hints.refused
    assert any(f"hints of gpt are refused: {hints.refused}" == note for note in notes)
    assert told == facts_of(Knowledge())[0]


def test_hints_that_are_older_than_an_hour_are_not_believed_of_a_job_that_trains():
    old = Knowledge(hints=HINTS, at_s=NOW_S - STALE_S - 1.0, gpu_type="H100")
    told, notes = facts_of(old)
    queued, none = facts_of(old, job())

    assert told == facts_of(Knowledge())[0]
    assert "hints of gpt are not believed: they are 1.0 h old" in notes
    assert queued.profiles["H100"].replicas_max == 2, "who waits says nothing newer"
    assert none == ()


def test_batches_that_allow_no_number_of_gpus_end_no_job():
    narrow = replace(HINTS, batch_max=64, local_min=64, batch=64)
    told, notes = facts_of(
        Knowledge(hints=narrow, at_s=NOW_S), running(gpus=4, spec=job(low=4).spec)
    )

    assert told.batches.replicas_max >= 4
    assert "they allow no number of GPUs" in notes[0]


def test_a_job_that_says_nothing_is_taken_to_scale_as_its_bounds_say():
    fresh = running(began_at_s=NOW_S - SILENT_S + 1.0)

    assert not facts_of(Knowledge(step=9), fresh)[0].profiles, "it may yet say something"
    assert not facts_of(Knowledge())[0].profiles, "it has done no step"
    assert facts_of(Knowledge(step=9))[0].profiles["H100"].replicas_max == 8
    known = {"gpt": Knowledge(step=9)}
    about = subject([running()], Cluster(nodes=NODES), known, {}, NOW_S)
    made = plan(about.view, Fifo(), NOW_S)
    assert sum(gpus for _, gpus in made.allocations["gpt"]) == 8


def test_what_was_measured_is_what_a_move_costs():
    costs = {"stall_s": 0.5, "copy_s": 1.5, "decide_s": 1.0, "fetch_s": 8.0, "load_s": 2.0}
    told, _ = facts_of(Knowledge(costs=costs))

    assert told.cost.save_s == 2.0
    assert told.cost.restore_s == 11.0
    assert told.cost.restore_local_s == 3.0
    known = {"a": Knowledge(costs={"load_s": 1.0}), "b": Knowledge(costs={"load_s": 3.0})}
    assert with_defaults({**known, "c": Knowledge()})["c"].costs == {"load_s": 3.0}


def test_a_job_on_a_node_that_is_silent_stays_as_it_is_and_its_gpus_are_not_planned():
    nodes = {**NODES, "b": replace(NODES["b"], silent_s=20.0)}
    stuck, other = running("stuck", node="b"), job("other", high=8)
    stuck = replace(stuck, parts=(*stuck.parts, Part(node="a", devices=(3,), start=1)))
    jobs = {"stuck": stuck, "other": other}
    about = subject(jobs.values(), Cluster(nodes=nodes), {}, {}, NOW_S)
    wished = wishes(plan(about.view, Fifo(), NOW_S), about, jobs)

    assert [(node.name, node.gpus) for node in about.view.nodes] == [("a", 3)]
    assert wished["stuck"].gpus == {"b": 2, "a": 1}
    assert "stays as it is: node b: its executor is silent" in wished["stuck"].why
    assert set(wished["other"].gpus) == {"a"}


def test_a_job_stays_where_only_the_agent_is_away():
    """Its ranks train on, and its round goes on."""
    jobs = {"gpt": running("gpt", node="b")}
    for silent_s, nodes in ((60.0, {"b"}), (500.0, {"a"})):
        away = replace(NODES["b"], agent_live=False, agent_silent_s=silent_s)
        about = subject(jobs.values(), Cluster(nodes={**NODES, "b": away}), {}, {}, NOW_S)
        assert wishes(plan(about.view, Fifo(), NOW_S), about, jobs)["gpt"].gpus.keys() == nodes


def test_nodes_are_lost_left_or_set_aside():
    nodes = {
        "gone": Node(name="gone", gpus=1, silent_s=500.0),
        "agentless": Node(name="agentless", gpus=1, agent_live=False, agent_silent_s=500.0),
        "upgraded": Node(name="upgraded", gpus=1, agent_live=False, agent_silent_s=60.0),
        "leaving": Node(name="leaving", gpus=1, leaving="spot"),
        "aside": Node(name="aside", gpus=1, aside=Aside(until_s=NOW_S + 1, count=2, why="x")),
        "good": Node(name="good", gpus=1, agent_live=None),
    }
    view = subject([], Cluster(nodes=nodes), {}, {}, NOW_S).view

    assert {node.name: node.state for node in view.nodes} == {
        "gone": NodeState.LOST,
        "agentless": NodeState.LOST,
        "leaving": NodeState.DRAINING,
        "good": NodeState.UP,
    }


def test_who_pauses_is_not_planned():
    paused = job(not_before_s=NOW_S + 5.0, message="begins again in 5 s: killed")
    about = subject([paused], Cluster(nodes=NODES), {}, {}, NOW_S)

    assert about.view.jobs == ()
    assert wishes(plan(about.view, Fifo(), NOW_S), about, {"gpt": paused})["gpt"].gpus == {}


def test_what_never_fits_is_refused_with_the_sum():
    spec = job(low=64, high=64).spec

    assert "there are 2 nodes x 4 = 8 of H100" in refusal(spec, NODES.values(), {})
    assert refusal(spec, [], {}) == "", "before the first node has come nothing is known"
    assert "the quota of ada is 1" in refusal(
        replace(spec, gpus_min=2, owner="ada"), NODES.values(), {"ada": 1}
    )


def test_the_next_number_with_a_mesh_is_that_of_the_type_of_gpu_which_the_job_may_have():
    """G26: 12 are on three nodes of another type alone, and would keep it at 6 for ever."""
    nodes = {f"a{n}": Node(name=f"a{n}", gpus=8, gpu_type="A") for n in range(3)}
    nodes |= {f"b{n}": Node(name=f"b{n}", gpus=4, gpu_type="B") for n in range(3)}
    spec = replace(job(low=6, high=24).spec, meshes=("dp=*,tp=6",), gpu_types=("A",))
    hints = replace(HINTS, points=(replace(POINT, replicas=6),), local_min=1)
    known = {"gpt": Knowledge(hints=hints, at_s=NOW_S, gpu_type="A")}
    about = subject([job(spec=spec)], Cluster(nodes=nodes), known, {}, NOW_S)

    assert sum(gpus for _, gpus in plan(about.view, Fifo(), NOW_S).allocations["gpt"]) == 24


def test_a_quota_between_two_meshes_leaves_the_smaller_one():
    """G26: 6, of which there would be no choice without a mesh for it."""
    meshes = ("dp=1", "dp=6", "dp=8")
    spec = replace(job().spec, meshes=meshes, owner="ada")
    hints = replace(HINTS, points=(replace(POINT, replicas=8),), local_min=1)
    known = {"gpt": Knowledge(hints=hints, at_s=NOW_S, gpu_type="H100")}
    about = subject([job(spec=spec)], Cluster(nodes=NODES), known, {"ada": 7}, NOW_S)

    assert sum(gpus for _, gpus in plan(about.view, Fifo(), NOW_S).allocations["gpt"]) == 6


@pytest.mark.parametrize(
    ("low", "high", "meshes", "nodes", "chosen"),
    [
        (2, 6, ("tp=2", "tp=6"), "a", 2),  # 4 are free, and have no mesh
        (4, 4, ("dp=*,tp=4",), "ab", 4),  # 8 have one, and are more than it wants
    ],
)
def test_no_number_above_has_a_mesh_that_the_job_may_have(low, high, meshes, nodes, chosen):
    """G26"""
    spec = replace(job(low=low, high=high).spec, meshes=meshes)
    hints = replace(HINTS, points=(replace(POINT, replicas=low),), local_min=1)
    known = {"gpt": Knowledge(hints=hints, at_s=NOW_S, gpu_type="H100")}
    here = Cluster(nodes={name: NODES[name] for name in nodes})
    about = subject([job(spec=spec)], here, known, {}, NOW_S)

    assert sum(gpus for _, gpus in plan(about.view, Fifo(), NOW_S).allocations["gpt"]) == chosen


@pytest.mark.parametrize(
    ("meshes", "measured", "chosen"),
    [
        (("tp=2", "tp=6"), 8, 6),  # not 8, which both nodes have
        (("dp=*,tp=3",), 8, 6),
        (("dp=1", "dp=6"), 1, 6),  # the next, though more than twice what was measured
        (("dp=1", "dp=2", "dp=6"), 2, 6),
        (("dp=1", "dp=6"), 0, 1),
        (("dp=*,tp=3",), 1, 3),  # others of its family have trained on less than its least
    ],
)
def test_a_job_with_meshes_has_as_many_gpus_as_one_of_them(meshes, measured, chosen):
    """G26: the least of them first, and more once it is known how it scales."""
    least = 3 if "*" in meshes[0] else int(meshes[0][3:])
    spec = replace(job(low=least, high=6).spec, meshes=meshes)
    known = {}
    if measured:
        point = replace(POINT, replicas=measured)
        hints = replace(HINTS, points=(point,), local_min=1)
        known["gpt"] = Knowledge(hints=hints, at_s=NOW_S, gpu_type="H100")
    about = subject([job(spec=spec)], Cluster(nodes=NODES), known, {}, NOW_S)
    made = plan(about.view, Fifo(), NOW_S)

    assert sum(gpus for _, gpus in made.allocations["gpt"]) == chosen
