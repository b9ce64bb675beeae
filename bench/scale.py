"""What one coordinator process carries in a large cluster: processor time, connections, memory, messages.

    python -m splitserve.bench.scale [--workers 10 100 1000] [--json bench/results/scale.json]

The real coordinator, with encrypted channels, runs on the first core. This process, on the last one, plays
the workers (fake_fleet.py) and the clients. For each size of cluster, the coordinator's processor time is
divided by its load: heartbeats; blocks that workers report as cached; requests of one token, whose
prompt is cached on no worker, then on all; steps of streams. ``needed`` adds that up for a load.

``simulated``: the same load on the largest cluster under virtual time, every heartbeat and step of it:
messages that the coordinator receives each second, and the time that its dispatcher took for them here.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..transport.channels.keys import generate_key
from .environment import environment, option_parser, write_record
from .fake_fleet import HASH_BYTES, FakeFleet
from .http.front_door_requests import OpenLoop
from .http.raw_client import RawClient, allow_many_files, request_bytes
from .http.streaming import PATH, await_events
from .http.streaming_servers import TEXT, Server, coordinator, model_folder
from .live_cluster import is_up
from .scale_simulated import simulated

STORED_BLOCKS = 4096  # that each worker reports as cached: the most that a reset report has
STREAMS_PER_WORKER = 28  # of a decode worker: 1,667 requests/s of 211 tokens at 25 tokens/s, over 500
MAX_STREAMS = 2000
STEPS_PER_S = 25
TOKEN = 300
PER_MINUTE, OUTPUT_TOKENS, NEW_BLOCKS = 100_000, 211, 72
"""The load to add up: requests, tokens of each, and blocks of each that are cached anew on both workers."""
SIMULATED_S = 30.0  # virtual
CHAT = {"model": "bench", "messages": [{"role": "user", "content": 45 * TEXT}]}  # some 1,150 tokens


class Meter:
    """The coordinator's processor time, and the messages that it is sent meanwhile."""

    def __init__(self, server: Server, fleet: FakeFleet, heartbeat_s: float) -> None:
        self._server, self._fleet, self._heartbeat_s = server, fleet, heartbeat_s
        self._beat_at = time.monotonic()

    def tend(self) -> None:
        """Answer what has come, and beat when it is time."""
        self._fleet.poll()
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._heartbeat_s
            self._fleet.beat()

    def cpu_s(self, seconds: float, work: Callable[[], None]) -> tuple[float, float, int]:
        """Do ``work`` again and again. Return processor seconds, wall seconds and messages sent."""
        begin, cpu, sent = time.monotonic(), self._server.cpu_s(), self._fleet.num_sent
        while (took := time.monotonic() - begin) < seconds:
            work()
            self.tend()
            time.sleep(0.0005)
        return self._server.cpu_s() - cpu, took, self._fleet.num_sent - sent


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[10, 100, 1000], help="sizes of the cluster"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second while they are measured")
    parser.add_argument(
        "--heartbeat-s", type=float, default=0.25, help="of the workers; the default is theirs"
    )
    options = parser.parse_args()
    allow_many_files()
    cores = sorted(os.sched_getaffinity(0))
    sizes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        for num_workers in options.workers:
            found = measured(model, Path(folder), cores, num_workers, options)
            found["needed"] = needed(found)
            sizes[str(num_workers)] = found
            print(num_workers, json.dumps(found, indent=1), flush=True)
    largest = simulated(max(options.workers), PER_MINUTE / 60, SIMULATED_S)
    print(json.dumps(largest, indent=1))
    write_record(options.json, {"environment": environment(), "workers": sizes, "simulated": largest})


