"""What all ranks of a node would say, and say again in the next round: one of them says it, once.

A launcher gives its ranks a folder. Who is the first to make the file of a text there says it;
without a folder, as under torchrun, each rank does.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

FOLDER = "HOLDFAST_SAID"
"""Variable of a rank: the folder, which ends with its launcher."""


def is_first_to_say(text: str) -> bool:
    """Tell whether no rank of this launcher that runs this command has said ``text`` before."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return True
    said = "\0".join((*sys.argv, text)).encode(errors="backslashreplace")
    path = Path(folder, hashlib.blake2b(said, digest_size=16).hexdigest()).with_suffix(".said")
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # better twice than never
        return True
    return True
