"""The folder of adapters, and the slots of a worker's process with their weights. All workers share the
folder; each sees its changes late."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from splitserve.coordinator.lifecycle.request import Request
from splitserve.engine.adapters.slots import AdapterSlots

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess
    from simulation.world import World

NAMES = ("a", "b", "c", "d")
LOOK_S, PUT_S = 0.5, 0.2
SHARE = 0.6  # of requests that name an adapter where there are any


def shift(content: str) -> int:
    """What an adapter adds to every token that the model reads; "": nothing."""
    return int(content, 16) << 20 if content else 0


class AdapterFolder:
    """``contents`` by name. An adapter is added, replaced, renamed or taken away."""

    def __init__(self, world: World) -> None:
        self._world, self._random = world, Random(f"adapters {world.seed}")
        self._number = 0
        self.contents: dict[str, str] = {}
        for name in NAMES[: world.scenario.cluster.adapters]:
            self._add(name)

    def choose(self, request: Request, served: Mapping[str, str]) -> None:
        """Let the request name one of these, or none."""
        if served and self._random.random() < SHARE:
            request.adapter_name, request.adapter = self._random.choice(sorted(served.items()))

    def change(self) -> None:
        self._world.counts["adapters changed"] += 1
        random, name = self._random, self._random.choice(NAMES)
        if random.random() < 0.3:
            self.contents.pop(name, None)
        elif random.random() < 0.3 and self.contents:
            self.contents[name] = random.choice(sorted(self.contents.values()))
        else:
            self._add(name)

    def _add(self, name: str) -> None:
        self._number += 1
        self.contents[name] = f"{self._number:x}"


class ProcessAdapters:
    """What looks at the folder for a process, and its resident adapters."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process, self._world = process, process.world
        self._random = Random(f"adapters {self._world.seed} {process.name} {process.pid}")
        self._num_slots = self._world.scenario.cluster.adapters
        self.slots = AdapterSlots(self._num_slots)
        self._slot_of: dict[str, int] = {}
        self._weights: dict[int, int] = {}
        if self._num_slots:
            self._look()

    def shift(self, content: str) -> int:
        """What a step adds that names this adapter."""
        return self._weights[self._slot_of[content]] if content in self._slot_of else 0

    @property
    def problem(self) -> str:
        """Why not all of the folder that fits is reported; empty: it is."""
        contents: Mapping[str, str] = self._world.folder.contents
        named = {each.name: each.content for each in self.slots.reported if each.name}
        if not named.items() <= contents.items():
            return f"reports {named}, and there are {contents}"
        if self.slots._filling:
            return f"puts {self.slots._filling} into slots"
        wanted = min(self._num_slots, len({*contents.values()}))
        return "" if len({*named.values()}) == wanted else f"reports {named} of {contents}"

    def _look(self) -> None:
        self.slots.rename(self._world.folder.contents)
        for content in self.slots.wanted():
            if (slot := self.slots.take(content)) is not None:
                self._begin_put(slot)
                self._process.after(PUT_S * self._random.random() ** 2, self._put, slot, content)
        self._process.after(LOOK_S * self._random.random(), self._look)

    def _begin_put(self, slot: int) -> None:
        """From now on the slot's weights are anything."""
        for content in [content for content, its in self._slot_of.items() if its == slot]:
            if content in self._process.device.adapters:
                self._world.violated(f"{self._process.name}: a step uses a slot that is filled")
            del self._slot_of[content]
            self._world.counts["adapters replaced in their slot"] += 1
        self._weights[slot] = -1

    def _put(self, slot: int, content: str) -> None:
        self._weights[slot], self._slot_of[content] = shift(content), slot
        self.slots.filled(content)
        self._world.counts["adapters put into slots"] += 1
