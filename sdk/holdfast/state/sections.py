"""Sections of a model: modules that lie on some ranks and are called as in the whole model.

A stage of a pipeline that was cut by hand counts its layers from 0 again, and each rank of expert
parallelism its experts. What such a module says of its place is all that a restart on another
number of stages or ranks needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import nn

from holdfast.errors import InvalidRequestError

_TRACED = frozenset({"InterpreterModule", "InterpreterModuleDispatcher"})
"""What ``torch.distributed.pipelining.pipeline()`` makes of the modules that it cuts."""


class Section:
    """A module in the state that is a section of a model: a pipeline stage, some experts.

    Names are those of the whole model: a tensor of one name is the same tensor on whichever ranks
    it lies now or lay when it was saved. A stage that ``torch.distributed.pipelining.pipeline()``
    has traced keeps the names of the model, and is a section without this class.

    Args:
        module: The module, wrapped in DDP or not, sharded or not. It stays the caller's.
        names: What is called how in the whole model, such as ``{"layers.0": "layers.4"}``: by the
            name of a module or tensor inside ``module``, which stands for all that is in it. The
            longest one counts; ``""`` is all of the module, or all of the model. What is not in it
            has the same name in both.

    Raises:
        InvalidRequestError: ``module`` is no module, or ``names`` not of texts.
    """

    def __init__(self, module: nn.Module, names: Mapping[str, str] | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidRequestError(
                f"a Section is made of a module, not of a {type(module).__name__}"
            )
        given = names or {}
        if not isinstance(given, Mapping) or {str} < {str, *map(type, chain(*given.items()))}:
            raise InvalidRequestError(f"names of a Section are texts by texts, not {names!r:.80}")
        self.module = module
        self.names = {key.rstrip("."): name.rstrip(".") for key, name in given.items()}
        if len(self.names) < len(given):
            raise InvalidRequestError(
                f"a name stands twice in the names of a Section: {names!r:.80}"
            )

    def name(self, inner: str) -> str:
        """Return what the tensor or module ``inner`` is called in the whole model.

        >>> stage = Section(nn.ReLU(), {"layers.0": "layers.4", "": "body"})
        >>> stage.name("layers.0.weight"), stage.name("layers.01"), stage.name("")
        ('layers.4.weight', 'body.layers.01', 'body')
        """
        at = inner
        while at not in self.names:
            if not at:
                return inner
            at = at.rpartition(".")[0]
        rest = inner[len(at) :].removeprefix(".")
        return ".".join(filter(None, (self.names[at], rest)))

    def check_fits(self, path: str, inner: list[str]) -> None:
        """Refuse a name of the map that nothing in the module has.

        Raises:
            InvalidRequestError: there is one; names it and ``path``, the section's place.
        """
        known = {""}
        for name in inner:
            while name and name not in known:
                known.add(name)
                name = name.rpartition(".")[0]  # noqa: PLW2901 - up the tree
        for key in self.names:
            if key not in known:
                raise InvalidRequestError(
                    f"section {path!r} has no {key!r}, which its names say is "
                    f"{self.names[key]!r} of the model: names are those of the module's "
                    f"state_dict(), without its wrappers",
                    key=path,
                )


def section_of(value: object) -> Section | None:
    """Return the section that a value of the state is; None if it is none.

    A stage that torch's tracer has cut has the names of the whole model.
    """
    if isinstance(value, Section):
        return value
    if not isinstance(value, nn.Module):
        return None
    traced = any(type(module).__name__ in _TRACED for module in value.modules())
    return Section(value) if traced else None
