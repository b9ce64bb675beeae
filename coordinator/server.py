"""The HTTP server: uvicorn inside the coordinator's event loop, and the ASGI application it runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ..transport.process.host import allow_many_files
from ..transport.process.otel import Tracing
from .background import Spawn, follow, unwatched
from .batch.asking import Asking
from .batch.routes import BatchRoutes
from .batch.runner import BatchOptions, BatchRunner
from .dashboard.routes import Dashboard
from .dialects.messages import MessagesRoutes
from .dialects.ollama import OllamaRoutes
from .dialects.responses import ResponsesRoutes, opened_store
from .dialects.stored_response import ResponseStore
from .errors import Unavailable
from .front_door import FrontDoor, front_door_of
from .generate.api import GenerationApi
from .http.access.operators import Operators, admin_key
from .http.access_gate import AccessGate
from .http.limits import HttpLimits
from .http.listening_server import ListeningServer, bind
from .http.overload import Overload
from .images.opening import fetcher_of
from .lifecycle.request import Fleet
from .listeners import ListenerFailures, Listeners
from .metrics.body_log import BodyLog
from .metrics.metrics import Metrics, Scrape
from .metrics.objectives import Objectives
from .metrics.request_record import log_request
from .metrics.request_trace import end_trace
from .metrics.route_collector import RouteCollector
from .metrics.server_collector import FailuresCollector
from .metrics.system_snapshot import SystemSnapshot
from .routes.admin import AdminRoutes
from .routes.gate import Gate
from .routes.health import Health
from .routes.peer_pages import PeerPages
from .routes.routes import OrdinaryRoutes
from .routes.tenants import tenant_routes
from .routes.usage import usage_routes
from .routes.websocket_stream import WebSocketStreams
from .routes_file import RoutesFile
from .serving import Served, Serving, Servings
from .settings import CoordinatorSettings
from .stored_bytes import StoredBytes
from .tenants.tenancy import Tenancy
from .text.served_model import ServedModel

if TYPE_CHECKING:
    from .images.fetching import ImageFetcher

POLL_S, SAMPLE_EVERY_S, ROUTES_EVERY_S = 0.02, 2.0, 0.5
DAY_S = 86_400.0


@dataclass(frozen=True)
class AppParts:
    """What an application is made of beside the fleet and the model. The defaults are for loopback alone.

    ``bodies``, ``tracing``, ``times_tokens``: see ``GenerationApi``.
    """

    limits: HttpLimits = field(default_factory=HttpLimits)
    system: Callable[[], SystemSnapshot] = SystemSnapshot  # of the first model
    operators: Operators | None = None  # None: none is configured
    tenancy: Tenancy = field(default_factory=Tenancy)
    # not None: the admin API has a port of its own, with these routes beside its usual ones
    more_admin: Sequence[Route] | None = None
    batches: BatchOptions | None = None
    price_per_hour: float | None = None
    front: FrontDoor = field(default_factory=FrontDoor)
    overload: Overload = field(default_factory=Overload)
    failures: ListenerFailures | None = None
    objectives: Objectives | None = None
    folders: Mapping[str, Path] | None = None  # where this process writes, by option, for /health
    bodies: BodyLog | None = None
    tracing: Tracing | None = None
    times_tokens: bool = False
    images: ImageFetcher | None = None  # None: none are fetched
    responses: ResponseStore | None = None
    stored: StoredBytes = field(default_factory=StoredBytes)
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready, for /server_info
    ollama: bool = False  # Ollama's API is spoken, too
    further: Sequence[Served] = ()  # models beside the first
    routes_file: Path | None = None


class HttpApp:
    """The ASGI application. Requests for tokens skip it: the protocol hands them to ``generation``."""

    def __init__(self, dispatcher: Fleet, model: ServedModel, parts: AppParts | None = None) -> None:
        """Raises CannotStart for a routes file that is no good."""
        parts = parts or AppParts()
        self.front, tenancy, failures = parts.front, parts.tenancy, parts.failures or ListenerFailures()
        self.servings = servings = Servings(
            Serving(*one, Metrics(one.model.name, one.system, parts.price_per_hour, failures))
            for one in (Served(model, dispatcher, parts.system), *parts.further)
        )
        self.metrics = servings.first.metrics
        self.routes = None if (file := parts.routes_file) is None else RoutesFile(file, servings.models)
        self.dashboard = Dashboard(servings, parts.objectives)
        fleets = {one.model.name: one.dispatcher for one in servings.all}
        self.health = Health(fleets, failures, parts.folders)
        self._sampled = [self._watch(one, failures) for one in servings.all]
        self.overload, self.stored = parts.overload, parts.stored
        registry = CollectorRegistry()
        self.scrape = Scrape([one.metrics for one in servings.all], registry)
        self.generation = GenerationApi(
            servings,
            parts.limits,
            tenancy,
            parts.overload,
            self.front.access,
            self.front.proxies,
            parts.bodies,
            parts.tracing,
            parts.times_tokens,
            parts.images,
        )
        of_routes = RouteCollector(self.generation.route_counts)
        for collector in (self.overload, self.stored, FailuresCollector(failures.counts), of_routes):
            registry.register(collector)
        self.responses = ResponsesRoutes(self.generation, parts.responses)
        messages = MessagesRoutes(self.generation)
        self.batches: BatchRunner | None = None
        if parts.batches is not None:
            dialects = {"/v1/responses": self.responses.create, "/v1/messages": messages.create}
            asking = Asking(self.generation, dialects)
            self.batches = BatchRunner(parts.batches, asking, tenancy.directory, failures)
        clients: list[BaseRoute] = [
            *WebSocketStreams(self.generation).routes(),
            *messages.routes(),
            *self.responses.routes(),
            *PeerPages(servings, parts.settings).routes(),
        ]
        if parts.ollama:
            clients += OllamaRoutes(self.generation).routes()
        if self.batches is not None:
            clients += BatchRoutes(self.batches, parts.overload).routes()
        self.operators = operators = parts.operators or Operators(secrets.token_hex(32))
        by_each_name = {name: one.dispatcher for one in servings.all for name in one.model.names}
        admin_routes = [*AdminRoutes(by_each_name).routes(), *(parts.more_admin or ())]

        def pages(more: Sequence[Route]) -> Starlette:
            own = [*operators.routes(), *self.dashboard.routes(), *clients, *more]
            return OrdinaryRoutes(self.generation, self.scrape, self.health, own).application()

        gate = Gate(pages(admin_routes if parts.more_admin is None else ()), operators, tenancy.directory)
        self._pages = AccessGate(gate, self.front.access, self.front.proxies)
        self.admin = AccessGate(
            Gate(pages(admin_routes), operators, None), self.front.admin_access, self.front.proxies
        )
        """All pages and the admin API, for a port of their own."""

    def _watch(self, one: Serving, failures: ListenerFailures) -> Listeners[[float, SystemSnapshot]]:
        """Return the model's histories."""
        view, sampled = self.dashboard.views[one.model.name], Listeners[[float, SystemSnapshot]](failures)
        one.metrics.listeners.add("dashboard", view.note)
        sampled.add("dashboard", view.sample)
        sampled.add("efficiency", one.metrics.efficiency.sample)
        sampled.add("health", self.health.sample)
        return sampled

    def sample(self) -> None:
        """Add every model's state to its histories."""
        for one, sampled in zip(self.servings.all, self._sampled, strict=True):
            sampled(monotonic(), one.system())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._pages(scope, receive, send)

    async def drain(self, grace_s: float, at_once: asyncio.Event | None = None) -> None:
        """Takes no new request for tokens; gives open ones ``grace_s`` seconds, or until ``at_once``, then
        ends them with an error; workers keep answers with a key."""
        refusal = Unavailable("The server is shutting down.", retry_after_s=1)
        api, deadline = self.generation, monotonic() + grace_s
        api.refusal, self.health.stopping = refusal, True
        while (api.open or api.preparing) and monotonic() < deadline and not (at_once and at_once.is_set()):
            await asyncio.sleep(POLL_S)
        for exchange in list(api.open.values()):
            exchange.fail(refusal, stopping=True)
        api.shadows.stop()
        await asyncio.sleep(0)  # WebSockets send their clients these errors


