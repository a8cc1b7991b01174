"""What people see of jobs, plans and nodes. Pure; times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast_services.scheduler.domain.cluster import Cluster, Node
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.wishes import Wishes

Document = dict[str, Any]


def job_doc(job: Job, plan: Wishes | None, now_s: float) -> Document:
    """Return what people see of a job; of its environment the names only."""
    spec = job.spec
    return {
        "job": spec.name,
        "id": job.id,
        "state": job.state.value,
        "message": job.message,
        "since": job.since_s,
        "submitted_at": job.submitted_at_s,
        "owner": spec.owner,
        "priority": spec.priority,
        "preemptible": spec.preemptible,
        "gpus": job.gpus,
        "gpus_min": spec.gpus_min,
        "gpus_max": spec.gpus_max,
        "meshes": list(spec.meshes),
        "nodes": job.shares,
        "devices": {part.node: list(part.devices) for part in job.parts},
        "allocation": job.number,
        "taken": job.told,
        "held": {held.node: list(held.devices) for held in job.held},
        "waiting": job.waiting,
        "why": why(job, plan),
        "wished": wished(job, plan),
        "starts": job.starts,
        "script_failures": job.script_failures,
        "outside_failures": len(job.outside_at_s),
        "not_before": job.not_before_s if job.not_before_s > now_s else None,
        "gpu_s": job.gpu_s + (max(0.0, now_s - job.counted_s) * job.gpus if job.counted_s else 0),
        "command": list(spec.command),
        "folder": spec.folder,
        "environment": sorted(spec.environment),
        "history": [
            {"at": entry.at_s, "state": entry.state.value, "message": entry.message}
            for entry in job.history
        ],
    }


def wished(job: Job, plan: Wishes | None) -> Mapping[str, int] | None:
    """Return what the newest plan wishes a job to have; None: it says nothing of it."""
    found = plan.by_job.get(job.name) if plan else None
    return dict(found.gpus) if found and found.id == job.id else None


def why(job: Job, plan: Wishes | None) -> str:
    """Return why a job has what it has, in one line."""
    if job.over:
        return job.message
    found = plan.by_job.get(job.name) if plan else None
    if found is None or found.id != job.id:
        return "no plan has been made since it was submitted"
    return f"{found.why}; {job.waiting}" if job.waiting else found.why


def node_doc(node: Node, jobs: Iterable[Job], now_s: float) -> Document:
    """Return what people see of a node, and who has its GPUs."""
    used = {
        str(device): job.name
        for job in jobs
        for part in (*job.parts, *job.held)
        if part.node == node.name
        for device in part.devices
    }
    return {
        "node": node.name,
        "gpus": node.gpus,
        "gpu_type": node.gpu_type,
        "spot": node.spot,
        "used": used,
        "hindrance": node.hindrance(now_s),
        "launches": [
            {
                "job": one.job,
                "start": one.start,
                "outcome": one.outcome.value,
                "code": one.code,
                "reason": one.reason,
            }
            for one in node.launches
        ],
    }


def plan_doc(plan: Wishes) -> Document:
    """Return a plan as people see it."""
    return {
        "number": plan.number,
        "made_at": plan.made_at_s,
        "policy": plan.policy,
        "took_s": plan.took_s,
        "notes": list(plan.notes),
        "jobs": {
            name: {"gpus": dict(one.gpus), "why": one.why} for name, one in plan.by_job.items()
        },
    }


def nodes_docs(cluster: Cluster, jobs: Iterable[Job], now_s: float) -> list[Document]:
    """Return all nodes as people see them."""
    known = list(jobs)
    return [node_doc(node, known, now_s) for _, node in sorted(cluster.nodes.items())]
