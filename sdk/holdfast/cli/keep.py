"""``rm``, ``pin``, ``unpin``, ``retain``, ``collect``, ``scrub``, ``links``: what is kept."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from holdfast.cli.catalogue import find_checkpoint
from holdfast.cli.output import Report, Table, confirm, counted
from holdfast.cli.rest import Record, Rest
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import job_name
from holdfast.errors import NotFoundError

NO_RULE = {
    "last": 0,
    "every": 0,
    "spaced_s": 0.0,
    "best": 0,
    "metric": "",
    "maximize": False,
    "age_s_min": 0.0,
}


def rm(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Delete one checkpoint from the object tier; without a step, the whole job from everywhere.

    Raises:
        PreconditionError: it is needed, or trains; the message says by whom.
        InvalidRequestError: nobody agreed that the whole job goes.
    """
    rest = Rest.find(environ)
    if args.target.step is None:
        return _rm_job(rest, args.target.job, agreed=args.yes)
    found = find_checkpoint(rest, args.target)
    rest.of_checkpoint("DELETE", found, force="true" if args.force else "false")
    return _done(found, "will be deleted by the next worker that looks")


def _rm_job(rest: Rest, job: str, *, agreed: bool) -> Report:
    try:
        rows = rest.checkpoints(job)
    except NotFoundError as error:
        roles = _roles(rest.jobs(), job)
        if not roles:
            raise
        raise NotFoundError(f"no job {job}, but its roles: {', '.join(roles)}", job=job) from error
    durable = [row for row in rows if row["durable_at"] is not None and not row["expired_at"]]
    held = [row for row in rows if row["nodes"]]
    summary = (
        f"{job}: {counted(len(held), 'checkpoint')} in memory, {_size(held)}, "
        f"and {len(durable)} in the object store, {_size(durable)}"
    )
    if not agreed:
        confirm(f"remove {summary}?", f"rm {job} removes {summary}: say --yes as well")
    done = dict(rest.of_job("DELETE", job, ""))
    text = f"removed {summary}; agents free their slots now, workers delete the objects"
    return Report(data={"job": job, "memory": len(held), **done}, text=[text])


def _roles(jobs: list[Record], job: str) -> list[str]:
    """Return the jobs that are roles of ``job``.

    >>> _roles([{"job": "gan/g"}, {"job": "gan2"}, {"job": "gan/d"}], "gan")
    ['gan/d', 'gan/g']
    """
    return sorted(str(row["job"]) for row in jobs if str(row["job"]).startswith(f"{job}/"))


def _size(rows: list[Record]) -> str:
    return format_bytes(sum(int(row["length_bytes"]) for row in rows))


def pin(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Keep a checkpoint whatever the policy says; one in memory goes to the object tier first."""
    rest = Rest.find(environ)
    found = find_checkpoint(rest, args.target)
    rest.of_checkpoint("POST", found, "/pin", body={"note": args.note})
    durable = found["durable_at"] is not None
    return _done(found, "pinned" if durable else "pinned, and on its way to the object store")


def unpin(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Let the policy decide about a checkpoint again."""
    rest = Rest.find(environ)
    found = find_checkpoint(rest, args.target)
    rest.of_checkpoint("DELETE", found, "/pin")
    return _done(found, "unpinned")


def retain(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Set what is kept of a job, as a whole; without options show it."""
    rest = Rest.find(environ)
    job = job_name(args.job)
    given = {key: getattr(args, key) for key in NO_RULE if getattr(args, key) is not None}
    if args.all:
        given = dict(NO_RULE)
    if given:
        policy = rest.of_job("PUT", job, "/retention", {**NO_RULE, **given})
    else:
        policy = rest.of_job("GET", job, "/retention")
    policy = {**NO_RULE, **(policy or {})}
    return Report(data=policy, text=[describe(policy)])


def describe(policy: Record) -> str:
    """Return a policy as a sentence.

    >>> describe({**NO_RULE, "last": 3, "every": 1000})
    'keeps the last 3, and every 1000 steps; pinned ones and the newest always'
    """
    rules = []
    if policy["last"]:
        rules.append(f"the last {policy['last']}")
    if policy["every"]:
        rules.append(f"every {policy['every']} steps")
    if policy["spaced_s"]:
        rules.append(f"one per {policy['spaced_s']:g} s")
    if policy["best"]:
        most = "highest" if policy["maximize"] else "lowest"
        rules.append(f"the {policy['best']} with the {most} {policy['metric']}")
    if not rules:
        return "keeps everything"
    young = f"; nothing younger than {policy['age_s_min']:g} s goes" if policy["age_s_min"] else ""
    return f"keeps {', and '.join(rules)}; pinned ones and the newest always{young}"


def collect(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Expire what the policy does not keep, so that workers delete it; or only list it."""
    rest = Rest.find(environ)
    method = "GET" if args.dry_run else "POST"
    plan = list(rest.of_job(method, job_name(args.job), "/collect"))
    word = "would go" if args.dry_run else "goes"
    rows = tuple(
        (
            str(item["step"]),
            str(item["generation"]),
            "is going" if item["expired"] else "stays" if item["keep"] else word,
            str(item["why"]),
        )
        for item in plan
    )
    table = Table(("step", "attempt", "", "why"), rows)
    return Report(data=plan, text=[table if plan else "nothing is in the object store"])


def scrub(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Have workers read a job's durable checkpoints back; what they find is in ``ls``."""
    job = job_name(args.job)
    answer = Rest.find(environ).of_job("POST", job, "/scrub")
    return Report(data=answer, text=[f"workers will read {job} back: see `holdfast ls {job}`"])


def links(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return a URL per object of a checkpoint; whoever has one can read it for a while (F90)."""
    rest = Rest.find(environ)
    found = find_checkpoint(rest, args.target, durable=True)
    urls = dict(rest.of_checkpoint("GET", found, "/links", valid_s=int(args.valid_s)))
    rows = tuple((name, str(url)) for name, url in sorted(urls.items()))
    return Report(data=urls, text=[Table(("name", "link"), rows)])


def _done(found: Record, what: str) -> Report:
    data = {key: found[key] for key in ("job", "run", "step", "attempt")}
    return Report(data={**data, "done": what}, text=[f"{found['job']} step {found['step']} {what}"])
