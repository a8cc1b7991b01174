"""What the tests of Megatron-core look at, done by forked ranks of one parent; writes a report.

``python scenarios.py FOLDER AGENT...`` leaves ``report.json`` in the folder: by name of a check,
what was found. The models are Megatron's own GPT, on the CPU: its sharded state dicts are what
counts, and no forward pass, which wants CUDA.
"""

import dataclasses
import inspect
import io
import json
import os
import signal
import sys
import traceback
import warnings
import zlib
from pathlib import Path

warnings.simplefilter("ignore")  # megatron warns of what is not installed

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing as dc  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.dist_checkpointing.core import CONFIG_FNAME  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.optimizer import (  # noqa: E402
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies import base  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

import holdfast  # noqa: E402
from holdfast.format import blob as blobs  # noqa: E402
from holdfast.integrations import megatron as ours  # noqa: E402
from holdfast.integrations.megatron.contents import Load  # noqa: E402
from holdfast.integrations.megatron.naming import keys_of  # noqa: E402
from holdfast.integrations.megatron.strategies import Folder  # noqa: E402
from holdfast.integrations.megatron.wholeness import STREAM  # noqa: E402

BASE, AGENTS = Path(sys.argv[1]), sys.argv[2:]
RANKS = 2
LAYERS, HIDDEN, ROWS = 2, 16, 100
SAVED = "iter_0000001"
OPTIONS = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "use_cpu_initialization": True,
    "gated_linear_unit": True, "pipeline_dtype": torch.float32, "bias_activation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False,
}  # fmt: skip


def note(name, found):
    if dist.get_rank() == 0:
        with (BASE / "report.jsonl").open("a") as file:
            file.write(json.dumps([name, found]) + "\n")


