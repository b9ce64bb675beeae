"""The HTTP server on one socket: uvicorn, inside an event loop that runs other things too.

Nothing outside this folder knows uvicorn. The folder's protocols override private members of it, so its
version is pinned. They give requests for tokens to a ``CallHandler`` and everything else to the ASGI
application. Measured on one core: a streamed chunk costs 4.5 us of processor time by ``Call.write`` and 8.6
us by Starlette's StreamingResponse, where the whole coordinator spends about 4.6 us on a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from ..background import Spawn, unwatched
from .access.tls import TlsFiles
from .call import CallHandler
from .overload import Overload
from .protocol import HttpProtocol
from .websocket_protocol import WebSocketProtocol

BACKLOG = 4096
KEEP_ALIVE_S = 75
GRACE_S, POLL_S = 5.0, 0.005


class App(Protocol):
    """What one port serves: an ASGI application, and what takes its requests for tokens."""

    @property
    def overload(self) -> Overload:
        """What all clients together may hold."""

    @property
    def generation(self) -> CallHandler | None:
        """Takes requests for tokens; None: the port has none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer everything else."""


class ListeningServer(uvicorn.Server):
    """Leaves signals to the process that it runs in. ``start`` and ``stop`` are called in the loop that is to
    run it."""

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        tls: TlsFiles | None = None,
        *,
        max_message_bytes: int | None = None,
    ) -> None:
        """``max_message_bytes``: bound of a WebSocket message; None: no WebSockets."""
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none" if max_message_bytes is None else WebSocketProtocol,
            ws_max_size=max_message_bytes or 0,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="error",  # not a line for each client that speaks no HTTP
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_context_factory=None
            if tls is None
            else lambda config, default: tls.context,  # follows changed files
        )
        super().__init__(config)
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self, spawn: Spawn = unwatched) -> None:
        """Return once connections are accepted; ``spawn`` watches what runs until ``stop``."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self._socket])
        self._task = spawn("HTTP server", self.main_loop())

    async def main_loop(self) -> None:
        """Keep the Date header right, until it is cancelled."""
        while not await self.on_tick(0):
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """End all connections, and close the socket. (Uvicorn's own way takes 0.1 to 0.3 s.)"""
        if self._task is None:
            self._socket.close()
            return
        self._task.cancel()
        self.servers[0].close()
        self._socket.close()
        for connection in tuple(self.server_state.connections):
            if not connection.transport.is_closing():  # uvicorn's WebSocket would raise
                connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(POLL_S)
        for task in self.server_state.tasks:
            task.cancel()

    def hurry(self, now: float, timeout_s: float) -> None:
        """Cut off clients that take longer than ``timeout_s`` over a request; ``now``: seconds of the loop's
        clock."""
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, HttpProtocol | WebSocketProtocol):
                connection.hurry(now, timeout_s)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. ``shared``: connections are spread over all processes that share the port.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it sets TCP_NODELAY
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port"
        ) from error
    return sock


def admin_server(app: App, host: str, port: int, tls: TlsFiles | None = None) -> ListeningServer:
    """Bind at once. Raises OSError. ``app`` checks the caller."""
    return ListeningServer(app, bind(host, port), tls)
