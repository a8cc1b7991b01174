"""Nodes and jobs as tests of policies make them."""

from dataclasses import replace

from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.profile import Profile
from holdfast.goodput.step_time import StepTime
from holdfast_services.scheduler.domain.policies.facts import Job, MoveCost, Node, View, Work

SCALES = StepTime(
    alpha_c=0.01, beta_c=0.001, alpha_n=0.01, beta_n=1e-4, alpha_r=0.005, beta_r=1e-4, gamma=2.0
)
"""Nearly twice as fast on twice as many GPUs, with large batches."""
LIMITS = BatchLimits(initial=64, maximum=16384, local_min=8, local_max=256, accumulation=True)
NOISY = GradientNoise(sqr=1.0, var=200.0)
MOVES = MoveCost(save_s=2.0, restore_s=10.0, restart_s=18.0)


def nodes(count, gpus=4, **facts):
    kind = facts.get("gpu_type", "gpu")
    return tuple(Node(name=f"{kind}{at:03d}", gpus=gpus, **facts) for at in range(count))


def job(name, *, seconds=3600.0, seen=64, **facts):
    """A job that would take ``seconds`` on one GPU, and was measured on ``seen`` of them."""
    one = 64 / SCALES.step_s(1, 1, 64)
    profile = Profile(step_time=SCALES, replicas_max=seen) if seen else None
    defaults = {
        "submitted_s": 0.0, "batches": LIMITS, "replicas_max": 64, "noise": NOISY, "cost": MOVES,
        "work": Work(declared=None if seconds is None else seconds * one),
        "profiles": {"gpu": profile} if profile else {},
    }  # fmt: skip
    return Job(name=name, **{**defaults, **facts})


def view(jobs, its_nodes, **facts):
    return View(nodes=tuple(its_nodes), jobs=tuple(jobs), **facts)


def running(before, plan, now_s=0.0):
    """The view after a plan was carried out."""
    jobs = []
    for one in before.jobs:
        has = plan.allocations.get(one.name, ())
        changed = bool(has) != bool(one.allocation)
        restarts = one.restarts + (bool(one.allocation) and has != one.allocation)
        since_s = now_s if changed else one.since_s
        waited_s = now_s - one.since_s if changed and has else one.waited_s
        held = frozenset(name for name, _ in has) or one.held_by
        jobs.append(
            replace(
                one,
                allocation=has,
                since_s=since_s,
                waited_s=waited_s,
                held_by=held,
                restarts=restarts,
            )
        )
    return replace(before, jobs=tuple(jobs))
