"""The smallest training loop that survives being killed: run it, kill it, run it again.

Nothing needs to be started: with no service configured Holdfast starts its own on this machine.
"""

from __future__ import annotations

import torch

import holdfast

STEPS = 5000


def main() -> None:
    """Fit a line to noise, saving every tenth step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer("minimal", state, save=holdfast.EverySteps(10)) as ck:
        restored = ck.restore()
        for step in range(restored.step if restored else 0, STEPS):
            inputs = torch.randn(32, 64)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ck.step(step + 1)
            if (step + 1) % 500 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
