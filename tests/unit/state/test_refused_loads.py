"""A restore that is refused has changed nothing: neither tensors nor the state of optimizers."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.errors import CheckpointError, DigestMismatchError, InvalidRequestError, NotReadyError
from holdfast.reading.reader import Reader
from holdfast.state.capture import Capture


def made(seed: int, **more: object) -> dict[str, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, **more}


def stepped(seed: int, **more: object) -> dict[str, object]:
    state = made(seed, **more)
    state["model"](torch.randn(5, 3)).sum().backward()
    state["optimizer"].step()
    return state


def load(folder, saved, target) -> None:
    with worlds.save_all(folder, [Capture(saved, rank=0, world_size=1)]) as segments:
        Capture(target, rank=0, world_size=1).load(segments, step=1)


def weights(state) -> list[list[float]]:
    return [p.flatten().tolist() for p in state["model"].parameters()]


REFUSED = {
    "another shape at the end": lambda: made(2, last=nn.Linear(2, 2)),
    "another class": lambda: made(2, last={"a": 1}),
    "a tensor that is expanded": lambda: made(2, last=Expanded()),
}


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(1).expand(3, 3))
        self.register_buffer("bias", torch.zeros(3))


@pytest.mark.parametrize("target", REFUSED.values(), ids=REFUSED)
def test_a_restore_that_is_refused_leaves_all_as_it_was(tmp_path, target):
    state = target()
    before = weights(state)
    with pytest.raises(CheckpointError):
        load(tmp_path, stepped(1, last=nn.Linear(3, 3)), state)

    assert before == weights(state)
    assert {} == dict(state["optimizer"].state)


def test_state_of_an_optimizer_on_the_meta_device_is_refused_by_name(tmp_path):
    """Else its bytes would be read into nothing, and training would go on with zeros."""
    state = made(2)
    p = state["model"][1].bias
    state["optimizer"].state[p] = {"exp_avg": torch.zeros(2, device="meta")}
    name = "optimizer.state.model.1.bias.exp_avg"
    with pytest.raises(InvalidRequestError, match=rf"'{name}' is on the meta device.*to_empty"):
        load(tmp_path, stepped(1), state)


def test_an_optimizer_gets_no_memory_that_was_not_read(tmp_path, monkeypatch):
    """Bytes that turn out corrupt while they are read: the optimizer has no state, as before."""

    def fail(self, wants):
        raise DigestMismatchError("part 3 does not match")

    state = made(2)
    saved = stepped(1)
    with worlds.save_all(tmp_path, [Capture(saved, rank=0, world_size=1)]) as segments:
        text = segments.blob(0)
        monkeypatch.setattr(Reader, "blob", lambda *_: text)
        monkeypatch.setattr(Reader, "read", fail)
        with pytest.raises(DigestMismatchError):
            Capture(state, rank=0, world_size=1).load(segments, step=1)

    assert {} == dict(state["optimizer"].state)


def test_a_plain_tensor_that_cannot_be_filled_is_refused_before_anything_is(tmp_path):
    """Defect: it was seen when all had been read."""
    state = made(2, extra={"t": torch.zeros(1).expand(3)})
    before = weights(state)
    with pytest.raises(InvalidRequestError, match=r"elements of tensor 'extra\.t' share memory"):
        load(tmp_path, stepped(1, extra={"t": torch.ones(3)}), state)

    assert before == weights(state)


def test_a_model_with_a_layer_more_is_not_taken_for_a_stage_of_a_pipeline(tmp_path):
    """Names that differ in numbers alone are other ranks' only if there are other ranks."""
    state = {"model": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))}
    with pytest.raises(NotReadyError, match=r"'model\.2\.weight'.*strict=False") as refused:
        load(tmp_path, {"model": made(1)["model"]}, state)

    assert "Section" not in str(refused.value)
