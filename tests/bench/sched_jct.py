"""Completion times of the scheduler on the traces of Pollux, beside what was published with them.

Pollux's figures are the means over workloads 1 to 4 of its artifact, 60 s rounds and 30 s restarts,
and so are ours unless said otherwise. It does not use what jobs declare; ours does, and the records
say so. The data is read where it lies: ``HOLDFAST_POLLUX_DATA``, else ``../shared/data/pollux``
beside the repository.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.bench.harness import Record
from tests.bench.reference_fit import reference

from holdfast_services.scheduler.domain.policies.plan import Policy
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.simulator.alone import Alone, alone_s
from holdfast_services.scheduler.simulator.pollux_traces import (
    PolluxApplication,
    applications,
    workload,
)
from holdfast_services.scheduler.simulator.results import Result, result_of
from holdfast_services.scheduler.simulator.scenario import Scenario
from holdfast_services.scheduler.simulator.simulation import simulate

NAMES = (
    "sched/load1_cold", "sched/load2_cold", "sched/load1_history", "sched/load2_history",
    "sched/load1_p99", "sched/load2_p99", "sched/load1_makespan", "sched/load2_makespan",
    "sched/load1_ftf", "sched/load2_ftf", "sched/load1_system", "sched/load2_system",
    "sched/load1_wrong", "sched/load2_wrong", "sched/load1_undeclared", "sched/load1_pollux",
    "sched/alone",
)  # fmt: skip
BESIDE = Path(__file__).parents[3] / "shared/data/pollux"
DATA = Path(os.environ.get("HOLDFAST_POLLUX_DATA") or BESIDE)
LACKS = (
    ""
    if (DATA / "workloads").is_dir()
    else f"no traces of Pollux in {DATA}: set HOLDFAST_POLLUX_DATA to a folder with traces/, "
    f"workloads/ and workloads-2.0/ of its artifact"
)
FOLDERS = {1: "workloads", 2: "workloads-2.0"}


@dataclass(frozen=True, slots=True)
class Published:
    """What Pollux's simulator published of one workload, from the times of its jobs."""

    mean_s: float
    p99_s: float
    makespan_s: float


PUBLISHED = {
    1: (
        Published(2088.77, 39104.6, 64849.0), Published(3322.94, 43323.7, 56644.0),
        Published(2188.49, 14570.1, 36806.0), Published(2720.98, 51976.5, 64694.0),
    ),
    2: (
        Published(6186.26, 106007.9, 134515.0), Published(4190.83, 51949.1, 75850.0),
        Published(5131.84, 25877.5, 58158.0), Published(5262.40, 80366.3, 95080.0),
    ),
}  # fmt: skip
ALL, TWO = (1, 2, 3, 4), (1, 3)
ALONE_S = {
    "cifar10": {1: 3745, 4: 1143, 16: 452, 64: 650},
    "bert": {1: 13614, 4: 3403, 16: 1369, 64: 1029},
    "imagenet": {4: 150517, 16: 42845, 64: 15982},
    "deepspeech2": {1: 18254, 4: 5297, 16: 2006, 64: 1646},
    "yolov3": {1: 33748, 2: 18613, 4: 13176, 8: 15358, 16: 8957, 64: 7250},
    "ncf": {1: 47},
}
"""Seconds that jobs take alone on so many GPUs in the simulator that was published."""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the records; of a quick run, one workload for each."""
    every, two = ((3,), (3,)) if quick else (ALL, TWO)
    with ProcessPoolExecutor(min(2, len(os.sched_getaffinity(0)))) as pool:
        run = _Runs(pool)
        for load, most in ((1, 0.90), (2, 0.80)):
            found = run(load, every, Scenario())
            yield _mean(f"sched/load{load}_cold", load, every, found, most, "no history")
        for load, most in ((1, 0.85), (2, 0.76)):
            found = run(load, every, Scenario(history=True))
            yield _mean(f"sched/load{load}_history", load, every, found, most, "history")
            yield from _guards(load, every, found)
        for load, most in ((1, 0.80), (2, 0.73)):
            found = run(load, every, Scenario(history=True, restart_s=10.0))
            what = "history, restarts of 10 s: system beside system, Pollux was published with 30 s"
            yield _mean(f"sched/load{load}_system", load, every, found, most, what)
        for load, most in ((1, 0.92), (2, 0.83)):
            found = run(load, two, Scenario(history=True, wrong_by=0.7))
            what = "history, declared epochs wrong by a factor, log-normal, sigma 0.7"
            yield _mean(f"sched/load{load}_wrong", load, two, found, most, what)
        found = run(1, two, Scenario(history=True, declares=False))
        what = "history, nothing declared: what Pollux knows, and families"
        yield _mean("sched/load1_undeclared", 1, two, found, 0.95, what)
        yield _baseline(every, run(1, every, Scenario(), Pollux()))
    yield _known_times(("cifar10", "ncf") if quick else tuple(ALONE_S))


class _Runs:
    """Runs workloads, as many at a time as there are processes; each takes one core."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(
        self, load: int, numbers: Sequence[int], scenario: Scenario, policy: Policy | None = None
    ) -> list[Mapping[str, float]]:
        asked = [(load, number, scenario, policy or Price()) for number in numbers]
        return list(self._pool.map(_run, asked))


