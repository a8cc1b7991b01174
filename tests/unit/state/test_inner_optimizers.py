"""Optimizers that step through another one: ZeroRedundancyOptimizer and ShardedOptimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.unit.state import worlds
from tests.unit.state.test_fsdp1 import numbered, planned
from tests.unit.state.test_needs_over_meshes import Saved
from tests.unit.state.test_whose_tensor import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.core.shard import unlike_ranks
from holdfast.errors import InvalidRequestError
from holdfast.format.header import parse_header
from holdfast.format.plan_faults import first_fault
from holdfast.format.segment import header_length
from holdfast.snapshot.engine import CopyEngine
from holdfast.snapshot.optimizer_gate import Gate
from holdfast.state.capture import Capture

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own import
WORLD = 4
KEYS = ("exp_avg", "exp_avg_sq")


def zero(parameters, kind=torch.optim.AdamW, **kwargs):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=kind, lr=0.1, **kwargs)


def model(filled):
    """Layers of several sizes, the last of which nobody trains."""
    made = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    for name, p in made.named_parameters():
        nn.init.zeros_(p)
        if filled:
            p.detach().copy_(numbered("w", name, p.shape))
    return made.requires_grad_(True)


def groups_of(made):
    """Two groups with settings of their own, in another order than the model's."""
    return [
        {"params": [*made[1].parameters(), *made[3].parameters()], "weight_decay": 0.5},
        {"params": [*made[0].parameters(), *made[2].parameters()]},
    ]


def state(kind, *, filled):
    """Return what one rank has: ``zero`` or ``adam``, over DDP (``ddp``) or not."""
    made = model(filled)
    wrapped = DistributedDataParallel(made) if "ddp" in kind else made
    make = zero if "zero" in kind else lambda groups: torch.optim.AdamW(groups, lr=0.1)
    optimizer = make(groups_of(made))
    steps = getattr(optimizer, "optim", optimizer)
    here = {id(p) for group in steps.param_groups for p in group["params"]}
    for name, p in made.named_parameters():
        if filled and id(p) in here and not name.startswith("3."):
            moments = {key: numbered(key, name, p.shape) for key in KEYS}
            steps.state[p] = {"step": torch.tensor(5.0), **moments}
    if filled:
        for group, rate in zip(optimizer.param_groups, (0.3, 0.7), strict=True):
            group["lr"] = rate
    return {"m": wrapped, "o": optimizer}


def check(held):
    """Compare what a rank has of model and optimizer with what all of it should be."""
    optimizer = held["o"]
    steps = getattr(optimizer, "optim", optimizer)
    here = {id(p) for group in steps.param_groups for p in group["params"]}
    for name, p in getattr(held["m"], "module", held["m"]).named_parameters():
        assert torch.equal(numbered("w", name, p.shape), p), name
        kept = steps.state.get(p, {})
        trained = id(p) in here and not name.startswith("3.")
        assert kept.keys() == ({"step", *KEYS} if trained else set()), name
        for key in KEYS if trained else ():
            assert torch.equal(numbered(key, name, p.shape), kept[key]), (name, key)
        assert float(kept.get("step", 5.0)) == 5.0
    assert [0.3, 0.7] == [group["lr"] for group in optimizer.param_groups]
    assert [0.5, 0.01] == [group["weight_decay"] for group in optimizer.param_groups]


FORMS = [
    ("zero ddp", 4, "zero ddp", 4),
    ("zero ddp", 4, "zero ddp", 3),
    ("zero ddp", 2, "zero ddp", 4),
    ("zero ddp", 4, "adam ddp", 4),
    ("zero ddp", 4, "adam ddp", 2),
    ("zero ddp", 4, "adam", 1),
    ("adam", 1, "zero ddp", 4),
    ("adam ddp", 3, "zero ddp", 3),
    ("zero", 4, "zero", 4),
    ("zero", 4, "zero", 3),
    ("zero", 4, "adam", 1),
]


