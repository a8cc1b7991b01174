"""DeepSpeed's plug for storage, filled: what it saves becomes Holdfast checkpoints.

DeepSpeed calls with its files one by one; a checkpoint is made of what an engine has, when the last
of them has come. What only steps of the optimizer write is copied in the background, and the next
step waits for that; all else on the calling thread. Then it is written and committed.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from torch.optim import Optimizer

from holdfast.bucket.holding import TRIES_MAX
from holdfast.errors import (
    ConflictError,
    InvalidRequestError,
    OutcomeUnknownError,
    PreconditionError,
)
from holdfast.integrations.deepspeed import committing
from holdfast.integrations.deepspeed.background import Background
from holdfast.integrations.deepspeed.contents import Contents, add_model, add_optimizer
from holdfast.integrations.deepspeed.host_copies import HostCopies
from holdfast.integrations.deepspeed.placing import MODEL_FILE, OPTIMIZER_FILE, name_until_whole
from holdfast.integrations.deepspeed.reading import SavedEngine
from holdfast.logs import steady_logger
from holdfast.oneshot.world import Agreement, World
from holdfast.snapshot.later_copies import Copies
from holdfast.snapshot.optimizer_gate import GATE_S_MAX, Gate

NAME = "HoldfastCheckpointEngine"
OnFailure: TypeAlias = Literal["warn", "raise"]

_RANK = re.compile(r"zero_pp_rank_\d+_")

log = steady_logger(__name__)


class HoldfastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine of one engine of DeepSpeed; ``install`` makes it.

    A save is DeepSpeed's *decoupled* one: ``save_checkpoint`` returns before all is copied, the
    next step of the optimizer when it is, and ``latest`` names the checkpoint once it is whole on
    disk. What fails is logged, and training goes on (P4).
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = NAME
        self._engine: weakref.ref[Any] = weakref.ref(self)
        self._world = World(0, 1)
        self._launch = ""
        self._words: Any = None
        self._on_failure: OnFailure = "warn"
        self._saves_count = 0
        self._info: CheckpointCommitInfo | None = None
        self._contents: Contents | None = None
        self._failure: Exception | None = None
        self._markers: list[str] = []
        self._memory = HostCopies()
        self._copies = Copies()
        self._gate = Gate(self._copies)
        weakref.finalize(self, _let_go, self._gate, self._copies)
        self._background = Background("holdfast-deepspeed")
        self._opened: SavedEngine | None = None

    @property
    def waited_s(self) -> float:
        """How many seconds steps of optimizers have waited for copies, in all."""
        return self._gate.waited_s

    def bind(
        self, engine: Any, world: World, words: Any, launch: str, on_failure: OnFailure
    ) -> None:
        """Serve ``engine`` from now on.

        Args:
            engine: DeepSpeed's engine; it owns this one.
            world: This rank, and how many there are.
            words: The ``Store`` in which the ranks leave each other a word; None with one rank.
            launch: The same on all ranks, and no other engine's: 24 hex digits.
            on_failure: What the next ``save_checkpoint`` does after one that failed.
        """
        self._engine = weakref.ref(engine)
        self._world, self._words = world, words
        self._launch, self._on_failure = launch, on_failure

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, if it can be made: if not, the save will say so on all ranks (P4)."""
        try:
            super().makedirs(path, exist_ok=exist_ok)
        except OSError as cause:
            log.warning("%s cannot be made: %s", path, cause)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save, once the one before is done; it is left out if that does not end (P4).

        Raises:
            CheckpointError: with ``on_failure="raise"``, what the one before has failed of, once,
                or that it does not end.
        """
        try:
            self._background.settle(committing.COMMIT_S_MAX)
        except OutcomeUnknownError as late:
            if self._on_failure == "raise":
                raise
            log.warning("save %s is left out, training goes on: %s", info.tag, late)
        failure = self._background.take_failure()
        if failure is not None and self._on_failure == "raise":
            raise failure
        self._saves_count += 1
        self._info, self._contents, self._failure, self._markers = info, None, None, []

    def save(self, state_dict: Any, path: str) -> None:
        """Take what DeepSpeed would write into one file; with the last one, save all of it.

        A file that is no part of a checkpoint, such as that of ``save_16bit_model``, is written as
        ``torch.save`` does, and replaces one of its name when it is whole.
        """
        name = Path(path).name
        is_model = MODEL_FILE.fullmatch(name) is not None
        if not is_model and not OPTIMIZER_FILE.fullmatch(name):
            _save_file(state_dict, Path(path))
            return
        engine = self._served()
        if self._contents is None:
            self._contents = Contents(self._world.rank, self._world.size)
        self._markers.append(name)
        try:
            if is_model:
                add_model(self._contents, engine, state_dict)
            else:
                add_optimizer(self._contents, engine, state_dict["optimizer_state_dict"])
        except Exception as failure:  # noqa: BLE001 - the others must hear of it (P4)
            self._failure = failure
        if not is_model or not engine.save_zero_checkpoint:
            self._begin(self._contents)
            self._contents = None

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Return what DeepSpeed reads from ``path``, cut for this engine; tensors are on the CPU.

        Raises:
            NotFoundError: there is no checkpoint in the folder.
            InvalidRequestError: the checkpoint does not fit the engine; says what differs.
            CheckpointError: see ``holdfast.load``.
        """
        del map_location  # DeepSpeed copies from where it is
        found = MODEL_FILE.fullmatch(Path(path).name)
        if found is None and not OPTIMIZER_FILE.fullmatch(Path(path).name):
            raise InvalidRequestError(f"{path} is no file of a checkpoint of DeepSpeed")
        with self.opened(str(Path(path).parent)) as saved:
            if found is not None:
                return saved.model_file(int(found[1] or 0))
            return saved.optimizer_file()

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return whether the save that is under way has become a checkpoint, once it is known."""
        del info
        self._background.settle(committing.COMMIT_S_MAX)
        return self._background.failure is None

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return True: all ranks share in saving what they all have."""
        del dp_rank
        return True

    def is_decoupled(self) -> bool:
        """Return True: DeepSpeed leaves ``latest`` to us."""
        return True

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: each save brings its own."""

    def get_commit_info(self) -> None:
        """Return None: there is nothing that DeepSpeed should commit at a step."""

    def preserves_storage_sharing(self) -> bool:
        """Return False: tensors are written alone, whatever storage they are part of."""
        return False

    def cleanup(self) -> None:
        """Wait for the save that is under way; idempotent."""
        self._background.settle(committing.COMMIT_S_MAX)

    def wait(self) -> None:
        """Return once the last save is a checkpoint; see ``wait`` of the package."""
        self._background.settle(committing.COMMIT_S_MAX)
        self._raise_failure()

    @contextmanager
    def opened(self, folder: str, *, weights_only: bool = False) -> Iterator[SavedEngine]:
        """Have the checkpoint in ``folder`` open; one that is open is not opened again.

        Args:
            folder: Where it lies.
            weights_only: See ``SavedEngine``.
        """
        if self._opened is not None:
            yield self._opened
            return
        with SavedEngine(folder, self._served(), weights_only=weights_only) as saved:
            self._opened = saved
            try:
                yield saved
            finally:
                self._opened = None

    @contextmanager
    def opened_by_all(self, folder: str, *, weights_only: bool = False) -> Iterator[SavedEngine]:
        """Have the same checkpoint open on all ranks; collective. See ``opened``.

        Raises:
            ConflictError: each time they looked another save had just taken the folder's place.
            CheckpointError: one of the ranks cannot open it, and why.
        """
        for _ in range(TRIES_MAX):
            with ExitStack() as kept:
                with Agreement(self._world) as said:
                    saved = kept.enter_context(self.opened(folder, weights_only=weights_only))
                    said.value = {"run": saved.run}
                if len({value["run"] for value in said.values}) == 1:
                    yield saved
                    return
        raise ConflictError(f"{folder} is replaced by other saves faster than all ranks open it")

    def _served(self) -> Any:
        engine = self._engine()
        if engine is None or engine is self:
            raise PreconditionError("this checkpoint engine serves no engine: use install()")
        return engine

    def _raise_failure(self) -> None:
        if self._background.failure is not None:
            raise self._background.failure

    def _copy(self, contents: Contents) -> Future[list[torch.Tensor]]:
        """Copy what was taken: now, but for what only steps write that the gate is known to hold.

        Raises:
            PreconditionError: the copy of an earlier save that was given up has not ended.
        """
        if not self._copies.wait(GATE_S_MAX):
            raise PreconditionError("the copy of an earlier save has not ended")
        steps = getattr(self._served().optimizer, "optimizer", None)
        held = isinstance(steps, Optimizer) and self._gate.trusts([steps])
        later = contents.stepped if held and self._copies.may_defer else ()
        copies, now, after = self._memory.take(contents.tensors, later)
        return self._copies.begin(now, after, copies)

    def _begin(self, contents: Contents) -> None:
        """Copy what was taken, and have it written; not if an earlier save still is."""
        if self._background.is_busy:
            return
        assert self._info is not None, "DeepSpeed creates a checkpoint before it saves one"
        failure, copied = self._failure, None
        if failure is None:
            try:
                copied = self._copy(contents)
            except Exception as cause:  # noqa: BLE001 - the others must hear of it (P4)
                failure = cause
        save = committing.Save(
            run=committing.run_of(self._launch, self._saves_count),
            save_dir=str(Path(self._info.save_dir).absolute()),  # the script may go elsewhere
            tag=str(self._info.tag),
            latest=bool(self._info.save_latest),
            markers=tuple(_of_all_ranks(self._markers, self._world.size)),
        )
        part = partial(_part, contents, copied, failure)
        job = partial(committing.commit, save, self._world, self._words, part)
        self._background.begin(f"save {save.tag} in {save.save_dir}", job)


def _part(
    contents: Contents, copied: Future[list[torch.Tensor]] | None, failure: Exception | None
) -> committing.Part:
    """Return what this rank saves once it is copied, or raise why it saves nothing."""
    if copied is None:
        assert failure is not None
        raise failure
    copies = copied.result(GATE_S_MAX)
    return committing.Part(contents.specs, copies, contents.tree, contents.alike)


def _let_go(gate: Gate, copies: Copies) -> None:
    gate.uninstall()
    copies.close(0.0)


def _of_all_ranks(names: list[str], world_size: int) -> Iterator[str]:
    """Yield the names that the files have for all ranks, of those that one rank has given."""
    for name in names:
        if _RANK.search(name):
            yield from (_RANK.sub(f"zero_pp_rank_{r}_", name) for r in range(world_size))
        else:
            yield name


def _save_file(state: object, path: Path) -> None:
    made = name_until_whole(path)
    torch.save(state, made)
    made.replace(path)
