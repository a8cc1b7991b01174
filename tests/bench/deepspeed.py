"""How long ``save_checkpoint`` of DeepSpeed keeps training waiting, ours beside its own engine."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.bench.harness import Record, faster, in_turn
from torch import nn

import holdfast.integrations.deepspeed as ours

NAMES = ("deepspeed/stall",)
RUNS = 5
WIDTH, LAYERS = 2048, 12
BYTES_OF_A_PARAMETER = 2 + 3 * 4
"""The 16-bit weight, the master weight and AdamW's two moments."""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the record; the disk is the one of the working directory."""
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="build")).resolve()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    try:
        engine = _engine(folder, WIDTH // 4 if quick else WIDTH)
        peer = engine.checkpoint_engine
        ours.install(engine)
        mine = engine.checkpoint_engine

        def save(kind: Any, name: str) -> Callable[[], float]:
            def timed() -> float:
                engine.checkpoint_engine = kind
                _train(engine)
                begun = time.perf_counter()
                engine.save_checkpoint(str(folder / name), tag="step")
                took_s = time.perf_counter() - begun
                waited_s = mine.waited_s
                _train(engine)
                took_s += mine.waited_s - waited_s
                if kind is mine:
                    ours.wait(engine)
                return took_s

            return timed

        ours_s, peer_s = in_turn(save(mine, "ours"), save(peer, "peer"), runs=RUNS)
        parameters = sum(p.numel() for p in engine.module.parameters())
        yield faster(
            "deepspeed/stall",
            ours_s,
            peer_s,
            peer="DeepSpeed's own TorchCheckpointEngine, without fsync",
            length_bytes=parameters * BYTES_OF_A_PARAMETER,
            note="ZeRO-2, one rank, bf16; the call of save_checkpoint, with what the next step "
            "waits for the copy; the save before is over",
            times_min=10,
        )
        dist.destroy_process_group()
    finally:
        shutil.rmtree(folder)


def _engine(folder: Path, width: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
    # On CPU its first process group would compile C++ for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    _train(engine)
    return engine


def _train(engine: Any) -> None:
    inputs = torch.randn(1, engine.module[0].in_features)
    engine.backward(engine(inputs.bfloat16()).float().square().mean())
    engine.step()
