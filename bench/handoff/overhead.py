"""What the system costs around the model, with a model runner that takes no time.

    python -m splitserve.bench.handoff.overhead            # half a minute; prints JSON
    python -m splitserve.bench.handoff.overhead --json bench/results/overhead.json

1. Decode steps a second at a batch of 64 through the decode worker's loop: its core, its step thread, its
   sockets. The coordinator is a stub on the other core that only drains them.
2. Time to first token of single requests through the real coordinator, prefill worker and handoff: all of it
   is overhead. Beside it, in the same run, what no code of ours can avoid: a bare HTTP exchange with
   uvicorn's parser, and a bare ZeroMQ round trip between two processes (what is above the
   two of them: ``ttft_added_ms``). And what a prefill worker takes by itself for a prompt that is not handed
   over, from the message to the first token: what is above that and the HTTP exchange is added by coordinator
   and handoff (``by_control_ms``).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from ...cli.settings import DEMO_MODEL, DEMO_MODEL_NAME
from ...cli.up import free_port
from ...transport.channels.channels import RouterChannel
from ...transport.messages.messages import (
    FROM_WORKER,
    FirstToken,
    Hello,
    Message,
    Peer,
    Prefill,
    RequestSpec,
    SamplingParams,
    StepTokens,
    Welcome,
    u32,
)
from ..environment import environment, option_parser, write_record
from ..http.raw_client import request_bytes
from ..live_cluster import await_up, coordinator_command
from ..null_workers import start_null_worker
from .bare_exchange import PAUSE_S, echoing, exchange, round_trip

BATCH = 64
WARM_S, WINDOW_S, WINDOWS = 0.5, 0.4, 5  # sequences end after 19,000 steps
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"  # answered with {"status": ...}


def decode_loop() -> dict[str, Any]:
    """Steps a second of the decode worker's loop, in windows of a second."""
    os.sched_setaffinity(0, {0})
    channel = RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER)
    workers = [
        start_null_worker("prefill", channel.address, 0, 80_000, 20_000),
        start_null_worker("decode", channel.address, 1, 80_000, 20_000),
    ]
    try:
        return _drive(channel)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        channel.close()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _drive(channel: RouterChannel) -> dict[str, Any]:
    hellos: dict[str, tuple[bytes, Hello]] = {}
    steps: list[float] = []
    tokens = mark = begun = 0.0
    deadline = time.monotonic() + 60
    while len(steps) < WINDOWS and time.monotonic() < deadline:
        channel.socket.poll(10)
        for identity, message in channel.receive(256):
            if isinstance(message, Hello):
                hellos[message.role] = (identity, message)
                channel.send(identity, Welcome(coordinator=1, heartbeat_s=0.25))
                if len(hellos) == 2:
                    _submit(channel, *hellos["prefill"], hellos["decode"][1])
            elif isinstance(message, StepTokens):
                rows = len(message.dispatches) // 4
                begun = begun or (time.monotonic() if rows == BATCH else 0.0)
                tokens += rows
        now = time.monotonic()
        if begun and now - begun >= WARM_S and now - mark >= WINDOW_S:
            if mark:
                steps.append(tokens / BATCH / (now - mark))
            tokens, mark = 0.0, now
    return {"batch": BATCH, "steps_per_s": statistics.median(steps), "min": min(steps), "max": max(steps)}


def _submit(channel: RouterChannel, identity: bytes, prefill: Hello, decode: Hello) -> None:
    peer = Peer(worker_id=decode.worker_id, incarnation=decode.incarnation, address=decode.peer_address)
    for dispatch in range(BATCH):
        channel.send(identity, Prefill(spec=_spec(dispatch, 32, 19_000), decode=peer))


def _spec(dispatch: int, num_prompt_tokens: int, max_tokens: int) -> RequestSpec:
    return RequestSpec(
        request_id=f"r{dispatch}",
        epoch=0,
        dispatch=dispatch,
        coordinator=1,
        token_ids=u32([dispatch % 60 + 1] * num_prompt_tokens),
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        deadline_s=600.0,
    )


