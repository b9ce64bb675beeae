"""The coordinator's process: the lifecycle behind a control socket and an HTTP server, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvloop

from ..transport.channels.keys import ClusterKey, KeyFile
from ..transport.messages.fields import incarnations
from ..transport.process.heap import settle_heap
from ..transport.process.vocabulary import model_size, vocabulary_name
from .background import background, follow
from .generate.reader.allocator import give_memory_back
from .http.access.operators import make_admin_key
from .http.access.url import is_loopback, url_of
from .http.listening_server import admin_server
from .lifecycle.lifecycle import Lifecycle
from .lifecycle.request import Ended, Request
from .lifecycle.snapshot import FinishedRequest, finished
from .listeners import ListenerFailures
from .metrics.body_log import body_log_of
from .metrics.request_trace import tracing_of
from .metrics.system_snapshot import SystemSnapshot
from .metrics.trace_log import TraceLog
from .processes import Place, Serve, run_all
from .readiness import prove
from .run_folder import ADMIN_KEY, RESPONSES, Door, RunFolder, announce
from .server import HttpServer, app_of
from .serving import Served
from .settings import CoordinatorSettings
from .socket_dispatcher import SocketDispatcher
from .tenants.opening import tenancy_of
from .text.served_model import ServedModel

_log = logging.getLogger(__name__)


class Controller(Protocol):
    """What watches the load and may change the workers: ``steering/shell.py``."""

    def note(self, request: FinishedRequest) -> None: ...
    def as_json(self) -> dict[str, Any]: ...
    async def run(self) -> None: ...


MakeController = Callable[[Any, Lifecycle, SocketDispatcher], Controller | None]
"""Takes the settings; returns None where they ask for no controller."""


def run(settings: CoordinatorSettings, in_child: Serve, make_controller: MakeController) -> None:
    """Run the coordinator, in one process or several, until SIGTERM or Ctrl-C.

    ``in_child``: what each of several processes runs; it must call ``run_one``.
    """
    with ExitStack() as stack:
        folder = _make_run_folder()
        if folder is not None:
            stack.callback(folder.close)
            if settings.admin_key_file is None:
                settings = settings.model_copy(update={"admin_key_file": _own_admin_key(folder.path)})
        path = None if folder is None else folder.path
        if path is not None and settings.responses_file is None:
            settings = settings.model_copy(update={"responses_file": str(path / RESPONSES)})
        _log_who_may_connect(settings)
        if settings.processes > 1:
            run_all(settings, in_child, path)
        else:
            run_one(settings, Place(run_folder=path), make_controller)


def run_one(settings: CoordinatorSettings, place: Place, make_controller: MakeController) -> None:
    """Run one process, alone or of several. Exit status 1: background work has failed; see the log."""
    try:
        uvloop.run(serve(settings, place, make_controller))
    except ExceptionGroup:
        sys.exit(1)


async def serve(settings: CoordinatorSettings, place: Place, make_controller: MakeController) -> None:
    """Serve until a signal, or until the parent of several processes is gone.

    Raises CannotStart, EngineError, TenantsError, TransportError or OSError if it cannot start, and an
    ExceptionGroup once background work has failed. Whatever ends it, the components are closed in reverse
    order.
    """
    give_memory_back()
    (stopping, at_once), failures = _stop_events(place), ListenerFailures()
    async with AsyncExitStack() as stack:
        spawn = await stack.enter_async_context(background())
        keys = None if settings.insecure or settings.key_file is None else KeyFile(settings.key_file)
        tenancy = await stack.enter_async_context(tenancy_of(settings, failures, spawn))
        if (tracing := tracing_of(settings, settings.port)) is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        if (bodies := body_log_of(settings, place.number if place.num > 1 else None, failures)) is not None:
            stack.push_async_callback(asyncio.to_thread, bodies.close)
        key = None if keys is None else keys.key
        parts, models = list[_Part](), settings.each_model()
        names = frozenset(name for one in models for name in one.names)
        for one in models:
            part = _Part(one, names, place, key, failures, make_controller)
            stack.callback(part.dispatcher.stop)
            if one.trace_folder is not None:
                trace_log = TraceLog(one.trace_folder, settings.request_timeout_s)
                part.dispatcher.listeners.add("trace file", stack.enter_context(closing(trace_log)).note)
            parts.append(part)
        app = app_of(settings, [part.served for part in parts], failures, tenancy, bodies, tracing)
        admin = None
        if settings.admin_port is not None:
            admin = admin_server(app.admin, settings.admin_host, settings.admin_port, app.front.tls)
            stack.push_async_callback(admin.stop)
        server = HttpServer(app, host=settings.listen_host, port=settings.port, shared=place.num > 1)
        stack.push_async_callback(server.stop, settings.shutdown_timeout_s, at_once)
        app.generation.reader.warm_up()
        for part in parts:
            part.model.tokenizer.start_threads()
            part.dispatcher.start()
        if admin is not None:
            await admin.start(spawn)
            _log.info("admin API on %s://%s:%d", settings.scheme, settings.admin_host, admin.port)
        await server.start(spawn)
        for part in parts:
            of_model = f" of {part.model.name}" if len(parts) > 1 else ""
            probes = prove(part.dispatcher, part.lifecycle.incarnation, of_model)
            stack.callback(spawn(f"probes{of_model}", probes).cancel)
            if (controller := part.controller) is not None:
                stack.callback(spawn(f"steering{of_model}", controller.run()).cancel)
        if keys is not None:
            refresh = partial(_refresh, keys, [part.dispatcher for part in parts])
            stack.callback(spawn("cluster key", follow("cluster key", refresh)).cancel)
        control = parts[0].dispatcher.address
        _announce(settings, place, control, server.port, None if admin is None else admin.port)
        settle_heap()
        address = f"{settings.scheme}://{settings.listen_host}:{server.port}"
        _log.info("HTTP on %s, workers connect to %s", address, control)
        for part in parts[1:]:
            _log.info("workers of %s connect to %s", part.model.name, part.dispatcher.address)
        await stopping.wait()


def _stop_events(place: Place) -> tuple[asyncio.Event, asyncio.Event]:
    """Return what SIGTERM or SIGINT sets, the first also the end of the parent of several processes; and
    what a second signal sets, of several processes their parent's SIGUSR1: a terminal, systemd and Slurm
    signal all of them, and the parent does, too."""
    stopping, at_once, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        (at_once if stopping.is_set() and place.num == 1 else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if place.num > 1 and (parent := multiprocessing.parent_process()) is not None:
        loop.add_signal_handler(signal.SIGUSR1, at_once.set)
        loop.add_reader(parent.sentinel, stopping.set)
    return stopping, at_once


class _Part:
    """What one model has of the coordinator. ``names``: of all models. Raises CannotStart, TransportError or
    ProfileError."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        names: frozenset[str],
        place: Place,
        key: ClusterKey | None,
        failures: ListenerFailures,
        make_controller: MakeController,
    ) -> None:
        limits = settings.lifecycle_limits(place.siblings(settings.control_address))
        self.lifecycle = Lifecycle(incarnations()(), settings.routing, limits)
        self.model = _model_of(settings, self.lifecycle, names)
        self.dispatcher = SocketDispatcher(self.lifecycle, settings.control_address, key, failures)
        self.controller = make_controller(settings, self.lifecycle, self.dispatcher)
        if self.controller is not None:
            self.dispatcher.listeners.add("steering", partial(_note, self.controller))

    @property
    def served(self) -> Served:
        return Served(self.model, self.dispatcher, self._system)

    def _system(self) -> SystemSnapshot:
        snapshot, controller = self.dispatcher.system(), self.controller
        return snapshot if controller is None else replace(snapshot, steering=controller.as_json())


