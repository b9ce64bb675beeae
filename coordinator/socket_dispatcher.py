"""The live dispatcher: workers connect to its control socket, and it runs on an event loop. What its
lifecycle knows becomes plain values for /debug/state, metrics and the dashboard."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from ..transport.channels.channels import RouterChannel
from ..transport.channels.event_loop import Attachment, LoopTimers
from ..transport.channels.keys import ClusterKey
from ..transport.messages.messages import FROM_WORKER, Hello, Load
from ..transport.process.host import host_identity
from .dispatcher import LifecycleDispatcher
from .lifecycle.lifecycle import Lifecycle
from .lifecycle.worker import WorkerId, WorkerRecord
from .listeners import ListenerFailures
from .metrics.system_snapshot import SystemSnapshot, WorkerSnapshot


class ProcessWatch:
    """Notices the end of workers' processes on this host at once, not by their silence. ``on_end`` is called
    on the event loop when a watched worker's process has ended, whatever ended it."""

    def __init__(self, on_end: Callable[[WorkerId], None]) -> None:
        self._on_end = on_end
        self._here = host_identity()
        self._fds: dict[WorkerId, int] = {}

    def watch(self, hello: Hello) -> None:
        """Watch a new worker's process, if it runs on this host and in this process namespace."""
        worker = (hello.worker_id, hello.incarnation)
        if hello.host != self._here or worker in self._fds:
            return
        try:
            fd = os.pidfd_open(hello.pid)
        except OSError:
            return  # ended already, or not supported: its silence will show its end
        self._fds[worker] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker is not known any more."""
        fd = self._fds.pop(worker, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for worker in list(self._fds):
            self.forget(worker)

    def _ended(self, worker: WorkerId) -> None:
        self.forget(worker)
        self._on_end(worker)


class SocketDispatcher(LifecycleDispatcher):
    """Made, started, called and stopped on one event loop."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        control_address: str,
        key: ClusterKey | None,
        failures: ListenerFailures | None = None,
    ) -> None:
        """Bind the control socket. Raises AddressError."""
        self._loop = asyncio.get_running_loop()
        self._channel = RouterChannel.bind(control_address, key, FROM_WORKER)
        self._channel.watch_connections()
        self.address = self._channel.address
        self._watch = ProcessWatch(self.process_ended)
        self._attachment: Attachment | None = None
        super().__init__(lifecycle, LoopTimers(self._loop), self._channel, self._watch, failures)

    def start(self) -> None:
        """Begin to receive from the workers."""
        self._attachment = Attachment(self._loop, self._channel, self.receive)
        super().start()

    def stop(self) -> None:
        """Close the socket. Workers notice, and reconnect when there is a coordinator again."""
        if self._attachment is not None:
            self._attachment.close()
        super().stop()
        self._watch.close()
        self._channel.close()

    def change_key(self, key: ClusterKey) -> None:
        """Change the cluster's key; see ``RouterChannel.change_key``."""
        self._channel.change_key(key)

    def ready(self) -> bool:
        return is_ready(self._core)

    def failing(self) -> str:
        waits = "a worker that left in good order is expected back" if self._core.pools.gap else ""
        return self._core.outcomes.failing or waits

    def gap(self) -> str:
        return self._core.gap(self._timers.now())

    def full(self) -> str:
        return self._core.queue.full(self._core.limits.max_queue)

    def flips(self) -> list[dict[str, object]]:
        """Return the latest changes of role, JSON-ready."""
        now = self._timers.now()
        return [record.as_json(now) for record in self._core.flips.latest]

    def snapshot(self) -> dict[str, object]:
        """Return the state for /debug/state, JSON-ready."""
        return {
            "coordinator": {
                "pid": os.getpid(),
                "incarnation": self._core.incarnation,
                "control_address": self.address,
                "ready": self.ready(),
            },
            "channel": asdict(self._channel.counters),
            **debug_state(self._core, self._timers.now()),
        }

    def system(self) -> SystemSnapshot:
        """Return the state for /metrics and the dashboard."""
        return system_snapshot(self._core)


