"""What the lifecycle counts and the workers report, for /metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .system_snapshot import SystemSnapshot, WorkerSnapshot

LIFECYCLE_COUNTERS = {
    "flips": "Changes of workers' roles that were ordered.",
    "prefix_pulls": "Prompts whose prefill worker was to get cached blocks from another worker.",
    "borrowed_prompts": "Prompts that decode workers computed, because no prefill worker had room.",
    "borrowed_sequences": "Sequences that prefill workers kept, because no decode worker had room.",
    "redispatches": "Attempts at requests that failed or were preempted and were followed by another.",
    "refused_early": "Requests refused at once because their first token would have come too late.",
    "recoveries": "Times a request that was dispatched again had its next token.",
    "recovery_seconds": (
        "Seconds from a lost attempt that was noticed to the next token, summed over recoveries."
    ),
    "workers_lost": "Workers that were declared dead or came back as a new process.",
    "workers_left": "Workers that drained and left.",
    "sequences_moved": (
        "Running sequences handed from a decode worker that left to another one, with their KV blocks."
    ),
    "moves_given_up": "Such hand-overs that failed; the sequence ran on where it was.",
    "answers_resumed": "Answers that a decode worker had kept for a client that came again.",
    "deadlines_queue": "Requests that passed a deadline while they waited for a worker.",
    "deadlines_prefill": "Requests that passed a deadline while their prompt was computed.",
    "deadlines_handoff": "Requests that passed a deadline between prefill and decode.",
    "deadlines_decode": "Requests that passed a deadline while they generated.",
}
WORKER_COUNTERS = {
    "output_tokens": "Output tokens of a worker.",
    "prompt_tokens": "Prompt tokens of a prefill worker, cached ones included.",
    "cached_tokens": "Of these, tokens found in its prefix cache.",
    "pulled_tokens": "Prompt tokens whose cached blocks a prefill worker got from other workers.",
    "loaded_tokens": "Prompt tokens whose cached blocks a prefill worker read from the KV store.",
    "late_loads": "Prompts whose cached blocks did not come from the KV store in time.",
    "saved_blocks": "KV blocks that a worker wrote to the KV store.",
    "late_pulls": "Prompts whose cached blocks did not come from other workers in time.",
    "preemptions": "Sequences that had to leave a decode worker's batch for lack of KV blocks.",
    "corrupt_blocks": "KV blocks that arrived corrupt.",
    "handed_over": "Sequences that a decode worker handed over when it left.",
    "mover_fallbacks": "Peers for which a worker had to take a slower mover.",
    "handoff_bytes": "Bytes of KV blocks that a worker has put.",
    "handoff_seconds": "Seconds in which it was putting them.",
    "busy_seconds": "Seconds in which a step ran on a worker. Its rate is the worker's busy share.",
    "uptime_seconds": "Seconds since a worker's model was loaded.",
    "full_step_tokens": "Prompt tokens of a prefill worker's full steps.",
    "full_step_seconds": "Seconds of these.",
    "step_sequences": "Sequences in a worker's steps; by splitserve_worker_steps_total: the mean batch size.",
    "draft_tokens": "Tokens that a decode worker has drafted.",
    "accepted_tokens": "Of these, tokens that were right.",
    "mtp_draft_tokens": "Of the drafted tokens, those that the model's prediction layer drafted.",
    "mtp_accepted_tokens": "Of these, tokens that were right.",
    "gpu_energy_joules": "Energy of a worker's GPUs.",
    "gpu_nvlink_receive_bytes": "Bytes received over NVLink.",
    "gpu_nvlink_transmit_bytes": "Bytes sent over NVLink.",
}
WORKER_GAUGES = {
    "largest_batch": "Most sequences in one step of a worker since its start.",
    "largest_batch_tokens": "Most prompt tokens in one step of a prefill worker since its start.",
    "adapters": "Adapters that a worker has ready.",
    "gpu_utilization_ratio": "Share of time in which a worker's GPUs ran a kernel.",
    "gpu_memory_used_bytes": "Memory in use on a worker's GPUs.",
    "gpu_memory_total_bytes": "Memory of a worker's GPUs.",
    "gpu_temperature_celsius": "Temperature of a worker's hottest GPU.",
    "gpu_power_watts": "Power that a worker's GPUs draw.",
    "gpu_pcie_receive_bytes_per_second": "Bytes a second that a worker's GPUs receive over PCIe.",
    "gpu_pcie_transmit_bytes_per_second": "Bytes a second that they send over PCIe.",
}
LOADS: dict[str, tuple[str, Callable[[WorkerSnapshot], float | None]]] = {
    "kv_cache_usage_ratio": (
        "Share of a worker's KV blocks that requests hold.",
        lambda worker: worker.blocks_used / worker.blocks_total if worker.blocks_total else 0.0,
    ),
    "worker_running": ("Sequences in a worker's batch.", lambda worker: worker.num_running),
    "worker_waiting": ("Sequences that wait on a worker.", lambda worker: worker.num_waiting),
    "worker_waiting_tokens": (
        "Prompt tokens that wait on a worker.",
        lambda worker: worker.num_waiting_tokens,
    ),
    "worker_draining": (
        "1 where a worker gets no new work and leaves.",
        lambda worker: float(worker.draining),
    ),
    "worker_busy_ratio": (
        "Share of the last 10 s in which a step ran on a worker.",
        lambda worker: worker.busy,
    ),
}
START_PHASE = "start_seconds_"
"""A worker's gauges of this prefix name a phase of its start."""


