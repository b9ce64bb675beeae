"""A worker's connections to all coordinators: one process, several on one host, several hosts. Each is the
owner of the requests that it sent.

The settings name some coordinators, and each that welcomes the worker names the others of its host. Others
are found by name while the worker runs: one that the name has no more is left once it is silent. A message
about one request goes to the coordinator that the message names; reports go to every coordinator that has
welcomed the worker.

Fenced by its only coordinator, a worker starts over as a new incarnation. Fenced by one of several, it drops
that one's work and sends Hello again; the others' work goes on. (A channel keeps messages in order, so no
earlier message arrives after the Hello.)
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence

from ..environment import Network
from ..messages.messages import FirstToken, Hello, Joined, Load, Message, RequestFailed, StepTokens
from ..process.settings import DNS
from .coordinator_link import HEARTBEAT_S, CoordinatorLink, LinkedWorker

EVERY_S = 2.0


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the tcp:// addresses behind ``dns://HOST:PORT``, sorted. Raises OSError."""
    host, _, port = name.removeprefix(DNS).rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return tuple(sorted(f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in hosts))


class NameWatch:
    """Looks names (``dns://HOST:PORT``) up in a thread, again and again. While a name cannot be resolved its
    last addresses stand."""

    def __init__(
        self,
        names: Sequence[str],
        resolve: Callable[[str], tuple[str, ...]] = addresses_of,
        every_s: float = EVERY_S,
    ) -> None:
        self._found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
        self._failed: set[str] = set()
        self._resolve, self._every_s, self._over = resolve, every_s, threading.Event()
        if names:
            threading.Thread(target=self._run, name="coordinators' names", daemon=True).start()

    def addresses(self) -> list[str]:
        """Return the addresses of all names, as last looked up."""
        return [address for found in self._found.values() for address in found]

    def stop(self) -> None:
        """End the thread; a lookup under way is not waited for."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            for name in self._found:
                self._look_up(name)
            self._over.wait(self._every_s)

    def _look_up(self, name: str) -> None:
        try:
            self._found[name] = self._resolve(name)
            self._failed.discard(name)
        except (OSError, UnicodeError) as error:  # the second: no name of a host
            if name not in self._failed:
                _log.warning("cannot find coordinators by %s: %s; trying again", name, error)
            self._failed.add(name)


OF_A_REQUEST = (FirstToken, Joined, StepTokens, RequestFailed)
_log = logging.getLogger(__name__)


class CoordinatorLinks:
    """All links of a worker; each link sees this object as the worker."""

    def __init__(
        self,
        addresses: Sequence[str],
        network: Network,
        worker_id: str,
        worker: LinkedWorker,
        incarnations: Callable[[], int],
        orphaned_after_s: float,
        discover: Callable[[], Sequence[str]],
    ) -> None:
        """``discover``: returns the present addresses of coordinators that are found by name."""
        self._discover, self._discovered = discover, set[str]()
        self._network, self._worker_id, self._worker = network, worker_id, worker
        self._incarnations = incarnations
        self._orphaned_after_s = orphaned_after_s
        self._links: dict[str, CoordinatorLink] = {}
        self._newcomers: list[str] = []
        self._leaves = False
        self.incarnation = incarnations()
        for address in dict.fromkeys(addresses):
            self._open(address)

    @property
    def coordinators(self) -> list[int]:
        """Incarnations of the coordinators that have welcomed this worker: only their work is accepted."""
        return [link.coordinator for link in self._links.values() if link.coordinator is not None]

    @property
    def misfits(self) -> list[str]:
        """For each coordinator that has welcomed this worker, why no worker of the other role fits this one;
        empty: one does."""
        return [link.misfit for link in self._links.copy().values() if link.coordinator is not None]

    @property
    def refusal(self) -> str:
        """Why some coordinator has not welcomed this worker; empty: none has given a reason."""
        links = self._links.copy().values()
        return next((link.misfit for link in links if link.coordinator is None and link.misfit), "")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between reports: the shortest that any coordinator asks for."""
        return min((link.heartbeat_s for link in self._links.values()), default=HEARTBEAT_S)

    def send(self, *messages: Message) -> None:
        """Send each message to its coordinators. One for a coordinator that is gone is dropped."""
        for link in self._links.values():
            owner = link.coordinator
            mine = [m for m in messages if not isinstance(m, OF_A_REQUEST) or m.coordinator == owner]
            if mine and owner is not None:
                link.send(*mine)

    def report(self, load: Callable[[int], Load]) -> None:
        """Send each coordinator the load as ``load`` returns it for that one."""
        for link in self._links.values():
            if link.coordinator is not None:
                link.send(load(link.coordinator))

    def receive(self, ready: set[object], now: float) -> list[Message]:
        """Return the coordinators' messages, without those about the links. ``ready``: sockets with something
        to read."""
        messages = [
            message
            for link in list(self._links.values())
            if link.socket in ready
            for message in link.receive(now)
        ]
        newcomers, self._newcomers = self._newcomers, []
        for address in newcomers:
            if address not in self._links:
                _log.info("connecting to another coordinator at %s", address)
                self._open(address)
        return messages

    def leave(self, now: float) -> None:
        """Send every coordinator that has welcomed this worker Goodbye, and nothing after it."""
        self._leaves = True
        for link in self._links.values():
            link.leave(now)

    @property
    def have_left(self) -> bool:
        """Whether every coordinator knows that this worker has left."""
        return all(link.has_left for link in self._links.values())

    def tick(self, now: float) -> None:
        """Follow the coordinators' names; send Hello or Goodbye again where it was not answered."""
        if not self._leaves:
            self._follow_names()
        for link in list(self._links.values()):
            link.tick(now)

    def close(self, linger_s: float = 0.0) -> None:
        """End all channels. ``linger_s``: how long the last messages may take to leave."""
        for link in self._links.values():
            link.close(linger_s)

    # --- the worker, as its links see it --------------------------------------------------------

    def hello(self, incarnation: int) -> Hello:
        return self._worker.hello(incarnation)

    def welcomed(self, coordinator: int) -> None:
        self._worker.welcomed(coordinator)

    def learn_addresses(self, addresses: Sequence[str]) -> None:
        """Connect to other coordinators, at these addresses, soon."""
        self._newcomers += addresses

    def fenced(self, incarnation: int) -> None:
        """Go on under this number, which the only link has taken."""
        self.incarnation = incarnation
        self._worker.fenced(incarnation)

    def orphaned(self) -> None:
        self._worker.orphaned()

    @property
    def alone(self) -> bool:
        """Whether there is one coordinator only."""
        return len(self._links) == 1

    def _follow_names(self) -> None:
        present = set(self._discover())
        for address in sorted(present - self._links.keys()):
            _log.info("connecting to the coordinator at %s", address)
            self._open(address)
            self._discovered.add(address)
        for address in sorted(self._discovered - present):
            if self._links[address].coordinator is None:
                self._links.pop(address).close()
                self._discovered.discard(address)

    def _open(self, address: str) -> None:
        self._links[address] = CoordinatorLink(
            address,
            self._network,
            self._worker_id,
            self,
            self.incarnation,
            self._incarnations,
            self._orphaned_after_s,
        )