def is_ready(core: Lifecycle) -> bool:
    """Whether a request has gone prefill, handoff, decode since the start, and requests can be served now."""
    return core.outcomes.proven and not core.pools.gap and not core.outcomes.failing


def debug_state(core: Lifecycle, now: float) -> dict[str, Any]:
    """Return requests, counters and workers for /debug/state, JSON-ready."""
    return {
        "requests": {"queued": len(core.queue), "running": len(core.requests) - len(core.queue)},
        "counters": core.counters(),
        "last_retries": list(core.outcomes.last_retries),
        "last_recoveries": [asdict(recovery) for recovery in core.outcomes.last_recoveries],
        "flips": [record.as_json(now) for record in core.flips.latest],
        "workers": [
            {**_debug_worker(worker, now), "requests": core.request_ids(worker)}
            for worker in core.pools.workers.values()
        ],
        "refused": core.refused(now),
        "adapters": dict(core.pools.adapters.names().served),
    }


def system_snapshot(core: Lifecycle) -> SystemSnapshot:
    """Return the system's state for /metrics and the dashboard."""
    return SystemSnapshot(
        ready=is_ready(core),
        gap=core.pools.gap,
        num_waiting=len(core.queue),
        num_running=len(core.requests) - len(core.queue),
        workers=[_worker_snapshot(worker) for worker in core.pools.workers.values()],
        counters=core.counters(),
        stages=dict(Counter(request.state for request in core.requests.values())),
        reasons_lost={worker_id: reason for (worker_id, _), reason in core.pools.reasons_lost.items()},
        last_retries=tuple(core.outcomes.last_retries),
        num_adapters=len(core.pools.adapters.names().served),
    )


def _load_of(worker: WorkerRecord) -> Load:
    """Return its last report; before the first one, that of a worker without work."""
    hello = worker.hello
    return worker.load or Load(
        worker_id=hello.worker_id, incarnation=hello.incarnation, blocks_free=hello.num_blocks,
        blocks_cached=0, blocks_used=0, blocks_leased=0, num_running=0, num_waiting=0, num_waiting_tokens=0,
        steps=0, busy=False, accepting=True,
    )  # fmt: skip


def _debug_worker(worker: WorkerRecord, now: float) -> dict[str, object]:
    hello, load = worker.hello, _load_of(worker)
    return {
        "worker_id": hello.worker_id,
        "process": hello.process,
        "role": hello.role,
        "pid": hello.pid,
        "host": hello.host.partition("/")[0],
        "incarnation": hello.incarnation,
        "wire_version": hello.wire_version,
        "model": {**msgspec.structs.asdict(hello.model), "cache_map": list(map(str, hello.model.cache_map))},
        "silent_s": round(max(0.0, now - worker.last_seen), 3),
        "blocks": {
            "total": hello.num_blocks,
            "free": load.blocks_free,
            "cached": load.blocks_cached,
            "used": load.blocks_used,
            "leased": load.blocks_leased,
        },
        "running": load.num_running,
        "waiting": load.num_waiting,
        "accepting": load.accepting,
        "draining": worker.draining,
        "steps": load.steps,
        "counters": load.counters,
        "cached_hashes": len(worker.cached),
        "adapters": [[adapter.name, adapter.content] for adapter in worker.adapters],
        "dispatches": sorted(worker.dispatches),
        "held": sorted(worker.held),
    }


def _worker_snapshot(worker: WorkerRecord) -> WorkerSnapshot:
    hello, load = worker.hello, _load_of(worker)
    return WorkerSnapshot(
        worker_id=hello.worker_id,
        role=hello.role,
        blocks_total=hello.num_blocks,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_used=load.blocks_used,
        blocks_leased=load.blocks_leased,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        draining=worker.draining,
        host=hello.host.partition("/")[0],
        pid=hello.pid,
        max_num_seqs=hello.max_num_seqs,
        device=hello.device,
        gauges=load.gauges,
        busy=worker.busy.share,
        steps=load.steps,
        counters=load.counters,
        adapters=[adapter.name for adapter in worker.adapters if adapter.name],
    )
