"""``verify``: hashes a checkpoint again in memory, in the object store or both (G20).

In memory every agent hashes its own copies; ``verify_object`` does the other tier.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.cli.catalogue import Target, find_checkpoint
from holdfast.cli.output import Report, Table, progress
from holdfast.cli.rest import Record, Rest
from holdfast.cli.verify_object import verify_objects
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import Generation, Rank, ShardId, Step, run_id
from holdfast.errors import CheckpointError, InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from holdfast.v1.agent_pb2_grpc import ReplicationStub

VERIFY_S_MIN = 10.0
VERIFY_BYTES_PER_S_MIN = 200 << 20
ASKS_COUNT_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy to be checked: which shard, on which node, where that node answers.

    ``listed``: the catalogue counts on it. Others may turn up too: quarantined ones.
    """

    shard: ShardId
    node: str
    address: str
    length_bytes: int
    listed: bool

    @property
    def timeout_s(self) -> float:
        """How long hashing it may take."""
        return VERIFY_S_MIN + self.length_bytes / VERIFY_BYTES_PER_S_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one copy is good; ``detail`` says why it is not."""

    copy: Copy
    ok: bool
    detail: str = ""


def verify(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Check one tier or all; failed when a copy is bad or a shard has no good one.

    Raises:
        InvalidRequestError: a folder has no copies in memory.
        NotFoundError: no such checkpoint, or none of it is there.
        PreconditionError: it is not in the object store.
    """
    if isinstance(args.place, str):
        if args.tier == "memory":
            raise InvalidRequestError(f"{args.place} is a folder: its only tier is object")
        return verify_objects(args.place, environ)
    if args.tier == "object":
        return verify_objects(args.place, environ)
    if args.tier in (None, "memory"):
        return _memory(find_checkpoint(Rest.find(environ), args.place), environ)
    return _all(args.place, environ)


def _all(place: Target, environ: Mapping[str, str]) -> Report:
    """Check what there is: a checkpoint may have left memory, or not have reached the store."""
    found = find_checkpoint(Rest.find(environ), place)
    exact = Target(place.job, int(found["step"]), int(found["generation"]))
    reports = {}
    if any(_in_memory(replica) for s in found["shards"] for replica in s["replicas"]):
        reports["memory"] = _memory(found, environ)
    if found["durable_at"] is not None:
        reports["object"] = verify_objects(exact, environ)
    if not reports:
        raise NotFoundError(
            f"step {found['step']} is neither in memory nor in the object store any more"
        )
    return Report(
        data={
            "ok": not any(report.failed for report in reports.values()),
            **{tier: report.data for tier, report in reports.items()},
        },
        text=[line for report in reports.values() for line in report.text],
        failed=any(report.failed for report in reports.values()),
    )


def _in_memory(replica: Record) -> bool:
    return bool(replica["tier"] != "object")


def _memory(checkpoint: Record, environ: Mapping[str, str]) -> Report:
    """Have all agents check their copies.

    Raises:
        NotFoundError: none of it is in memory.
    """
    rest = Rest.find(environ)
    nodes = {str(n["node"]): str(n["rpc_address"]) for n in rest.nodes() if n["live"]}
    copies = copies_to_ask(checkpoint, nodes)
    with progress("verifying", len(copies)) as advance:
        verdicts = list(_verdicts(copies, advance))
    if not verdicts:
        stored = "; it is in the object store: pass --tier object"
        raise NotFoundError(
            f"no live agent holds step {checkpoint['step']} in memory"
            f"{stored if checkpoint['durable_at'] is not None else ''}"
        )
    return judge(checkpoint, verdicts)


def copies_to_ask(checkpoint: Record, nodes: Mapping[str, str]) -> list[Copy]:
    """Return the copies of ``checkpoint`` that live ``nodes`` (name -> address) may hold.

    Every node is asked for every shard, since the catalogue does not list quarantined copies;
    only the listed ones when that would be more than ``ASKS_COUNT_MAX``.
    """
    everywhere = len(nodes) * len(checkpoint["shards"]) <= ASKS_COUNT_MAX
    copies = []
    for shard in checkpoint["shards"]:
        holders = {str(r["node"]) for r in shard["replicas"] if _in_memory(r)}
        copies += [
            Copy(
                shard=_shard_id(checkpoint, shard),
                node=node,
                address=address,
                length_bytes=int(shard["length_bytes"]),
                listed=node in holders,
            )
            for node, address in nodes.items()
            if everywhere or node in holders
        ]
    return copies


