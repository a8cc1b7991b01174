"""What ``holdfast run`` is asked to do: a value, checked before anything is started."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import meshes
from holdfast.core.ids import JOB_NAME_LENGTH_MAX
from holdfast.core.rounds import NODES_MAX, RANKS_PER_NODE_MAX, Terms
from holdfast.errors import InvalidRequestError
from holdfast.launcher.notices import Source

DIGEST_LENGTH = 8
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "holdfast.checkpointer")
"""What a standby has imported: DDP's constructor and an optimizer's first step want dynamo."""
AUTO_PRELOADED = ("holdfast.auto",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, with torchrun's names where it has one.

    ``nproc`` is a number, ``auto``, ``gpu`` or ``cpu``. ``redirects`` and ``tee``: 1 is standard
    output, 2 standard error, 3 both. ``address``: where other nodes reach this node's ranks; empty:
    where they reach its agent. ``allocated``: the scheduler says which nodes take part. ``meshes``:
    ranks are told which of these is for as many as there are; empty: none.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    job: str = ""
    standalone: bool = False
    nodes_min: int = 1
    nodes_max: int = 1
    nproc: str = "1"
    restarts_max: int = 20
    shrink_after_s: float = 30.0
    grace_s: float = 30.0
    log_folder: Path | None = None
    redirects: int = 0
    tee: int = 0
    standby: bool = True
    preload: tuple[str, ...] = ()
    warm_cuda: bool = False
    notices: tuple[Source, ...] = ()
    address: str = ""
    allocated: bool = False
    meshes: tuple[str, ...] = ()
    auto: bool = False
    auto_steps_by: str = ""
    fresh: bool = False

    @property
    def terms(self) -> Terms:
        """What all launchers of the launch must agree on."""
        return Terms(
            command=self.digest,
            nodes_min=self.nodes_min,
            nodes_max=self.nodes_max,
            shrink_after_s=self.shrink_after_s,
            restarts_max=self.restarts_max,
            allocated=self.allocated,
        )

    @property
    def digest(self) -> str:
        """A name for the command that is run, the same on all nodes."""
        words = [str(self.module), self.script, *self.arguments]
        body = "\0".join(words).encode(errors="surrogateescape")
        return hashlib.blake2b(body, digest_size=16).hexdigest()

    @property
    def job_name(self) -> str:
        """The name under which launchers find each other: given, or made of the command."""
        alone = f"-{os.urandom(4).hex()}" if self.standalone else ""
        return self.job or self.trained_job + alone

    @property
    def trained_job(self) -> str:
        """The name under which ``--auto`` saves: given, or made of the command."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.script).stem).lstrip("._-") or "run"
        return self.job or f"{stem[: JOB_NAME_LENGTH_MAX // 2]}-{self.digest[:DIGEST_LENGTH]}"

    @property
    def auto_arguments(self) -> dict[str, object] | None:
        """What ``holdfast.auto.install`` is called with in each rank; None: it is not."""
        if not self.auto:
            return None
        return {"job": self.trained_job, "steps_by": self.auto_steps_by, "fresh": self.fresh}


def check_script(options: Options) -> None:
    """Refuse what no rank could run.

    Raises:
        InvalidRequestError: names the script and what is wrong with it.
    """
    if options.module:
        _check_module(options.script)
        return
    path = Path(options.script)
    if not path.is_file():
        raise InvalidRequestError(f"there is no script {options.script}; for a module write -m")
    _check_python(path)


def _check_python(path: Path) -> None:
    try:
        ast.parse(path.read_bytes(), str(path))
    except OSError as cause:
        raise InvalidRequestError(f"{path}: {cause.strerror}") from cause
    except SyntaxError as cause:
        text = f"{path}, line {cause.lineno} is no Python: {cause.msg}"
        raise InvalidRequestError(text) from cause
    except (MemoryError, RecursionError, ValueError) as cause:
        raise InvalidRequestError(f"{path} is no Python: {cause}") from cause


def check_meshes(options: Options, ranks: int) -> None:
    """Refuse meshes of which none is for a number of ranks that the launch may come to have.

    Nodes are taken to have ``ranks`` each.

    Raises:
        InvalidRequestError: names the number.
    """
    meshes.check(options.meshes)
    if not options.meshes or options.allocated:
        return
    for nodes in range(options.nodes_min, options.nodes_max + 1):
        meshes.required(options.meshes, nodes * ranks)


def check_warm_cuda(options: Options, environ: Mapping[str, str]) -> None:
    """Refuse ``--warm-cuda`` where nothing could be warmed.

    Raises:
        InvalidRequestError: says what is missing.
    """
    if not options.warm_cuda:
        return
    if not options.standby:
        raise InvalidRequestError("--warm-cuda is for standbys: leave it or --no-standby out")
    if not gpus_count(environ):
        raise InvalidRequestError("--warm-cuda: this node has no GPU; leave it out here")


def check_log_folder(options: Options) -> None:
    """Make the folder of ``--log-dir``, if it is asked for.

    Raises:
        InvalidRequestError: names it, and why it cannot be.
    """
    folder = options.log_folder
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise InvalidRequestError(f"--log-dir {folder}: {cause.strerror}") from cause


def _check_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidRequestError(f"-m {name}: that is no name of a module")
    folder = Path(*name.split("."))
    for path in (folder / "__main__.py", folder.with_suffix(".py")):
        if path.is_file():
            _check_python(path)
            return
    without_main = f"{name} is a package without a __main__, so it cannot be run"
    if (folder / "__init__.py").is_file():
        raise InvalidRequestError(without_main)
    try:
        spec = importlib.util.find_spec(name)
        inside = spec and spec.submodule_search_locations is not None
        found = importlib.util.find_spec(f"{name}.__main__") if inside else spec
    except (ImportError, ValueError, AttributeError):
        found = spec = None
    if spec is None:
        raise InvalidRequestError(f"there is no module {name}")
    if found is None:
        raise InvalidRequestError(without_main)


def ranks_count(nproc: str, environ: Mapping[str, str]) -> int:
    """Return how many ranks a node has, as torchrun counts them.

    Raises:
        InvalidRequestError: it is no number, or there is no GPU.
    """
    if re.fullmatch("[0-9]{1,4}", nproc) and 1 <= int(nproc) <= RANKS_PER_NODE_MAX:
        return int(nproc)
    gpus = gpus_count(environ)
    if nproc == "gpu" and not gpus:
        raise InvalidRequestError("--nproc-per-node gpu: this node has no GPU")
    if nproc in ("auto", "gpu") and gpus:
        return gpus
    if nproc in ("auto", "cpu"):
        return os.cpu_count() or 1
    raise InvalidRequestError(
        f"--nproc-per-node {nproc}: pass a number from 1 to {RANKS_PER_NODE_MAX}, auto, gpu or cpu"
    )


def gpus_count(environ: Mapping[str, str]) -> int:
    """Return how many GPUs this process may use; 0: none is here."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


def nodes_range(text: str) -> tuple[int, int]:
    """Return least and most nodes of ``N`` or ``MIN:MAX``.

    Raises:
        InvalidRequestError: it is neither.
    """
    low, colon, high = text.partition(":")
    high = high if colon else low
    if re.fullmatch("[0-9]{1,5}", low) and re.fullmatch("[0-9]{1,5}", high):
        least, most = int(low), int(high)
        if 1 <= least <= most <= NODES_MAX:
            return least, most
    raise InvalidRequestError(
        f"--nnodes {text}: pass a number of nodes, or MIN:MAX, from 1 to {NODES_MAX}"
    )
