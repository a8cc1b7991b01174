"""Saves and resumes scripts that know nothing of Holdfast: ``holdfast run --auto train.py``.

What a script builds is noted as it is built. The first pass over a ``DataLoader`` with an optimizer
there makes a ``Checkpointer`` of all of it; from then on every step is saved when the next batch
is asked for. Nothing is patched before ``install``, and nothing stays patched after ``uninstall``.
"""

from __future__ import annotations

from holdfast.auto.driver import Driver
from holdfast.auto.gathering import Gathering
from holdfast.auto.trainers import Trainers
from holdfast.errors import PreconditionError
from holdfast.patches import Patches

_installed: list[tuple[Driver, Patches]] = []


def install(job: str, *, steps_by: str = "", fresh: bool = False) -> None:
    """Save and resume what this process trains from here on, as ``job``.

    Args:
        job: Name of the job; a restart finds its checkpoints by it.
        steps_by: Name of the optimizer whose steps count, as the log gives it; empty: a step is
            done when each optimizer has stepped.
        fresh: Start over, once per launch.

    Raises:
        PreconditionError: it is installed already.
    """
    if _installed:
        raise PreconditionError("holdfast.auto is installed already: call uninstall() first")
    patches = Patches()
    gathering = Gathering(patches)
    driver = Driver(job, gathering, patches, steps_by=steps_by, fresh=fresh)
    driver.watch()
    Trainers(job, gathering, driver, patches, fresh=fresh)
    _installed.append((driver, patches))


def uninstall() -> None:
    """Undo all that ``install`` did; what was saved stays. A repeat is harmless.

    Raises:
        CheckpointError: the newest save is not safe, as ``Checkpointer.close`` says.
    """
    while _installed:
        driver, patches = _installed.pop()
        patches.undo()
        driver.close()