def judge(checkpoint: Record, verdicts: list[Verdict]) -> Report:
    """Return the report: every copy, and the shards of which no good copy was found."""
    good = {verdict.copy.shard for verdict in verdicts if verdict.ok}
    shards = [_shard_id(checkpoint, shard) for shard in checkpoint["shards"]]
    missing = [shard for shard in shards if shard not in good]
    bad = [verdict for verdict in verdicts if not verdict.ok]
    rows = tuple(
        (
            str(verdict.copy.shard.rank),
            verdict.copy.node,
            format_bytes(verdict.copy.length_bytes),
            "ok" if verdict.ok else f"BAD: {verdict.detail}",
        )
        for verdict in verdicts
    )
    text: list[str | Table] = [Table(("rank", "node", "size", "result"), rows)]
    text += [f"bad copy: {v.copy.shard.key} on {v.copy.node}: {v.detail}" for v in bad]
    text += [f"no good copy in memory: {shard.key}" for shard in missing]
    if not bad and not missing:
        text.append(f"step {checkpoint['step']}: {_all_match(verdicts)}")
    data = {
        "step": checkpoint["step"],
        "attempt": checkpoint["generation"],
        "ok": not bad and not missing,
        "copies": [
            {"shard": v.copy.shard.key, "node": v.copy.node, "ok": v.ok, "detail": v.detail}
            for v in verdicts
        ],
        "missing": [shard.key for shard in missing],
    }
    return Report(data=data, text=text, failed=bool(bad or missing))


def _all_match(verdicts: list[Verdict]) -> str:
    """Say on how many nodes each shard is: what is on one alone has no copy."""
    nodes = Counter(verdict.copy.shard for verdict in verdicts).values()
    low, high = min(nodes), max(nodes)
    where = f"{low} to {high} nodes" if low < high else f"{high} nodes"
    where = where if high > 1 else "one node only"
    if len(nodes) == 1:
        return f"its shard matches its digest, on {where}"
    return f"all {len(nodes)} shards match their digests, each on {where}"


def _verdicts(copies: list[Copy], advance: Callable[[], None]) -> Iterator[Verdict]:
    """Yield what agents say, one after the other; nothing for a copy that is not there."""
    from holdfast.rpc.channel import sync_channel  # noqa: PLC0415 - grpc is slow to import
    from holdfast.v1.agent_pb2_grpc import ReplicationStub  # noqa: PLC0415

    for address in dict.fromkeys(copy.address for copy in copies):
        with sync_channel(address) as channel:
            stub = ReplicationStub(channel)
            for copy in copies:
                if copy.address == address:
                    verdict = _ask(stub, copy)
                    advance()
                    if verdict is not None:
                        yield verdict


def _ask(stub: ReplicationStub, copy: Copy) -> Verdict | None:
    from holdfast.rpc import codec  # noqa: PLC0415 - grpc is slow to import
    from holdfast.rpc.channel import call  # noqa: PLC0415
    from holdfast.v1 import agent_pb2, common_pb2  # noqa: PLC0415

    request = agent_pb2.VerifyRequest(id=codec.to_message(copy.shard, common_pb2.ShardId))
    try:
        answer = call(stub.Verify, request, timeout_s=copy.timeout_s)
    except CheckpointError as error:
        if isinstance(error, NotFoundError) and not copy.listed:
            return None
        return Verdict(copy=copy, ok=False, detail=str(error))
    if answer.ok and answer.length_bytes != copy.length_bytes:
        detail = f"has {answer.length_bytes} bytes, not {copy.length_bytes}"
        return Verdict(copy=copy, ok=False, detail=detail)
    return Verdict(copy=copy, ok=answer.ok, detail=answer.detail)


def _shard_id(checkpoint: Record, shard: Record) -> ShardId:
    return ShardId(
        run_id(checkpoint["run"]),
        Step(checkpoint["step"]),
        Generation(checkpoint["generation"]),
        Rank(shard["rank"]),
        int(shard["volume"]),
    )
