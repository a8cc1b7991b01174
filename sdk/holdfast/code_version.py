"""Which code this process runs, by the repository that its script is in. Asks git, briefly."""

from __future__ import annotations

import getpass
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.core.env import number
from holdfast.core.origin import Origin, Tree, kept

GIT_S_MAX = 0.5
"""A start waits for it at most so long; without an answer nothing is known of the code."""
DIRTY = "-dirty"

_HEAD = re.compile(r"# branch\.oid ([0-9a-f]{40,64})")


def origin(environ: Mapping[str, str]) -> Origin:
    """Return what this process was started with.

    ``HOLDFAST_COMMIT`` wins over the repository; with ``HOLDFAST_RECORD_COMMAND=0`` the command
    line is left out.

    Raises:
        InvalidRequestError: ``HOLDFAST_RECORD_COMMAND`` is neither 0 nor 1.
    """
    commit, tree = named(environ.get("HOLDFAST_COMMIT", "")) or of_repository(_folder())
    recorded = number(environ, "HOLDFAST_RECORD_COMMAND", 1, low=0, high=1)
    command = shlex.join(sys.argv) if recorded else ""
    return kept(Origin(commit=commit, tree=tree, command=command, user=user()))


def named(text: str) -> tuple[str, Tree] | None:
    """Return the commit that a user names, with ``-dirty`` behind it if files have changed.

    As ``git describe --always --dirty`` has it. None: none is named.

    >>> named("4fe1c9a-dirty"), named("release 7")
    (('4fe1c9a', <Tree.DIRTY: 2>), ('release 7', <Tree.CLEAN: 1>))
    """
    if not text:
        return None
    if text.endswith(DIRTY) and text != DIRTY:
        return text.removesuffix(DIRTY), Tree.DIRTY
    return text, Tree.CLEAN


def of_repository(folder: Path) -> tuple[str, Tree]:
    """Return the commit that ``folder`` is at, and whether a file that git knows has changed.

    Nothing is known outside a repository, before its first commit, and without git.
    """
    command = ["git", "--no-optional-locks", "-C", str(folder), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"]
    try:
        done = subprocess.run(  # noqa: S603 - git, with words of ours and a folder
            command, capture_output=True, timeout=GIT_S_MAX, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return "", Tree.UNKNOWN
    lines = done.stdout.decode(errors="replace").splitlines()
    head = next((found[1] for line in lines if (found := _HEAD.fullmatch(line))), "")
    if not head:
        return "", Tree.UNKNOWN
    changed = any(not line.startswith("#") for line in lines)
    return head, Tree.DIRTY if changed else Tree.CLEAN


def _folder() -> Path:
    """Return where the script is, else where the process was started."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    return script.resolve().parent if script.is_file() else Path.cwd()


def user() -> str:
    """Return who runs this process, and where, for people."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its uid
        name = ""
    return f"{name}@{socket.gethostname()}"