class SystemCollector:
    """Asks when somebody scrapes."""

    def __init__(self, system: Callable[[], SystemSnapshot]) -> None:
        self._system = system

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        system = self._system()
        yield GaugeMetricFamily("splitserve_ready", "1 if /ready says yes.", value=float(system.ready))
        workers = GaugeMetricFamily("splitserve_workers", "Live workers.", labels=["role"])
        for role in ("prefill", "decode"):
            workers.add_metric([role], sum(worker.role == role for worker in system.workers))
        yield workers
        yield GaugeMetricFamily(
            "splitserve_adapters", "Adapters that requests may name.", value=system.num_adapters
        )
        yield GaugeMetricFamily(
            "splitserve_num_requests_waiting", "Sequences that wait for a worker.", value=system.num_waiting
        )
        yield GaugeMetricFamily(
            "splitserve_num_requests_running", "Sequences on workers.", value=system.num_running
        )
        stages = GaugeMetricFamily(
            "splitserve_requests_in_stage", "Sequences by the stage that they are in.", labels=["stage"]
        )
        for stage in ("queue", "prefill", "handoff", "decode"):
            stages.add_metric([stage], system.stages.get(stage, 0))
        yield stages
        for name, value in system.counters.items():
            yield CounterMetricFamily(
                _safe(f"splitserve_{name}"), LIFECYCLE_COUNTERS.get(name, name), value=value
            )
        if system.steering is not None:
            yield from _steering(system.steering)
        yield self._blocks(system.workers)
        yield from self._loads(system.workers)
        yield from self._reported(system.workers)

    def _blocks(self, workers: Sequence[WorkerSnapshot]) -> Metric:
        blocks = GaugeMetricFamily(
            "splitserve_kv_blocks", "KV blocks of a worker by state.", labels=["worker", "role", "state"]
        )
        for worker in workers:
            for state in ("total", "free", "cached", "used", "leased"):
                blocks.add_metric([worker.worker_id, worker.role, state], getattr(worker, f"blocks_{state}"))
        return blocks

    def _loads(self, workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
        labels = ["worker", "role"]
        for name, (text, value_of) in LOADS.items():
            load = GaugeMetricFamily(f"splitserve_{name}", text, labels=labels)
            for worker in workers:
                if (value := value_of(worker)) is not None:
                    load.add_metric([worker.worker_id, worker.role], value)
            yield load
        phases = GaugeMetricFamily(
            "splitserve_worker_start_seconds",
            "Seconds of a worker's start by phase.",
            labels=[*labels, "phase"],
        )
        steps = CounterMetricFamily("splitserve_worker_steps", "Engine steps of a worker.", labels=labels)
        for worker in workers:
            values = [worker.worker_id, worker.role]
            steps.add_metric(values, worker.steps)
            for name, seconds in worker.gauges.items():
                if name.startswith(START_PHASE):
                    phases.add_metric([*values, name.removeprefix(START_PHASE)], seconds)
        yield from (phases, steps)

    def _reported(self, workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
        """The workers' own counters and gauges; those that are not known here come from a newer worker."""
        yield from _families(
            CounterMetricFamily, WORKER_COUNTERS, [(worker, worker.counters) for worker in workers]
        )
        gauges = [
            (worker, {k: v for k, v in worker.gauges.items() if not k.startswith(START_PHASE)})
            for worker in workers
        ]
        yield from _families(GaugeMetricFamily, WORKER_GAUGES, gauges)


def _steering(steering: Mapping[str, Any]) -> Iterator[Metric]:
    text = (
        "Workers of a role that the pool controller would have: as many as there are, or one more or fewer."
    )
    wanted = GaugeMetricFamily("splitserve_steering_wanted_workers", text, labels=["role"])
    for role, count in steering["wanted_workers"].items():
        wanted.add_metric([role], count)
    yield wanted
    load = GaugeMetricFamily(
        "splitserve_steering_load", "Predicted load of a role: 1 just meets the objectives.", labels=["role"]
    )
    for role, value in (steering["load"] or {}).items():
        load.add_metric([role], value)
    yield load
    decisions = CounterMetricFamily(
        "splitserve_steering_decisions", "What the pool controller has decided.", labels=["kind"]
    )
    for kind in ("flip", "scale_up", "scale_down", "hold"):
        decisions.add_metric([kind], steering["counts"].get(kind, 0))
    yield decisions


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    texts: Mapping[str, str],
    values: Sequence[tuple[WorkerSnapshot, Mapping[str, float]]],
) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for worker, named in values:
        for name, value in named.items():
            if name not in families:
                text = texts.get(name, f"The workers' {name}.")
                families[name] = kind(_safe(f"splitserve_worker_{name}"), text, labels=["worker", "role"])
            families[name].add_metric([worker.worker_id, worker.role], value)
    yield from families.values()


def _safe(name: str) -> str:
    """Counter names come over the wire."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
