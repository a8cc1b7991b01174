"""An export that a full disk or a signal ends leaves nothing, says so, and works when run again."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.integration.convert import made

from holdfast.convert import staged as staging
from holdfast.convert.exporting import FORMATS, export
from holdfast.convert.reading import CheckpointReader
from holdfast.errors import ExhaustedError

SDK = Path(__file__).parents[3] / "sdk"
STEPS_COUNT = 12


@contextmanager
def files_of_at_most(length_bytes):
    """As on a full disk, whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk_ends_an_export_wherever_it_is_full(form, store, tmp_path):
    """At the first byte, in the middle, in what a format writes last; then there is room."""
    big = [(f"model.{n}", torch.arange(30_000.0), None) for n in range(3)]
    folder = made.put(store, [{0: big}])
    with CheckpointReader(folder) as reader:
        export(reader, tmp_path / "whole", form)
        files = [p for p in (tmp_path / "whole", *(tmp_path / "whole").rglob("*")) if p.is_file()]
        longest = max(path.stat().st_size for path in files)
        for step in range(STEPS_COUNT + 1):
            limit = (longest - 1) * step // STEPS_COUNT
            with files_of_at_most(limit), pytest.raises(ExhaustedError) as full:
                export(reader, tmp_path / "out", form)

            assert f"cannot write {tmp_path / 'out'}" in full.value.message
            assert [] == [path for path in tmp_path.iterdir() if "out" in path.name]
        export(reader, tmp_path / "out", form)

    assert (tmp_path / "out").exists()


STOPPED = """
import contextlib, os, signal, sys
from holdfast.cli import export
from holdfast.cli.main import main
import holdfast.convert.exporting, holdfast.convert.importing, holdfast.convert.reading

@contextlib.contextmanager
def progress(*_):
    yield lambda _bytes: os.kill(os.getpid(), int(number))

*command, number = sys.argv[1:]
plain = export.byte_progress
for form in ("safetensors", "hf", "dcp", "torch"):
    order = [*command, f"out/{form}", "--format", form, "--json"]
    export.byte_progress = progress
    child = os.fork()
    if not child:
        code = main(order)
        sys.stderr.flush()
        os._exit(code)
    print(form, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(*sorted(os.listdir("out") if os.path.exists("out") else []))
    sys.stdout.flush()
export.byte_progress = plain
for form in ("safetensors", "hf", "dcp", "torch"):
    assert main([*command, f"out/{form}", "--format", form]) == 0
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["export", "convert"])
def test_a_signal_ends_an_export_as_an_error_does(command, number, folder, tmp_path):
    """After the first tensor, in every format; the same command works afterwards."""
    source = tmp_path / "store" / folder.prefix
    if command == "convert":
        with CheckpointReader(folder) as reader:
            export(reader, tmp_path / "source.pt", "torch")
        source = tmp_path / "source.pt"
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, command, source, str(number.value)],
        env={**os.environ, "PYTHONPATH": str(SDK), "HOLDFAST_HOME": str(tmp_path / "home")},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    codes, left = done.stdout.splitlines()[:8:2], done.stdout.splitlines()[1:8:2]
    errors = [json.loads(line)["error"] for line in done.stderr.splitlines() if line[0] == "{"]

    assert [f"{form} {128 + number}" for form in FORMATS] == codes
    assert ["", "", "", ""] == left
    for form, error in zip(FORMATS, errors, strict=True):
        assert "stopped" == error["kind"]
        assert f"stopped by {number.name}: out/{form} was not written" in error["message"]


@pytest.mark.parametrize("force", [False, True])
def test_the_state_does_not_stay_alone_where_the_tensors_did_not_follow(
    force, folder, tmp_path, monkeypatch
):
    """It is there first; the next export is not refused because of it. What was there stays."""
    dest = tmp_path / "out.safetensors"
    with CheckpointReader(folder) as reader:
        if force:
            export(reader, dest, "safetensors")
        before = sorted(path.name for path in tmp_path.iterdir())
        plain = staging._replace

        def stopped(at, to):
            if to == dest:
                raise KeyboardInterrupt
            plain(at, to)

        with monkeypatch.context() as patched:
            patched.setattr(staging, "_replace", stopped)
            with pytest.raises(KeyboardInterrupt):
                export(reader, dest, "safetensors", force=force)

        assert before == sorted(path.name for path in tmp_path.iterdir())
        export(reader, dest, "safetensors", force=force)