class LoneWorker:
    """A null prefill worker whose coordinator is this process."""

    def __init__(self) -> None:
        self._channel = RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER)
        self._worker = start_null_worker("prefill", self._channel.address, 0, 20_000, 2_000)
        self._dispatch = 0
        self._identity, _ = self._await(Hello)
        self._channel.send(self._identity, Welcome(coordinator=1, heartbeat_s=0.25))

    def first_token(self) -> float:
        """Seconds from a prompt to its one token, some milliseconds after the last."""
        time.sleep(PAUSE_S)
        self._dispatch += 1
        nobody = Peer(worker_id="nobody", incarnation=1, address="tcp://127.0.0.1:9")
        message = Prefill(spec=_spec(self._dispatch, 256, 1), decode=nobody)
        start = time.perf_counter()
        self._channel.send(self._identity, message)
        self._await(FirstToken)
        return time.perf_counter() - start

    def _await(self, kind: type[Message]) -> tuple[bytes, Message]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self._channel.socket.poll(1_000)
            for identity, message in self._channel.receive(256):
                if isinstance(message, kind):
                    return identity, message
        raise TimeoutError(f"the prefill worker said no {kind.__name__}")

    def __enter__(self) -> LoneWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.terminate()
        self._worker.join()
        self._channel.close()


def time_to_first_token(windows: int = 10, requests: int = 60) -> dict[str, Any]:
    """Milliseconds from sending a request to its first streamed token, one request at a time, and to the last
    of four.

    In windows, each with floors of its own, taken right beside: a shared machine is now quicker, now slower,
    for seconds at a time. Medians over the windows, and each window's.
    """
    with (
        _null_cluster() as port,
        echoing() as dealer,
        LoneWorker() as worker,
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _window(connection, dealer, worker, 20)  # warm-up
        taken = [_window(connection, dealer, worker, requests) for _ in range(windows)]
    by_window = {name: [window[name] for window in taken] for name in taken[0]}
    return {
        "windows": windows,
        "requests": windows * requests,
        "prompt_tokens": 256,
        **{
            name: {"p50": statistics.median(values), "min": min(values), "max": max(values)}
            for name, values in by_window.items()
        },
    }


def _window(
    connection: socket.socket, dealer: zmq.Socket[bytes], worker: LoneWorker, requests: int
) -> dict[str, float]:
    """Medians, in milliseconds."""
    answers = [exchange(connection, _request(i), b"0\r\n\r\n") for i in range(requests)]
    floors = [exchange(connection, HEALTH, b"}")[1] for _ in range(requests)]
    round_trips = [round_trip(dealer) for _ in range(requests)]
    alone = [worker.first_token() for _ in range(requests)]
    stages = [_stages(text) for _, _, text in answers]
    firsts = [first for first, _, _ in answers]
    ttft, floor, zmq_trip, own = (
        statistics.median(times) * 1e3 for times in (firsts, floors, round_trips, alone)
    )
    return {
        "http_floor_ms": floor,
        "zmq_round_trip_ms": zmq_trip,
        "worker_alone_ms": own,
        "ttft_added_ms": ttft - floor - zmq_trip,
        "by_control_ms": ttft - floor - own,
        "ttft_ms": ttft,
        "e2e_ms": statistics.median(last for _, last, _ in answers) * 1e3,
        **{
            f"{name.removesuffix('_s')}_ms": statistics.median(s[name] for s in stages) * 1e3
            for name in stages[0]
        },
    }


def _request(number: int) -> bytes:
    fields = {"model": DEMO_MODEL_NAME, "prompt": [number % 60 + 1] * 256, "max_tokens": 4, "stream": True}
    return request_bytes("/v1/completions", {**fields, "stream_options": {"include_usage": True}})


def _stages(text: bytes) -> dict[str, float]:
    usage = next(json.loads(line[6:])["usage"] for line in text.splitlines() if b'"splitserve"' in line)
    return {name: usage["splitserve"][name] for name in ("queue_s", "prefill_s", "handoff_s", "decode_s")}


@contextmanager
def _null_cluster() -> Iterator[int]:
    port, control = free_port("127.0.0.1"), f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    command = coordinator_command(DEMO_MODEL, port, control, served_model_name=DEMO_MODEL_NAME)
    coordinator = subprocess.Popen(command)
    processes: list[Any] = [
        coordinator,
        start_null_worker("prefill", control, 0, 20_000, 2_000),
        start_null_worker("decode", control, 1, 20_000, 2_000),
    ]
    try:
        await_up(f"http://127.0.0.1:{port}/ready", coordinator)
        yield port
    finally:
        for process in processes:
            process.terminate()


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    arguments = parser.parse_args()
    results = {
        "environment": environment(),
        "decode_loop": decode_loop(),
        "single_request": time_to_first_token(),
    }
    print(json.dumps(results, indent=2))
    write_record(arguments.json, results)


if __name__ == "__main__":
    main()
