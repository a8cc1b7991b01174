"""From what a turn has found to the facts of a policy, and from its plan to wishes.

Jobs on nodes of which nobody knows just now are left out, with the GPUs that they have: they stay
as they are until somebody does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from holdfast.core.hints import JobHints
from holdfast.core.job_spec import JobSpec
from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.profile import Profile
from holdfast.goodput.step_time import StepTime
from holdfast_services.scheduler.domain.cluster import Cluster, Node
from holdfast_services.scheduler.domain.families import family_of
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.knowledge import (
    NOTHING,
    Knowledge,
    batches_of,
    measured,
    noise,
    profile,
)
from holdfast_services.scheduler.domain.policies import facts
from holdfast_services.scheduler.domain.policies.plan import Plan
from holdfast_services.scheduler.domain.policies.refusals import refusals
from holdfast_services.scheduler.domain.wishes import Wished

SILENT_S = 10.0
"""A job that has done steps, trains for so long and has said nothing of how it scales is not going
to: it is taken to scale as its bounds say."""
STALE_S = 3600.0
RESTART_S = 5.0
"""What a start of ranks takes beside save and restore, where it was not measured."""
MOVE_S_MAX = facts.MOVE_S_MAX


_UNKNOWN = facts.Family()
_ALL_NOISE = GradientNoise(sqr=0.0, var=1.0)
"""Of which each sample is worth as much as the one before."""
_LINEAR = StepTime(
    alpha_c=1.0, beta_c=1e-8, alpha_n=1e-8, beta_n=1e-8, alpha_r=1e-8, beta_r=1e-8, gamma=1.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a plan is made of: the view, and the jobs that it is not about, with the reason."""

    view: facts.View
    left_out: Mapping[str, str]
    notes: tuple[str, ...]


def subject(
    jobs: Iterable[Job],
    cluster: Cluster,
    known: Mapping[str, Knowledge],
    quotas: Mapping[str, int],
    now_s: float,
    families: Mapping[str, facts.Family] = MappingProxyType({}),
) -> Subject:
    """Return what a policy is told."""
    live = [job for job in jobs if not job.over]
    unseen = {n.name: n for n in cluster.nodes.values() if _is_unseen(n, now_s)}
    left_out: dict[str, str] = {}
    taken: dict[str, int] = {}
    for job in live:
        stuck = sorted(job.shares.keys() & unseen)
        if stuck:
            why = unseen[stuck[0]].hindrance(now_s)
            left_out[job.name] = f"stays as it is: node {stuck[0]}: {why}"
            for node, gpus in job.shares.items():
                taken[node] = taken.get(node, 0) + gpus
        elif not job.parts and now_s < job.not_before_s:
            left_out[job.name] = job.message
    nodes = [
        _node(node, taken.get(node.name, 0))
        for _, node in sorted(cluster.nodes.items())
        if node.name not in unseen
    ]
    notes: list[str] = []
    planned = [
        _job(
            job, cluster, known.get(job.name, NOTHING),
            families.get(family_of(job.spec), _UNKNOWN), notes, now_s,
        )
        for job in live
        if job.name not in left_out
    ]  # fmt: skip
    view = facts.View(nodes=tuple(nodes), jobs=tuple(planned), families=families, quotas=quotas)
    return Subject(view=view, left_out=left_out, notes=tuple(notes))


def wishes(plan: Plan, about: Subject, jobs: Mapping[str, Job]) -> dict[str, Wished]:
    """Return what a plan wishes for each job; who was left out keeps what it has."""
    found = {}
    for job in about.view.jobs:
        gpus = dict(plan.allocations.get(job.name, ()))
        why = plan.reasons.get(job.name, "")
        found[job.name] = Wished(id=jobs[job.name].id, gpus=gpus, why=why)
    for name, why in about.left_out.items():
        found[name] = Wished(id=jobs[name].id, gpus=jobs[name].shares, why=why)
    return found


def refusal(spec: JobSpec, nodes: Iterable[Node], quotas: Mapping[str, int]) -> str:
    """Return why a job could never run, were the cluster empty, with the sum; empty: it could."""
    job = facts.Job(
        name=spec.name,
        submitted_s=0.0,
        batches=_unbounded(spec),
        replicas_min=spec.gpus_min,
        replicas_max=spec.gpus_max,
        gpu_types=frozenset(spec.gpu_types) or None,
        owner=spec.owner,
        preemptible=spec.preemptible,
    )
    planned = tuple(_node(node, 0) for node in nodes)
    return refusals(facts.View(nodes=planned, jobs=(job,), quotas=quotas)).get(spec.name, "")


def _is_unseen(node: Node, now_s: float) -> bool:
    """Tell whether nobody knows what becomes of a node: it is neither used nor given up."""
    waits = (node.silent_s > 0 or node.agent_live is False) and not (node.gone or node.agent_gone)
    return waits or bool(node.aside and node.aside.until_s > now_s)


