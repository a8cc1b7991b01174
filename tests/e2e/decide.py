"""A rank that builds its model from the notes of the step that it will restore.

Prints ``decided <step> <width>``, why calls were refused, ``begins <step> <sum of its weights>``,
and ``ends`` with the same.
"""

from __future__ import annotations

import argparse

import pytest
import torch

import holdfast
from holdfast.errors import InvalidRequestError, NotFoundError, PreconditionError


def main() -> None:
    """Decide, build, restore, train a little."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--width", type=int, required=True, help="only where the job is new")
    options = parser.parse_args()
    state: dict[str, object] = {}
    with holdfast.Checkpointer(options.job, state, replicas=0) as ck:
        decided = ck.decide()
        width = int(str(decided.notes["width"])) if decided else options.width
        print(f"decided {decided.step if decided else 0} {width}", flush=True)
        for call in (lambda: ck.step(1), lambda: ck.save(1), ck.decide, lambda: ck.restore(3)):
            try:
                call()
            except PreconditionError as error:
                print(f"refused {error.message}", flush=True)
        if decided:
            assert decided.value("width") == width
            with pytest.raises(InvalidRequestError, match="no plain data"):
                decided.value("model")
            with pytest.raises(NotFoundError, match="nothing under"):
                decided.value("depth")
        state["width"] = width
        state["model"] = model = torch.nn.Linear(width, 1)
        state["optimizer"] = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        restored = ck.restore()
        step = restored.step if restored else 0
        assert step == (decided.step if decided else 0)
        print(f"begins {step} {model.weight.sum().item():.6f}", flush=True)
        for _ in range(2):
            step += 1
            model(torch.randn(4, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = ck.step(step, notes={"width": width})
            assert handle is not None
            handle.wait("local", timeout_s=60)
        print(f"ends {step} {model.weight.sum().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
