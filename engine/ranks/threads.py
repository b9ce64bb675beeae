"""The threads of a worker's ranks: rank 0 is whatever thread runs a step, the others have their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from ..device import mark_stream, select_device
from ..engine_config import EngineConfig
from ..errors import DeviceLostError, RankFailedError
from ..loaded_model import LoadedModel
from ..model.ranks import ALONE, Rank
from .host import HostRank, mailboxes
from .nccl import Communicators, NcclRank

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[T], object]


def ranks_of(device: torch.device, size: int) -> Sequence[Rank]:
    """Make those of a worker on GPUs from ``device`` on, or on a CPU."""
    if size == 1:
        return [ALONE]
    boxes = mailboxes(size)
    if device.type == "cpu":
        return [HostRank(number, boxes) for number in range(size)]
    communicators = Communicators(size)
    first = device.index or 0
    gpus = [torch.device("cuda", first + number) for number in range(size)]
    return [NcclRank(number, boxes, communicators, gpu) for number, gpu in enumerate(gpus)]


def load_ranks(engine: EngineConfig) -> list[LoadedModel]:
    """The model of each rank, rank 0 first, KV caches of one size. Raises EngineError with what to do."""
    settings = engine.settings
    first, *others = ranks_of(select_device(settings.device), settings.tensor_parallel_size)
    loaded = [LoadedModel(engine, first)]
    loaded += (LoadedModel(engine, rank, loaded[0]) for rank in others)
    sizes = [each.cache_size() for each in (loaded if loaded[0].device.type == "cuda" else loaded[:1])]
    num_blocks, longest = (
        min(of) for of in zip(*((s.num_blocks, s.max_model_len) for s in sizes), strict=True)
    )
    if loaded[0].spread is not None:
        num_blocks = max(num_blocks, len(loaded))  # each has one
    for each in loaded:
        each.make_cache(num_blocks, longest, None if each is loaded[0] else loaded[0])
    loaded[0].use_this_thread()
    return loaded


def written_by_all(
    on_layer: Callable[[int], None], num_layers: int, rank: Rank, device: torch.device
) -> Callable[[int], None]:
    """Report what all ranks have written: a layer ends in a sum over them. What comes behind that on one rank
    comes behind the layers before on every rank. The last layer gets a sum of its own."""
    at_end = torch.zeros(1, device=device)

    def report(count: int) -> None:
        if count == num_layers:
            rank.sum(at_end)
        on_layer(max(count - 1, 0))
        if count == num_layers:
            on_layer(count)

    return report


class AllRanks(Generic[T]):
    """Runs on all ranks what rank 0 does. ``runners``: of all, rank 0 first."""

    def __init__(self, runners: Sequence[T], ranks: Sequence[Rank], on_gpus: bool) -> None:
        self._runners, self._ranks, self._on_gpus = runners, ranks, on_gpus
        self._inboxes = [queue.SimpleQueue[Work[T]]() for _ in runners[1:]]
        self._launched = [queue.SimpleQueue[torch.cuda.Event]() for _ in runners[1:]]
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        for number in range(1, len(runners)):
            for work in (self._run, self._wait) if on_gpus else (self._run,):
                threading.Thread(target=work, args=(number,), name="rank", daemon=True).start()

    def run(self, other: Work[T], own: Callable[[], R], launched: bool = False) -> R:
        """``own`` on this thread, ``other`` on the other ranks meanwhile. ``launched``: they do not wait for
        the device. Raises what one of them, or this one, could not go on for."""
        for inbox in self._inboxes:
            inbox.put(other)
        try:
            result = own()
        except Exception as error:
            self._finish(error, launched)
            raise
        self._finish(None, launched)
        return result

    def _finish(self, own: Exception | None, launched: bool) -> None:
        if own is not None and not (launched and self._on_gpus):
            self._ranks[0].fail()
        errors = [own, *(self._ended.get() for _ in self._inboxes)]
        found = [error for error in errors if error is not None]
        if not found:
            return
        first = next((error for error in found if not isinstance(error, RankFailedError)), found[0])
        alike = found == [own] and len({rank.num_calls for rank in self._ranks}) == 1
        if self._on_gpus and not alike:
            self._ranks[0].fail()  # a communicator that was aborted is of no more use
            raise DeviceLostError(
                f"a GPU of this worker could not go on with a step ({first}): it ends, to be started anew"
            ) from first
        for rank in self._ranks:
            rank.forget()
        raise first

    def _run(self, number: int) -> None:
        while True:
            work, error = self._inboxes[number - 1].get(), None
            try:
                work(self._runners[number])
                if self._on_gpus:
                    self._launched[number - 1].put(mark_stream(blocking=True))
            except Exception as raised:
                self._ranks[number].fail()
                error = raised
            self._ended.put(error)

    def _wait(self, number: int) -> None:
        """For the GPU of this rank: were it lost, the others would wait for its sums for ever."""
        while True:
            try:
                self._launched[number - 1].get().synchronize()
            except Exception:
                self._ranks[number].fail()
