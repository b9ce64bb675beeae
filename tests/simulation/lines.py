"""A worker's lines to all coordinators, as thin as the live ones (transport/channels/coordinator_links.py): who has welcomed it,
who is silent, and
who hears what. Each coordinator is the owner of what it asked for, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.transport.messages.messages import FirstToken, Joined, Load, Message, RequestFailed, StepTokens

if TYPE_CHECKING:
    from simulation.worker_process import PeerId, WorkerProcess

HELLO_S, ORPHANED_S = 0.4, 1.5
OF_A_REQUEST = frozenset({FirstToken, Joined, StepTokens, RequestFailed})


@dataclass(slots=True)
class Line:
    """To the coordinator of one name, whichever process that is."""

    coordinator: int | None = None  # its incarnation, once it has welcomed us
    newest: int = 0  # number of the process that was last heard: of one before it nothing comes any more
    heard: float = 0.0
    said_hello: float = -1e9


class Lines:
    """By the coordinators' names."""

    def __init__(self, process: WorkerProcess, names: list[str]) -> None:
        self._process, self._world = process, process.world
        self.lines = {name: Line() for name in names}

    @property
    def coordinators(self) -> list[int]:
        """Incarnations of those that have welcomed this worker: only their work counts."""
        return [line.coordinator for line in self.lines.values() if line.coordinator is not None]

    def tell(self, message: Message, me: PeerId) -> None:
        """To whom it concerns. What is for a coordinator that is not there any more is dropped."""
        kind = type(message)
        for name, line in self.lines.items():
            if line.coordinator is None:
                continue
            if kind in OF_A_REQUEST:
                if message.coordinator == line.coordinator:  # type: ignore[attr-defined]
                    self._world.to_coordinator(name, me, message)
            elif kind is Load:
                self._world.to_coordinator(name, me, self._process.core.load(line.coordinator))
            else:
                self._world.to_coordinator(name, me, message)

    def report(self, me: PeerId) -> None:
        """To each coordinator the load as it is to it."""
        for name, line in self.lines.items():
            if line.coordinator is not None:
                self._world.to_coordinator(name, me, self._process.core.load(line.coordinator))

    def hears(self, name: str, speaker: int, now: float) -> bool:
        """Whether a word of this process can still come: one connection's words come in order."""
        line = self.lines.setdefault(name, Line())
        if speaker < line.newest:
            return False
        line.newest, line.heard = speaker, now
        return True

    def welcomed(self, name: str, coordinator: int, others: tuple[str, ...]) -> None:
        """``others``: where more coordinators listen."""
        self.lines[name].coordinator = coordinator
        for other in others:
            self.lines.setdefault(other, Line())

    def lost(self, name: str) -> None:
        """It does not know us, or is silent: hello is said again."""
        line = self.lines[name]
        line.coordinator, line.said_hello = None, -1e9

    def silent(self, now: float) -> list[str]:
        """Who has welcomed us and has said nothing for long."""
        return [name for name, line in self.lines.items() if line.coordinator is not None and now - line.heard >= ORPHANED_S]

    def say_hello(self, now: float) -> None:
        """To those that have not welcomed us (yet)."""
        for name, line in self.lines.items():
            if line.coordinator is None and now - line.said_hello >= HELLO_S:
                line.said_hello = now
                self._world.to_coordinator(name, self._process.id, self._process.hello())
