"""The HTTP server: uvicorn inside the coordinator's event loop, and the ASGI application it runs."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from time import monotonic

import uvicorn
from starlette.types import Receive, Scope, Send

from .admin import AdminRoutes
from .errors import Unavailable
from .generate import GenerationApi
from .http_protocol import HttpProtocol
from .limits import HttpLimits
from .metrics import Metrics, SystemSnapshot
from .request import Dispatcher
from .routes import OrdinaryRoutes
from .served_model import ServedModel

BACKLOG = 4096
KEEP_ALIVE_S = 75
POLL_S = 0.02


class HttpApp:
    """Requests for tokens go to ``generation`` straight from the protocol; all else comes here as ASGI, and goes through starlette."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        limits: HttpLimits,
        system: Callable[[], SystemSnapshot],
        admin: AdminRoutes | None = None,
    ) -> None:
        self.metrics = Metrics(model.name, system)
        self.generation = GenerationApi(dispatcher, model, limits, self.metrics)
        admin = admin or AdminRoutes(dispatcher, None)
        self._ordinary = OrdinaryRoutes(dispatcher, model, limits, self.metrics, admin.routes()).application()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ordinary(scope, receive, send)

    async def drain(self, grace_s: float) -> None:
        """Takes no new request for tokens; gives the open ones ``grace_s`` seconds, then ends them with an error."""
        refusal = Unavailable("The server is shutting down.", retry_after_s=1)
        self.generation.refusal = refusal
        deadline = monotonic() + grace_s
        while self.generation.open and monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        for exchange in list(self.generation.open.values()):
            exchange.fail(refusal)


def create_app(
    dispatcher: Dispatcher,
    model: ServedModel,
    limits: HttpLimits | None = None,
    system: Callable[[], SystemSnapshot] = SystemSnapshot,
    admin: AdminRoutes | None = None,
) -> HttpApp:
    """The application. ``system`` is asked at each scrape of /metrics; ``admin``: default: for this host only, without a key."""
    return HttpApp(dispatcher, model, limits or HttpLimits(), system, admin)


class HttpServer:
    """Runs an application on one listening socket. ``start`` and ``stop`` are called in the loop that is to run it."""

    def __init__(self, app: HttpApp, *, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None) -> None:
        """Binds at once. Raises OSError with the address and what to do."""
        self.app = app
        self._socket = sock or _bind(host, port)
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        """Returns once connections are accepted. Raises the process's limit of open files as far as it may: a stream is a file."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        started = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await self._task  # raises what went wrong

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ends open requests as ``HttpApp.drain`` says, then all connections."""
        assert self._task is not None, "start() comes first"
        await self.app.drain(grace_s)
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio looks at the protocol before it sets TCP_NODELAY
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from error
    return sock
