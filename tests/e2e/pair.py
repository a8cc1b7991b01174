"""One rank with two Checkpointers: a generator and a critic, each a role of one job.

Prints ``restored <role> <step>``, ``step <n> -`` while it runs, ``final <sha256>`` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time

import torch
from torch import nn

import holdfast

ROLES = ("generator", "critic")


def network() -> nn.Sequential:
    """Dropout makes the random stream matter."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8))


def main() -> None:
    """Train both against each other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="pair")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--preemption", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(11)
    torch.set_num_threads(1)
    save = holdfast.OnPreemption(grace_s=20) if options.preemption else holdfast.EverySteps(1)
    networks = {role: network() for role in ROLES}
    optimizers = {
        role: torch.optim.AdamW(net.parameters(), lr=1e-2) for role, net in networks.items()
    }
    keepers = {
        role: holdfast.Checkpointer(
            options.job,
            {"model": networks[role], "optimizer": optimizers[role]},
            role=role, save=save, replicas=0,
        )
        for role in ROLES
    }  # fmt: skip
    begun = set()
    for role, keeper in keepers.items():
        restored = keeper.restore()
        begun.add(restored.step if restored else 0)
        print(f"restored {role} {restored.step if restored else 0}", flush=True)
    for step in range(min(begun) + 1, options.steps + 1):
        noise = torch.randn(16, 8)
        for role, sign in zip(ROLES, (1.0, -1.0), strict=True):
            made = networks["generator"](noise)
            loss = sign * networks["critic"](made).square().mean()
            optimizers[role].zero_grad()
            loss.backward()
            optimizers[role].step()
        time.sleep(options.pause_s)
        handles = [keeper.step(step) for keeper in keepers.values()]
        for handle in handles:
            if handle is not None:
                handle.wait("local", timeout_s=30)
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"step {step} -", flush=True)
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for net in networks.values():
        for parameter in net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    print(f"final {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