def app_of(
    settings: CoordinatorSettings,
    served: Sequence[Served],
    failures: ListenerFailures,
    tenancy: Tenancy,
    bodies: BodyLog | None,
    tracing: Tracing | None,
) -> HttpApp:
    """Make the application that the settings describe. Raises CannotStart."""
    key_file, counted, (first, *further) = settings.admin_key_file, settings.counted_files, served
    overload, limits = Overload(settings.overload_limits), settings.http_limits
    batch_file, keep_s = settings.batch_file, settings.retention_days * DAY_S
    parts = AppParts(
        limits=limits,
        system=first.system,
        further=further,
        operators=None if key_file is None else Operators(admin_key(key_file), file=key_file),
        tenancy=tenancy,
        more_admin=None
        if settings.admin_port is None
        else [*tenant_routes(settings.tenants_file, counted), *usage_routes(settings.metered_to)],
        batches=None if batch_file is None else BatchOptions(batch_file, keep_s=keep_s),
        price_per_hour=settings.price_per_hour,
        front=front_door_of(settings),
        overload=overload,
        failures=failures,
        objectives=settings.objectives,
        folders=settings.folders,
        bodies=bodies,
        tracing=tracing,
        times_tokens=settings.trace_token_times,
        images=fetcher_of(settings.image_hosts, limits.max_body_bytes, overload),
        responses=opened_store(settings.responses_file, keep_s),
        stored=StoredBytes(counted),
        settings=settings.model_dump(mode="json"),
        ollama=settings.ollama,
        routes_file=settings.routes_file,
    )
    app = HttpApp(first.dispatcher, first.model, parts)
    for one in app.servings.all:
        if settings.log_requests:
            one.metrics.listeners.add("request log", log_request)
        if tracing is not None:
            one.metrics.listeners.add("tracing", end_trace)
    return app


