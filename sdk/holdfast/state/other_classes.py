"""Optimizers and schedulers that seem to be of another class than those that were saved.

No class is saved, and torch fills any of them with what any other has. A warning, not an error:
what both have is restored, which may be meant, and a newer torch has settings more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.state.name_differences import name_differences

log = logging.getLogger(__name__)


def warn_of_optimizer(
    path: str, optimizer: Optimizer, groups: Iterable[Mapping[str, object]]
) -> None:
    """Say so if ``groups``, as they were saved, lack settings that the class has.

    What only they have may be a scheduler's.
    """
    lost = {name for group in groups for name in optimizer.defaults if name not in group}
    _warn(path, optimizer, [name for name in optimizer.defaults if name in lost], [])


def warn_of_scheduler(path: str, scheduler: LRScheduler, saved: Mapping[str, object]) -> None:
    """Say so if ``saved`` has other settings than the scheduler."""
    here = scheduler.state_dict()
    if isinstance(here, Mapping):  # a class of the user's may return anything
        _warn(path, scheduler, _settings(here, saved), _settings(saved, here))


def _settings(some: Mapping[str, object], others: Mapping[str, object]) -> list[str]:
    """Return the names of public settings that only ``some`` has."""
    names = (name for name in some if name not in others)
    return [name for name in names if isinstance(name, str) and not name.startswith("_")]


def _warn(path: str, value: object, lost: Sequence[str], extra: Sequence[str]) -> None:
    if lost or extra:
        log.warning(
            "state %r is of class %s now, and was saved with other settings, as another class or "
            "version of it has: %s; what both have was restored",
            path,
            type(value).__name__,
            name_differences("setting", lost, extra),
        )