@cache
def _applications() -> Mapping[str, PolluxApplication]:
    return applications(DATA)


@cache
def _alone() -> Alone:
    return Alone(4)


def _run(asked: tuple[int, int, Scenario, Policy]) -> Mapping[str, float]:
    load, number, scenario, policy = asked
    path = DATA / FOLDERS[load] / f"workload-{number}.csv"
    found: Result = result_of(simulate(workload(path, _applications()), policy, scenario), _alone())
    one = found.summary
    return {
        "mean_s": one.jct_mean_s, "p50_s": one.jct_p50_s, "p99_s": one.jct_p99_s,
        "makespan_s": one.makespan_s, "ftf": one.ftf_worst, "starts": one.starts_mean,
    }  # fmt: skip


def _mean(
    name: str, load: int, numbers: Sequence[int], found: Sequence[Mapping[str, float]],
    most: float, what: str,
) -> Record:  # fmt: skip
    value = statistics.fmean(one["mean_s"] for one in found)
    peer = statistics.fmean(PUBLISHED[load][number - 1].mean_s for number in numbers)
    each = ", ".join(
        f"w{number} {one['mean_s'] / PUBLISHED[load][number - 1].mean_s:.3f}"
        for number, one in zip(numbers, found, strict=True)
    )
    starts = statistics.fmean(one["starts"] for one in found)
    return Record(
        name=name,
        value=value,
        unit="s",
        peer="Pollux as published",
        peer_value=peer,
        ratio=value / peer,
        bytes=0,
        note=f"mean completion time, load {load}, {what}; {each}; {starts:.1f} starts per job",
        target=f"<= {most} of the peer",
        met=value / peer <= most,
    )


def _guards(
    load: int, numbers: Sequence[int], found: Sequence[Mapping[str, float]]
) -> Iterator[Record]:
    pairs = [(one, PUBLISHED[load][number - 1]) for number, one in zip(numbers, found, strict=True)]
    tails = [one["p99_s"] / peer.p99_s for one, peer in pairs]
    ends = [one["makespan_s"] / peer.makespan_s for one, peer in pairs]
    unfair = [one["ftf"] for one, _ in pairs]
    p99 = statistics.fmean(tails)
    yield _guard(f"sched/load{load}_p99", p99, tails, "<= 1 on average", most=1.0)
    yield _guard(f"sched/load{load}_makespan", max(ends), ends, "<= 1.12 each", most=1.12)
    yield _guard(f"sched/load{load}_ftf", max(unfair), unfair, "<= 2 each", most=2.0)


def _guard(name: str, value: float, each: Sequence[float], target: str, *, most: float) -> Record:
    is_ftf = name.endswith("_ftf")
    what = (
        "worst time beside that alone on a fair share, of jobs of 300 s and more"
        if is_ftf
        else "beside Pollux as published"
    )
    return Record(
        name=name,
        value=value,
        unit="times alone" if is_ftf else "of the peer",
        peer="" if is_ftf else "Pollux as published",
        peer_value=None if is_ftf else 1.0,
        ratio=value / most if is_ftf else value,
        bytes=0,
        note=f"{what}, history; by workload {', '.join(f'{one:.2f}' for one in each)}",
        target=target,
        met=value <= most,
    )


def _baseline(numbers: Sequence[int], found: Sequence[Mapping[str, float]]) -> Record:
    """Return Pollux's objective in our simulator: whether the two simulators agree."""
    what = "Pollux's objective, solved exactly, in our simulator: it should be 1.02"
    return _mean("sched/load1_pollux", 1, numbers, found, 1.05, what)


def _known_times(names: Sequence[str]) -> Record:
    """Return how far times of jobs alone are from the known ones, with the fit of AdaptDL."""
    off = {
        f"{name} {gpus}": alone_s(_applications()[name], gpus, 4, own=reference()) / known_s - 1
        for name in names
        for gpus, known_s in ALONE_S[name].items()
    }
    worst = max(off, key=lambda each: abs(off[each]))
    return Record(
        name="sched/alone",
        value=100 * abs(off[worst]),
        unit="%",
        peer="",
        peer_value=None,
        ratio=abs(off[worst]) / 0.01,
        bytes=0,
        note=f"most that {len(off)} times of jobs alone are off those of the published simulator, "
        f"with the fit of AdaptDL; worst {worst} GPUs",
        target="<= 1 %",
        met=abs(off[worst]) <= 0.01,
    )
