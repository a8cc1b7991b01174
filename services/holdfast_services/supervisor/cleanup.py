"""What ``down`` removes: memory always; catalogue and store only as far as was asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.queue_items import Kind, prefix
from holdfast.errors import UnavailableError
from holdfast_services.kit.queue import Queue, open_queue
from holdfast_services.supervisor import layout as places
from holdfast_services.supervisor import store

FORGET_S_MAX = 30.0
# A checkpoint is undrained while one of these is in the queue. Metadata offers them within its
# reconcile period (5 s) of the commit, and the manifest as soon as the last shard is stored, so
# the queue alone tells; scrubs and sweeps are in it as well and keep nobody waiting.
UNDRAINED = (prefix(Kind.SHARD), prefix(Kind.MANIFEST))


def undrained_count(queue: Queue) -> int:
    """Return how many shards and manifests the store still lacks; 1 if the queue cannot tell."""
    try:
        return sum(map(queue.items_count, UNDRAINED))
    except UnavailableError:
        return 1  # unknown is not done


def drain_report(home: Path) -> dict[str, Any]:
    """Return whether the worker of the stack in ``home`` claims, and how long its queue is."""
    queue = open_queue(places.queue_url(home), lease_s=1.0)
    report = {
        "worker_ready": places.worker_ready_file(home).exists(),
        "waiting_count": queue.waiting_count(),
        "items_count": queue.items_count(),
        "undrained_count": undrained_count(queue),
    }
    queue.close()
    return report


def clean(home: Path, *, everything: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Remove the arenas of ``home``, whose lock the caller holds; return what was done.

    The catalogue keeps what is durable, and is removed whole if it cannot be told to forget the
    rest: a catalogue that speaks of memory thrown away on purpose would have every job look for
    it, and what is durable is found again in the store.

    Args:
        home: HOME of the stack.
        everything: Remove catalogue and own store as well; never a store elsewhere.
        environ: What the one-shot that cuts the catalogue down inherits.
    """
    used = store.remembered(home)
    is_gone = everything and used == store.own_folder(home).as_uri()
    report: dict[str, Any] = {"store": "" if is_gone else used, "undrained_count": 0}
    if (home / "queue.db").exists():
        report["undrained_count"] = drain_report(home)["undrained_count"]
    report["freed_bytes"] = places.erase(home)
    report["store_freed_bytes"] = _remove_store(home) if everything else 0
    why = "" if everything else _forget_memory(home, environ)
    if everything or why:
        for file in home.glob("metadata.db*"):
            file.unlink()
    return {**report, "catalogue_lost": why}


def _remove_store(home: Path) -> int:
    folder = store.own_folder(home)
    freed_bytes = 0
    if folder.is_dir() and not folder.is_symlink():
        freed_bytes = sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))
        shutil.rmtree(folder)
    store.forget_choice(home)
    return freed_bytes


def _forget_memory(home: Path, environ: Mapping[str, str]) -> str:
    """Have the catalogue forget what only memory held; return why it did not, or nothing."""
    catalogue = home / "metadata.db"
    if not catalogue.exists():
        return ""
    clean_environ = {key: environ[key] for key in environ if not key.startswith("HOLDFAST_")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast_services.metadata", "forget-memory"],
            env={**clean_environ, "HOLDFAST_DATABASE_URL": f"sqlite:///{catalogue}"},
            capture_output=True, text=True, timeout=FORGET_S_MAX, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not within {FORGET_S_MAX:g} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