def _node(node: Node, taken: int) -> facts.Node:
    state = facts.NodeState.UP
    if node.gone or node.agent_gone:
        state = facts.NodeState.LOST
    elif node.leaving:
        state = facts.NodeState.DRAINING
    return facts.Node(
        name=node.name,
        gpus=max(0, node.gpus - taken),
        gpu_type=node.gpu_type or "gpu",
        spot=node.spot,
        domain=node.domain,
        state=state,
    )


def _job(
    job: Job,
    cluster: Cluster,
    known: Knowledge,
    family: facts.Family,
    notes: list[str],
    now_s: float,
) -> facts.Job:
    spec = job.spec
    hints = _believed(job, known, notes, now_s)
    profiles: dict[str, Profile] = {}
    said = batches_of(hints) if hints is not None else family.batches
    fits = said is not None and said.replicas_max >= spec.gpus_min
    batches, found = said if said and fits else _unbounded(spec), noise(hints)
    if hints is not None:
        if not fits:
            notes.append(f"batches of {job.name} are not believed: they allow no number of GPUs")
        own = profile(tuple(measured(hints)))
        profiles = {known.gpu_type or "gpu": own} if own is not None else {}
    elif known.step and job.began_at_s and now_s - job.began_at_s > SILENT_S:
        kinds = {node.gpu_type or "gpu" for node in cluster.nodes.values()}
        linear = Profile(step_time=_LINEAR, replicas_max=spec.gpus_max)
        profiles = dict.fromkeys(sorted(kinds), linear)
        found = _ALL_NOISE
    return facts.Job(
        name=spec.name,
        submitted_s=job.submitted_at_s,
        batches=batches,
        replicas_min=spec.gpus_min,
        replicas_max=spec.gpus_max,
        gpu_types=frozenset(spec.gpu_types) or None,
        meshes=spec.meshes,
        family=family_of(spec),
        owner=spec.owner,
        priority=spec.priority,
        preemptible=spec.preemptible,
        work=_work(spec, hints, batches if hints or fits else None),
        profiles=profiles,
        noise=found,
        cost=_cost(known.costs),
        allocation=tuple(job.shares.items()),
        held_by=frozenset(job.shares),
        since_s=job.gpus_since_s or job.submitted_at_s,
        waited_s=job.waited_s,
        restarts=max(0, job.starts - 1),
    )


def _believed(job: Job, known: Knowledge, notes: list[str], now_s: float) -> JobHints | None:
    """Return what a job said of itself, if it says something that is not too old to be so."""
    hints = known.hints
    if hints is None:
        return None
    if hints.refused:
        notes.append(f"hints of {job.name} are refused: {hints.refused}")
        return None
    if job.parts and known.at_s < now_s - STALE_S:
        age_s = now_s - known.at_s
        notes.append(f"hints of {job.name} are not believed: they are {age_s / 3600:.1f} h old")
        return None
    return hints if hints.initial_batch > 0 and hints.points else None


def _unbounded(spec: JobSpec) -> BatchLimits:
    """Return batches that keep nobody from a number of GPUs: one sample for each."""
    return BatchLimits(initial=1, maximum=spec.gpus_max, local_max=1)


def _work(spec: JobSpec, hints: JobHints | None, batches: BatchLimits | None) -> facts.Work:
    """Return samples: of the initial batch, as progress is counted."""
    declared: float | None = None
    if spec.epochs and spec.samples:
        declared = float(spec.epochs) * spec.samples
    elif spec.work and batches is not None:
        declared = spec.work * batches.initial
    done = hints.progress * batches.initial if hints and batches else 0.0
    most = facts.WORK_MAX
    return facts.Work(
        done=min(done, most), declared=None if declared is None else min(declared, most)
    )


def _cost(costs: Mapping[str, float]) -> facts.MoveCost:
    """Return what a move costs as it was measured; what was not is taken to be quick."""

    def seconds(*names: str) -> float:
        return min(sum(max(0.0, costs.get(name, 0.0)) for name in names), MOVE_S_MAX)

    return facts.MoveCost(
        save_s=seconds("stall_s", "copy_s"),
        restore_s=seconds("decide_s", "fetch_s", "load_s"),
        restore_local_s=seconds("decide_s", "load_s"),
        restart_s=RESTART_S,
    )


def with_defaults(known: Mapping[str, Knowledge]) -> dict[str, Knowledge]:
    """Return what is known, with the median of all where the costs of a job are not."""
    names = sorted({name for one in known.values() for name in one.costs})
    medians: dict[str, float] = {}
    for name in names:
        values = sorted(one.costs[name] for one in known.values() if name in one.costs)
        medians[name] = values[len(values) // 2]
    return {job: one if one.costs else replace(one, costs=medians) for job, one in known.items()}
