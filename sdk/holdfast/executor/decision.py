"""What an executor does next: pure, from orders and from what runs here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.core.executions import Order, Orders

KILL_AFTER_S = 10.0
"""Beyond its grace: a launcher that was told to end kills its ranks after that, and says so."""

Key: TypeAlias = tuple[str, int]
"""A job, and the number of the start of its launcher here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A launcher that was started here: alive or not. ``stopped_at_s``: told to end; 0: not."""

    alive: bool
    grace_s: float
    stopped_at_s: float = 0.0
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start the launcher of an order."""

    order: Order


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell a launcher to save and end."""

    key: Key


@dataclass(frozen=True, slots=True)
class Kill:
    """End a launcher, and its ranks with it."""

    key: Key


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody asks what became of a launcher any more."""

    key: Key


Action: TypeAlias = Start | Stop | Kill | Forget


def decide(orders: Orders | None, known: Mapping[Key, Known], now_s: float) -> Iterable[Action]:
    """Yield what is to be done now; without orders yet, nothing.

    A start that is known is never started again, whatever became of it.
    """
    if orders is None:
        return
    ordered = {(order.job, order.start): order for order in orders.orders}
    for key, order in ordered.items():
        if key not in known and not order.leaving:
            yield Start(order)
    for key, launcher in known.items():
        if key in ordered:
            continue
        if not launcher.alive:
            yield Forget(key)
        elif not launcher.stopped_at_s:
            yield Stop(key)
        elif now_s >= kill_at_s(launcher) and not launcher.killed:
            yield Kill(key)


def kill_at_s(launcher: Known) -> float:
    """Return when a launcher that was told to end is killed."""
    return launcher.stopped_at_s + launcher.grace_s + KILL_AFTER_S