@pytest.mark.parametrize(("before", "ranks_before", "after", "ranks_after"), FORMS)
def test_each_rank_is_given_what_it_steps_whoever_stepped_it_before(
    world, tmp_path, before, ranks_before, after, ranks_after
):
    """From what it names by bytes: model, moments, steps and groups."""
    saved = Saved(tmp_path, world, lambda _: state(before, filled=True), ranks_before)
    for rank in range(ranks_after):
        check(load(saved, world, lambda _: state(after, filled=False), rank, ranks_after))


def headers_of(located):
    found = []
    for path, _ in located:
        data = path.read_bytes()
        found.append(parse_header(data[: header_length(data)], len(data)))
    return found


def saved_by(folder, world, make, world_size=WORLD):
    located = []
    for rank in range(world_size):
        world(rank, world_size)
        capture = Capture(make(rank), rank=rank, world_size=world_size)
        located.append(worlds.Saver(folder).save(capture))
    return located


def test_each_rank_saves_the_moments_that_it_has_and_all_are_there(world, tmp_path):
    located = saved_by(tmp_path, world, lambda _: state("zero ddp", filled=True))
    headers = headers_of(located)

    assert first_fault(headers) == unlike_ranks(shard for _, shard in located) == ""
    names = [e.spec.fqn for header in headers for e in header.entries if "exp_avg" in e.spec.fqn]
    assert len(names) == len(set(names)) == 12
    assert all("exp_avg" in str(header.entries) for header in headers)


def test_a_rank_names_no_moments_that_others_have(world, tmp_path, monkeypatch):
    """Two thirds of what DDP has everywhere lie on one rank each: nobody else fetches them."""
    monkeypatch.setattr("holdfast.format.byte_ranges.PART_BYTES", 1)  # else all lies in one part
    saved = Saved(tmp_path, world, lambda _: state("zero ddp", filled=True), WORLD)
    named = []
    for rank in range(WORLD):
        world(rank)
        capture = Capture(state("zero ddp", filled=False), rank=rank, world_size=WORLD)
        names = [name for name in saved.names(saved.needs(capture)) if "exp_avg" in name]
        named += names
        assert names
        assert len(names) < 12

    assert len(named) == 12


@pytest.mark.parametrize("kind", ["zero ddp", "zero"])
def test_what_is_reserved_before_the_first_step_is_what_is_saved_then(world, tmp_path, kind):
    """P8: what other ranks keep counts for a whole checkpoint, and not for this rank."""
    files = saved_by(tmp_path, world, lambda _: wide(kind, filled=True))
    saved_bytes = sum(path.stat().st_size for path, _ in files)
    for rank in range(WORLD):
        world(rank)
        known, expected = (
            Capture(wide(kind, filled=filled), rank=rank, world_size=WORLD).estimate()
            for filled in (True, False)
        )
        assert known.names_needs
        assert expected.names_needs
        assert 0.9 < known.own_bytes / files[rank][1].length_bytes < 1.1
        for one in (known, expected):
            assert 0.95 < one.own_bytes / known.own_bytes < 1.05
            assert 0.95 < one.loaded_bytes / known.loaded_bytes < 1.05
            assert 0.9 < one.whole_bytes / saved_bytes < 1.1


def wide(kind, *, filled):
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(100, 100 + n) for n in range(8)))
    wrapped = DistributedDataParallel(made) if "ddp" in kind else made
    optimizer = zero(made.parameters())
    for group in optimizer.optim.param_groups if filled else ():
        for p in group["params"]:
            moments = {key: torch.zeros_like(p) for key in KEYS}
            optimizer.optim.state[p] = {"step": torch.tensor(1.0), **moments}
    return {"m": wrapped, "o": optimizer}


HALVES = ([0, 1], [2, 3])


