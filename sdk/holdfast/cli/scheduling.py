"""What asks the scheduler: ``submit, jobs, queue, explain, cancel``, and ``execute``."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from holdfast.cli.output import Json, Report, Table, counted
from holdfast.core import meshes
from holdfast.core.job_spec import JobSpec, check
from holdfast.core.records import from_record, to_record
from holdfast.embedded import agent_socket, home_folder, running_stack
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.rpc import rest

SCHEDULER = "HOLDFAST_SCHEDULER"
FILE_BYTES_MAX = 1 << 20

Record = dict[str, Any]
Command = Callable[[argparse.Namespace, Mapping[str, str]], Report]


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Return the URL of the scheduler: named, or of the stack that runs here.

    Raises:
        NotFoundError: there is neither.
    """
    if named := environ.get(SCHEDULER):
        return named.rstrip("/")
    stack = running_stack(home_folder(environ))
    if stack is not None and stack.scheduler_url:
        return stack.scheduler_url.rstrip("/")
    raise NotFoundError(
        f"no scheduler is known: set {SCHEDULER}, or start one with `holdfast up --scheduler`"
    )


def _ask(environ: Mapping[str, str], method: str, path: str, body: Json = None) -> Any:
    return rest.ask(method, f"{find_scheduler(environ)}/api/v1{path}", body)


def _path(job: str) -> str:
    return f"/jobs/{urllib.parse.quote(job)}"


