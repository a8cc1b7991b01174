"""Storage for Megatron-core: ``dist_checkpointing`` saves and loads Holdfast checkpoints.

A strategy for the sharded part of a checkpoint: into its folder, or into the memory of a job. The
common part and ``metadata.json`` stay Megatron's own files. What is sharded over any number of
tensor, pipeline, expert and data parallel ranks is loaded by any other.
"""

from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    register_default_strategy,
)

from holdfast.integrations.megatron.job import HoldfastJob
from holdfast.integrations.megatron.strategies import (
    BACKEND,
    VERSION,
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
)

__all__ = ["HoldfastJob", "HoldfastLoadStrategy", "HoldfastSaveStrategy", "install"]


def install() -> None:
    """Have Megatron find the strategies by name, ``("holdfast", 1)``; idempotent.

    ``load`` without a strategy then loads what was saved with it.
    """
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, HoldfastSaveStrategy())
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, HoldfastLoadStrategy())
