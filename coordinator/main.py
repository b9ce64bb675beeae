"""The coordinator's process: the lifecycle behind a control socket and an HTTP server, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop

from ..engine.latency_profile import Profile
from ..steering.hooks import Hooks
from ..steering.shell import SteeringShell
from ..steering.steering import Steering
from ..transport.channels.incarnation import incarnations
from ..transport.channels.keys import KeyFile
from ..transport.errors import KeyFileError
from ..transport.messages.messages import Sampling
from ..transport.process.collector import settle_heap
from ..transport.process.otel import Tracing
from ..transport.process.private_files import OpenToOthers
from .background import until_stopped
from .batch.runner import BatchOptions
from .dispatcher import SocketDispatcher, prove
from .generate.reader.allocator import give_memory_back
from .http.access.access import Access
from .http.access.forwarded import TrustedProxies
from .http.access.operators import Operators, admin_key, make_admin_key
from .http.access.tls import TlsFiles
from .http.access.url import url_of
from .http.limits import HttpLimits
from .http.overload import Overload, OverloadLimits
from .lifecycle.lifecycle import Lifecycle, LifecycleLimits
from .lifecycle.request import Request, Sink
from .listeners import ListenerFailures
from .metrics.body_log import BodyLog
from .metrics.request_log import log_request
from .metrics.request_trace import end_trace
from .metrics.trace_log import TraceLog
from .processes import CannotStart, Place, Serve, run_all
from .routes.tenants import tenant_routes
from .routes.usage import usage_routes
from .run_folder import ADMIN_KEY, Door, RunFolder, announce
from .server import FrontDoor, HttpServer, admin_server, create_app
from .settings import CoordinatorSettings, is_loopback, listed
from .tenants.directory import KeyDirectory, directory_of
from .tenants.limiter import Limiter, NoLimits
from .tenants.meter import Meter
from .tenants.shared_limiter import SharedLimiter
from .tenants.tenancy import Tenancy
from .tenants.usage_database import SQLITE
from .text.served_model import ServedModel

PROBE_TOKENS = 4
DAY_S = 86_400.0
_log = logging.getLogger(__name__)


def run(settings: CoordinatorSettings, in_child: Serve) -> None:
    """The process, or all of them: until SIGTERM or Ctrl-C. ``in_child``: what each of several runs, which must come to ``run_one``."""
    folder = run_folder()
    try:
        if settings.admin_key_file is None and folder is not None:
            settings = settings.model_copy(update={"admin_key_file": own_admin_key(folder.path / ADMIN_KEY)})
        if settings.processes > 1:
            say_who_may(settings)
            run_all(settings, in_child, folder.path if folder else None)
        else:
            run_one(settings, Place(run_folder=folder.path if folder else None))
    finally:
        if folder is not None:
            folder.close()


def run_one(settings: CoordinatorSettings, place: Place) -> None:
    """One process, alone or of several."""
    uvloop.run(serve(settings, place))


async def serve(settings: CoordinatorSettings, place: Place) -> None:
    """Serves until a signal, or until the parent of several processes is gone. Raises CannotStart, EngineError,
    TenantsError, TransportError or OSError where it cannot start; SystemExit once a background task has failed."""
    give_memory_back()
    keys = None if settings.insecure or settings.key_file is None else KeyFile(settings.key_file)
    model = model_of(settings)
    lifecycle = Lifecycle(incarnations()(), settings.routing, limits_of(settings, place))
    model = replace(model, workers_hold=lambda: lifecycle.pools.max_sequence_tokens)
    dispatcher = SocketDispatcher(lifecycle, settings.control_address, keys.key if keys is not None else None)
    limits = HttpLimits(
        max_body_bytes=int(settings.max_body_mib * 2**20),
        request_timeout_s=settings.request_timeout_s,
        deadline_error=settings.deadline_error,
        receive_timeout_s=settings.receive_timeout_s,
    )
    directory = directory_of(settings.tenants_file)
    operators = None if settings.admin_key_file is None else Operators(admin_key(settings.admin_key_file))
    routes = [*tenant_routes(settings.tenants_file), *usage_routes(settings.metered_to)]
    more_admin = None if settings.admin_port is None else routes
    limiter, meter = limiter_of(settings), meter_of(settings)
    batches = batches_of(settings)
    front = front_door_of(settings)
    app = create_app(
        dispatcher,
        model,
        limits,
        dispatcher.system,
        operators,
        Tenancy(directory, limiter, meter),
        more_admin,
        batches,
        settings.price_per_hour,
        front,
        Overload(OverloadLimits(settings.max_connections, int(settings.max_held_mib * 2**20))),
    )
    app.dashboard.view.objectives = settings.objectives
    app.health.folders = written_by(settings)
    dispatcher.listeners.failures = app.metrics.failures
    if meter is not None:
        meter.failures = app.metrics.failures
    app.generation.reader.warm_up()
    steering = steering_of(settings, lifecycle, dispatcher)
    if settings.log_requests:
        app.metrics.listeners.add("request log", log_request)
    trace_log = None if settings.trace_folder is None else TraceLog(settings.trace_folder, settings.request_timeout_s)
    if trace_log is not None:
        dispatcher.listeners.add("trace file", trace_log.note)
        app.generation.times_tokens = settings.trace_token_times
    if (bodies := bodies_of(settings, place, app.metrics.failures)) is not None:
        app.generation.bodies = bodies
    tracing = tracing_of(settings)
    if tracing is not None:
        app.generation.tracing = tracing
        app.metrics.listeners.add("tracing", end_trace)
    server = HttpServer(app, host=settings.listen_host, port=settings.port, shared=bool(place.others))
    if not place.others:
        say_who_may(settings)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    if place.others and (parent := multiprocessing.parent_process()) is not None:
        asyncio.get_running_loop().add_reader(parent.sentinel, stopping.set)
    await limiter.start()
    if meter is not None:
        meter.start()
    dispatcher.start()
    await server.start()
    admin_port = None if settings.admin_port is None else admin_server(app.admin, settings.admin_host, settings.admin_port, front.tls)
    if admin_port is not None:
        await admin_port.start()
        _log.info("admin API on %s://%s:%d", settings.scheme, settings.admin_host, admin_port.port)
    if place.run_folder is not None and settings.admin_key_file is not None:
        url = url_of(settings.listen_host, server.port, settings.scheme)
        admin_url = url if admin_port is None else url_of(settings.admin_host, admin_port.port, settings.scheme)
        door = Door(
            url=url,
            admin_url=admin_url,
            control_address=dispatcher.address,
            admin_key_file=settings.admin_key_file.absolute(),
            tls_cert=None if settings.tls_cert is None else settings.tls_cert.absolute(),
        )
        announce_to_commands(place.run_folder, place.number, door)
    settle_heap()
    _log.info("HTTP on %s://%s:%d, workers connect to %s", settings.scheme, settings.listen_host, server.port, dispatcher.address)
    tasks = [asyncio.create_task(prove(dispatcher, partial(_probe, lifecycle.incarnation)))]
    if keys is not None:
        tasks.append(asyncio.create_task(follow(keys, dispatcher)))
    if steering is not None:
        tasks.append(asyncio.create_task(steering.run()))
    if isinstance(directory, KeyDirectory):
        tasks.append(asyncio.create_task(directory.follow()))
    well = await until_stopped(stopping, [*tasks, *server.background])
    for task in tasks:
        task.cancel()
    await server.stop()
    if admin_port is not None:
        await admin_port.stop()
    dispatcher.stop()
    if trace_log is not None:
        trace_log.close()
    if bodies is not None:
        await asyncio.to_thread(bodies.close)
    await limiter.stop()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    if meter is not None:
        await asyncio.to_thread(meter.stop)
    directory.close()
    if not well:
        raise SystemExit(1)


def run_folder() -> RunFolder | None:
    """None where it cannot be made, such as on a full disk: the coordinator serves all the same."""
    try:
        return RunFolder()
    except OSError as error:
        _log.warning("commands on this host will not find this coordinator; without --admin-key-file nobody is an operator: %s", error)
        return None


def own_admin_key(path: Path) -> Path | None:
    """A new key; None where it cannot be written."""
    try:
        make_admin_key(path)
    except OSError as error:
        _log.warning("nobody is an operator: give --admin-key-file, for no key could be written to %s: %s", path, error.strerror)
        return None
    _log.info("operators' pages ask for the admin key in %s", path)
    return path


def announce_to_commands(folder: Path, number: int, door: Door) -> None:
    try:
        announce(folder, number, door)
    except OSError as error:
        _log.warning("commands on this host will not find this coordinator: %s", error)


def model_of(settings: CoordinatorSettings) -> ServedModel:
    """As configured. Raises CannotStart."""
    try:
        return ServedModel.load(
            settings.model,
            settings.model_name,
            max_model_len=settings.max_model_len,
            tool_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
    except (OSError, ValueError) as error:
        raise CannotStart(str(error)) from error


def front_door_of(settings: CoordinatorSettings) -> FrontDoor:
    """As configured. Raises CannotStart."""
    hosts, origins = [*listed(settings.allowed_hosts), settings.host, socket.gethostname()], listed(settings.allowed_origins)
    private_names = not is_loopback(settings.listen_host)

    def access(keyed: bool) -> Access:
        return Access([*hosts, "*"] if keyed and not settings.allowed_hosts else hosts, origins, private_names=private_names)

    try:
        tls = None if settings.tls_cert is None else TlsFiles(settings.tls_cert, settings.tls_key)
    except ValueError as error:
        raise CannotStart(f"--tls-cert: {error}") from error
    proxies = TrustedProxies(listed(settings.trusted_proxies))
    return FrontDoor(access(settings.tenants_file is not None), access(True), tls, proxies)


def steering_of(settings: CoordinatorSettings, lifecycle: Lifecycle, dispatcher: SocketDispatcher) -> SteeringShell | None:
    """As configured. Raises ProfileError."""
    options = settings.steering
    if options is None or settings.steer_profile is None:
        return None
    hooks = Hooks(options.mode, settings.steer_webhook, settings.steer_command)
    shell = SteeringShell(Steering(options, Profile.read(settings.steer_profile)), lifecycle, dispatcher, hooks)
    dispatcher.listeners.add("steering", shell.note)
    dispatcher.steering = shell.as_json
    return shell


def meter_of(settings: CoordinatorSettings) -> Meter | None:
    """As configured. Raises TenantsFileError."""
    url = settings.metered_to
    if url is None:
        return None
    beside = settings.tenants_file or Path(url.removeprefix(SQLITE) if url.startswith(SQLITE) else "usage").absolute()
    keep_s = None if settings.usage_retention_days is None else settings.usage_retention_days * DAY_S
    return Meter(url, beside.parent, f"{beside.name}-journal-", soon=asyncio.get_running_loop().call_soon, keep_s=keep_s)


def bodies_of(settings: CoordinatorSettings, place: Place, failures: ListenerFailures) -> BodyLog | None:
    """As configured. Raises OSError."""
    if (path := settings.log_bodies) is None:
        return None
    own = path.with_name(f"{path.name}-{place.number}") if place.others else path
    try:
        return BodyLog(own, int(settings.log_bodies_mib * 2**20), failures)
    except OpenToOthers:
        raise
    except OSError as error:
        raise CannotStart(f"--log-bodies: cannot write {own} ({error.strerror or error}); name a file in a folder that is there") from error


def written_by(settings: CoordinatorSettings) -> dict[str, Path]:
    """The folders that this process writes to, by option."""
    usage = settings.metered_to or ""
    files = {
        "--tenants-file": settings.tenants_file,
        "--usage-url": Path(usage.removeprefix(SQLITE)) if usage.startswith(SQLITE) else None,
        "--batch-file": settings.batch_file,
        "--log-bodies": settings.log_bodies,
    }
    folders = {option: path.absolute().parent for option, path in files.items() if path is not None}
    return folders if settings.trace_folder is None else {**folders, "--trace-folder": settings.trace_folder.absolute()}


def batches_of(settings: CoordinatorSettings) -> BatchOptions | None:
    """As configured."""
    if settings.batch_file is None:
        return None
    return BatchOptions(settings.batch_file, settings.batch_max_running, settings.batch_retention_days * DAY_S)


def limiter_of(settings: CoordinatorSettings) -> Limiter:
    """As configured. Raises TenantsFileError."""
    if settings.tenants_file is None:
        return NoLimits()
    if settings.redis_url is not None:
        from .tenants.redis_limiter import RedisLimiter

        return RedisLimiter(settings.redis_url)
    return SharedLimiter(settings.tenants_file.with_name(settings.tenants_file.name + "-limits"))


def tracing_of(settings: CoordinatorSettings) -> Tracing | None:
    """Raises TracingUnavailable."""
    if settings.otlp_endpoint is None:
        return None
    return Tracing.open(settings.otlp_endpoint, "coordinator", f"{socket.gethostname()}:{settings.port}", settings.trace_sample_ratio)


def say_who_may(settings: CoordinatorSettings) -> None:
    """Whether keys are asked for, and what that means for the address."""
    if settings.tenants_file is not None:
        _log.info("API keys of %s are asked for", settings.tenants_file)
    elif settings.listen_host != settings.host:
        _log.warning(
            "no API keys are configured: listening on %s, not on %s; give --tenants-file (see `splitserve keys create --help`), "
            "or --open-access if whoever reaches %s may use it",
            settings.listen_host,
            settings.host,
            settings.host,
        )
    elif is_loopback(settings.host):
        _log.info("no API keys are configured: listening on this host's loopback only")
    else:
        _log.warning("no API keys are configured: whoever reaches %s may use it (--open-access)", settings.host)


async def follow(keys: KeyFile, dispatcher: SocketDispatcher, every_s: float = 1.0) -> None:
    """Goes by the cluster key that the file holds, whenever it changes: nobody has to wait for a restart."""
    while True:
        await asyncio.sleep(every_s)
        try:
            if not keys.changed():
                continue
        except KeyFileError as error:
            _log.error("still going by the old cluster key: %s", error)
            continue
        dispatcher.change_key(keys.key)
        _log.info("the cluster key has changed: %s", "two are accepted for now" if keys.key.second else "one is accepted")


def limits_of(settings: CoordinatorSettings, place: Place) -> LifecycleLimits:
    """The lifecycle's bounds, as configured."""
    return LifecycleLimits(
        max_queue=settings.max_queue,
        max_attempts=settings.max_attempts,
        suspect_after=settings.suspect_after,
        max_deaths=settings.max_deaths,
        dead_after_s=settings.dead_after_s,
        progress_timeout_s=settings.progress_timeout_s,
        heartbeat_s=settings.heartbeat_s,
        lost_after_s=max(1.0, 4 * settings.heartbeat_s),
        queue_timeout_s=settings.queue_timeout_s,
        prefill_timeout_s=settings.prefill_timeout_s,
        handoff_timeout_s=settings.handoff_timeout_s,
        token_timeout_s=settings.token_timeout_s,
        ttft_slo_s=settings.ttft_slo_s,
        siblings=place.others,
    )


def _probe(coordinator: int, number: int, sink: Sink) -> Request:
    """A request that passes prefill, handoff and decode, whatever the model says."""
    now = time.monotonic()
    sampling = Sampling(max_tokens=2, min_tokens=2, temperature=0.0, ignore_eos=True)
    return Request(f"probe-{coordinator:x}-{number}", [0] * PROBE_TOKENS, sampling, sink, now, now + 10.0, salt=b"probe")
