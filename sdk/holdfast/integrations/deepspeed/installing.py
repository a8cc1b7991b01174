"""Puts Holdfast into DeepSpeed's plug: for one engine, or for all that are made from now on."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch.distributed as dist
from deepspeed.runtime import engine as of_deepspeed
from deepspeed.runtime.pipe.module import PipelineModule

from holdfast.errors import AccessError, InvalidRequestError
from holdfast.integrations.deepspeed.committing import mark
from holdfast.integrations.deepspeed.engine import HoldfastCheckpointEngine, OnFailure
from holdfast.integrations.deepspeed.partitions import rows_of
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
        said.value = {"nonce": token_hex(16)}
    ours.bind(engine, world, str(said.values[0]["nonce"]), on_failure)
    engine.checkpoint_engine = ours
    engine.save_non_zero_checkpoint = True
    engine.load_checkpoint = _loader(engine)


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
        _check_loads_weights(here, signature.bind(here, load_dir, tag, *args, **named).arguments)
        latest = Path(load_dir, "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text(encoding="utf-8").strip()
        if tag is None:
            return of_its_class(here, load_dir, tag, *args, **named)
        with ours.opened(str(Path(load_dir, str(tag)))):
            # Of other ranks' or stage's names it finds none, and says so with an assertion.
            _mark_own(Path(here._get_ckpt_name(load_dir, tag)))  # noqa: SLF001
            return of_its_class(here, load_dir, tag, *args, **named)

    return load_checkpoint


def _check_loads_weights(engine: Any, asked: Mapping[str, Any]) -> None:
    """Refuse what would load no weights with stage 3, and say nothing.

    Raises:
        InvalidRequestError: names the argument.
    """
    if not engine.zero_optimization_partition_weights():
        return
    for argument, loads_all in (("load_module_only", False), ("load_optimizer_states", True)):
        if bool(asked.get(argument, loads_all)) is not loads_all:
            raise InvalidRequestError(
                f"{argument}={not loads_all} is not supported with ZeRO stage 3, where DeepSpeed "
                f"takes the weights from the optimizer's state: load all of it, or the weights "
                f"with holdfast.load before deepspeed.initialize"
            )


def _mark_own(path: Path) -> None:
    try:
        mark(path)
    except OSError as cause:
        raise AccessError(
            f"{path} cannot be made, which DeepSpeed looks for: the checkpoint was saved by other "
            f"ranks or with another stage, so its folder must be writable: {cause}"
        ) from cause
