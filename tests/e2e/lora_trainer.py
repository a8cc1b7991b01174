"""One rank that trains low-rank additions to weights that do not learn.

Prints ``restored <step> <sha256>``, ``step <n> <bytes of the segment> <bytes not copied>`` for each
replicated step, and ``final <n> <sha256>``.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn

import holdfast

SIZE, LAYERS, RANK = 2048, 4, 5


class Adapted(nn.Module):
    """A layer whose weight stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE, bias=False).requires_grad_(requires_grad=False)
        self.down = nn.Linear(SIZE, RANK, bias=False)
        self.up = nn.Linear(RANK, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.base(x) + self.up(self.down(x))


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all values."""
    digest = hashlib.sha256()
    state = [*model.state_dict().values()]
    for kept in optimizer.state.values():
        state += kept.values()
    for tensor in state:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Train to a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="lora")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--declared", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    if options.declared:
        holdfast.frozen(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    state = {"model": model, "optimizer": optimizer}
    keeper = holdfast.Checkpointer(options.job, state, save=holdfast.Never(), replicas=1)
    restored = keeper.restore()
    begun = restored.step if restored else 0
    print(f"restored {begun} {fingerprint(model, optimizer)}", flush=True)
    for step in range(begun + 1, options.steps + 1):
        optimizer.zero_grad()
        model(torch.randn(2, SIZE)).square().mean().backward()
        optimizer.step()
        keeper.save(step).wait("replicated", timeout_s=60)
        snapshot = keeper._saver._performer.latest
        print(f"step {step} {snapshot.plan.length_bytes} {snapshot.kept_bytes}", flush=True)
    print(f"final {options.steps} {fingerprint(model, optimizer)}", flush=True)
    keeper.close()


if __name__ == "__main__":
    main()
