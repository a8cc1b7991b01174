"""A small trace as a recording of ours: ten jobs of three families, some short, one long."""

import json

from holdfast_services.scheduler.simulator.recordings import FORMAT

MODEL = {
    "alpha_c": 0.02, "beta_c": 0.002, "alpha_n": 0.02, "beta_n": 1e-3, "alpha_r": 0.01,
    "beta_r": 5e-4, "gamma": 1.5,
}  # fmt: skip
FAMILIES = {
    "small": (20_000.0, 4), "middle": (400_000.0, 16), "large": (3_000_000.0, 64),
}  # fmt: skip


def line(name, family, submitted_s, **fields):
    samples, most = FAMILIES[family]
    whole = {
        "name": name,
        "family": family,
        "submitted_s": submitted_s,
        "gpus_max": most,
        "batch": {
            "initial": 32, "maximum": 4096, "local_min": 8, "local_max": 128, "accumulation": True,
        },
        "step_time": MODEL,
        "noise": [[0.0, 1.0, 20.0], [samples / 2, 1.0, 80.0]],
        "samples": samples,
        "asked_gpus": 2,
        "asked_batch": 128,
    }  # fmt: skip
    return {**whole, **fields}


JOBS = [
    line("large-0", "large", 0.0),
    *(line(f"small-{at}", "small", 200.0 * at) for at in range(5)),
    *(line(f"middle-{at}", "middle", 700.0 * at + 30.0) for at in range(4)),
]


def write(path, jobs=JOBS):
    lines = [{"format": FORMAT}, *jobs]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path
