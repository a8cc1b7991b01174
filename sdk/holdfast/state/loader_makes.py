"""What of a data loader's make must stay inside an epoch, and what cannot be brought back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from holdfast.errors import InvalidRequestError

log = logging.getLogger(__name__)


def check_loader(loader: DataLoader[Any], what: str) -> None:
    """Refuse what cannot be brought back, and say what to do instead.

    Workers that live on keep random state that nobody can read: they are started anew for each
    epoch, as without ``persistent_workers``.

    Raises:
        InvalidRequestError: batches in any order.
    """
    if loader.persistent_workers:
        vars(loader)["persistent_workers"] = False  # the loader itself refuses a change
        cast("Any", loader)._iterator = None  # noqa: SLF001 - lets those go that it has started
        log.warning(
            "%s has persistent_workers=True: its workers are started anew for each epoch, since "
            "what they draw from epoch to epoch could not be brought back",
            what,
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise InvalidRequestError(
            f"{what} with in_order=False cannot be saved: the order of its batches is random; "
            f"use in_order=True"
        )


def make_of(loader: DataLoader[Any]) -> dict[str, object]:
    """Return what ``check_make`` compares."""
    return {
        "stateful": is_stateful_loader(loader),
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size,
    }


def is_made_alike(loader: DataLoader[Any], saved: Mapping[str, object]) -> bool:
    """Tell whether ``check_make`` has nothing to refuse."""
    return not any(True for _ in _differences(loader, saved))


def check_make(loader: DataLoader[Any], saved: Mapping[str, object]) -> None:
    """Refuse a loader that would draw other samples for the rest of the epoch.

    Raises:
        InvalidRequestError: it is not as ``make_of`` says that it was.
    """
    for name, value, here in _differences(loader, saved):
        raise InvalidRequestError(
            f"the data loader was saved inside an epoch with {name}={value}, but has {name}="
            f"{here} now: finish that epoch with {name}={value}, then change it"
        )


def _differences(
    loader: DataLoader[Any], saved: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
    here = make_of(loader)
    if not here["stateful"] and not isinstance(loader.dataset, IterableDataset):
        here["num_workers"] = saved["num_workers"]  # the order does not depend on it
    yield from ((name, value, here[name]) for name, value in saved.items() if here[name] != value)


def continues_by_itself(loader: Any) -> bool:
    """Tell whether a loader is torchdata's and all its parts say where they are.

    With workers the dataset must say it too: there it may draw and remember out of reach.
    """
    if not is_stateful_loader(loader):
        return False
    sampler, batches, dataset = loader.sampler, loader.batch_sampler, loader.dataset
    iterable = isinstance(dataset, IterableDataset)
    return (
        (_is_stateful(dataset) or not (loader.num_workers or iterable))
        and (iterable or _is_known(sampler))
        and (batches is None or is_torchdatas(batches, "BatchSampler") or _is_stateful(batches))
    )


def _is_known(sampler: Any) -> bool:
    if is_torchdatas(sampler, "RandomSampler"):
        # More than one permutation is drawn on the way, and so are pieces with replacement.
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler) or _is_stateful(sampler)


def is_torchdatas(value: object, name: str) -> bool:
    """Tell whether ``value`` is of a class of torchdata, without importing it."""
    return type(value).__name__ == name and type(value).__module__.startswith("torchdata.")


def _is_stateful(value: object) -> bool:
    return all(callable(getattr(value, n, None)) for n in ("state_dict", "load_state_dict"))


def is_stateful_loader(value: object) -> bool:
    """Tell whether ``value`` is torchdata's, without importing torchdata."""
    return any(
        cls.__name__ == "StatefulDataLoader" and cls.__module__.startswith("torchdata.")
        for cls in type(value).__mro__
    )
