"""What the tests of DeepSpeed look at, done by forked ranks of one parent; writes a report.

``python scenarios.py FOLDER`` leaves ``report.json`` in the folder: by name of a check, what was
found, as rank 0 saw it. A rank that fails ends the whole.
"""

import inspect
import json
import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer

import torch
import torch.distributed as dist
import trainings as t
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from holdfast.bucket.holding import remove
from holdfast.integrations import deepspeed as ours
from holdfast.integrations.deepspeed import committing
from holdfast.objectstore.folders import exchange

BASE = Path(sys.argv[1])
SAVED = 2
"""The ranks that save."""
STEPS, LATER = range(3), range(3, 5)
ELASTIC = {3: ((1, 3), (2, 2), (3, 1), (3, 3)), 4: ((2, 3), (3, 2)), 1: ((1, 2), (3, 3))}
"""By number of ranks that load: the stage that saved, the stage that loads."""


def client(rank):
    return {
        "epoch": 3, "rng": torch.get_rng_state(), "rank": rank, "text": ("a", b"b", {1: 2}),
        "a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2),
    }  # fmt: skip


def note(rank, name, found):
    if rank == 0:
        with (BASE / "report.jsonl").open("a") as file:
            file.write(json.dumps([name, found]) + "\n")


def raised(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hold_copies(engine):
    """Have the thread that copies wait until the event is set."""
    event = Event()
    engine.checkpoint_engine._copies._pool.submit(event.wait)
    return event


def save_and_load_where_it_was(rank):
    for stage in (1, 2, 3):
        engine = t.make(stage)
        folder = str(BASE / f"stage{stage}")
        engine.save_checkpoint(folder, tag="first")  # from here on steps are seen to be announced
        t.train(engine, STEPS)
        copy = hold_copies(engine)
        engine.save_checkpoint(folder, client_state=client(rank))
        before = t.truth(engine)
        Timer(0.2, copy.set).start()
        t.train(engine, LATER)  # what is saved is as it was at the call: the first step waits
        ours.wait(engine)
        note(rank, f"waited {stage}", engine.checkpoint_engine.waited_s > 0)
        after = t.truth(engine)
        if rank == 0:
            torch.save(before, BASE / f"truth{stage}")
        engine.destroy()
        again = t.make(stage, seed=5)
        path, state = again.load_checkpoint(folder)
        note(rank, f"same {stage}", t.differences(before, t.truth(again)))
        note(rank, f"client {stage}", [
            state["epoch"], list(state["text"][2]), path is not None,
            int(state["a"]["b"]), int(state["a.b"]),
        ])  # fmt: skip
        t.train(again, LATER)
        note(rank, f"later {stage}", t.differences(after, t.truth(again)))
        again.destroy()


def elastic(size):
    def work(rank):
        for saved, stage in ELASTIC[size]:
            engine = t.make(stage, seed=5)
            engine.load_checkpoint(str(BASE / f"stage{saved}"))
            truth = torch.load(BASE / f"truth{saved}", weights_only=False)
            note(rank, f"elastic {saved}->{stage} on {size}", t.differences(truth, t.truth(engine)))
            engine.destroy()

    return work


def other_kinds(rank):
    for name, stage, more in (
        ("stage 0", 0, {"dtype": "fp32"}),
        ("offload 2", 2, {"offload_optimizer": {"device": "cpu"}}),
        (
            "offload 3",
            3,
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
        ("loss scaler", 2, {}),
        ("fp32", 1, {"dtype": "fp32", "round_robin_gradients": True}),
    ):
        engine = t.make(stage, **more)
        t.train(engine, STEPS)
        if name == "loss scaler":  # on CPU there is no fp16, which would have made one
            engine.optimizer.loss_scaler = DynamicLossScaler(64.0, 3, 1, 2, False)
            engine.optimizer.loss_scaler.update_scale(True)
        folder = str(BASE / name.replace(" ", "-"))
        engine.save_checkpoint(folder)
        before = t.truth(engine)
        again = t.make(stage, seed=5, **more)
        ours.wait(engine)
        again.load_checkpoint(folder)
        note(rank, name, t.differences(before, t.truth(again)))
        if name == "loss scaler":
            note(rank, "the scaler", before["plain"]["scaler"])
        engine.destroy()
        again.destroy()


def the_contract(rank):
    engine = t.make(2)
    kind, served = type(engine.checkpoint_engine), engine.checkpoint_engine
    named = [n for n, _ in inspect.getmembers(CheckpointEngine, inspect.isfunction) if n[0] != "_"]
    unlike = [
        name
        for name in named
        if list(inspect.signature(getattr(kind, name)).parameters)
        != list(inspect.signature(getattr(CheckpointEngine, name)).parameters)
    ]
    note(rank, "methods", [named, unlike, sorted(CheckpointEngine.__abstractmethods__)])
    info = CheckpointCommitInfo(tag="x", save_dir=str(BASE / "contract"), save_latest=False)
    served.makedirs(str(BASE / "contract"), exist_ok=True)
    served.create(info)
    note(rank, "answers", [
        served.name, served.is_decoupled(), served.is_data_parallel_writer(1),
        served.get_commit_info(), served.set_commit_info(info), served.commit(info),
        served.preserves_storage_sharing(), served.cleanup(),
    ])  # fmt: skip
    note(rank, "not a file", raised(lambda: served.load(str(BASE / "contract/x/some.bin"))))
    engine.destroy()


def one_engine_after_initialize(rank):
    """Without ``install()`` before; then DeepSpeed's own files beside ours."""
    engine = t.make(2)
    note(rank, "its own", type(engine.checkpoint_engine).__name__)
    t.train(engine, STEPS)
    theirs, mine = str(BASE / "theirs"), str(BASE / "mine")
    engine.save_checkpoint(theirs)
    ours.install(engine)
    engine.save_checkpoint(mine)
    before = t.truth(engine)
    ours.wait(engine)
    again = t.make(2, seed=5)
    ours.install(again)
    again.load_checkpoint(mine)
    note(rank, "after initialize", t.differences(before, t.truth(again)))
    note(rank, "a pickle", raised(lambda: again.load_checkpoint(theirs)))
    engine.destroy()
    again.destroy()


def one_for_all_ranks(rank):
    """Rank 0 has opened the checkpoint when another takes its place, and rank 1 comes late."""
    engine, folder = t.make(2), BASE / "replaced"
    for tag in ("before", "after"):
        t.train(engine, STEPS)
        engine.save_checkpoint(str(folder), tag=tag)
        ours.wait(engine)
    before, truth = folder / "before", t.truth(engine)
    again = t.make(2, seed=5)
    served = again.checkpoint_engine
    opened = served.opened

    @contextmanager
    def opened_early(*args, **named):
        served.opened = opened
        with opened(*args, **named) as saved:
            dist.barrier()
            yield saved

    @contextmanager
    def opened_anew(*args, **named):
        served.opened = opened
        dist.barrier()
        exchange(folder / "after", before)
        remove(folder / "after")
        with opened(*args, **named) as saved:
            yield saved

    served.opened = opened_anew if rank == 1 else opened_early
    again.load_checkpoint(str(folder), tag="before")
    note(rank, "one for all", t.differences(truth, t.truth(again)))
    for made in (engine, again):
        made.destroy()


def sixteen_bit(rank):
    for stage in (2, 3):
        engine = t.make(
            stage, **({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {})
        )
        t.train(engine, STEPS)
        engine.save_16bit_model(str(BASE / f"bit16-{stage}"))
        truth = t.truth(engine)
        if rank == 0:
            file = torch.load(BASE / f"bit16-{stage}/pytorch_model.bin", weights_only=True)
            weights = {
                n.removeprefix("weights."): v for n, v in truth.items() if n[:8] == "weights."
            }
            note(
                rank,
                f"bit16 {stage}",
                [n for n, v in weights.items() if not torch.equal(v, file[n])],
            )
        dist.barrier()
        engine.destroy()


def failures(rank):
    engine = t.make(2)
    t.train(engine, STEPS)
    folder = BASE / "failures"
    engine.save_checkpoint(str(folder), tag="good")
    ours.wait(engine)
    # One rank has something that only pickle could express: no rank stops, and nothing changes.
    bad = {"odd": lambda: None} if rank == 0 else {}
    engine.save_checkpoint(str(folder), tag="bad", client_state=bad)
    t.train(engine, LATER)
    note(rank, "why", raised(lambda: ours.wait(engine)))
    note(rank, "latest", (folder / "latest").read_text())
    note(
        rank,
        "no manifest",
        [
            (folder / "bad" / "manifest.json").exists(),
            any(path.suffix == ".pt" for path in (folder / "bad").iterdir()),
        ],
    )
    note(rank, "torn", raised(lambda: engine.load_checkpoint(str(folder), tag="bad")))
    before = t.truth(engine)
    engine.save_checkpoint(str(folder), tag="next")
    ours.wait(engine)
    note(rank, "goes on", (folder / "latest").read_text())
    engine.save_checkpoint(str(folder), tag="next")  # over the one that is there
    ours.wait(engine)
    again = t.make(3, seed=5)
    again.load_checkpoint(str(folder))
    note(rank, "after a failure", t.differences(before, t.truth(again)))
    again.destroy()
    ours.install(engine, on_failure="raise")
    engine.save_checkpoint(str(folder), tag="bad", client_state=bad)
    told = [bool(raised(lambda: engine.save_checkpoint(str(folder), tag="told"))) for _ in "12"]
    note(rank, "raised", told)
    os.chdir(folder)
    engine.save_checkpoint("near", tag="here")
    os.chdir(BASE)
    ours.wait(engine)
    note(rank, "left", (folder / "near/here/manifest.json").is_file())
    engine.destroy()


class OneEach(torch.optim.SGD):
    """Keeps three values for each tensor, whatever its size, as optimizers by blocks do."""

    def step(self, closure=None):
        for weights in self.param_groups[0]["params"]:
            self.state[weights].setdefault("blocks", torch.zeros(3))
        return super().step(closure)


def a_save_that_does_not_end(rank):
    engine = t.make(2)
    t.train(engine, STEPS)
    folder, served = BASE / "hangs", engine.checkpoint_engine
    event, deadline_s = Event(), committing.COMMIT_S_MAX
    served._background.begin("what hangs", event.wait)
    committing.COMMIT_S_MAX = 0.1
    engine.save_checkpoint(str(folder), tag="left out")
    committing.COMMIT_S_MAX = deadline_s
    t.train(engine, LATER)
    event.set()
    engine.save_checkpoint(str(folder), tag="next")
    ours.wait(engine)
    note(rank, "after one that hung", sorted(p.parent.name for p in folder.glob("*/manifest.json")))
    engine.destroy()


def cannot_be_written(rank):
    """By rank 0 alone, which nobody could hear of in the folder."""
    engine = t.make(2)
    t.train(engine, STEPS)
    (BASE / "blocked").touch()
    engine.save_checkpoint(str(BASE / "blocked/x"))
    t.train(engine, LATER)
    note(1 - rank, "blocked", raised(lambda: ours.wait(engine)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:  # as a full disk: the smaller files of the process group still grow
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    engine.save_checkpoint(str(BASE / "full"), client_state={"big": torch.zeros(1 << 20)})
    t.train(engine, LATER)
    why = raised(lambda: ours.wait(engine))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    note(1 - rank, "full", why)
    engine.save_checkpoint(str(BASE / "full"), tag="next")
    ours.wait(engine)
    note(rank, "after a full disk", (BASE / "full/latest").read_text())
    note(rank, "scripts", [str(p) for p in (BASE / "full").glob("*.py")])
    engine.destroy()


def weights_alone(size):
    def work(rank):
        for saved in (1, 3):
            truth = torch.load(BASE / f"truth{saved}", weights_only=False)
            for asked in ({"load_module_only": True}, {"load_optimizer_states": False}):
                engine = t.make(3, seed=5)
                t.train(engine, range(1))  # moments, which stay
                wanted = t.truth(engine)
                engine.load_checkpoint(str(BASE / f"stage{saved}"), **asked)
                for name in wanted:
                    if name.startswith(("weights.", "buffer.")):
                        wanted[name] = truth[name]
                    elif name.startswith("fp32."):
                        wanted[name] = truth[name.replace("fp32.", "weights.")].float()
                if not asked.get("load_module_only"):
                    # The rate is the optimizer's until the next step of the schedule.
                    kept = {key: wanted["plain"][key] for key in ("steps", "scaler", "lr")}
                    wanted["plain"] = truth["plain"] | kept
                found = t.differences(wanted, t.truth(engine))
                note(rank, f"{next(iter(asked))} {saved} on {size}", found)
                t.train(engine, STEPS)
                engine.destroy()

    return work


def values_that_differ(rank):
    """A value that is one for all parameters, and which ranks, or parts of one rank, have apart."""
    for name, stage, more in (("rank", 2, {}), ("part", 3, {"sub_group_size": 60})):
        engine = t.make(stage, **more)
        t.train(engine, STEPS)
        for number, state in enumerate(engine.optimizer.optimizer.state.values()):
            state["seen"] = torch.tensor(float(rank if name == "rank" else number))
        engine.save_checkpoint(str(BASE / f"differ-{name}"))
        note(rank, f"differ {name}", raised(lambda at=engine: ours.wait(at)))
        engine.destroy()
    engine = t.make(2)
    t.train(engine, STEPS)
    engine.optimizer.optimizer.param_groups[1]["d"] = 0.1 * rank
    engine.save_checkpoint(str(BASE / "differ-group"))
    note(rank, "differ group", raised(lambda: ours.wait(engine)))
    engine.destroy()


def refusals(rank):
    odd = t.make(2)
    odd.optimizer.optimizer = OneEach(odd.optimizer.optimizer.param_groups, lr=0.1)
    odd.optimizer.optimizer.step()
    odd.save_checkpoint(str(BASE / "odd"))
    note(rank, "odd state", raised(lambda: ours.wait(odd)))
    odd.destroy()
    note(rank, "elastic config", raised(lambda: t.make(2, elastic_checkpoint=True)))
    zero = t.make(2)
    note(rank, "no zero", raised(lambda: zero.load_checkpoint(str(BASE / "stage-0"))))
    zero.destroy()


def main():
    run = lambda size, work: sum(t.run(size, work, BASE)) and sys.exit(f"{work.__name__} failed")  # noqa: E731
    run(SAVED, one_engine_after_initialize)
    ours.install()
    ours.install(on_failure="warn")
    for work in (save_and_load_where_it_was, other_kinds):
        run(SAVED, work)
    for size in ELASTIC:
        run(size, elastic(size))
    for size in (SAVED, 3):
        run(size, weights_alone(size))

    def the_rest(rank):
        for work in (
            the_contract, one_for_all_ranks, sixteen_bit, failures, a_save_that_does_not_end,
            cannot_be_written, values_that_differ, refusals,
        ):  # fmt: skip
            work(rank)

    run(SAVED, the_rest)
    lines = (BASE / "report.jsonl").read_text().splitlines()
    (BASE / "report.json").write_text(json.dumps(dict(map(json.loads, lines))))


main()
