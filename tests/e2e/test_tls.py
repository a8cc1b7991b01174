"""A whole stack with ``HOLDFAST_TLS``: saved on one node, copied, restored on the other."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.stack import environment, running_stack
from tests.e2e.test_bit_identity import restored
from tests.members import Members


def test_a_stack_with_tls_saves_copies_restores_and_answers_members_only(tmp_path):
    folder = Members().issue(tmp_path / "member")
    common = ("--job", "secret", "--steps", "4", "--save", "1", "--wait", "replicated")
    with running_stack(2, "--scheduler", HOLDFAST_TLS=str(folder)) as stack:
        stack.ranks(*common, "--kill-at", "3").wait()
        [output] = stack.ranks(*common, nodes=(1,)).succeed()

        assert 2 == restored(output)
        assert stack.info["rest_url"].startswith("https://")
        kept = json.loads(stack.holdfast("ls", "secret", "--json").stdout)
        assert 4 in [one["step"] for one in kept]
        for command in ("jobs", "status", "doctor"):  # the scheduler, the stack, every probe
            stack.holdfast(command)
        stranger = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", "ls"], capture_output=True, text=True,
            env=environment(HOLDFAST_HOME=str(stack.home)), check=False,
        )  # fmt: skip

        assert 1 == stranger.returncode
        assert "HOLDFAST_TLS" in stranger.stderr
