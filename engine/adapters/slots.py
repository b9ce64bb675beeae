"""Which adapter is in which slot of a worker. Pure; its methods may be called from any thread.

    slot     until                                                                     then
    -------  ------------------------------------------------------------------------  -------
    empty    an adapter with a name takes it                                           filling
    filling  its weights are there                                                     ready
    ready    it has no name, nothing here uses it, and one with a name lacks a slot    leaving
    leaving  no role reports it any more, and nothing here uses it                     empty

A name is its folder's; one whose content has changed names another adapter. Where there are more of them than
slots, those that are there stay, and others follow in the order of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from threading import Lock
from typing import Protocol

from ...transport.messages.fields import MAX_ADAPTERS, Adapter
from ..step.batch import SamplingState

LACKS = "its adapter is not on worker {} any more"


class AdapterSlots:
    """Adapters are named by their content."""

    def __init__(self, num_slots: int = 0) -> None:
        self._num_slots, self._empty = num_slots, list(range(num_slots))
        self._filling: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._leaving: set[str] = set()  # some that are ready
        self._names: dict[str, str] = {}
        self._shown: dict[str, str] = {}  # what each name stands for
        self.reported: tuple[Adapter, ...] = ()
        """All that requests may ask for."""
        self.lacks_slots = False  # ``give_up`` may have something to do
        self._lock = Lock()

    def has(self, content: str) -> bool:
        """Whether steps may use it; also "", the model's own weights."""
        return not content or content in self._ready

    @property
    def gauges(self) -> dict[str, float]:
        """See ``transport.reports.Telemetry``."""
        return {"adapters": len(self._ready)} if self._num_slots else {}

    @property
    def counters(self) -> dict[str, float]:
        return {}

    # --- for what reads the folder ---------------------------------------------------------------

    def rename(self, names: Mapping[str, str]) -> None:
        """These names stand for these contents, and no others do."""
        with self._lock:
            self._names = dict(sorted(names.items()))
            self._leaving.difference_update(names.values())
            self._show()

    def wanted(self) -> list[str]:
        """The contents that may take a slot now."""
        with self._lock:
            return self._wanted()[: len(self._empty)]

    def left_out(self) -> list[str]:
        """The names for whose contents there are too few slots."""
        with self._lock:
            served = {*self._filling, *self._ready, *self._wanted()}
            return [name for name, content in self._names.items() if content not in served]

    def take(self, content: str) -> int | None:
        """Return the slot that this content is put into next. None: it needs none, or none is empty."""
        with self._lock:
            if not self._empty or content not in self._wanted():
                return None
            slot = self._filling[content] = self._empty.pop()
            self._show()
            return slot

    def filled(self, content: str, ready: bool = True) -> None:
        """Its weights are in its slot; not ``ready``: they cannot be put there."""
        with self._lock:
            slot = self._filling.pop(content)
            if ready:
                self._ready[content] = slot
            else:
                self._empty.append(slot)
            self._show()

    # --- for what computes with them -------------------------------------------------------------

    def give_up(self, in_use: Set[str], reported: Set[str]) -> None:
        """Empty the slots that others need. ``in_use``: contents that any step may use; ``reported``: those
        that a coordinator knows of."""
        with self._lock:
            for content in sorted(self._leaving - in_use - reported):
                self._leaving.remove(content)
                self._empty.append(self._ready.pop(content))
            num_short = len(self._wanted()) - len(self._empty) - len(self._leaving)
            kept = in_use | self._leaving | set(self._names.values())
            nameless = [content for content in self._ready if content not in kept]
            self._leaving.update(nameless[: max(0, num_short)])
            self._show()

    # --- inside ----------------------------------------------------------------------------------

    def _wanted(self) -> list[str]:
        contents = dict.fromkeys(self._names.values())
        lacking = [c for c in contents if c not in self._ready and c not in self._filling]
        return lacking[: self._num_slots - len(contents) + len(lacking)]

    def _show(self) -> None:
        """A name keeps its earlier content until the new one is there, if that has a slot."""
        usable, wanted = self._ready.keys() - self._leaving, self._wanted()
        coming = {*self._filling, *wanted[: len(self._empty)]}
        shown: dict[str, str] = {}
        for name, content in self._names.items():
            earlier = self._shown.get(name, "") if content in coming else ""
            if content in usable or earlier in usable:
                shown[name] = content if content in usable else earlier
        self._shown = shown
        self.lacks_slots = bool(self._leaving) or len(wanted) > len(self._empty)
        nameless = [("", content) for content in self._ready if content in usable - {*shown.values()}]
        self.reported = tuple(
            Adapter(name=name, content=content)
            for name, content in [*nameless, *shown.items()][:MAX_ADAPTERS]
        )


class AdaptedSequence(Protocol):
    state: SamplingState


class RoleAdapters:
    """The adapters of a process as one of its roles uses and reports them."""

    def __init__(
        self,
        slots: AdapterSlots | None,
        sequences: Callable[[], Iterable[AdaptedSequence]],
        coming: Callable[[], set[str]] = set,
    ) -> None:
        """``sequences``: returns those that steps may compute, or compute now. ``coming``: returns the
        adapters of others that will be. ``slots``: None: there are none."""
        self._slots, self._sequences, self._coming = slots or AdapterSlots(), sequences, coming
        self._last: tuple[Adapter, ...] = ()

    def has(self, content: str) -> bool:
        """Whether a request with this adapter, or without one, may be computed."""
        return self._slots.has(content)

    def take(self, everything: bool) -> tuple[Adapter, ...] | None:
        """Return all that are ready, for a report. None: the same as in the last one."""
        last, self._last = self._last, self._slots.reported
        return self._last if everything or last != self._last else None

    def close(self) -> None:
        """The role gets no more requests."""
        self._last = ()

    @property
    def in_use(self) -> set[str]:
        return {sequence.state.adapter for sequence in self._sequences()} | self._coming()

    @property
    def reported(self) -> set[str]:
        return {adapter.content for adapter in self._last}