def submit(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Have the scheduler take a job on; with ``--dry-run`` only say whether it would.

    Raises:
        InvalidRequestError: the spec makes no sense.
        ExhaustedError: it can never fit.
        AlreadyExistsError: a job of this name lives, with another spec.
    """
    spec = _spec(args)
    query = "?dry_run=true" if args.dry_run else ""
    job = dict(_ask(environ, "POST", f"/jobs{query}", to_record(spec)))
    what = "would be taken on" if args.dry_run else f"is {job['state']}"
    return Report(data=job, text=[f"{spec.name} {what}: {_asked(job)}"])


def _asked(job: Record) -> str:
    least, most = job["gpus_min"], job["gpus_max"]
    gpus = counted(most, "GPU") if least == most else f"{least} to {most} GPUs"
    return f"{gpus}, priority {job['priority']}"


def _spec(args: argparse.Namespace) -> JobSpec:
    """Return the spec of a file, with what options say in place of what it says."""
    values = _read(args.file) if args.file else {}
    given = {name: value for name, value in vars(args).items() if name in _GIVEN}
    values |= {name: value for name, value in given.items() if value is not None}
    if args.words:
        values["command"] = args.words[1:] if args.words[0] == "--" else args.words
    if args.gpus:
        values["gpus_min"], values["gpus_max"] = args.gpus
    if args.meshes:
        values["meshes"] = args.meshes
        bounds = meshes.bounds(args.meshes)
        if bounds and not {"gpus_min", "gpus_max"} & values.keys():
            values["gpus_min"], values["gpus_max"] = bounds
    if args.environment:
        values["environment"] = {**values.get("environment", {}), **dict(args.environment)}
    values.setdefault("folder", str(Path.cwd()))
    if "name" not in values:
        raise InvalidRequestError("the job has no name: pass --job NAME, or `name` in the file")
    values.setdefault("command", [])
    spec = from_record(JobSpec, values)
    check(spec)
    return spec


_GIVEN = (
    "name",
    "priority",
    "owner",
    "preemptible",
    "epochs",
    "samples",
    "work",
    "family",
    "gpu_types",
    "folder",
    "grace_s",
    "retries",
)


def _read(path: Path) -> Record:
    """Return what a file of TOML or JSON says."""
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise InvalidRequestError(f"{path}: {cause.strerror}") from cause
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequestError(f"{path} is longer than {FILE_BYTES_MAX} bytes")
    try:
        text = data.decode()
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as cause:
        raise InvalidRequestError(f"{path} cannot be read: {cause}") from cause
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{path} must hold one object")
    return found


def jobs(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """List the jobs that live, then those that are over."""
    found = list(_ask(environ, "GET", "/jobs"))
    if not args.all:
        found = [job for job in found if job["state"] not in ("ended", "failed", "cancelled")]
    return Report(data=found, text=[_jobs_table(found)])


def _jobs_table(found: list[Record]) -> Table:
    return Table(
        ("job", "state", "for", "GPUs", "nodes", "owner", "message"),
        tuple(
            (
                str(job["job"]),
                str(job["state"]),
                _span(time.time() - job["since"]),
                f"{job['gpus']} of {job['gpus_min']}:{job['gpus_max']}",
                _shares(job["nodes"]),
                str(job["owner"]),
                _line(job["message"]),
            )
            for job in found
        ),
    )


def queue(_args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """List the jobs that wait for GPUs, who comes first, and why each waits."""
    found = list(_ask(environ, "GET", "/queue"))
    rows = tuple(
        (
            str(place),
            str(job["job"]),
            str(job["priority"]),
            _span(time.time() - job["submitted_at"]),
            f"{job['gpus_min']}:{job['gpus_max']}",
            _line(job["why"]),
        )
        for place, job in enumerate(found, 1)
    )
    return Report(
        data=found, text=[Table(("place", "job", "priority", "waits", "GPUs", "why"), rows)]
    )


def explain(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Say what a job has, and why.

    Raises:
        NotFoundError: it was never submitted.
    """
    job = dict(_ask(environ, "GET", _path(args.job)))
    has = f"{counted(job['gpus'], 'GPU')} on {_shares(job['nodes'])}" if job["gpus"] else "no GPUs"
    text = [
        f"{job['job']} is {job['state']} since {_at(job['since'])}, and has {has}",
        f"  asks for   {_asked(job)}",
        f"  why        {job['why']}",
    ]
    if job["wished"] is not None and job["wished"] != job["nodes"]:
        text.append(f"  planned    {_shares(job['wished']) or 'nothing'}")
    if job["held"]:
        text.append(f"  gives up   {_shares({n: len(d) for n, d in job['held'].items()})}")
    failures = job["script_failures"], job["outside_failures"]
    text.append(f"  failures   {failures[0]} of its script, {failures[1]} others in the last hour")
    text.append(f"  has used   {job['gpu_s'] / 3600:.2f} GPU hours, began {job['starts']} times")
    text += [
        f"  {_at(entry['at'])}  {entry['state']}  {_line(entry['message'])}".rstrip()
        for entry in job["history"]
    ]
    return Report(data=job, text=text)


def cancel(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """End a job; its ranks save once more.

    Raises:
        NotFoundError: it was never submitted.
        PreconditionError: it is over.
    """
    job = dict(_ask(environ, "POST", f"{_path(args.job)}/cancel"))
    return Report(data=job, text=[f"{args.job} is told to save and to end"])


def execute(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Run launchers as the scheduler orders, on this node or on those of a Ray cluster.

    Ends the process with its code.

    Raises:
        SystemExit: with 130 or 143.
        CheckpointError: it could not begin.
    """
    from holdfast.cli.node import agent_node  # noqa: PLC0415 - grpc, which others do not need
    from holdfast.executor import gpus  # noqa: PLC0415
    from holdfast.executor.execute import Executor, Options  # noqa: PLC0415
    from holdfast.executor.holder import HolderGone  # noqa: PLC0415
    from holdfast.launcher.notices import source  # noqa: PLC0415

    if args.ray:
        _execute_on_ray(args, environ)
    if args.nodes is not None:
        raise InvalidRequestError("--nodes goes with --ray: without it there is this node")
    agent = agent_socket(environ, world_size=1, local_world_size=1)
    node = agent_node(agent)
    options = Options(
        scheduler=args.scheduler or find_scheduler(environ),
        node=node,
        folder=(args.folder or home_folder(environ) / "execute" / node).absolute(),
        gpus=gpus.offered(args.offered, environ),
        gpu_type=args.type if args.type is not None else gpus.kind(),
        spot=args.spot,
        notices=tuple(source(notice) for notice in args.notices),
        holder=HolderGone(args.while_held, args.hold_s) if args.while_held else None,
    )
    sys.exit(Executor(options, {**environ, "HOLDFAST_AGENT": str(agent)}).run())


def _execute_on_ray(args: argparse.Namespace, environ: Mapping[str, str]) -> NoReturn:
    from holdfast.executor import gpus  # noqa: PLC0415
    from holdfast.executor.ray_cluster import RayCluster, RayOptions  # noqa: PLC0415

    words = ["--scheduler", args.scheduler or find_scheduler(environ)]
    words += [word for notice in args.notices for word in ("--notice", notice)]
    words += ["--type", args.type] if args.type is not None else []
    words += ["--spot"] if args.spot else []
    ours = {k: v for k, v in environ.items() if k.startswith("HOLDFAST_")}
    options = RayOptions(
        address=args.ray,
        gpus=None if args.offered == "auto" else gpus.count(args.offered),
        nodes=args.nodes,
        words=tuple(words),
        environ=ours,
        folder=str(args.folder or ""),
        hold_s=args.hold_s,
    )
    sys.exit(RayCluster(options).run())


def _shares(shares: Mapping[str, int]) -> str:
    return ", ".join(f"{node} {gpus}" for node, gpus in sorted(shares.items()))


def _line(text: str) -> str:
    """Return the first line that says something; below may be a traceback."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[0] if lines else ""


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _span(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
