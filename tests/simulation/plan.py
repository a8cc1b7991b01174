"""What a history consists of: drawn from a seed before it begins, as data.

So it can be cut down until only what matters is left, written to a file and read by people.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from holdfast.core.budget import slots_per_rank
from holdfast.core.protection import Copies, Parity, Protection

TROUBLE_S = 6.0
BEGIN_S = 0.5
KINDS_COUNT_MAX = 9
MOMENTS_COUNT = 3
MOMENT_S = 0.4
GAPS_S = (1.5, 4.0, 8.0)
SCENES_PART = 0.6
FIRST_PART = 0.3
SHARDED_PART = 0.3
RANGED_PART = 0.5
PARITY_PART = 0.4
PARITY_GROUP = 2
SLOTS_PART = 0.15
TWINS_PART = 0.4
ROLLBACK_PART = 0.25
SCENE_GAPS_S = (4.0, 8.0)
NAMES = "abcd"
NODE_LEASE_S = 5.0
RANKS_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One thing that goes wrong, or that somebody does.

    Attributes:
        at_s: When, in seconds since the history began.
        kind: A name of ``trouble.KINDS``.
        target: Whom it befalls: a node, "metadata 0", "worker 1", "rank 2"; empty: there is one.
        other: The second party, where there are two.
        for_s: How long it lasts; 0: for ever, or it has no duration.
        amount: How much, where it can be more or less.
    """

    at_s: float
    kind: str
    target: str = ""
    other: str = ""
    for_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cluster, a job and all trouble. ``workers`` 0: there is no object store.

    ``parity`` elements for the shards of each two nodes take the place of copies if there are any.
    ``sharded``: each rank has a part of the state, and names what it needs of a checkpoint;
    ``ranged``: and of that not all bytes. ``slots`` of each rank; 0: as many as it needs.
    ``saves_first``: step 0 is saved, before any training.
    ``twins``: ranks have the same tensors, and fill slots for copies of each other's.
    ``seed`` draws what the plan leaves open: how long each message and each copy takes. ``lost``,
    ``doubled``, ``answer_lost`` and ``slow`` are chances of one message. ``peace_s`` is when all
    trouble ends; 0: two seconds after the last of it begins, and at ``TROUBLE_S`` at most.
    """

    seed: int
    nodes: int = 2
    metadata: int = 1
    workers: int = 0
    world_size: int = 2
    replicas: int = 1
    parity: int = 0
    spare_slots: int = 0
    step_s: float = 0.5
    save_every: int = 1
    saves_first: bool = False
    persist_steps: int = 0
    keep_last: int = 0
    slots: int = 0
    sharded: bool = False
    ranged: bool = False
    twins: bool = False
    lost: float = 0.0
    doubled: float = 0.0
    answer_lost: float = 0.0
    slow: float = 0.0
    peace_s: float = 0.0
    troubles: tuple[Trouble, ...] = ()


def protection_of(plan: Plan) -> Protection:
    """Return what the job asks for against the loss of nodes."""
    return Parity(PARITY_GROUP, plan.parity) if plan.parity else Copies(plan.replicas)


def ranks_per_node(plan: Plan) -> int:
    """Return how many ranks the budget of a node is for, when all that can be lost for good is."""
    gone = len({t.target for t in plan.troubles if t.kind == "lose_node" and not t.for_s})
    return -(-RANKS_MAX // max(plan.nodes - gone, 1))


def slots_of(plan: Plan) -> int:
    """Return how many slots each rank has."""
    return slots_per_rank(persist=bool(plan.persist_steps), asked=plan.slots)


def draw(seed: int) -> Plan:
    """Return the plan of a seed: a few kinds of trouble, each at a rate of its own (swarm)."""
    rng = random.Random(seed)
    scene = rng.choice(_SCENES) if rng.random() < SCENES_PART else ()
    nodes = rng.choice([1, 2, 2, 2, 3, 3, 4])
    plan = Plan(
        seed=seed,
        nodes=nodes,
        metadata=rng.choice([1, 1, 2]),
        workers=rng.choice([1, 1, 2] if _OF_THE_STORE & {*scene} else [0, 0, 1, 2]),
        world_size=rng.randint(1, min(nodes + 1, 3)),
        replicas=rng.choice([0, 1, 1, 1, 2]) if nodes > 1 else 0,
        spare_slots=rng.choice([0, 0, 1, 4]),
        step_s=rng.choice([0.3, 0.5, 0.5, 1.0]),
        save_every=rng.choice([1, 1, 1, 2]),
    )
    if plan.workers:
        plan = replace(
            plan, persist_steps=rng.choice([1, 2, 4]), keep_last=rng.choice([0, 0, 1, 2])
        )
    if rng.random() < 0.4:
        most = rng.choice([0.02, 0.1, 0.25])
        chances = ("lost", "doubled", "answer_lost", "slow")
        chosen = rng.sample(chances, rng.randint(1, 4))
        plan = replace(plan, **{name: round(rng.uniform(0, most), 3) for name in chosen})
    # Drawn apart, so that what a seed was before there were sharded jobs stays as it was.
    sharded = random.Random(f"sharded {seed}").random() < SHARDED_PART
    ranged = sharded and random.Random(f"ranged {seed}").random() < RANGED_PART
    sized = random.Random(f"slots {seed}")
    slots = sized.choice([2, 4] if plan.persist_steps else [3, 4])
    slots = slots if sized.random() < SLOTS_PART else 0
    first = random.Random(f"first {seed}").random() < FIRST_PART
    plan = replace(plan, sharded=sharded, ranged=ranged, slots=slots, saves_first=first)
    parity = random.Random(f"parity {seed}")
    if nodes > PARITY_GROUP and parity.random() < PARITY_PART:
        plan = replace(plan, replicas=0, parity=parity.randint(1, nodes - PARITY_GROUP))
    if plan.replicas and not sharded and random.Random(f"twins {seed}").random() < TWINS_PART:
        plan = replace(plan, twins=True)
    troubles = [*_troubles(plan, rng, scene), *_rollbacks(random.Random(f"rollback {seed}"))]
    return replace(plan, troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at_s)))


def _troubles(plan: Plan, rng: random.Random, scene: tuple[str, ...]) -> list[Trouble]:
    least, most, gaps_s = 0, KINDS_COUNT_MAX, GAPS_S
    if scene:
        least, most, gaps_s = 2, len(scene), SCENE_GAPS_S
    kinds = [kind for kind in scene or _DRAWN if plan.workers or kind not in _OF_THE_STORE]
    # What is worth seeing is what happens while something else does.
    moments = [rng.uniform(BEGIN_S, TROUBLE_S - MOMENT_S) for _ in range(MOMENTS_COUNT)]
    found = []
    for kind in rng.sample(kinds, min(rng.randint(least, most), len(kinds))):
        gap_s = rng.choice(gaps_s)
        # Of a scene each kind comes, and seldom often: between them training goes on.
        first_s = rng.uniform(0.0, TROUBLE_S - BEGIN_S) if scene else rng.expovariate(1 / gap_s)
        at_s = BEGIN_S + first_s
        while at_s < TROUBLE_S:
            drawn = _DRAWN[kind](plan, rng)
            near_s = rng.choice(moments) + rng.uniform(0.0, MOMENT_S)
            when_s = near_s if rng.random() < 0.5 else at_s
            found.append(replace(drawn, at_s=round(when_s, 3), kind=kind))
            at_s += rng.expovariate(1 / gap_s)
    return sorted(found, key=lambda trouble: trouble.at_s)


def _rollbacks(rng: random.Random) -> list[Trouble]:
    """Return when users roll back by command; drawn apart, as this came later than the others."""
    count = rng.randint(1, 3) if rng.random() < ROLLBACK_PART else 0
    return [
        Trouble(
            at_s=round(rng.uniform(1.5, TROUBLE_S), 3),
            kind="command_rollback",
            other=rng.choice(["", "force", "force"]),
            for_s=round(rng.uniform(0.0, 1.0), 3),
            amount=float(rng.randint(0, 6)),
        )
        for _ in range(count)
    ]


def _made(**values: object) -> Trouble:
    return Trouble(at_s=0.0, kind="", **values)  # type: ignore[arg-type]


def _for_s(rng: random.Random) -> float:
    """Return a duration: shorter than every deadline, about as long, or longer."""
    return round(rng.choice([rng.uniform(0.05, 1.0), rng.uniform(1, 5), rng.uniform(4, 7)]), 3)


def _lost(plan: Plan, rng: random.Random) -> Trouble:
    """``for_s`` 0: no other machine takes its place."""
    drawn = _node(plan, rng)
    return replace(drawn, for_s=0.0) if plan.nodes > 1 and rng.random() < 0.3 else drawn


def _node(plan: Plan, rng: random.Random) -> Trouble:
    return _made(target=rng.choice(NAMES[: plan.nodes]), for_s=_for_s(rng))


def _short(plan: Plan, rng: random.Random) -> Trouble:
    """As long as a process takes to start."""
    return replace(_node(plan, rng), for_s=round(rng.uniform(0.2, 2.5), 3))


def _rank(plan: Plan, rng: random.Random) -> Trouble:
    return _made(target=f"rank {rng.randrange(plan.world_size)}", for_s=_for_s(rng))


def _metadata(plan: Plan, rng: random.Random) -> Trouble:
    return _made(target=f"metadata {rng.randrange(plan.metadata)}", for_s=_for_s(rng))


def _worker(plan: Plan, rng: random.Random) -> Trouble:
    return _made(target=f"worker {rng.randrange(plan.workers)}", for_s=_for_s(rng))


def _lasting(plan: Plan, rng: random.Random) -> Trouble:
    return _made(for_s=_for_s(rng))


def _plain(plan: Plan, rng: random.Random) -> Trouble:
    return _made()


def _pair(plan: Plan, rng: random.Random) -> Trouble:
    parties = [*NAMES[: plan.nodes], *(f"metadata {n}" for n in range(plan.metadata))]
    one, other = rng.sample(parties, 2)
    return _made(target=one, other=other, for_s=_for_s(rng))


def _off(plan: Plan, rng: random.Random) -> float:
    return rng.choice([-3600.0, -10.0, -1.5, 1.5, 10.0, 3600.0])


def _clock(plan: Plan, rng: random.Random) -> Trouble:
    return _made(amount=_off(plan, rng))


def _node_clock(plan: Plan, rng: random.Random) -> Trouble:
    return replace(_node(plan, rng), for_s=0.0, amount=_off(plan, rng))


def _backup(plan: Plan, rng: random.Random) -> Trouble:
    """``for_s`` is how old the backup is when it is put in place."""
    return _made(for_s=round(rng.choice([rng.uniform(0.02, 0.3), rng.uniform(0.3, 8)]), 3))


def _back(plan: Plan, rng: random.Random) -> Trouble:
    """``amount`` is how many of the committed steps are skipped."""
    return _made(amount=float(rng.randint(0, 3)))


def _sized(plan: Plan, rng: random.Random) -> Trouble:
    return _made(amount=float(rng.randint(1, 3)))


_DRAWN: dict[str, Callable[[Plan, random.Random], Trouble]] = {
    "kill_rank": _rank,
    "freeze_rank": _rank,
    "kill_agent": _node,
    "stop_agent": _node,
    "freeze_agent": _node,
    "update_agent": _short,
    "lose_node": _lost,
    "lose_all": _lasting,
    "freeze_node": _node,
    "fill_disk": _node,
    "flip_in_memory": _node,
    "step_node_clock": _node_clock,
    "kill_metadata": _metadata,
    "freeze_metadata": _metadata,
    "cut": _pair,
    "cut_one_way": _pair,
    "cut_nodes": _lasting,
    "step_clock": _clock,
    "lose_database": _plain,
    "restore_backup": _backup,
    "stop_database": _lasting,
    "restart": _plain,
    "resize": _sized,
    "take_over": _plain,
    "start_over": _plain,
    "roll_back": _back,
    "kill_worker": _worker,
    "freeze_worker": _worker,
    "forget_queue": _plain,
    "stop_queue": _lasting,
    "step_queue_clock": _clock,
    "stop_store": _lasting,
    "break_store": _lasting,
    "flip_in_store": _plain,
    "pin": _back,
    "unpin": _plain,
    "read": _back,
    "remove": _back,
    "scrub": _plain,
}
"""How the details of each kind are drawn; what it does is in ``trouble``."""

_SCENES = (
    ("lose_database", "restart", "kill_rank", "stop_agent", "update_agent", "lose_node"),
    ("restore_backup", "restart", "lose_all", "start_over", "roll_back", "kill_worker"),
    ("freeze_agent", "stop_agent", "update_agent", "cut_one_way", "restart", "kill_rank"),
    ("restart", "kill_rank", "start_over", "roll_back", "resize", "lose_all", "pin", "remove"),
    ("step_clock", "lose_node", "restart", "kill_rank", "freeze_node", "take_over"),
    ("take_over", "restart", "stop_database", "freeze_metadata", "freeze_rank"),
    ("stop_database", "kill_metadata", "cut", "freeze_metadata"),
    ("step_queue_clock", "break_store", "stop_store", "kill_worker", "freeze_worker"),
    ("lose_node", "kill_agent", "flip_in_memory", "fill_disk", "stop_database", "restart"),
    ("flip_in_store", "lose_all", "read", "remove", "scrub", "restore_backup"),
    ("freeze_node", "freeze_agent", "cut", "forget_queue"),
    ("restart", "kill_rank", "lose_node", "kill_agent", "resize"),
    ("restore_backup", "lose_all", "restart", "kill_worker"),
    ("flip_in_memory", "restart", "kill_rank", "update_agent"),
    ("lose_database", "restore_backup", "take_over", "freeze_rank", "restart"),
    ("restore_backup", "start_over", "kill_rank"),
    ("cut_nodes", "update_agent", "stop_agent", "kill_rank"),
    ("cut_nodes", "kill_agent", "restart", "kill_rank"),
)
"""Kinds that have to do with each other: where most is drawn from all, they seldom meet."""

_OF_THE_STORE = frozenset({
    *("kill_worker", "freeze_worker", "forget_queue", "stop_queue", "step_queue_clock"),
    *("stop_store", "break_store", "flip_in_store", "pin", "unpin", "read", "remove", "scrub"),
})  # fmt: skip


def to_toml(plan: Plan) -> str:
    """Return the plan as a table of TOML and one for each trouble; what is default is left out."""
    lines = ["[plan]", *_values(asdict(plan), asdict(Plan(seed=-1)))]
    for trouble in plan.troubles:
        lines += ["", "[[trouble]]", *_values(asdict(trouble), _NO_TROUBLE)]
    return "\n".join(lines) + "\n"


_NO_TROUBLE = asdict(Trouble(at_s=-1.0, kind=""))


def _values(values: dict[str, object], defaults: dict[str, object]) -> list[str]:
    return [
        f"{name} = {_literal(value)}"
        for name, value in values.items()
        if name != "troubles" and value != defaults[name]
    ]


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def from_toml(text: str) -> Plan:
    """Return the plan in a story's file; what else the file says is for people."""
    read = tomllib.loads(text)
    troubles = tuple(Trouble(**table) for table in read.get("trouble", ()))
    return Plan(**read["plan"], troubles=troubles)
