"""Holdfast in five minutes: train a GPT on two nodes, kill a rank twice, then a node; lose nothing.

Three runs of the same seed: one without faults, and one with them under each launcher. Their loss
curves and their final parameters and optimizer state must be equal bit by bit; the exit code says
whether they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from cluster import LAUNCHERS, Cluster, DemoError, Node
from faults import kill_node, kill_rank
from report import Journals, Recovery, differences, recoveries
from screen import Screen, print_report
from stack import Stack, down

TRAIN = Path(__file__).parents[1] / "gpt" / "train.py"
NODES = 2
POLL_S = 0.05
START_S_MAX = 60.0
STEP_S_MAX = 5.0
RECOVERY_S_MAX = 60.0
MID_STEP_S = 0.2
TAIL_LINES = 30
DIFFERENCES_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to do to which node, once all ranks have completed ``after_step``."""

    kind: str
    after_step: int
    strike: Callable[[Node, Sequence[int]], float]
    node: int


def main() -> int:
    """Run the demo; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse_arguments()
    try:
        return demo(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        if error.log is not None and error.log.exists():
            lines = error.log.read_text(encoding="utf-8", errors="replace").splitlines()
            print(f"--- end of {error.log}", *lines[-TAIL_LINES:], sep="\n", file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="emptied first")
    parser.add_argument("--result", type=Path, default=Path("build/demo.json"))
    parser.add_argument("--size", choices=("small", "tiny"), default="small")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--launcher",
        action="append",
        choices=LAUNCHERS,
        help="whose recovery is shown; may be given several times (default: each one's)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the stack running at the end")
    return parser.parse_args()


def demo(arguments: argparse.Namespace) -> int:
    """Train twice, compare, report; return the exit code."""
    folder: Path = arguments.dir.absolute()
    clear(folder)
    steps = arguments.steps
    faults = (
        Fault(kind="rank_killed", after_step=steps // 4, strike=kill_rank, node=1),
        Fault(kind="rank_killed", after_step=2 * steps // 4, strike=kill_rank, node=1),
        Fault(kind="node_lost", after_step=3 * steps // 4, strike=kill_node, node=0),
    )
    with Stack(folder / "home", nodes=NODES, keep=arguments.keep) as stack:
        print(f"dashboard: {stack.rest_url}", flush=True)
        run = Run(stack, folder, size=arguments.size, steps=steps)
        reference, _ = run.train("undisturbed", LAUNCHERS[0], ())
        found: list[str] = []
        costs: dict[str, list[Recovery]] = {}
        for launcher in arguments.launcher or LAUNCHERS:
            journals, costs[launcher] = run.train(
                f"with-faults-{launcher.replace(' ', '-')}", launcher, faults
            )
            found += [
                f"{launcher}: {each}" for each in differences(reference, journals, steps=steps)
            ]
        print_report(costs)
        tell(found, journals, steps=steps)
        write_result(arguments.result, found, costs, journals, steps=steps)
        print(f"dashboard: {stack.rest_url}" + ("" if arguments.keep else " (until now)"))
    return 1 if found else 0


def clear(folder: Path) -> None:
    """Remove what an earlier demo left in ``folder``, a running stack included.

    Raises:
        DemoError: no demo has ever run there, so it is not ours to empty.
    """
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "home").is_dir():
            raise DemoError(f"{folder} is not a demo's folder: choose another --dir")
        down(folder / "home")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


class Run:
    """Trains the same job under different names, with and without faults."""

    def __init__(self, stack: Stack, folder: Path, *, size: str, steps: int) -> None:
        self._stack = stack
        self._folder = folder
        self._size = size
        self._steps = steps

    def train(
        self, name: str, launcher: str, faults: Sequence[Fault]
    ) -> tuple[Journals, list[Recovery]]:
        """Train to the end; return what the ranks wrote and what each fault cost.

        Raises:
            DemoError: it takes too long, or fails more often than the faults explain.
        """
        out = self._folder / name
        script = [str(TRAIN), "--job", f"gpt-{name}", "--size", self._size]
        script += ["--steps", str(self._steps), "--out", str(out)]
        journals = Journals(out, ranks=NODES)
        kills = []
        with (
            Screen(name, self._steps) as screen,
            Cluster(launcher, self._stack.nodes, script, self._stack.env, out) as cluster,
        ):
            watch = Watch(cluster, journals, screen)
            for fault in faults:
                watch.until(
                    partial(journals.has_completed, fault.after_step),
                    START_S_MAX + fault.after_step * STEP_S_MAX,
                )
                time.sleep(MID_STEP_S)
                node = cluster.nodes[fault.node]
                killed_at = fault.strike(node, journals.refresh().pids_on(str(node.spec.agent)))
                screen.say(f"{fault.kind.replace('_', ' ')} after step {journals.completed()}")
                watch.until(partial(journals.recovered, killed_at), RECOVERY_S_MAX)
                kills.append((fault.kind, killed_at))
            watch.until(lambda: False, START_S_MAX + self._steps * STEP_S_MAX)
        return journals.refresh(), recoveries(kills, journals)


class Watch:
    """Keeps the nodes running and the screen up to date while the demo waits for something."""

    def __init__(self, cluster: Cluster, journals: Journals, screen: Screen) -> None:
        self._cluster = cluster
        self._journals = journals
        self._screen = screen

    def until(self, happened: Callable[[], bool], timeout_s: float) -> None:
        """Return once ``happened``, or once all nodes have finished.

        Raises:
            DemoError: neither, within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self._cluster.poll():
            self._screen.show(self._journals.refresh().completed())
            if happened():
                return
            if time.monotonic() > deadline:
                raise DemoError(
                    f"no progress within {timeout_s:.0f} s, at step {self._journals.completed()}",
                    self._cluster.nodes[0].log,
                )
            time.sleep(POLL_S)
        self._screen.show(self._journals.refresh().completed())


def tell(found: Sequence[str], journals: Journals, *, steps: int) -> None:
    """Print the verdict."""
    print(f"stall per step, median: {journals.stall_ms_median():.2f} ms")
    if not found:
        print(f"bit-identical: the loss of all {steps} steps, parameters, optimizer state")
        return
    print(f"NOT bit-identical, {len(found)} differences:")
    print(*(f"  {line}" for line in found[:DIFFERENCES_SHOWN_MAX]), sep="\n")


def write_result(
    path: Path,
    found: Sequence[str],
    costs: Mapping[str, Sequence[Recovery]],
    journals: Journals,
    *,
    steps: int,
) -> None:
    """Write what the demo found, for machines."""
    result = {
        "bit_identical": not found,
        "faults": {name: [asdict(each) for each in found] for name, found in costs.items()},
        "stall_ms_median": journals.stall_ms_median(),
        "steps": steps,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
