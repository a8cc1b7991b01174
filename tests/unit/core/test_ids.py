"""``core.ids``: what may be a name, and the spelling of a shard (P9)."""

import numpy as np
import pytest
import torch

from holdfast.core import ids
from holdfast.core.ids import CheckpointId, ShardId, shard_id
from holdfast.errors import InvalidRequestError


@pytest.mark.parametrize("text", ["a", "gpt-small", "team/gpt.v2", "A_b/0", "x" * 128])
def test_a_job_name_is_kept_as_it_is(text):
    assert text == ids.job_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        "a/../b",
        ".hidden",
        "-a",
        "a b",
        "a\n",
        "a\x00",
        "ä",
        "x" * 129,
    ],
)
def test_what_could_walk_out_of_a_folder_is_no_job_name(text):
    """P9: no name from a peer or a trainer becomes a path unchecked."""
    with pytest.raises(InvalidRequestError, match="job name"):
        ids.job_name(text)


@pytest.mark.parametrize("text", ["a/b", "", "..", "a\n", "x" * 129])
def test_a_node_name_has_no_slash(text):
    with pytest.raises(InvalidRequestError, match="node name"):
        ids.node_name(text)


@pytest.mark.parametrize("text", ["", "A", "a-b", "a" * 33, "a\n", "٣"])
def test_a_run_id_is_lower_case_letters_and_digits(text):
    with pytest.raises(InvalidRequestError, match="run id"):
        ids.run_id(text)


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "../" + "0" * 29])
def test_a_session_is_32_hex_digits(text):
    """P9: the session becomes a file name."""
    with pytest.raises(InvalidRequestError, match="32 hex digits"):
        ids.session_id(text)


def test_a_shard_key_goes_there_and_back():
    shard = ShardId("r7", 1200, 3, 5, 1)

    assert "r7/1200/3/5/1" == shard.key
    assert shard == shard_id(shard.key)
    assert CheckpointId("r7", 1200, 3) == shard.checkpoint


@pytest.mark.parametrize(
    "key",
    ["", "r/1/2/3", "r/1/2/3/4/5", "r/-1/2/3/4", "r/1/2/3/x", "R/1/2/3/4", "r/٣/2/3/4",
     "r/+1/2/3/4", "../1/2/3/4", "r/1_0/2/3/4", f"r/{'9' * 5000}/2/3/4"],
)  # fmt: skip
def test_a_malformed_shard_key_is_refused(key):
    """The long one: Python refuses to read 5000 digits, with another error than ours."""
    with pytest.raises(InvalidRequestError):
        shard_id(key)


def test_the_newest_checkpoint_of_a_run_is_the_greatest():
    """F68: by step, then generation."""
    older, newer, later = (CheckpointId("r", *n) for n in ((9, 2), (10, 1), (10, 2)))

    assert [older, newer, later] == sorted([later, older, newer])


@pytest.mark.parametrize("step", [0, 7, np.int64(7), torch.tensor(7), ids.STEP_MAX])
def test_a_whole_number_is_a_step(step):
    assert type(ids.step_number(step)) is int
    assert step == ids.step_number(step)


@pytest.mark.parametrize("step", [-1, ids.STEP_MAX + 1, 1 << 63, 3.0, "7", None, torch.tensor(7.0)])
def test_what_is_no_step_is_refused_before_anybody_is_told(step):
    """P4: no message holds it: it ended the thread that tells the agent how training goes on."""
    with pytest.raises(InvalidRequestError, match=r"^step "):
        ids.step_number(step)
