"""What `holdfast submit` asks for: what options say, in place of what a file says."""

import json

import pytest

from holdfast.cli import arguments
from holdfast.cli.scheduling import _spec


@pytest.mark.parametrize(
    ("in_file", "words", "gpus"),
    [
        ({}, (), (2, 8)),
        ({"gpus_min": 2, "gpus_max": 4}, (), (2, 4)),
        ({"gpus_min": 4, "gpus_max": 4}, ("--gpus", "2:4"), (2, 4)),
    ],
)
def test_meshes_say_how_many_gpus_where_nobody_else_does(tmp_path, in_file, words, gpus):
    """G26"""
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"name": "gpt", "command": ["x.py"], **in_file}))
    meshes = ("--mesh", "dp=1,tp=2", "--mesh", "dp=2,tp=2", "--mesh", "dp=4,tp=2")

    spec = _spec(arguments.parse(["submit", "--file", str(file), *meshes, *words]))

    assert (spec.gpus_min, spec.gpus_max) == gpus
    assert spec.meshes == meshes[1::2]
