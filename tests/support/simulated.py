"""Simulated clusters with step times that add up by hand."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve.engine.latency_profile import HandoffModel, Memory, Piece, Profile, StepModel
from splitserve.planner.simulator.cluster import Cluster, Pool
from splitserve.planner.simulator.records import RequestRecord
from splitserve.planner.simulator.simulation import Simulation
from splitserve.traces.request import Trace, TraceRequest

PREFILL_S, TOKEN_S, DECODE_S = 0.05, 1e-4, 0.02


def profile(**changes: object) -> Profile:
    base = Profile(
        name="toy",
        memory=Memory(block_size=16, num_blocks=512, block_bytes=1600, num_layers=4, max_model_len=4096),
        prefill=StepModel(pieces=(Piece(curve=((0, PREFILL_S), (1000, PREFILL_S + 1000 * TOKEN_S))),)),
        decode=StepModel(pieces=(Piece(curve=((0, DECODE_S), (100, 2 * DECODE_S))),)),
        handoff=HandoffModel(put_s=0.0, bytes_per_s=1e15, message_s=0.001, check_bytes_per_s=1e15),
    )
    return base.model_copy(update=changes)


def cluster(prefill: int = 1, decode: int = 1, of: Profile | None = None, **changes: object) -> Cluster:
    of = of or profile()
    pools = (Pool(role="prefill", count=prefill, profile=of), Pool(role="decode", count=decode, profile=of))
    return Cluster(pools=pools, coordinator_s=0.0, **changes)  # type: ignore[arg-type]


def trace(requests: Iterable[TraceRequest], block_size: int | None = None) -> Trace:
    kept = list(requests)
    return Trace("test", lambda: iter(kept), block_size)


def run(
    cluster: Cluster, requests: Iterable[TraceRequest], **options: object
) -> tuple[Simulation, list[RequestRecord]]:
    records: list[RequestRecord] = []
    block_size = options.pop("block_size", None)
    simulation = Simulation(cluster, on_record=records.append, **options)  # type: ignore[arg-type]
    simulation.run(trace(requests, block_size))  # type: ignore[arg-type]
    return simulation, sorted(records, key=lambda r: r.number)


def colocated(count: int = 1, prefill: int = 0, of: Profile | None = None, **changes: object) -> Cluster:
    of = of or profile()
    beside = (Pool(role="prefill", count=prefill, profile=of),) if prefill else ()
    return Cluster(
        pools=(*beside, Pool(role="colocated", count=count, profile=of, **changes)), coordinator_s=0.0
    )  # type: ignore[arg-type]
