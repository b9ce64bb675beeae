"""What the lifecycle knows, as plain values for /debug/state, metrics and the dashboard."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import msgspec

from .lifecycle.lifecycle import Lifecycle
from .lifecycle.worker import WorkerRecord
from .metrics.system_snapshot import SystemSnapshot, WorkerSnapshot


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
    }


def system_snapshot(core: Lifecycle) -> SystemSnapshot:
    """Return the system's state for /metrics and the dashboard."""
    return SystemSnapshot(
        ready=is_ready(core),
        num_waiting=len(core.queue),
        num_running=len(core.requests) - len(core.queue),
        workers=[_worker_snapshot(worker) for worker in core.pools.workers.values()],
        counters=core.counters(),
        stages=dict(Counter(request.state for request in core.requests.values())),
        reasons_lost={worker_id: reason for (worker_id, _), reason in core.pools.reasons_lost.items()},
        last_retries=tuple(core.outcomes.last_retries),
    )


def _debug_worker(worker: WorkerRecord, now: float) -> dict[str, object]:
    hello, load = worker.hello, worker.load
    return {
        "worker_id": hello.worker_id,
        "process": hello.process,
        "role": hello.role,
        "pid": hello.pid,
        "host": hello.host.partition("/")[0],
        "incarnation": hello.incarnation,
        "wire_version": hello.wire_version,
        "model": {**msgspec.structs.asdict(hello.model), "cache_map": list(map(str, hello.model.cache_map))},
        "silent_s": round(now - worker.last_seen, 3),
        "blocks": {
            "total": hello.num_blocks,
            "free": load.blocks_free if load else hello.num_blocks,
            "cached": load.blocks_cached if load else 0,
            "used": load.blocks_used if load else 0,
            "leased": load.blocks_leased if load else 0,
        },
        "running": load.num_running if load else 0,
        "waiting": load.num_waiting if load else 0,
        "accepting": load.accepting if load else True,
        "draining": worker.draining,
        "steps": load.steps if load else 0,
        "counters": load.counters if load else {},
        "cached_hashes": len(worker.cached),
        "dispatches": sorted(worker.dispatches),
        "held": sorted(worker.held),
    }


def _worker_snapshot(worker: WorkerRecord) -> WorkerSnapshot:
    hello, load = worker.hello, worker.load
    return WorkerSnapshot(
        worker_id=hello.worker_id,
        role=hello.role,
        blocks_total=hello.num_blocks,
        blocks_free=load.blocks_free if load else hello.num_blocks,
        blocks_cached=load.blocks_cached if load else 0,
        blocks_used=load.blocks_used if load else 0,
        blocks_leased=load.blocks_leased if load else 0,
        num_running=load.num_running if load else 0,
        num_waiting=load.num_waiting if load else 0,
        num_waiting_tokens=load.num_waiting_tokens if load else 0,
        draining=worker.draining,
        host=hello.host.partition("/")[0],
        pid=hello.pid,
        max_num_seqs=hello.max_num_seqs,
        device=hello.device,
        gauges=load.gauges if load else {},
        busy=worker.busy.share,
        steps=load.steps if load else 0,
        counters=load.counters if load else {},
    )
