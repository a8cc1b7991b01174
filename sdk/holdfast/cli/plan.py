"""``plan``: what a job would need of each node's memory, by the sum that admits it (P8).

Asks no service: it is for a job, or a cluster, that is not there yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.cli.output import Report, Table
from holdfast.core.budget import (
    MemoryNeed,
    memory_need,
    restored_bytes_of_part,
    shortfall,
    slots_per_rank,
)
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.model_sizes import ModelState
from holdfast.core.protection import Copies, Parity, Protection
from holdfast.errors import InvalidRequestError

REPLICAS_SHOWN = (0, 1, 2)
WHY_TWO = (
    "slots: the newest step that is safe, the next until it is, and with persist one on its way to "
    "the object store; a copy or element of the older goes only once all of the newer is there"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """A state of ``whole_bytes`` on ``nodes`` nodes of ``gpus`` ranks each.

    It is cut into ``shards`` parts, of which each rank trains with one; 1: each has all of it.

    Raises:
        InvalidRequestError: there is no state, or its parts cannot be shared out evenly; says why.
    """

    whole_bytes: int
    nodes: int
    gpus: int
    shards: int

    def __post_init__(self) -> None:
        if self.whole_bytes <= 0:
            raise InvalidRequestError(f"a state of {self.whole_bytes} bytes needs no plan")
        if self.ranks % self.shards:
            raise InvalidRequestError(
                f"--shards {self.shards} must divide the {self.ranks} ranks of {self.nodes} nodes "
                f"x {self.gpus} GPUs"
            )

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.nodes * self.gpus

    @property
    def own_bytes(self) -> int:
        """Segments of one node's ranks at one step: each byte is saved by one rank alone."""
        return -(-self.whole_bytes // self.ranks) * self.gpus

    @property
    def loaded_bytes(self) -> int:
        """What the ranks of one node load; they read the same bytes once."""
        return min(self.whole_bytes, -(-self.whole_bytes // self.shards) * self.gpus)

    def need(self, protection: Protection, *, slots: int, persist: bool) -> MemoryNeed:
        """Return the sum of one node."""
        restored = restored_bytes_of_part(
            own_bytes=self.own_bytes,
            loaded_bytes=self.loaded_bytes,
            whole_bytes=self.whole_bytes,
            replicas=protection.copies.n,
        )
        return memory_need(
            own_bytes=self.own_bytes,
            restored_bytes=restored,
            protection=protection,
            nodes_count=self.nodes,
            slots=slots,
            persist=persist,
            shards_count=self.gpus,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One policy that a job may have, and what it costs on each node."""

    protection: Protection
    persist: bool
    need: MemoryNeed

    @property
    def name(self) -> str:
        """The policy as a script has it."""
        return f"{self.protection}{' with persist' if self.persist else ''}"


def plan(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Say what a job would need per node, by policy; fails if none of them fits ``--budget``.

    Raises:
        InvalidRequestError: a combination that no job has.
    """
    del environ
    model = _model(args)
    whole_bytes = model.total_bytes if model else args.state_bytes
    shape = JobShape(
        whole_bytes=whole_bytes,
        nodes=args.nodes,
        gpus=args.gpus,
        shards=args.nodes * args.gpus if args.shards is None else args.shards,
    )
    options = list(_options(args, shape))
    fitting = [option for option in options if _fits(option, args.budget_bytes)]
    return Report(
        data=_data(shape, options, args.budget_bytes),
        text=[_state(model, shape), *_tables(options, args.budget_bytes)],
        failed=not fitting,
    )


def _model(args: argparse.Namespace) -> ModelState | None:
    if args.params is None:
        return None
    return ModelState(
        params_count=args.params,
        dtype=args.dtype,
        optimizer=args.optimizer,
        optimizer_dtype=args.optimizer_dtype or "",
        master=args.master,
    )


def _options(args: argparse.Namespace, shape: JobShape) -> Iterator[Option]:
    counts = REPLICAS_SHOWN if args.replicas is None else (args.replicas,)
    compared: list[Protection] = [*map(Copies, counts)]
    if args.parity is not None:
        compared.append(args.parity)
    for protection in compared:
        for persist in (True,) if args.persist else (False, True):
            slots = slots_per_rank(persist=persist, asked=args.slots)
            need = shape.need(protection, slots=slots, persist=persist)
            yield Option(protection=protection, persist=persist, need=need)


def _fits(option: Option, budget_bytes: int | None) -> bool:
    return budget_bytes is None or option.need.total_bytes <= budget_bytes


def _state(model: ModelState | None, shape: JobShape) -> str:
    whole, own = format_bytes(shape.whole_bytes), format_bytes(shape.own_bytes)
    of = f"{model} = {whole}" if model else whole
    return (
        f"state: {of}; {shape.nodes} nodes x {shape.gpus} ranks save {own} per node and load "
        f"{format_bytes(shape.loaded_bytes)}"
    )


def _tables(options: list[Option], budget_bytes: int | None) -> list[str | Table]:
    rows = tuple(
        (
            _short(option.protection),
            "yes" if option.persist else "no",
            format_bytes(option.need.total_bytes),
            str(option.need),
        )
        for option in options
    )
    table = Table(("replicas", "persist", "per node", "sum"), rows)
    refused = [
        f"{option.name} does not fit: {shortfall(option.need, budget_bytes)}"
        for option in options
        if budget_bytes is not None and not _fits(option, budget_bytes)
    ]
    return [table, WHY_TWO, *refused]


def _short(protection: Protection) -> str:
    return str(protection.n if isinstance(protection, Copies) else protection)


def _numbers(protection: Protection) -> dict[str, int] | None:
    if isinstance(protection, Parity):
        return {"k": protection.k, "m": protection.m}
    return None


def _data(
    shape: JobShape, options: list[Option], budget_bytes: int | None
) -> dict[str, int | list[dict[str, object]] | None]:
    return {
        "state_bytes": shape.whole_bytes,
        "own_bytes": shape.own_bytes,
        "loaded_bytes": shape.loaded_bytes,
        "budget_bytes": budget_bytes,
        "policies": [
            {
                "replicas": option.protection.copies.n,
                "parity": _numbers(option.protection),
                "persist": option.persist,
                "slots": option.need.slots,
                "incoming_slots": option.need.incoming_slots,
                "incoming_bytes": option.need.incoming_bytes,
                "restore_bytes": option.need.restore_bytes,
                "total_bytes": option.need.total_bytes,
                "fits": _fits(option, budget_bytes),
                "sum": str(option.need),
            }
            for option in options
        ],
    }