def raised(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def build(tp=1, pp=1, rows=ROWS):
    """Return a sharded state dict over both ranks, as a training script has it."""
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(tp, pp)
    stage = ps.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config=TransformerConfig(
            num_layers=LAYERS, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
            **OPTIONS,
        ),
        transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=rows, max_sequence_length=8,
        pre_process=stage == 0, post_process=stage == pp - 1,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    of_model = model.sharded_state_dict()
    of_optimizer = optimizer.state_dict()
    shards = get_param_id_to_sharded_param_map(
        model.sharded_state_dict(), optimizer.param_groups[0]["params"]
    )
    optim_state_to_sharding_state(of_optimizer, shards, exclude_keys=("step",))
    return {"model": of_model, "optimizer": of_optimizer}


def own_values(rank):
    """Return what each rank has as its own."""
    generators = [{"torch": torch.get_rng_state(), "tuple": (1, b"x", {3: torch.ones(2)}, {})}]
    stream = io.BytesIO(b"of transformer engine")
    return {
        "rng": ShardedObject("rng", generators, (RANKS,), (rank,)),
        "stream": ShardedObject("stream", stream, (RANKS,), (rank,)),
    }


def truth(shard, salt):
    """Return what the shard is to hold: the same of each element, however it is sharded."""
    seed = zlib.crc32(f"{shard.key} {salt}".encode())
    shape = list(shard.global_shape)
    if shard.allow_shape_mismatch:
        shape[0] = 2 * ROWS  # the rows there are do not depend on how many are added
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made[shard.global_slice()].to(shard.dtype)


def shards_of(state):
    built = {**state}
    apply_factories(built)
    return [value for value in nested_values(built) if isinstance(value, ShardedTensor)]


def fill(state, salt):
    """Give all tensors of a state the values that ``salt`` means; return it."""
    with torch.no_grad():
        for shard in shards_of(state):
            shard.data.copy_(truth(shard, salt))
    return state


def wrong(state, salt):
    """Return the keys whose values are others, on any rank."""
    found = [s.key for s in shards_of(state) if not torch.equal(s.data, truth(s, salt))]
    everybody = [None] * RANKS
    dist.all_gather_object(everybody, found)
    return sorted({key for of_rank in everybody for key in of_rank})


def folder(name=SAVED):
    path = BASE / name
    path.mkdir(exist_ok=True)
    dist.barrier()
    return str(path)


def save(state, name, strategy=None, **options):
    options.setdefault("content_metadata", {"made": "here"})
    dc.save(state, folder(name), strategy or ours.HoldfastSaveStrategy(), **options)


def saved_and_killed(rank):
    state = fill(build(tp=2), 1)
    state |= {"iteration": 1, "args": {"lr": 0.5}, **own_values(rank)}
    save(state, SAVED)

    class Deadly(Folder):
        def save(self, *given):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            super().save(*given)

    again = fill(build(tp=2), 2)
    save(again, "iter_0000002", ours.HoldfastSaveStrategy(Deadly()))


def restored(rank):
    note("a checkpoint", [
        dc.check_is_distributed_checkpoint(str(BASE / name)) for name in (SAVED, "iter_0000002")
    ])  # fmt: skip
    for tp, pp in ((2, 1), (1, 1), (1, 2)):
        state = build(tp, pp)
        shards = {key: state[key] for key in ("model", "optimizer")}
        dc.load({**shards, "iteration": None}, folder(), ours.HoldfastLoadStrategy())
        note(f"restored {tp} {pp}", wrong(state, 1))
    asked = own_values(rank)
    found = dc.load(asked, folder(), ours.HoldfastLoadStrategy())
    wanted = own_values(rank)
    theirs = found["rng"][0]
    note("own values", [
        theirs["tuple"][:2] == (1, b"x"), theirs["tuple"][3] == {},
        torch.equal(theirs["tuple"][2][3], torch.ones(2)), theirs["torch"].dtype == torch.uint8,
        found["stream"].read() == wanted["stream"].data.read(), found["iteration"], found["args"],
    ])  # fmt: skip


def another_number_of_rows(rank):
    """As vocabularies are padded for a number of ranks."""
    state = build(tp=2, rows=ROWS + 4)
    dc.load({"model": state["model"]}, folder(), ours.HoldfastLoadStrategy())
    (rows,) = [s for s in shards_of(state["model"]) if s.key == "embedding.word_embeddings.weight"]
    wanted = truth(rows, 1)
    wanted[max(0, ROWS - rows.global_offset[0]) :] = 0
    fits = torch.tensor(int(torch.equal(rows.data, wanted)))
    dist.all_reduce(fits)
    note("padded rows", int(fits))


def by_name(rank):
    ours.install()
    save(fill(build(tp=1), 3), "named", ("holdfast", 1))
    state = build(tp=2)
    dc.load(state, folder("named"))
    note("by name", wrong(state, 3))
    metadata = dc.serialization.load_sharded_metadata(folder())
    note("metadata", {
        key: list(metadata[key].global_shape)
        for key in ("decoder.layers.mlp.linear_fc1.weight", "embedding.word_embeddings.weight")
    })  # fmt: skip
    note("objects", sorted(key for key in metadata if key.startswith(("rng", "stream"))))
    state = {**build(tp=2), **own_values(rank)}
    _, missing, unexpected = dc.load(state, folder(), strict="return_all")
    note("strict", [sorted(missing), sorted(unexpected)])
    plain = {}
    holdfast.load(BASE / SAVED, plain)
    note("plain", sorted(key for key in plain if "linear_fc1.weight" in key))


def fails(name, state, **options):
    """Note why a save is refused on each rank."""
    why = raised(lambda: save(state, "refused", validate_access_integrity=False, **options))
    everybody = [None] * RANKS
    dist.all_gather_object(everybody, why)
    note(name, everybody)


def refusals(rank):
    def shard(key="key", **more):
        return ShardedTensor.from_rank_offsets(key, torch.zeros(2), (0, rank, RANKS), **more)

    fails("reserved", {"x": shard("rank.key")})
    fails("hole", {"x": shard(replica_id=rank)})
    row = lambda at: ShardedTensor.from_rank_offsets(  # noqa: E731
        "rows", torch.zeros(1), (0, at, 4), replica_id=rank
    )
    fails("apart", {"x": [row(0), row(1)]})
    fails("pickle", {"x": ShardedObject("odd", Folder(), (1,), (0,))})
    fails("asynchronous", {"x": shard()}, async_sharded_save=True)
    dist.barrier()
    if rank == 0:
        (BASE / "mixed").mkdir()
    dist.barrier()
    save({"x": shard()}, "mixed")
    strategy = ours.HoldfastLoadStrategy()
    load = lambda state: raised(lambda: dc.load(state, folder("mixed"), strategy))  # noqa: E731
    note("missing", load({"x": shard("another")}))
    everybody = [None] * RANKS
    asked = {"x": shard("key" if rank else "another")}
    unchecked = {"validate_access_integrity": False}
    why = raised(lambda: dc.load(asked, folder("mixed"), strategy, **unchecked))
    dist.all_gather_object(everybody, why)
    note("missing on one", everybody)
    note("version", raised(lambda: strategy.check_version_compatibility(2)))
    other = ShardedTensor.from_rank_offsets("key", torch.zeros(3), (0, rank, RANKS))
    note("shape", load({"x": other}))
    flat = ShardedTensor.from_rank_offsets(
        "key", torch.zeros(2, 2), (0, rank, RANKS), allow_shape_mismatch=True
    )
    note("dims", load({"x": flat}))
    theirs = {"x": shard()}
    note("backend", raised(lambda: strategy.check_backend_compatibility("torch_dist")))
    if rank == 0:
        torch.save({"another": 1}, BASE / "mixed" / "common.pt")
    dist.barrier()
    note("mixed", load(theirs))


def wholeness(rank):
    """What would be a checkpoint that cannot be loaded, or lacks something, with no check else."""

    def tensor(data, shape, offset, key="key", **more):
        return ShardedTensor(
            key, data, data.dtype, tuple(data.shape), shape, offset, None, **more
        )  # fmt: skip

    def thing(data, key="thing", shape=(1,), **more):
        return ShardedObject(key, data, shape, (0,) * len(shape), **more)

    two = torch.ones(2)
    half = (2 * rank,)
    own = type("Own", (torch.Tensor,), {})
    for name, one in (
        ("no plain tensor", tensor(two.as_subclass(own), (2,), (0,), replica_id=rank)),
        ("hole and overlap", tensor(two, (4,), (0,))),
        ("dtypes", tensor(two.to((torch.float32, torch.bfloat16)[rank]), (4,), half)),
        ("shapes", tensor(two, (4 + rank,), half)),
        ("nobody", tensor(two, (2,), (0,), replica_id=1)),
        ("layer", tensor(two, (3, 2), (rank, 0), prepend_axis_num=1)),
        ("depths", tensor(two, (2 + rank, 2), (rank, 0), prepend_axis_num=1)),
        ("odd halves", [tensor(two, (5,), (begin,), replica_id=rank) for begin in (0, 2)]),
        (
            "uneven halves",
            [
                tensor(torch.ones(n), (6,), (begin,), replica_id=rank)
                for begin, n in ((0, 4), (4, 2))
            ],
        ),
        ("outside", tensor(two, (2,), (1,))),
        ("below", tensor(two, (2,), (-1,))),
        ("no such layer", tensor(two, (2, 2), (2, 0), prepend_axis_num=1)),
        ("sparse", tensor(torch.eye(2).to_sparse(), (2, 2), (0, 0), replica_id=rank)),
        ("unusable", tensor(two, (2,), (0,), key="a\ud800", replica_id=rank)),
        ("no object", thing(1, replica_id=1)),
        ("other objects", thing(rank)),
        ("objects of tensors", thing(two)),
        ("slash", thing(1, key="a/b", replica_id=rank)),
        ("own name", thing(1, key="rank.0", replica_id=rank)),
        ("no shape", thing(1, shape=(), replica_id=rank)),
        ("two objects", [thing(1, replica_id=rank), thing(2, replica_id=rank)]),
        ("subclass", thing(two.as_subclass(own), replica_id=rank)),
        ("subclass of a stream", thing(type("Own", (io.BytesIO,), {})(), replica_id=rank)),
    ):
        fails(name, {"x": one})

    mine = {"a.b": two, "a": {"b": 2 * two}, 1: 3 * two, "1": 4 * two}
    state = lambda: {  # noqa: E731
        "thing": thing(mine, replica_id=rank),
        "x": tensor(two * rank, (np.int64(2),) * 2, (np.int64(rank), np.int64(0)), "np",
                    prepend_axis_num=1),
        "stream": thing(io.BytesIO(b"bytes"), key="stream", replica_id=rank),
        "tied": [tensor(two.clone(), (2,), (0,), key="tied", replica_id=rank) for _ in "ab"],
        "empty": tensor(torch.ones(4 * rank), (4,), (0,), key="empty"),
    }  # fmt: skip
    save(state(), "whole", validate_access_integrity=False)
    asked = state()
    asked["x"].data = None  # it gets memory
    for shard in asked["tied"]:
        shard.data = torch.zeros(2)
    found = dc.load(asked, folder("whole"), ours.HoldfastLoadStrategy(),
                    validate_access_integrity=False)  # fmt: skip
    note("one path", [tensor.tolist() for tensor in (
        found["thing"]["a.b"], found["thing"]["a"]["b"], found["thing"][1], found["thing"]["1"]
    )])  # fmt: skip
    note("twice", [found["stream"].read() == b"bytes", *(one.tolist() for one in found["tied"])])
    note("others", [found["x"].tolist(), found["empty"].tolist()])


def hostile(rank):
    """Texts that nobody of ours has written, in a checkpoint whose digests are right."""
    text = blobs.Static(objects={}, aliases={}, world_size=1).encode()
    for name, value in (("refers", {"$ref": "none"}), ("bytes", 7)):
        key = "x/shard_0_1" + STREAM * (name == "bytes")
        tree = blobs.join(text, blobs.Live(tree={key: value}).encode())
        asked = {"x": ShardedObject("x", None, (1,), (0,))}
        note(name, raised(lambda: Load({}, tree).load(asked, list)))  # noqa: B023
    note("keys", sorted(keys_of({
        "a": (1,), "b/part_0_of_2_along_7": (1,), "c/else": (1,), "d/part_0_of_2_along_0": (3,)
    }).items()))  # fmt: skip
    (BASE / "mixed" / "common.pt").unlink(missing_ok=True)
    note("no common part", raised(
        lambda: ours.HoldfastLoadStrategy().load_tensors_metadata(BASE / "mixed")
    ))  # fmt: skip


def the_contract(rank):
    """Collect what the installed version is like where we rely upon it."""
    parameters = lambda call: list(inspect.signature(call).parameters)  # noqa: E731
    fields = lambda kind: [field.name for field in dataclasses.fields(kind)]  # noqa: E731
    note("fields", [fields(ShardedTensor), fields(ShardedObject)])
    note("methods", {
        f"{theirs.__name__}.{name}": [
            parameters(getattr(theirs, name)), parameters(getattr(mine, name))
        ]
        for theirs, mine in (
            (base.SaveShardedStrategy, ours.HoldfastSaveStrategy),
            (base.LoadShardedStrategy, ours.HoldfastLoadStrategy),
        )
        for name in theirs.__abstractmethods__ | {"load_sharded_metadata"} & set(dir(theirs))
    })  # fmt: skip
    note("calls", [parameters(dc.save), parameters(dc.load)])
    note("registry", parameters(base.register_default_strategy))
    note("main", [is_main_replica(of) for of in (0, (0, 0), 1, (0, 1), (1, 0))])
    one = ShardedObject("key", None, (3, 2), (1, 0))
    note("unique key", [one.unique_key, one == ShardedObject.empty_from_unique_key(one.unique_key)])
    note("files", [COMMON_STATE_FNAME, CONFIG_FNAME])
    seen = []

    class Looking(Folder):
        def save(self, folder, world, saved, tree):
            dist.barrier()
            seen.append(sorted(path.name for path in Path(folder).iterdir()))
            dist.barrier()
            super().save(folder, world, saved, tree)

    save({"x": ShardedObject("x", 1, (RANKS,), (rank,))}, "order",
         ours.HoldfastSaveStrategy(Looking()))  # fmt: skip
    note("order", seen)


def in_memory(rank):
    """Ranks are killed once the third save is committed, before Megatron has written its own."""
    os.environ["HOLDFAST_LAUNCH"] = "test"  # a restart by the same launcher
    job = ours.HoldfastJob("gpt", replicas=1)
    note("new", job.restores is None)

    class Deadly:
        def save(self, *given):
            job._memory.save(*given)
            job.newest.wait("replicated")
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    for step in (1, 2):
        save({**fill(build(tp=2), step), **own_values(rank)}, f"job_{step}", job.save_strategy)
    note("backwards", raised(lambda: save(build(tp=2), "job_2", job.save_strategy)))
    state = {**fill(build(tp=2), 3), **own_values(rank)}
    save(state, "job_3", ours.HoldfastSaveStrategy(Deadly()))


def from_memory(rank):
    os.environ["HOLDFAST_LAUNCH"] = "test"  # a restart by the same launcher
    with ours.HoldfastJob("gpt", replicas=1) as job:
        state = build(tp=1)
        load = lambda step: dc.load(  # noqa: E731
            {**state, **own_values(rank)}, folder(f"job_{step}"), job.load_strategy
        )
        note("not loaded", raised(lambda: save(build(tp=1), "job_4", job.save_strategy)))
        note("another step", raised(lambda: load(2)))
        dc.serialization.load_sharded_metadata(folder("job_3"), job.load_strategy)
        note("only looked at", raised(lambda: save(build(tp=1), "job_4", job.save_strategy)))
        load(job.restores.step)
        note("from memory", [job.restores.step, wrong(state, 3)])
        note("holds", [path.name for path in sorted((BASE / "job_3").iterdir())])
        save(fill(build(tp=1), 4), "job_4", job.save_strategy)
        note("goes on", job.newest.step)


def run(work, expected=0):
    """Do it on two ranks."""
    group, children = BASE / f"group-{work.__name__}", []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os._exit(_rank(rank, work, group))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if expected not in codes or (expected == 0 and any(codes)):
        sys.exit(f"{work.__name__} ended with {codes}")


def _rank(rank, work, group):
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE="1")
        os.environ["HOLDFAST_AGENT"] = AGENTS[rank]
        dist.init_process_group("gloo", f"file://{group}", rank=rank, world_size=RANKS)
        work(rank)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def whole(rank):
    for work in (
        restored, another_number_of_rows, by_name, refusals, wholeness, hostile, the_contract
    ):  # fmt: skip
        work(rank)


def main():
    run(saved_and_killed, -signal.SIGKILL)
    run(whole)
    run(in_memory, -signal.SIGKILL)
    run(from_memory)
    lines = (BASE / "report.jsonl").read_text().splitlines()
    (BASE / "report.json").write_text(json.dumps(dict(map(json.loads, lines))))


main()
