"""Where a save is written, and how it gets into the place of the one that has its tag.

A tag without a checkpoint is written where it will lie. One that has a checkpoint keeps it until
the new one is whole, which is written into a folder beside: then the two are exchanged. Where a
file system cannot do that in one step (NFS), it takes two renames, and a save that is killed
between them is put right by the next load or save.

Rank 0 alone calls ``prepare``, ``replace``, ``discard`` and ``write_latest``.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from holdfast.bucket.holding import remove
from holdfast.errors import InvalidRequestError
from holdfast.format.keys import MANIFEST
from holdfast.objectstore.folders import exchange
from holdfast.objectstore.rules import WORK_FOLDER

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_\d+_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_\d{1,7}_mp_rank_\d+_optim_states\.pt")
_OF_A_CHECKPOINT = re.compile(
    rf"shard-.*|{re.escape(MANIFEST)}|{re.escape(WORK_FOLDER)}"
    rf"|{MODEL_FILE.pattern}|{OPTIMIZER_FILE.pattern}"
)
_NEW, _OLD = ".new", ".old"


def folder_of(save_dir: str, tag: str) -> Path:
    """Return where the checkpoint of a tag lies; where a link leads, if it is one.

    What is exchanged is then the folder, not the link, and lies on one disk with what is beside.
    """
    return Path(save_dir, tag).resolve()


def check_apart(save_dir: str, folder: Path) -> None:
    """Refuse a tag whose folder is ``save_dir`` itself, or has it inside: both would be exchanged.

    Raises:
        InvalidRequestError: it is; names the folder.
    """
    if Path(save_dir).resolve().is_relative_to(folder):
        raise InvalidRequestError(
            f"the checkpoint would be {folder} itself, with all that is in {save_dir}: have the "
            f"tag name a folder of its own inside of that"
        )


def beside(folder: Path, run: str) -> Path:
    """Return where save ``run`` is written if there is a checkpoint in ``folder``."""
    return folder.with_name(f"{_beginning(folder)}{run}{_NEW}")


def is_whole(folder: Path) -> bool:
    """Tell whether there is a checkpoint in a folder."""
    return (folder / MANIFEST).is_file()


def prepare(folder: Path, run: str) -> Path:
    """Return where save ``run`` is to be written; what killed saves of the tag left is gone.

    Raises:
        OSError: it cannot be written there.
    """
    for left in _left_beside(folder):
        is_newer = is_whole(left) and not is_whole(folder)
        discard(replace(left, folder) if is_newer else left, folder)
    if not is_whole(folder):
        return folder
    made = beside(folder, run)
    made.mkdir()
    shutil.copymode(folder, made)
    return made


def replace(new: Path, folder: Path) -> Path:
    """Put ``new`` in the place of ``folder``, and return where that is now, for ``discard``."""
    if folder.is_dir() and exchange(new, folder):
        return new
    # Not with the name of ``new``: beside that of a killed save lies what it was to replace.
    old = folder.with_name(f"{_beginning(folder)}{token_hex(16)}{_OLD}")
    with suppress(FileNotFoundError):
        folder.rename(old)
    try:
        new.rename(folder)
    except FileNotFoundError:
        if not is_whole(folder):  # ``recover`` was quicker
            raise
    return old


def discard(old: Path, folder: Path) -> None:
    """Remove what a checkpoint has left in ``old``; what else lies there goes to ``folder``.

    If that cannot be moved, or somebody reads it, ``old`` stays until the next save of the tag.
    """
    with suppress(OSError):
        for path in old.iterdir():
            if not _OF_A_CHECKPOINT.fullmatch(path.name):
                folder.mkdir(parents=True, exist_ok=True)
                if not os.path.lexists(folder / path.name):
                    path.rename(folder / path.name)
        remove(old)


def recover(folder: Path) -> None:
    """Have a checkpoint be in ``folder`` whose save was killed between two renames.

    All ranks may do so at once: one of them succeeds.
    """
    if not is_whole(folder):
        for left in filter(is_whole, _left_beside(folder)):
            with suppress(OSError):  # another rank was quicker
                left.rename(folder)


def write_latest(save_dir: str, tag: str) -> None:
    """Have DeepSpeed's ``latest`` name ``tag``: at no time is it a part of a name."""
    path = Path(save_dir, "latest")
    made = name_until_whole(path)
    with made.open("w", encoding="utf-8") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)


def mark(path: Path) -> None:
    """Have an empty file at ``path``, unless there is a file."""
    path.touch(exist_ok=True)


def name_until_whole(path: Path) -> Path:
    """Return what a file is called that is to have the name of ``path`` once it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _beginning(folder: Path) -> str:
    """Return how names of what lies beside ``folder`` begin: short, however long its own name."""
    return f".holdfast-{sha256(os.fsencode(folder.name)).hexdigest()[:16]}-"


def _left_beside(folder: Path) -> list[Path]:
    """Return what killed saves have left, what is new before what is old."""
    with suppress(FileNotFoundError):
        beginning = _beginning(folder)
        found = [path for path in folder.parent.iterdir() if path.name.startswith(beginning)]
        return sorted(found, key=lambda path: path.suffix)
    return []