def _model_of(settings: CoordinatorSettings, lifecycle: Lifecycle, names: frozenset[str]) -> ServedModel:
    """``names``: no adapter may have one of these."""
    lifecycle.pools.vocabulary = vocabulary_name(settings.model)
    lifecycle.pools.size = model_size(settings.model)
    lifecycle.pools.adapters.taken = names
    return ServedModel.load(
        settings.model,
        settings.model_name,
        settings.names[1:],
        max_model_len=settings.max_model_len,
        image_max_pixels=settings.image_max_pixels,
        tool_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        trusts_templates=settings.trust_request_chat_template,
        workers_hold=partial(getattr, lifecycle.pools, "max_sequence_tokens"),
        adapters=lifecycle.pools.adapters.names,
    )


def _note(controller: Controller, request: Request, ended: Ended) -> None:
    if (over := finished(request, ended)) is not None:
        controller.note(over)


def _refresh(keys: KeyFile, dispatchers: Sequence[SocketDispatcher]) -> str:
    """Use the cluster key that the file holds."""
    if not keys.changed():
        return ""
    for dispatcher in dispatchers:
        dispatcher.change_key(keys.key)
    return "two are accepted for now" if keys.key.second else "one is accepted"


def _make_run_folder() -> RunFolder | None:
    """Return a new folder; None where it cannot be made, such as on a full disk: the coordinator serves
    without it."""
    try:
        return RunFolder()
    except OSError as error:
        _log.warning(
            "commands on this host will not find this coordinator; without --admin-key-file nobody "
            "is an operator: %s",
            error,
        )
        return None


def _own_admin_key(folder: Path) -> Path | None:
    """Write a new admin key into ``folder``; None where it cannot be written."""
    path = folder / ADMIN_KEY
    try:
        make_admin_key(path)
    except OSError as error:
        why = "nobody is an operator: give --admin-key-file, for no key could be written to %s: %s"
        _log.warning(why, path, error.strerror)
        return None
    _log.info("operators' pages ask for the admin key in %s", path)
    return path


def _announce(
    settings: CoordinatorSettings, place: Place, control_address: str, port: int, admin_port: int | None
) -> None:
    """Let commands on this host find this process."""
    if place.run_folder is None or settings.admin_key_file is None:
        return
    url = url_of(settings.listen_host, port, settings.scheme)
    door = Door(
        url=url,
        admin_url=url if admin_port is None else url_of(settings.admin_host, admin_port, settings.scheme),
        control_address=control_address,
        admin_key_file=settings.admin_key_file.absolute(),
        tls_cert=None if settings.tls_cert is None else settings.tls_cert.absolute(),
    )
    try:
        announce(place.run_folder, place.number, door)
    except OSError as error:
        _log.warning("commands on this host will not find this coordinator: %s", error)


def _log_who_may_connect(settings: CoordinatorSettings) -> None:
    if settings.tenants_file is not None:
        _log.info("clients need an API key of %s", settings.tenants_file)
    elif settings.listen_host != settings.host:
        _log.warning(
            "no API keys are configured: listening on %s, not on %s; give --tenants-file (see `splitserve "
            "keys create --help`), or --open-access if anyone who reaches %s may use it",
            settings.listen_host,
            settings.host,
            settings.host,
        )
    elif is_loopback(settings.host):
        _log.info("no API keys are configured: listening on this host's loopback only")
    else:
        _log.warning(
            "no API keys are configured: anyone who reaches %s may use it (--open-access)", settings.host
        )
