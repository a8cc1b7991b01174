"""Megatron-core saves and loads with our strategies: real models on CPU, forked by one process.

F79, G29: its own sharded state dicts, and what we rely upon of the installed version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.stack import running_stack

SCENARIOS = Path(__file__).with_name("scenarios.py")
WAIT_S = 280

TENSOR = [
    "key", "data", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations",
    "replica_id", "prepend_axis_num", "allow_shape_mismatch", "flattened_range",
]  # fmt: skip
OBJECT = ["key", "data", "global_shape", "global_offset", "replica_id"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    base = tmp_path_factory.mktemp("megatron")
    with running_stack(nodes=2) as stack:
        agents = [str(stack.node(node)["agent"]) for node in (0, 1)]
        done = subprocess.run(
            [sys.executable, str(SCENARIOS), str(base), *agents],
            env={**os.environ}, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((base / "report.json").read_text())


def test_a_save_in_which_a_rank_was_killed_is_no_checkpoint_and_the_one_before_is(report):
    """P1"""
    assert [True, False] == report["a checkpoint"]


@pytest.mark.parametrize("mesh", ["2 1", "1 1", "1 2"])
def test_what_two_tensor_parallel_ranks_saved_is_loaded_bit_for_bit_on_other_meshes(report, mesh):
    """F79: weights and moments of a GPT with gated projections, by TP and PP."""
    assert [] == report[f"restored {mesh}"]


def test_what_one_rank_alone_holds_is_loaded_by_two_and_found_by_name(report):
    assert [] == report["by name"]
    assert [[], []] == report["strict"]


def test_values_of_ranks_come_back_with_their_types_and_no_pickle(report):
    """P9"""
    assert [True, True, True, True, True, 1, {"lr": 0.5}] == report["own values"]


def test_rows_that_padding_adds_are_zero(report):
    assert 2 == report["padded rows"]


def test_megatron_is_told_what_is_in_a_checkpoint(report):
    assert {
        "decoder.layers.mlp.linear_fc1.weight": [2, 128, 16],
        "embedding.word_embeddings.weight": [100, 16],
    } == report["metadata"]
    assert report["objects"] == [
        f"{name}/shard_{n}_2" for name in ("rng", "stream") for n in (0, 1)
    ]


def test_it_is_an_ordinary_checkpoint_in_which_each_layer_and_each_half_is_a_tensor(report):
    assert [
        f"{prefix}decoder.layers.mlp.linear_fc1.weight/at_{layer}/part_{half}_of_2_along_0"
        for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
        for layer in (0, 1)
        for half in (0, 1)
    ] == report["plain"]


def test_what_cannot_be_saved_is_refused_on_all_ranks_by_its_key(report):
    for name, why in (
        ("reserved", "key 'rank.key' cannot be used"),
        ("hole", "main replicas leave a hole in tensor 'key' [4], or overlap"),
        ("apart", "this rank has 2 shards of 'rows' [4], of which"),
        ("pickle", "'odd/shard_0_1' holds a"),
        ("asynchronous", "Cannot apply async_save"),
    ):
        assert all(why in text for text in report[name]), report[name]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no plain tensor", "the data of 'key' are a Own on this rank"),
        ("hole and overlap", "main replicas leave a hole in tensor 'key' [4], or overlap"),
        ("dtypes", "tensor 'key' is F32 [4] on rank 0 and BF16 [4] on rank 1"),
        ("shapes", "tensor 'key' is F32 [4] on rank 0 and F32 [5] on rank 1"),
        ("nobody", "tensor 'key' has no main replica"),
        ("layer", "ranks have 2 of the 3 indices of the axes that are prepended to 'key'"),
        ("depths", "the axes that are prepended to 'key' are [2] long on one rank and [3] on"),
        ("odd halves", "this rank has 2 shards of 'key' [5], of which the first does not lie in"),
        ("uneven halves", "this rank has 2 shards of 'key' [6], of which the first does not lie"),
        ("outside", "shard [1] + [2] of 'key' is not in [2]"),
        ("below", "shard [-1] + [2] of 'key' is not in [2]"),
        ("no such layer", "shard [2, 0] + [1, 2] of 'key' is not in [2, 2]"),
        ("sparse", "tensor 'key' is torch.sparse_coo"),
        ("unusable", r"tensor name 'a\ud800' is not usable"),
        ("no object", "object 'thing/shard_0_1' has no main replica"),
        ("other objects", "object 'thing/shard_0_1' is saved by rank 1 as well"),
        ("objects of tensors", "object 'thing/shard_0_1' is saved by rank 1 as well"),
        ("slash", "key 'a/b' cannot be used"),
        ("own name", "key 'rank.0' cannot be used"),
        ("no shape", "object 'thing' has no shape"),
        ("two objects", "this rank has two objects 'thing/shard_0_1'"),
        ("subclass", "'thing/shard_0_1' holds a"),
        ("subclass of a stream", "'thing/shard_0_1' holds a"),
    ],
)
def test_what_no_rank_could_load_again_is_not_saved(report, name, why):
    """P1: whether Megatron checks it or not; all ranks hear why."""
    assert all(why in text and "InvalidRequestError" in text for text in report[name]), report[name]


def test_tensors_of_an_object_at_paths_that_read_alike_stay_apart(report):
    """P1"""
    assert [[n, n] for n in (1, 2, 3, 4)] == report["one path"]


def test_numbers_of_numpy_and_empty_shards_are_saved(report):
    assert [[0, 0], []] == report["others"]


def test_what_several_hold_is_saved_once_and_comes_back_to_each(report):
    assert [True, [1, 1], [1, 1]] == report["twice"]


def test_hostile_texts_and_names_are_refused_or_passed_over(report):
    """P9"""
    assert "ManifestError: state refers to the tensor 'none'" in report["refers"]
    assert "ManifestError: state of 'x/shard_0_1' is not bytes" in report["bytes"]
    assert [["a", [[1], "a"]], ["d", [[6], "d/part_0_of_2_along_0"]]] == report["keys"]
    assert report["no common part"].startswith("NotFoundError")


def test_what_cannot_be_loaded_is_refused_by_its_key(report):
    assert "has no 'another'" in report["missing"]
    assert all("has no 'another'" in why for why in report["missing on one"])
    assert "version 2, and this release reads 1" in report["version"]
    assert "'key' is [4] in the checkpoint and [6] here" in report["shape"]
    assert "'key' is [4] in the checkpoint and [4, 2] here" in report["dims"]
    assert "'torch_dist'" in report["backend"]


def test_the_common_part_of_another_save_is_refused(report):
    """Megatron writes it first: a save over another one that failed leaves the two mixed."""
    assert "is not the one that was saved with the tensors" in report["mixed"]


def test_a_job_that_was_killed_goes_on_from_memory_with_another_sharding(report):
    """P1, F79: both ranks were killed; each has half of what it loads on the other's node.

    Megatron had not come to write that there is a checkpoint.
    """
    assert report["new"]
    assert [3, []] == report["from memory"]
    assert ["common.pt", "metadata.json"] == report["holds"]
    assert 4 == report["goes on"]


def test_a_job_refuses_another_step_and_a_save_before_the_load(report):
    assert "steps only grow" in report["backwards"]
    assert "which was not loaded" in report["not loaded"]
    assert "which was not loaded" in report["only looked at"]
    assert "goes on from step 3" in report["another step"]


def test_shards_of_the_installed_version_have_what_we_read(report):
    """G29"""
    assert [TENSOR, OBJECT] == report["fields"]
    assert [True, True, False, False, False] == report["main"]
    assert ["key/shard_1.0_3.2", True] == report["unique key"]


def test_strategies_have_all_methods_that_the_installed_version_calls(report):
    """G29"""
    assert {
        "SaveShardedStrategy.save", "LoadShardedStrategy.load",
        "LoadShardedStrategy.load_tensors_metadata", "LoadShardedStrategy.load_sharded_metadata",
        "LoadShardedStrategy.check_backend_compatibility",
        "LoadShardedStrategy.check_version_compatibility",
    } == set(report["methods"])  # fmt: skip
    for name, (theirs, mine) in report["methods"].items():
        assert theirs == mine, name
    save, load = report["calls"]
    assert {"sharded_strategy", "common_strategy", "validate_access_integrity"} < {*save, *load}
    assert ["action", "backend", "version", "strategy"] == report["registry"]


def test_the_installed_version_writes_its_common_file_before_it_calls_and_metadata_after(report):
    """G29: a save that was killed is then no checkpoint."""
    assert ["common.pt", "metadata.json"] == report["files"]
    assert [["common.pt"]] == report["order"]
