"""``holdfast export`` reads what a mesh has saved straight from a bucket, with no service."""

from __future__ import annotations

import json
from functools import partial

import pytest
import safetensors.torch
import torch
from tests.integration.convert.test_meshes import WORLD, assert_same, expected, on_mesh, put
from tests.unit.state.conftest import world  # noqa: F401 - a fixture

from holdfast.cli.main import main
from holdfast.convert.copying import copy_checkpoint
from holdfast.format import keys
from holdfast.objectstore import open_store

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")


@pytest.fixture(params=["folder", "s3"])
def bucket(request, tmp_path):
    """URLs, as functions of what is below the bucket's prefix: a folder, and a server of S3."""
    if request.param == "folder":
        return lambda below="": (tmp_path / "bucket" / below).as_uri()
    url = request.getfixturevalue("moto").url("runs")
    return lambda below="": url.replace("/runs?", f"/runs/{below}?") if below else url


def test_what_a_mesh_has_saved_is_exported_from_a_bucket(
    bucket,
    world,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    """FSDP2 with tensor parallelism: whole weights for Hugging Face, and all of it for torch."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    saved = put(tmp_path, world, partial(on_mesh, "2d"), WORLD)
    copied, _ = copy_checkpoint(saved, open_store(bucket(), make=True))
    place = bucket(keys.folder(copied.job, copied.checkpoint))

    hf = ["--format", "hf", "--only", "model", "--max-shard-size", "300"]
    assert 0 == main(["export", place, str(tmp_path / "hf"), *hf])
    names = ["--only", "model", "--only", "optimizer"]
    assert 0 == main(["export", place, str(tmp_path / "all.pt"), "--format", "torch", *names])
    capsys.readouterr()

    weights = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        weights |= safetensors.torch.load_file(file)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert_same({k: v for k, v in expected().items() if k.startswith("model.")}, weights)
    assert_same(expected(), torch.load(tmp_path / "all.pt", weights_only=True))
