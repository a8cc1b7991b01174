"""``core.model_sizes``: bytes of a training state from the number of parameters."""

import pytest
import torch

from holdfast.core.model_sizes import OPTIMIZER_VALUES, ModelState
from holdfast.errors import InvalidRequestError

PARAMS = 10_000


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({}, 4 + 2 * 4),
        ({"dtype": "bf16"}, 2 + 2 * 2),
        ({"dtype": "bf16", "optimizer_dtype": "fp32"}, 2 + 2 * 4),
        ({"dtype": "bf16", "optimizer_dtype": "fp32", "master": True}, 2 + 4 + 2 * 4),
        ({"optimizer": "momentum"}, 4 + 4),
        ({"optimizer": "sgd", "dtype": "fp16"}, 2),
    ],
)
def test_a_state_is_its_weights_and_what_the_optimizer_keeps_for_each(fields, each):
    assert PARAMS * each == ModelState(params_count=PARAMS, **fields).total_bytes


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("momentum", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        ("sgd", lambda params: torch.optim.SGD(params, lr=0.1)),
    ],
)
def test_torchs_optimizers_keep_what_the_table_says(name, optimizer):
    weights = torch.nn.Parameter(torch.zeros(PARAMS))
    made = optimizer([weights])
    weights.grad = torch.ones(PARAMS)
    made.step()

    kept = [value for value in made.state[weights].values() if isinstance(value, torch.Tensor)]
    values = sum(value.numel() for value in kept if value.numel() > 1)
    assert OPTIMIZER_VALUES[name] * PARAMS == values


def test_the_sum_is_written_out():
    model = ModelState(params_count=7_000, dtype="bf16", optimizer_dtype="fp32", master=True)

    text = "7,000 parameters x (2 B of bf16 weights + 4 B of fp32 weights + 2 x 4 B of adamw)"
    assert text == str(model)
    assert "x (4 B of fp32 weights)" in str(ModelState(params_count=1, optimizer="sgd"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"params_count": 0}, "0 parameters"),
        ({"params_count": 10**16}, "10000000000000000 parameters"),
        ({"dtype": "int4"}, "'int4'"),
        ({"optimizer_dtype": "fp7"}, "'fp7'"),
        ({"optimizer": "shampoo"}, "'shampoo'"),
    ],
)
def test_what_no_model_has_is_refused_by_name(fields, named):
    with pytest.raises(InvalidRequestError, match=named):
        ModelState(**{"params_count": 1, **fields})
