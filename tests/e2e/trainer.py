"""A rank of the end-to-end tests: trains a small model that exercises one kind of state.

Prints ``step <n> <level> <loss>`` lines while it runs and, at the end, one ``final <sha256>`` over
everything that training could have changed. ``--kill-at`` makes it SIGKILL itself at that step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import CheckpointError
from holdfast.snapshot import engine, optimizer_gate

WIDTH = 64
SAMPLES = 96
BATCH = 8
HELD_S_MAX = 30.0


class Net(nn.Module):
    """Dropout makes RNG matter, BatchNorm writes buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one number per sample."""
        output: torch.Tensor = self.layers(inputs)
        return output


def dataset() -> torch.utils.data.TensorDataset:
    """Return the same samples in every process, without touching the global generator."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


class Training:
    """Model, update rule and loader of one scenario, and the mapping that is saved."""

    def __init__(self, scenario: str, ddp: str = "{}", ballast_mib: int = 0) -> None:
        self.scenario = scenario
        net: nn.Module = Net()
        distributed = dist.is_initialized() and scenario != "apart"
        self.model = (
            nn.parallel.DistributedDataParallel(net, **json.loads(ddp)) if distributed else net
        )
        loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH, shuffle=True)
        self.loader = holdfast.ResumableLoader(loader)
        self.state: dict[str, object] = {"model": self.model, "loader": self.loader}
        if ballast_mib:  # so that a part of the state is a part of the bytes, too
            self.state["ballast"] = torch.randn(ballast_mib << 18)
        self.gate: Callable[[], None] = lambda: None
        self.begin: Callable[[], None] = lambda: None  # what a step does first
        self.end: Callable[[], None] = lambda: None  # and last, after the save has begun
        self.updated: Callable[[], None] = lambda: None  # told after each update
        self._update = getattr(self, f"_make_{scenario}")(net)

    def update(self) -> None:
        """Change the parameters by the scenario's rule; gradients are ready."""
        self._update()

    def _stepping(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        self.state["optimizer"] = optimizer

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return update

    def _make_adamw(self, net: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.state["schedule"] = schedule
        step = self._stepping(optimizer)

        def update() -> None:
            step()
            schedule.step()

        return update

    _make_apart = _make_adamw  # each rank has a model of its own

    def _make_fused(self, net: nn.Module) -> Callable[[], None]:
        weight = net.layers[4].weight
        weight.data = weight.data.t().contiguous().t()  # its moments must lie as it does
        return self._stepping(torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))

    def _make_in_backward(self, net: nn.Module) -> Callable[[], None]:
        optimizers = {
            name: torch.optim.Adam([parameter], lr=1e-2)
            for name, parameter in net.named_parameters()
        }
        for name, parameter in net.named_parameters():

            def fire(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizers[name]) -> None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            parameter.register_post_accumulate_grad_hook(fire)
        self.state["optimizers"] = optimizers
        return lambda: None

    def _make_ema(self, net: nn.Module) -> Callable[[], None]:
        averaged = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
        step = self._stepping(torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9))
        self.state["ema"] = averaged

        def update() -> None:
            step()
            averaged.update_parameters(net)

        return update

    def _make_swapped(self, net: nn.Module) -> Callable[[], None]:
        """As scripts evaluate an average: it is the parameters' ``.data`` for a while."""
        update = self._make_ema(net)
        averaged = cast("nn.Module", self.state["ema"])

        def evaluate() -> None:
            before = [parameter.data for parameter in net.parameters()]
            for parameter, mean in zip(net.parameters(), averaged.parameters(), strict=True):
                parameter.data = mean.data.clone()
            self.updated()
            for parameter, data in zip(net.parameters(), before, strict=True):
                parameter.data = data

        self.end = evaluate
        return update

    def _make_by_hand(self, net: nn.Module) -> Callable[[], None]:
        """An optimizer, and at the beginning of each step a write that only the gate knows of."""

        def decay() -> None:
            self.gate()
            for parameter in net.parameters():
                parameter.data.mul_(1 - 1e-2 * random.random())
            self.updated()

        self.begin = decay
        return self._stepping(torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9))

    def _make_frozen(self, net: nn.Module) -> Callable[[], None]:
        """A momentum encoder: its optimizer has all parameters, and forward moves the frozen."""
        key = copy.deepcopy(net).requires_grad_(requires_grad=False)
        self.state["key"] = key

        def follow() -> None:
            for slow, fast in zip(key.parameters(), net.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)

        self.begin = follow
        both = [*net.parameters(), *key.parameters()]
        return self._stepping(torch.optim.SGD(both, lr=1e-2, momentum=0.9))


