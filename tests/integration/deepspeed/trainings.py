"""Small trainings with DeepSpeed on CPU, for the processes that tests start.

A parent imports deepspeed once, which takes seconds, and forks the ranks of each training.
"""

import os
import sys
import traceback
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # deepspeed warns of its imports, and of much else

import deepspeed  # noqa: E402
import deepspeed.module_inject  # noqa: E402
import deepspeed.moe.layer  # noqa: E402
import deepspeed.ops  # noqa: E402
import functorch.compile  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402

# On CPU its first process group would compile C++ for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Model(torch.nn.Module):
    """Weights that divide by no number of ranks, a buffer, a frozen layer and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.register_buffer("seen", torch.zeros(7))
        self.frozen = torch.nn.Linear(7, 7, bias=False)
        self.inner = torch.nn.Linear(7, 13)
        self.outer = torch.nn.Linear(13, 7)
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        self.seen += hidden.detach().mean(0)
        hidden = self.frozen(self.norm(hidden))
        return self.head(self.outer(torch.relu(self.inner(hidden))))


def groups_of(model):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


def config(stage, dtype="bf16", **zero):
    wanted = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 1000,
            **zero,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        wanted["bf16"] = {"enabled": True}
    return wanted


def make(stage, seed=0, dtype="bf16", **zero):
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(stage, dtype, **zero)
    )
    return engine


def train(engine, steps):
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(0, 11, (4,))
        logits = engine(tokens)
        engine.backward(torch.nn.functional.cross_entropy(logits.float(), tokens))
        engine.step()


def truth(engine):
    """Return what an engine has, as DeepSpeed itself says it, whole; collective."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # a load has made them anew
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if engine.zero_optimization() and parameter.requires_grad:
            found[f"fp32.{name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(parameter, key)
                found[f"{key}.{name}"] = None if value is None else value.clone()
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"weights.{name}"] = parameter.detach().clone()
    found.update({f"buffer.{n}": b.clone() for n, b in engine.module.named_buffers()})
    inner = engine.optimizer.optimizer if engine.zero_optimization() else engine.optimizer
    steps = [torch.as_tensor(s["step"]).item() for s in inner.state.values() if "step" in s]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    found["plain"] = {
        "steps": sorted(set(steps)),
        "schedule": engine.lr_scheduler.state_dict()["last_epoch"],
        "lr": engine.get_lr(),
        "global_steps": engine.global_steps,
        "scaler": None if scaler is None else {k: str(v) for k, v in vars(scaler).items()},
    }
    return found


def differences(one, other, *, skip=()):
    """Return the names of what differs between two truths, bit by bit."""
    lost = sorted(one.keys() ^ other.keys())
    return lost + [
        name
        for name in one.keys() & other.keys()
        if not name.startswith(tuple(skip)) and not _same(one[name], other[name])
    ]


def _same(one, other):
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other or (
        not torch.is_tensor(one) and not torch.is_tensor(other) and one == other
    )


def run(size, work, folder):
    """Fork ``size`` ranks that do ``work(rank)`` in one process group; raise if one of them fails.

    Returns the exit status of each.
    """
    group = Path(folder, f"group-{os.urandom(4).hex()}")
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os._exit(_rank(rank, size, work, group))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _rank(rank, size, work, group):
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo", f"file://{group}", rank=rank, world_size=size)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        work(rank)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0