class HttpServer:
    """Runs an application on one listening socket, in the loop that calls ``start`` and ``stop``."""

    def __init__(self, app: HttpApp, *, host: str = "127.0.0.1", port: int = 0, shared: bool = False) -> None:
        """Binds at once; ``shared``: beside other processes on the same port. Raises OSError with the address
        and what to do."""
        self.app = app
        self._socket = bind(host, port, shared=shared)
        size = app.generation.limits.max_body_bytes
        self._server = ListeningServer(app, self._socket, app.front.tls, max_message_bytes=size)
        self._running: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    async def start(self, spawn: Spawn = unwatched) -> None:
        """Return once connections are accepted; ``spawn`` starts what runs until ``stop``."""
        allow_many_files()
        await self._server.start(spawn)
        self._running = [spawn("samples", self._sample()), spawn("slow senders", self._hurry())]
        self._running.append(spawn("stored bytes", self.app.stored.follow()))
        self._running.append(spawn("admin key", follow("admin key", self.app.operators.refresh)))
        if (routes := self.app.routes) is not None:
            self._running.append(spawn("routes", follow("routes file", routes.refresh, ROUTES_EVERY_S)))
        if (tls := self.app.front.tls) is not None:
            self._running.append(spawn("TLS certificate", follow("TLS certificate", tls.refresh)))
        if self.app.batches is not None:
            self.app.batches.start(spawn)

    async def stop(self, grace_s: float = 5.0, at_once: asyncio.Event | None = None) -> None:
        """End open requests by ``HttpApp.drain``, then all connections; also before ``start``."""
        for task in self._running:
            task.cancel()
        if self.app.batches is not None:
            await self.app.batches.stop()
        await self.app.drain(grace_s, at_once)
        await self._server.stop()
        await self.app.responses.stop()
        self.app.generation.reader.close()

    async def _sample(self) -> None:
        """Again and again."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self.app.sample()

    async def _hurry(self) -> None:
        """Looks for clients that begin a request and do not end it."""
        timeout_s, loop = self.app.generation.limits.receive_timeout_s, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            self._server.hurry(loop.time(), timeout_s)