def hold_copies(training: Training) -> None:
    """Keep every copy in flight until the next update waits for it, or is over without a wait.

    So a copy that nothing protects is always torn. Prints ``held <step>`` for each.
    """
    go = threading.Event()
    begin, copy_deferred = engine.CopyEngine.begin, engine.CopyEngine._copy_deferred
    wait, let_pass = engine.CopyEngine.wait, engine.CopyEngine.let_pass
    copiers: list[engine.CopyEngine] = []

    def beginning(self: engine.CopyEngine, *arguments: object, **options: object) -> object:
        go.clear()
        copiers[:] = [self]
        return begin(self, *arguments, **options)

    def copying(self: engine.CopyEngine, snapshot: engine.Snapshot) -> None:
        assert go.wait(HELD_S_MAX)
        print(f"held {snapshot.step}", flush=True)
        copy_deferred(self, snapshot)

    def waiting(self: engine.CopyEngine, timeout_s: float) -> bool:
        if self.busy:
            go.set()
        return wait(self, timeout_s)

    def passing(self: engine.CopyEngine, timeout_s: float) -> bool:
        go.set()
        return let_pass(self, timeout_s)

    def updated() -> None:
        go.set()
        assert all(wait(copier, HELD_S_MAX) for copier in copiers)

    engine.CopyEngine.begin, engine.CopyEngine._copy_deferred = beginning, copying
    engine.CopyEngine.wait, engine.CopyEngine.let_pass = waiting, passing
    training.updated = updated


def disturb(training: Training, options: argparse.Namespace) -> None:
    """Do to the copy thread what is asked for."""
    if options.hang_copies:
        hang_copies()
    if options.hold_copies:
        hold_copies(training)


