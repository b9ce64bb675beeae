"""The IP addresses of the hosts of images."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

MAX_AT_ONCE = 64
"""Names that are looked up at a time; further ones wait."""
Answer = asyncio.Future[Sequence[str]]


class Resolver:
    """Looks names up, each on a thread of its own. A resolver that does not answer holds up no other name,
    and not the end of the process; the event loop's few threads for this would all wait for it."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._running: dict[tuple[str, int], Answer] = {}

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        """Return the IP addresses of a host. Raises OSError or UnicodeError. Callers that ask for the same
        name at a time share one lookup, which a cancelled one leaves to the others."""
        key = name, port
        if key not in self._running:
            await self._free.acquire()
            if key in self._running:
                self._free.release()
            else:
                self._begin(key)
        return await asyncio.shield(self._running[key])

    def _begin(self, key: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        self._running[key] = loop.create_future()

        def look_up() -> None:
            found = _addresses(*key)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._over, key, found)

        Thread(target=look_up, name=f"look up {key[0]}", daemon=True).start()

    def _over(self, key: tuple[str, int], found: Sequence[str] | Exception) -> None:
        self._free.release()
        answer = self._running.pop(key)
        if isinstance(found, Exception):
            answer.set_exception(found)
            answer.exception()  # all callers may have gone
        else:
            answer.set_result(found)


def _addresses(name: str, port: int) -> Sequence[str] | Exception:
    try:
        rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in rows))
    except (OSError, UnicodeError) as error:
        return error
