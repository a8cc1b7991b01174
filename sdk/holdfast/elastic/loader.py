"""A data loader whose batch follows the ranks: each sample once in a pass, whoever takes part.

What a loop has used is one number, the same on all ranks: the place in the pass's order up to which
updates are complete. Any number of ranks can go on from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sized
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from holdfast.core.hints import JobHints
from holdfast.elastic import batch_choice, running
from holdfast.elastic.fetching import Fetching, Wanted, seed_of
from holdfast.elastic.group import agreed, nodes_count, replicas_of
from holdfast.elastic.profiles import Profiles
from holdfast.elastic.running import Running
from holdfast.elastic.updates import (
    Batching,
    Micro,
    micro_batches,
    micro_batches_count,
    updates,
)
from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import BatchLimits
from holdfast.state.dealing import Order
from holdfast.state.samplers import ElasticSampler, check_order, order_of

if TYPE_CHECKING:
    from holdfast.elastic.adaptation import Adaptation

Epoch = Literal["pass", "progress"]
HINTS_S = 30.0
"""How old hints may be that are told again."""
_ROUNDING = 1e-9
_OURS = frozenset({"batch_sampler", "drop_last", "generator", "in_order", "sampler"})


class AdaptiveDataLoader:
    """Batches of a data set for the ranks that there are, of one global batch size.

    A batch that the loop is given is one micro-batch of this rank. With ``autoscale_batch_size``
    the batch size is chosen anew at the begin of a pass. Put it into the state of a Checkpointer.
    What the data set draws at random for a batch depends on the batch's place alone.

    Args:
        dataset: A map-style data set.
        batch_size: Samples of one update over all ranks; what the learning rate was chosen for.
        shuffle: Permute the order of each pass.
        epoch: What one loop over it is. ``pass``: each sample once. ``progress``: as much progress
            as a pass at ``batch_size`` makes, whatever samples that takes.
        seed: Of the order, the same on all ranks.
        sampler: Another order; the ``order`` of an ``ElasticSampler``.
        group: Ranks that share the data; None: all.
        options: Those of torch's ``DataLoader`` that say how samples are fetched.

    Raises:
        InvalidRequestError: an argument that cannot be; names it.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        epoch: Epoch = "pass",
        seed: int = 0,
        sampler: ElasticSampler | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        _check(dataset, batch_size, epoch, options)
        self._group = group
        replicas, self._rank = replicas_of(group)
        self.batch_size = batch_size
        self._mode = epoch
        self._sampler = sampler or ElasticSampler(
            cast("Sized", dataset), replicas, self._rank, shuffle, seed
        )
        self._length = self._sampler.length
        self._fetching = Fetching(dataset, options)
        self._limits: BatchLimits | None = None
        self._batching = _fixed(batch_size, replicas)
        self._profiles = Profiles()
        self._followed: Adaptation | None = None
        self._noise: tuple[float, float, bool] | None = None
        self._progress = 0.0
        self._hints: tuple[float, JobHints] | None = None
        self._pass = 0
        self._epoch = 0
        self._position = 0
        self._begun = False
        self._live = False
        self._resumes = False
        self._micro: Micro | None = None
        self._loop = object()

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Have the batch size chosen at the begin of each pass, by what makes the most progress.

        Args:
            max_batch_size: The largest batch of one update, over all ranks.
            local_bsz_bounds: Least and largest micro-batch of a rank, in samples.
            gradient_accumulation: Allow several micro-batches in an update.

        Raises:
            InvalidRequestError: no batch keeps these bounds; says which do not fit.
        """
        limits = batch_choice.limits_of(
            self.batch_size,
            max_batch_size,
            local_bsz_bounds,
            accumulation=gradient_accumulation,
        )
        self._batching = batch_choice.first(limits, self._batching.replicas)
        self._limits = limits

    @property
    def current_batch_size(self) -> int:
        """Samples of an update over all ranks now."""
        return self._batching.size

    @property
    def current_local_batch_size(self) -> int:
        """Samples of this rank's largest micro-batch now."""
        return self._batching.local

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of an update beside the one after which gradients are averaged."""
        return self._batching.micro_batches - 1

    @property
    def epoch(self) -> int:
        """Which loop over it this is, or the next one will be, from 0."""
        return self._epoch + (self._begun and not (self._live or self._resumes))

    @property
    def is_update_end(self) -> bool:
        """Whether the batch that the loop has is the last of its update, so that ``step`` acts."""
        return self._micro is None or self._micro.last

    def __len__(self) -> int:
        """Return how many batches this rank is given in a whole pass."""
        return micro_batches_count(0, self._length, self._batching)

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop = object()
        resumes, self._resumes = self._resumes, False
        if not resumes:
            self._pass += self._begun
            self._epoch += self._begun
            self._position = 0
            self._choose()
        elif self._batching.replicas != replicas_of(self._group)[0]:
            self._choose()
        self._begun = self._live = True
        self._micro = None
        try:
            yield from self._passes()
        finally:
            if self._loop is loop:  # else it was left, kept by somebody, and another has begun
                self._live = False
                self._micro = None
                running.leave(self)

    def _passes(self) -> Iterator[Any]:
        """Yield the rest of the epoch."""
        while True:
            if self._mode == "progress" and self._has_progressed():
                return
            yield from self._one_pass()
            if self._mode == "pass" or self._has_progressed():
                return
            self._pass += 1
            self._position = 0
            self._choose()

    def _one_pass(self) -> Iterator[Any]:
        """Yield the rest of a pass; of an epoch of progress, until there was enough."""
        order = self._sampler.order(self._pass)
        begin, batching, number = self._position, self._batching, 0

        def plan() -> Iterator[Wanted]:
            for _, micro in _micros(begin, self._length, self._rank, batching):
                samples = order[micro.begin : micro.end]
                held = samples.tolist() if isinstance(samples, torch.Tensor) else list(samples)
                yield Wanted(seed_of(self._sampler.seed, self._pass, self._rank, micro), held)

        batches = self._fetching.batches(plan)
        known = _micros(begin, self._length, self._rank, batching)
        since_s, first = 0.0, begin
        for (at, micro), batch in zip(known, batches, strict=True):
            if self._micro is not None:
                self._note_time(self._micro, since_s, skip=self._micro.of.start == first)
            if not micro.index:
                self._position = at
                if self._mode == "progress" and self._has_progressed():
                    return
                number = running.next_number()
            self._micro = micro
            running.enter(
                self,
                Running(number=number, micro=micro, batching=batching, initial=self.batch_size),
            )
            since_s = time.perf_counter()
            yield batch
        if self._micro is not None:
            self._note_time(self._micro, since_s, skip=self._micro.of.start == first)
            self._micro = None
        self._position = self._length

    def _note_time(self, micro: Micro, since_s: float, *, skip: bool) -> None:
        """Note how long a micro-batch took; the first update of a pass warms up, and is not."""
        sync_s = running.take_sync_s()
        whole = len(micro.of) == self._batching.size and not micro.spare
        if skip or not whole or self._followed is None:
            return
        where = nodes_count(), self._batching.replicas, self._batching.local
        seconds = time.perf_counter() - since_s
        self._profiles.add(where, seconds, synced=micro.last, sync_s=sync_s)

    def follow(self, adaptation: Adaptation) -> None:
        """Take noise and progress of a model that is trained with these; the first one counts."""
        if self._followed is None:
            self._followed = adaptation

    def _look(self) -> None:
        """Take noise and progress from the model, if it was stepped since the process began."""
        if self._followed is not None:
            self._followed.settle()
            noise = self._followed.noise
            self._noise = (noise.sqr, noise.var, noise.biased) if noise.known else None
            self._progress = self._followed.progress

    def _has_progressed(self) -> bool:
        """Tell whether the epoch's progress is made."""
        progress = self._followed.progress if self._followed is not None else self._progress
        asked = self._length * (self._epoch + 1) / self.batch_size
        return progress >= asked * (1 - _ROUNDING)

    def _choose(self) -> None:
        """Choose the batch of the next pass, or of the rest of this one; collective if chosen."""
        replicas, self._rank = replicas_of(self._group)
        if self._limits is None:
            self._batching = _fixed(self.batch_size, replicas)
            return
        present = self._batching
        if present.replicas != replicas:
            present = batch_choice.first(self._limits, replicas, present.size)
        self._look()
        found = present
        if self._rank == 0:
            noise = self._noise and self._noise[:2]
            points = self._profiles.points()
            found = batch_choice.chosen(self._limits, points, noise, nodes_count(), present)
        size, micro = agreed((found.size, found.micro_batches), self._group)
        self._batching = Batching(size=size, replicas=replicas, micro_batches=micro)

    def job_hints(self) -> JobHints | None:
        """Return what the scheduler may know of this job, on rank 0; at most ``HINTS_S`` old."""
        now_s = time.monotonic()
        if self._rank or not self._begun:
            return None
        if self._hints is None or now_s - self._hints[0] >= HINTS_S:
            self._hints = now_s, self._made_hints()
        return self._hints[1]

    def _made_hints(self) -> JobHints:
        self._look()
        sqr, var, biased = self._noise or (0.0, 0.0, False)
        limits = self._limits
        return JobHints(
            initial_batch=self.batch_size,
            batch=self._batching.size,
            batch_max=limits.maximum if limits else self.batch_size,
            local_min=limits.local_min if limits else 0,
            local_max=limits.largest_local if limits else 0,
            accumulates=bool(limits and limits.accumulation),
            sqr=sqr,
            var=var,
            biased=biased,
            progress=self._progress,
            points=self._profiles.points(),
        )

    def state_dict(self) -> dict[str, object]:
        """Return where the loop is: after the last update of which all batches were given.

        The same on all ranks, but for the times.
        """
        self._look()
        position = self._position
        if self._micro is not None and self._micro.last:
            position = self._micro.of.stop
        return {
            "order": asdict(order_of(self._sampler)),
            "initial": self.batch_size,
            "pass": self._pass,
            "epoch": self._epoch,
            "position": position,
            "begun": self._begun,
            "live": self._live or self._resumes,
            "batching": [
                self._batching.size,
                self._batching.replicas,
                self._batching.micro_batches,
            ],
            "noise": list(self._noise) if self._noise else None,
            "progress": self._progress,
            "profiles": self._profiles.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next loop be the rest of the one that was saved.

        Raises:
            InvalidRequestError: it was saved inside a pass of another order, or of progress in
                units of another batch size; says how it differs.
        """
        if state["live"]:
            check_order(Order(**state["order"]), order_of(self._sampler))
        if state["initial"] != self.batch_size:
            raise InvalidRequestError(
                f"this job began with batch_size={state['initial']}, for which its learning rate "
                f"was chosen, and has batch_size={self.batch_size} now: leave it as it was, and "
                f"bound the batch by autoscale_batch_size()"
            )
        self._pass, self._epoch = int(state["pass"]), int(state["epoch"])
        self._position = int(state["position"])
        self._begun, self._resumes = bool(state["begun"]), bool(state["live"])
        size, replicas, micro = map(int, state["batching"])
        self._batching = Batching(size=size, replicas=replicas, micro_batches=micro)
        noise = state["noise"]
        self._noise = (float(noise[0]), float(noise[1]), bool(noise[2])) if noise else None
        self._progress = float(state["progress"])
        self._profiles.load_state_dict(state["profiles"])


def _micros(begin: int, length: int, rank: int, batching: Batching) -> Iterator[tuple[int, Micro]]:
    """Yield the micro-batches of a rank, each with the place where its update begins."""
    for update in updates(begin, length, batching):
        for micro in micro_batches(update, rank, batching):
            yield update.start, micro


def _fixed(batch_size: int, replicas: int) -> Batching:
    """Return the script's own batch.

    Raises:
        InvalidRequestError: it has less than a sample for each rank.
    """
    return Batching(size=batch_size, replicas=replicas)


def _check(dataset: Any, batch_size: int, epoch: str, options: Mapping[str, Any]) -> None:
    if type(batch_size) is not int or batch_size < 1:
        raise InvalidRequestError(f"batch_size={batch_size!r}: pass a whole number from 1")
    if epoch not in ("pass", "progress"):
        raise InvalidRequestError(f"epoch={epoch!r} is unknown: use 'pass' or 'progress'")
    if isinstance(dataset, IterableDataset):
        raise InvalidRequestError(
            "an IterableDataset has no samples by number: AdaptiveDataLoader deals out numbers; "
            "use a map-style data set"
        )
    if not len(dataset):
        raise InvalidRequestError("the data set has no samples")
    ours = sorted(_OURS & options.keys())
    if ours:
        raise InvalidRequestError(
            f"{ours[0]}= says which samples make a batch, which AdaptiveDataLoader decides: leave "
            f"it out"
        )