def endless(loader: holdfast.ResumableLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def fingerprint(training: Training) -> str:
    """Return a digest of all that training could have changed."""
    digest = hashlib.sha256()
    holders = [v for v in training.state.values() if hasattr(v, "state_dict")]
    extra = training.state.get("optimizers")
    holders += list(extra.values()) if isinstance(extra, dict) else []
    for holder in holders:
        if not isinstance(holder, holdfast.ResumableLoader):
            _absorb(digest, copy.deepcopy(holder.state_dict()))
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    return digest.hexdigest()


def shared(training: Training) -> str:
    """Return a digest of what all ranks have in common."""
    digest = hashlib.sha256()
    # With one rank there is no wrapper: the names would differ.
    net = getattr(training.model, "module", training.model)
    _absorb(digest, dict(net.state_dict()))
    _absorb(digest, cast("torch.optim.Optimizer", training.state["optimizer"]).state_dict()
            if "optimizer" in training.state else None)  # fmt: skip
    return digest.hexdigest()


def learned(training: Training) -> str:
    """Return a digest of the parameters, which all ranks of DDP have the same; not so buffers."""
    digest = hashlib.sha256()
    _absorb(digest, list(training.model.parameters()))
    return digest.hexdigest()


def _absorb(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                      if value.ndim else repr(value.item()).encode())  # fmt: skip
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _absorb(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _absorb(digest, item)
    else:
        digest.update(repr(value).encode())


def policy(text: str) -> holdfast.policy.Policy:
    """Return the save policy that ``text`` names."""
    if text == "seconds":
        return holdfast.EverySeconds(0.3)
    if text == "preemption":
        return holdfast.OnPreemption(grace_s=20)
    if text == "exit":
        return holdfast.AtExit()
    if text == "never":
        return holdfast.Never()
    return holdfast.EverySteps(int(text))


def hang_copies() -> None:
    """Let the copy thread hang at its first copy, for good; the gate waits 1 s for it."""
    copy_chunk = engine.torch._foreach_copy_
    optimizer_gate.Gate.__init__.__kwdefaults__["gate_s_max"] = 1.0

    def hang(*arguments: list[torch.Tensor]) -> None:
        if threading.current_thread().name == engine.THREAD_NAME:
            threading.Event().wait()
        copy_chunk(*arguments)

    engine.torch._foreach_copy_ = hang


def settle(handle: holdfast.SaveHandle | None, level: str) -> None:
    """Wait for ``level``, if there is one and a save; an abandoned one costs steps, not bits."""
    if handle is not None and level:
        with contextlib.suppress(CheckpointError):
            handle.wait(level, timeout_s=30)


def train(options: argparse.Namespace) -> None:
    """Train to ``options.steps``; prints as the module says."""
    torch.manual_seed(11)
    random.seed(11)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    training = Training(options.scenario, options.ddp, options.ballast_mib)
    disturb(training, options)
    checkpointer = holdfast.Checkpointer(
        options.job, training.state, save=policy(options.save),
        replicas=holdfast.Parity(*options.parity) if options.parity else options.replicas,
        takeover=options.takeover,
        persist=holdfast.EverySteps(options.persist) if options.persist else None,
        keep=holdfast.Retention(last=options.keep_last) if options.keep_last else None,
    )  # fmt: skip
    training.gate = checkpointer.before_update
    restored = checkpointer.restore(only=options.only or None)
    begin = restored.step if restored else 0
    sources = dict(restored.sources) if restored else {}
    print(f"rank {rank} of {os.environ.get('MASTER_ADDR', 'nowhere')}", flush=True)
    print(f"restored {begin} {sources}", flush=True)
    print(f"loaded {shared(training)} {torch.get_rng_state().sum()}", flush=True)
    handle = None
    batches = endless(training.loader)
    for step in range(begin + 1, options.steps + 1):
        while options.until_told and step == options.steps and not options.until_told.exists():
            time.sleep(0.05)
        inputs, targets = next(batches)
        training.begin()
        loss = nn.functional.mse_loss(training.model(inputs), targets)
        if step == options.kill_at and rank in options.kill_ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        if step == options.fail_at:
            raise RuntimeError("a bug in the training script")
        training.update()
        training.updated()
        if step == options.request_at and rank == 0:
            checkpointer.request_save()
        time.sleep(options.pause_s * (1 + rank * options.skew))
        settle(handle, options.wait if options.hold_copies else "")  # the update has ended its copy
        handle = checkpointer.step(step, notes={"loss": loss.item()})
        training.end()
        if handle is not None and options.wait and not options.hold_copies:
            handle.wait(options.wait, timeout_s=30)
        if handle is not None and step in options.wait_durable:
            handle.wait("durable", timeout_s=60)
        print(f"step {step} {handle.level if handle else '-'} {loss.item()}", flush=True)
    print(f"left {shared(training)} {torch.get_rng_state().sum()}", flush=True)
    print(f"learned {learned(training)}", flush=True)
    print(f"final {fingerprint(training)}", flush=True)
    if options.save.isdigit():
        checkpointer.close(options.close_s)


def main() -> None:
    """Parse, train; an error of ours ends in one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="job")
    parser.add_argument("--scenario", default="adamw")
    parser.add_argument("--ddp", default="{}")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--ballast-mib", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", default="1")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--parity", type=int, nargs=2, default=())
    parser.add_argument("--wait", default="")
    parser.add_argument("--persist", type=int, default=0)
    parser.add_argument("--keep-last", type=int, default=0)
    parser.add_argument("--wait-durable", type=int, nargs="*", default=[])
    parser.add_argument("--close-s", type=float, default=30.0)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--until-told", type=Path, help="no last step before this file is there")
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--request-at", type=int, default=0)
    parser.add_argument("--kill-ranks", type=int, nargs="*", default=[0])
    parser.add_argument("--hold-copies", action="store_true")
    parser.add_argument("--hang-copies", action="store_true")
    parser.add_argument("--takeover", action="store_true")
    try:
        train(parser.parse_args())
    except CheckpointError as error:
        print(f"refused {error.kind}: {error}", flush=True)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
