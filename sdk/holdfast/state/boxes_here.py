"""What this rank has of which tensors, by their names: what a restore asks a checkpoint for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from holdfast.format.blob import is_section
from holdfast.format.flat_ranges import is_range
from holdfast.format.names import is_under
from holdfast.state.survey import CapturedTensor, Home, Survey


@dataclass(frozen=True, slots=True)
class LocalBoxes:
    """Which boxes of which tensors this rank holds, by name; ``aliases``: other names of them.

    Of what is in ``sections``, by their names, other ranks hold the rest; what is right in
    ``elsewhere`` they hold alone; what is in ``dealt`` any group of ranks may have saved.
    ``takes_over``: this rank also wants the texts of ranks that are no more.
    """

    tensors: Mapping[str, CapturedTensor]
    aliases: Mapping[str, str]
    sections: Collection[str] = ()
    elsewhere: Collection[str] = ()
    dealt: Collection[str] = ()
    takes_over: bool = False

    @classmethod
    def of(cls, survey: Survey) -> LocalBoxes:
        """Return what a survey has found here."""
        return cls(
            {tensor.fqn: tensor for tensor in survey.tensors},
            dict(survey.aliases),
            [path for path, saved in survey.static.items() if is_section(saved)],
            survey.elsewhere,
            survey.dealt,
            survey.takes_over,
        )

    def cut(self) -> Iterator[CapturedTensor]:
        """Yield what is held of tensors that several ranks hold; not of scalars."""
        return (t for t in self.tensors.values() if t.mesh and t.shape)

    @property
    def beside_shared(self) -> bool:
        """Whether there are tensors of DDP beside them, of which any rank may have saved some."""
        return any(t.home in (Home.SHARED, Home.FIRST) for t in self.tensors.values())

    def likely_savers(self, saved: int) -> set[int] | None:
        """Return who of ``saved`` ranks had what is here, if torch had cut it for them as for now.

        FSDP and tensor parallelism cut a tensor along one dim into equal lengths, for all ranks in
        their order, until nothing is left; so rank 0 has a part of each. None: what is here was
        not cut so, or others hold the same, and anybody may have saved it.
        """
        found = {0}
        for shape, box, holders in {(t.shape, t.box, t.holders) for t in self.cut()}:
            if len(holders) != 1 or is_range(shape, box):
                return None
            if not box.elements_count:
                continue
            cut = [dim for dim, length in enumerate(box.lengths) if length != shape[dim]]
            if len(cut) > 1:
                return None
            for dim in cut:  # if none is cut, the one that was is one row long, which is rank 0's
                rows = -(-shape[dim] // saved)
                found.update(range(box.offsets[dim] // rows, (box.stops[dim] - 1) // rows + 1))
        return found

    def find(self, name: str) -> CapturedTensor | None:
        """Return what is held of a tensor; of an optimizer's state, what is of its parameter."""
        for fqn in _names_of(name):
            held = self.tensors.get(self.aliases.get(fqn, fqn))
            if held is not None:
                return held
        return None

    def is_elsewhere(self, name: str) -> bool:
        """Tell whether other ranks hold a tensor: of a section, state of such, or of an optimizer.

        Of all others this rank may have something.
        """
        if self.elsewhere and name.rpartition(".")[0] in self.elsewhere:
            return True
        if not self.sections:
            return False
        of_section = any(is_under(fqn, self.sections) for fqn in _names_of(name))
        return of_section and not self.find(name)


def _names_of(name: str) -> Iterator[str]:
    """Yield what a name may stand for: a tensor, and of optimizer's state its parameter.

    >>> list(_names_of("o.state.m.state.w.step"))
    ['o.state.m.state.w.step', 'm.state.w', 'w']
    """
    yield name
    after = name.split(".state.")  # the optimizer's place and the parameter's may have one too
    for at in range(1, len(after)):
        yield ".state.".join(after[at:]).rpartition(".")[0]