def dealt(rank, groups=HALVES, *, filled):
    """Groups of ranks train a model each, which have the same names."""
    made, found = [dist.new_group(ranks) for ranks in groups], model(filled=False)
    number = next(n for n, ranks in enumerate(groups) if rank in ranks)
    optimizer = zero(found.parameters(), process_group=made[number])
    for group in optimizer.optim.param_groups if filled else ():
        for p in group["params"]:
            optimizer.optim.state[p] = {
                "step": torch.tensor(2.0 + number),
                "exp_avg": torch.full_like(p, number),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return {"m": found, "o": optimizer}


def load_all(saved, world, held_by, rank, world_size):
    """Load where all of the checkpoint is."""
    world(rank, world_size)
    held = held_by(rank)
    with saved.segments(range(saved.world_size)) as segments:
        Capture(held, rank=rank, world_size=world_size).load(segments, step=1)
    return held


@pytest.mark.parametrize("load", [load, load_all])
def test_ranks_that_deal_out_among_themselves_get_their_own_back(world, tmp_path, load):
    """Also where what the other group keeps under the same names is there, too."""
    saved = Saved(tmp_path, world, lambda rank: dealt(rank, filled=True), WORLD)
    for rank in range(WORLD):
        held = load(saved, world, lambda rank: dealt(rank, filled=False), rank, WORLD)
        steps = held["o"].optim
        assert len(steps.state) == sum(len(group["params"]) for group in steps.param_groups)
        for kept in steps.state.values():
            assert kept["step"] == 2.0 + rank // 2
            assert (kept["exp_avg"] == rank // 2).all()


@pytest.mark.parametrize("load", [load, load_all])
@pytest.mark.parametrize("groups", [([0, 1, 2, 3],), ([0, 2], [1, 3]), ([0, 1],), ([0, 1, 2],)])
def test_what_groups_keep_that_differs_is_never_taken_by_another_group(
    world, tmp_path, groups, load
):
    """Nor by the first rank of a group that has saved, which names what begins with its number."""
    saved = Saved(tmp_path, world, lambda rank: dealt(rank, filled=True), WORLD)
    count = sum(map(len, groups))
    for rank in range(count):
        with pytest.raises(InvalidRequestError, match=r"o\.state\.m.* by several groups of ranks"):
            load(saved, world, lambda rank: dealt(rank, groups, filled=False), rank, count)


def test_what_it_writes_is_copied_after_the_save_has_returned(world):
    """All parameters are written by its step, and by nothing else; the gate watches who steps."""
    world(1)
    held = state("zero ddp", filled=True)

    assert [] == planned(held).eager
    capture = Capture(held, rank=1, world_size=WORLD)
    assert [held["o"].optim] == list(capture.optimizers)


def test_a_moment_that_is_another_object_makes_another_plan(world):
    world(1)
    held = state("zero ddp", filled=True)
    plan = planned(held)
    assert plan.is_current()
    kept = next(iter(held["o"].optim.state.values()))
    kept["exp_avg"] = kept["exp_avg"].clone()

    assert not plan.is_current()


def test_one_that_steps_while_gradients_are_computed_is_refused_with_the_cure(world):
    world(0)
    made = model(filled=False)
    optimizer = zero(made.parameters(), overlap_with_ddp=True)
    with pytest.raises(InvalidRequestError, match="make it with overlap_with_ddp=False"):
        Capture({"m": made, "o": optimizer}, rank=0, world_size=WORLD)


def test_one_that_keeps_more_than_tensors_is_refused_with_the_cure(world):
    world(0)
    made = model(filled=False)
    optimizer = zero(made.parameters())
    optimizer.optim.state[optimizer.optim.param_groups[0]["params"][0]] = {"calls": 3}
    with pytest.raises(InvalidRequestError, match="use an optimizer that keeps only such"):
        Capture({"m": made, "o": optimizer}, rank=0, world_size=WORLD)


def staged(rank, stages, *, filled, make=zero):
    """A stage of a pipeline by hand over the ranks that copy it, which deal its optimizer out."""
    copies, each = dist.get_world_size() // stages, 4 // stages
    number = rank // copies
    groups = [list(range(n * copies, (n + 1) * copies)) for n in range(stages)]
    made = [dist.new_group(ranks) for ranks in groups]
    layers = nn.Sequential(*list(model(filled))[number * each : (number + 1) * each])
    names = {str(i): str(number * each + i) for i in range(each)}
    wrapped = DistributedDataParallel(layers, process_group=made[number])
    kwargs = {"process_group": made[number]} if make is zero else {"lr": 0.1}
    optimizer = make(layers.parameters(), **kwargs)
    steps = getattr(optimizer, "optim", optimizer)
    called = {id(p): f"{number * each + int(n[0])}{n[1:]}" for n, p in layers.named_parameters()}
    for p in [p for group in steps.param_groups for p in group["params"]]:
        if filled:
            moments = {key: numbered(key, called[id(p)], p.shape) for key in KEYS}
            steps.state[p] = {"step": torch.tensor(5.0), **moments}
    return {"m": holdfast.Section(wrapped, names), "o": optimizer}, called


@pytest.mark.parametrize(
    ("before", "after", "ranks_after"), [(2, 2, 4), (2, 4, 4), (2, 1, 2), (2, 1, 1), (1, 2, 4)]
)
@pytest.mark.parametrize("make", [zero, torch.optim.AdamW], ids=["zero", "adam"])
def test_stages_of_a_pipeline_deal_out_what_other_stages_had(
    world, tmp_path, before, after, ranks_after, make
):
    saved = Saved(tmp_path, world, lambda rank: staged(rank, before, filled=True)[0], WORLD)
    called = {}

    def again(rank):
        held, names = staged(rank, after, filled=False, make=make)
        called.update(names)
        return held

    for rank in range(ranks_after):
        called.clear()
        held = load(saved, world, again, rank, ranks_after)
        steps = getattr(held["o"], "optim", held["o"])
        mine = [p for group in steps.param_groups for p in group["params"]]
        assert len(steps.state) == len(mine) > 0
        for p in mine:
            for key in KEYS:
                expected = numbered(key, called[id(p)], p.shape)
                assert torch.equal(expected, steps.state[p][key]), (key, called[id(p)])
        for p in held["m"].module.parameters():
            assert torch.equal(numbered("w", called[id(p)], p.shape), p)


def test_a_group_that_was_added_is_saved_with_what_the_inner_optimizer_has_of_it(
    world, tmp_path, caplog
):
    """Until the next step the outer one has only what it was made with: no other class is it."""

    def make(_, **kwargs):
        made = model(filled=False)
        optimizer = zero(made[0].parameters(), **kwargs)
        optimizer.add_param_group({"params": [*made[1].parameters()], "lr": 0.3})
        return {"m": made, "o": optimizer}

    saved = Saved(tmp_path, world, make, WORLD)
    for rank in range(WORLD):
        held = load(saved, world, lambda rank: make(rank, eps=0.5), rank, WORLD)
        added = held["o"].param_groups[1]
        assert (0.3, 1e-8, (0.9, 0.999)) == (added["lr"], added["eps"], added["betas"])
    assert "another class" not in caplog.text


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: it has the groups and the state of another one, whose steps are told."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_a_gate_watches_what_is_inside_of_a_wrapper():
    """Of the wrapper no step is ever told, and saves would copy everything at once for good."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    wrapped = Wrapped(torch.optim.SGD([weight], lr=0.1))
    capture = Capture({"m": torch.nn.ParameterList([weight]), "o": wrapped}, rank=0, world_size=1)
    gate = Gate(CopyEngine(lambda _: None))
    try:
        gate.trusts(capture.optimizers)
        assert not gate.sees([wrapped])
        wrapped.step()
        assert gate.trusts(capture.optimizers)
        assert gate.sees(capture.optimizers)
        assert gate.sees([wrapped]), "each of its parameters is one of what was seen"
    finally:
        gate.uninstall()
