"""Coordinators found by name: ``dns://HOST:PORT`` stands for every address that HOST has at the moment, such
as those behind a headless Service of Kubernetes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence

from ..process.settings import DNS

EVERY_S = 2.0
_log = logging.getLogger(__name__)


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the tcp:// addresses behind ``dns://HOST:PORT``, sorted. Raises OSError."""
    host, _, port = name.removeprefix(DNS).rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return tuple(sorted(f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in hosts))


class NameWatch:
    """Looks names up in a thread, again and again. While a name cannot be resolved its last addresses
    stand."""

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