def measured(
    model: Path, folder: Path, cores: list[int], num_workers: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All figures of one size, each beside the heartbeats of all workers."""
    seconds, rate, heartbeat_s = options.seconds, options.rate, options.heartbeat_s
    with cluster(model, folder, cores, num_workers, heartbeat_s) as (server, fleet):
        meter = Meter(server, fleet, heartbeat_s)
        await_ready(server, fleet, meter)
        idle_mb = server.rss_mb()
        cpu, took, sent = meter.cpu_s(seconds, lambda: None)
        beats_share = cpu / took
        found: dict[str, Any] = {
            "idle_mb": round(idle_mb, 1),
            "open_files": server.process.num_fds(),
            "heartbeats_per_s": round(sent / took),
            "heartbeats_share_of_a_core": round(beats_share, 4),
            "cpu_us_per_heartbeat": round(1e6 * cpu / sent, 1),
        }
        found |= caches(server, fleet, meter, num_workers, beats_share)
        found["cpu_us_per_request"] = requests(server, meter, rate, seconds, beats_share)
        hashes = fleet.last_prompt
        fleet.store(hashes)
        meter.cpu_s(2.0, lambda: None)
        found["prompt_blocks"] = len(hashes) // HASH_BYTES
        found["cpu_us_per_request_cached_on_all"] = requests(server, meter, rate, seconds, beats_share)
        return found | streams(server, fleet, meter, num_workers, seconds)


def caches(
    server: Server, fleet: FakeFleet, meter: Meter, num_workers: int, beats_share: float
) -> dict[str, Any]:
    """Each worker reports blocks that no other one has."""
    before, cpu, begin = server.rss_mb(), server.cpu_s(), time.monotonic()
    fleet.store_own(STORED_BLOCKS)
    while not _has_read_all(server, meter):
        pass
    used = server.cpu_s() - cpu - beats_share * (time.monotonic() - begin)
    num_blocks = STORED_BLOCKS * num_workers
    return {
        "blocks_reported": num_blocks,
        "cpu_us_per_block_reported": round(1e6 * used / num_blocks, 3),
        "bytes_per_block": round(1e6 * (server.rss_mb() - before) / num_blocks, 1),
        "with_caches_mb": round(server.rss_mb(), 1),
    }


def _has_read_all(server: Server, meter: Meter) -> bool:
    """Whether the coordinator used nearly no time just now."""
    cpu, took, _ = meter.cpu_s(2.0, lambda: None)
    return cpu < 0.5 * took


def requests(server: Server, meter: Meter, rate: float, seconds: float, beats_share: float) -> float:
    """Processor microseconds of the coordinator for each request of one token."""
    load = OpenLoop(server.port, request_bytes(PATH, {**CHAT, "max_tokens": 1}), 128)
    begin, sent = time.monotonic(), 0

    def work() -> None:
        nonlocal sent
        while sent < rate * seconds and begin + sent / rate <= time.monotonic():
            load.send(begin + sent / rate)
            sent += 1
        load.receive(0)

    cpu, took, _ = meter.cpu_s(seconds, work)
    while load.num_open or sent < rate * seconds:
        more_cpu, more_s, _ = meter.cpu_s(0.2, work)
        cpu, took = cpu + more_cpu, took + more_s
        assert took < seconds + 60, f"{load.num_open} of {sent} are not answered"
    load.close()
    assert not load.num_errors, f"{load.num_errors} of {sent} requests failed"
    return round(1e6 * (cpu - beats_share * took) / sent, 1)


def streams(
    server: Server, fleet: FakeFleet, meter: Meter, num_workers: int, seconds: float
) -> dict[str, Any]:
    """Each step of a decode worker is a message with a token of each of its streams."""
    num_streams = min(MAX_STREAMS, STREAMS_PER_WORKER * num_workers // 2)
    before = server.rss_mb()
    client = RawClient(server.port, num_streams)
    client.send_all(request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}))
    await_events(client, 2 * num_streams, meter.tend)
    open_mb = server.rss_mb()
    beats_cpu, beats_s, _ = meter.cpu_s(seconds / 2, lambda: None)
    beats_share = beats_cpu / beats_s  # of the same streams, whose numbers heartbeats carry
    num_tokens, step_at = 0, time.monotonic()

    def work() -> None:
        nonlocal num_tokens, step_at
        client.count(0)
        if time.monotonic() >= step_at:
            step_at = max(step_at + 1 / STEPS_PER_S, time.monotonic() - 1 / STEPS_PER_S)
            num_tokens += fleet.step()

    before_steps = fleet.num_steps
    cpu, took, _ = meter.cpu_s(seconds, work)
    steps = fleet.num_steps - before_steps
    client.close()
    return {
        "streams": num_streams,
        "kb_per_stream": round(1e3 * (open_mb - before) / num_streams, 1),
        "streams_per_decode_worker": round(num_tokens / steps, 1),
        "tokens_per_s": round(num_tokens / took),
        "step_messages_per_s": round(steps / took),
        "heartbeats_share_with_streams": round(beats_share, 4),
        "cpu_us_per_token": round(1e6 * (cpu - beats_share * took) / num_tokens, 2),
    }


def needed(found: dict[str, Any]) -> dict[str, float]:
    """Processor time of all coordinators together, in cores, for the load. Heartbeats and reports of caches
    go to each coordinator; requests and their tokens to one."""
    rate = PER_MINUTE / 60
    each = {
        "heartbeats": found["heartbeats_share_of_a_core"],
        "cache_reports": 2 * rate * NEW_BLOCKS * found["cpu_us_per_block_reported"] / 1e6,
    }
    divided = {
        "requests": rate * found["cpu_us_per_request_cached_on_all"] / 1e6,
        "tokens": rate * OUTPUT_TOKENS * found["cpu_us_per_token"] / 1e6,
    }
    left = 0.7 - sum(each.values())  # of a core that is busy for 70%
    return {
        **{f"{name}_cores_each": round(cores, 3) for name, cores in each.items()},
        **{f"{name}_cores": round(cores, 3) for name, cores in divided.items()},
        "coordinators_at_70_percent": round(sum(divided.values()) / left, 2) if left > 0 else float("inf"),
    }


@contextmanager
def cluster(
    model: Path, folder: Path, cores: list[int], num_workers: int, heartbeat_s: float
) -> Iterator[tuple[Server, FakeFleet]]:
    """A coordinator with these workers."""
    key_file = folder / f"{num_workers}.key"
    key = generate_key(key_file)
    with coordinator(model, cores, key_file, heartbeat_s=heartbeat_s, dead_after_s=60) as server:
        fleet = FakeFleet(server.control, key, num_workers, TOKEN)
        try:
            yield server, fleet
        finally:
            fleet.close()


def await_ready(server: Server, fleet: FakeFleet, meter: Meter) -> None:
    deadline = time.monotonic() + 60
    while True:
        meter.cpu_s(0.5, lambda: None)
        fleet.step()
        if is_up(f"http://127.0.0.1:{server.port}/ready"):
            return
        assert time.monotonic() < deadline, "the coordinator did not become ready"


if __name__ == "__main__":
    main()
