"""uvicorn on one socket inside a loop that runs other things too: no signal handlers, and a start that says when it listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from ..background import Spawn, unwatched
from .access.tls import TlsFiles


class ListeningServer(uvicorn.Server):
    """Leaves signals to the process that it runs in. ``start`` and ``stop`` are called in the loop that is to run it."""

    def __init__(self, config: uvicorn.Config, sock: socket.socket) -> None:
        super().__init__(config)
        self._accepting = asyncio.Event()
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self, spawn: Spawn = unwatched) -> None:
        """Return once connections are accepted; ``spawn`` watches what runs until ``stop``."""
        self._task = asyncio.create_task(self.serve([self._socket]))
        started = asyncio.create_task(self._accepting.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await self._task  # raises what went wrong
        spawn("HTTP server", self._watch())

    async def _watch(self) -> None:
        """Return once the server has been stopped. Raises what ended it otherwise."""
        assert self._task is not None, "start() comes first"
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End all connections, and close the socket."""
        if self._task is None:
            self._socket.close()
            return
        self.should_exit = True
        await asyncio.wait({self._task})
        if self._task.exception() is not None:  # it is in the log, and uvicorn has closed nothing
            await self.shutdown([self._socket])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._accepting.set()


def context_of(tls: TlsFiles | None) -> Callable[..., ssl.SSLContext] | None:
    """For uvicorn, which knows of files only that stay as they are."""
    return None if tls is None else lambda config, default: tls.context


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket to listen on; ``shared``: other processes that say so too get their part of the connections. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio looks at the protocol before it sets TCP_NODELAY
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from error
    return sock
