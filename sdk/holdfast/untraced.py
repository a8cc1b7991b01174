"""What of Holdfast runs inside a step that a script compiles, and is no part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])


def untraced(hook: Hook) -> Hook:
    """Return ``hook``, called as it is where ``torch.compile`` comes by.

    Traced, whatever it counts would be a reason to compile anew, and what it asks of the moment,
    such as whether a graph is captured, would be answered once for all. It is what
    ``torch.compiler.disable`` does, which takes seconds to import.
    """
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    return hook
