"""Puts Holdfast into DeepSpeed's plug: for one engine, or for all that are made from now on."""

from __future__ import annotations

import functools
import inspect
import weakref
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import engine as of_deepspeed
from deepspeed.runtime.pipe.module import PipelineModule
from torch.distributed import distributed_c10d

from holdfast.errors import AccessError, InvalidRequestError
from holdfast.integrations.deepspeed.committing import LAUNCH_LENGTH
from holdfast.integrations.deepspeed.engine import HoldfastCheckpointEngine, OnFailure
from holdfast.integrations.deepspeed.partitions import rows_of
from holdfast.integrations.deepspeed.placing import folder_of, mark, recover
from holdfast.oneshot.world import Agreement, World

_INSTALLED = "_holdfast_on_failure"


def install_for_all(on_failure: OnFailure) -> None:
    """Have each engine of DeepSpeed that is made from now on use Holdfast; idempotent."""
    kind = of_deepspeed.DeepSpeedEngine
    is_installed = hasattr(kind, _INSTALLED)
    setattr(kind, _INSTALLED, on_failure)
    if is_installed:
        return
    configure = kind._configure_checkpointing  # noqa: SLF001 - where it makes its own

    @functools.wraps(configure)
    def _configure_checkpointing(self: Any) -> None:
        check_supported(self)
        configure(self)
        attach(self, getattr(kind, _INSTALLED))

    of_deepspeed.create_checkpoint_engine = lambda **_: HoldfastCheckpointEngine()
    kind._configure_checkpointing = _configure_checkpointing  # noqa: SLF001


def attach(engine: Any, on_failure: OnFailure) -> None:
    """Have one engine use Holdfast; collective over its ranks."""
    check_supported(engine)
    before = engine.checkpoint_engine
    ours = before if isinstance(before, HoldfastCheckpointEngine) else HoldfastCheckpointEngine()
    if before is not ours and before is not None and before.is_decoupled():
        before.cleanup()
    world = World(dist.get_rank(), dist.get_world_size())
    with Agreement(world) as said:
        words = _words() if world.size > 1 else None
        said.value = {"launch": token_hex(LAUNCH_LENGTH // 2)}
    ours.bind(engine, world, words, str(said.values[0]["launch"]), on_failure)
    engine.checkpoint_engine = ours
    engine.save_non_zero_checkpoint = True
    engine._copy_recovery_script = _no_script  # noqa: SLF001 - it reads pickles, and here are none
    engine.load_checkpoint = _loader(engine)


def _words() -> Any:
    """Return where ranks that share a process group can leave each other a word."""
    store = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
    if store is None:
        raise InvalidRequestError("Holdfast needs a process group with a store: gloo or nccl")
    return store


def _no_script(_save_dir: str) -> None:
    """Write nothing, in place of what DeepSpeed writes beside checkpoints."""


def check_supported(engine: Any) -> None:
    """Refuse an engine of which something would not be saved.

    Raises:
        InvalidRequestError: names what is not supported.
    """
    lacking = {
        "mixture of experts (has_moe_layers)": engine.has_moe_layers,
        "PipelineModule": isinstance(engine.module, PipelineModule),
        "model parallelism": engine.mp_world_size != 1,
        "ranks that are not all data parallel": engine.seq_dp_world_size != dist.get_world_size(),
        "load_universal": engine.load_universal_checkpoint(),
        "use_node_local_storage": engine.use_node_local_storage(),
        "offload to NVMe": engine.zero_nvme_offload_optimizer(),
        "elastic_checkpoint (any checkpoint loads on any number of ranks without it)": (
            engine.zero_optimization() and engine.zero_elastic_checkpoint()
        ),
    }
    for what, is_so in lacking.items():
        if is_so:
            raise InvalidRequestError(f"Holdfast does not support {what} of DeepSpeed yet")
    if hasattr(engine.optimizer, "dp_process_group"):
        rows_of(engine.optimizer, engine.param_names)


def _loader(engine: Any) -> Any:
    """Return ``load_checkpoint`` of an engine, which marks what DeepSpeed looks for."""
    of_its_class = type(engine).load_checkpoint
    served: Any = weakref.ref(engine)

    signature = inspect.signature(of_its_class)

    @functools.wraps(of_its_class)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **named: Any) -> Any:
        here = served()
        ours = here.checkpoint_engine
        ours.cleanup()
        latest = Path(load_dir, "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text(encoding="utf-8").strip()
        asked = signature.bind(here, load_dir, tag, *args, **named)
        if tag is None:
            return of_its_class(*asked.args, **asked.kwargs)
        folder = folder_of(load_dir, str(tag))
        recover(folder)
        weights_only = _asks_for_weights(here, asked.arguments)
        with ours.opened_by_all(str(folder), weights_only=weights_only):
            # Of other ranks' or stage's names it finds none, and says so with an assertion.
            _mark_own(Path(here._get_ckpt_name(load_dir, tag)))  # noqa: SLF001
            return of_its_class(*asked.args, **asked.kwargs)

    return load_checkpoint


def _asks_for_weights(engine: Any, asked: dict[str, Any]) -> bool:
    """Tell whether weights are wanted without the state of a stage 3 optimizer.

    There DeepSpeed has its weights of that state alone. So it gets them as such a state, with what
    the optimizer has now for the rest: ``asked`` is changed to ask for it.
    """
    wants_state = asked.get("load_optimizer_states", True)
    wanted = not wants_state or bool(asked.get("load_module_only", False))
    if not wanted or not engine.zero_optimization_partition_weights():
        return False
    asked["load_optimizer_states"] = True
    return True


def _mark_own(path: Path) -> None:
    try:
        mark(path)
    except OSError as cause:
        raise AccessError(
            f"{path} cannot be made, which DeepSpeed looks for: the checkpoint was saved by other "
            f"ranks or with another stage, so its folder must be writable: {cause}"
        ) from cause
