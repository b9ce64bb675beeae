"""Do pixels hold up a coordinator's other messages? Two workers' channels while one gets a large Prefill.

    python -m splitserve.bench.handoff.pixel_stalls --json bench/results/pixel_stalls.json # half a minute

The coordinator and two workers are processes with encrypted channels, as they are when serving. Each sends a
small message a millisecond both ways. In milliseconds, while a Prefill with as many MiB of pixels goes to the
first worker: the longest time without a message, at each end of each connection, and until the Prefill is
there. The median of ROUNDS. By turns the Prefill is one frame, as older workers get it, and several.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection

import zmq

from ...transport.channels.channels import DealerChannel, RouterChannel
from ...transport.channels.keys import ClusterKey, new_key
from ...transport.messages.cache_map import states
from ...transport.messages.fields import u32
from ...transport.messages.images import Image, image_name
from ...transport.messages.messages import (
    FROM_COORDINATOR,
    FROM_WORKER,
    Alive,
    Goodbye,
    Hello,
    ModelIdentity,
    Peer,
    Prefill,
    RequestSpec,
    SamplingParams,
)
from ..environment import environment, option_parser, write_record

SIZES_MIB = (0, 1, 4, 16, 60)
IMAGE_MIB = 4
ARMS = {"one frame": False, "several frames": True}
ROUNDS, EVERY_S, AROUND_S = 5, 0.001, 0.1
Gaps = dict[str, float]


class Gap:
    """The longest time between two messages."""

    def __init__(self) -> None:
        self.longest_s, self._last = 0.0, time.monotonic()

    def note(self) -> None:
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now

    def taken(self) -> float:
        """Return it, and begin anew."""
        longest, self.longest_s = self.longest_s, 0.0
        return longest


def work(address: str, number: int, key: ClusterKey, results: Connection, joins: bool) -> None:
    """A worker's process. Sends what it measured once it has been asked for."""
    small = Goodbye(worker_id=f"w{number}", incarnation=1)
    with DealerChannel.connect(address, f"w{number}".encode(), key, FROM_COORDINATOR) as channel:
        gap, arrived = Gap(), 0.0
        channel.send(hello_of(number, joins=joins))
        while True:
            channel.send(small)
            channel.socket.poll(1)
            for message in channel.receive(256):
                if isinstance(message, Prefill):
                    arrived = time.monotonic()
                gap.note()
            if results.poll():
                if not results.recv():
                    return
                results.send((gap.taken(), arrived))
            time.sleep(EVERY_S / 4)


class Coordinator:
    """The measuring end."""

    def __init__(self, *, joins: bool) -> None:
        key = new_key()
        self.channel = RouterChannel.bind("tcp://127.0.0.1:*", key, FROM_WORKER)
        self.gaps = {b"w0": Gap(), b"w1": Gap()}
        self._known = set[bytes]()
        pipes = [multiprocessing.Pipe() for _ in self.gaps]
        self._results = [ours for ours, _ in pipes]
        context = multiprocessing.get_context("spawn")
        self._workers = [
            context.Process(target=work, args=(self.channel.address, number, key, theirs, joins), daemon=True)
            for number, (_, theirs) in enumerate(pipes)
        ]
        for worker in self._workers:
            worker.start()
        while len(self._known) < len(pipes):
            self.turn()

    def turn(self) -> None:
        """Receive, and send to both."""
        self.channel.socket.poll(1, zmq.POLLIN)
        for identity, _ in self.channel.receive(256):
            self._known.add(identity)
            self.gaps[identity].note()
        for identity in self._known:
            self.channel.send(identity, Alive(coordinator=1))

    def turns(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def taken(self) -> tuple[Gaps, float]:
        """Return all gaps since the last call, and when the last Prefill arrived."""
        found, arrived = dict[str, float](), 0.0
        for number, (result, gap) in enumerate(zip(self._results, self.gaps.values(), strict=True)):
            result.send(True)
            while not result.poll():
                self.turn()
            at_worker, at = result.recv()
            arrived = max(arrived, at)
            found[f"to worker {number}"], found[f"from worker {number}"] = at_worker, gap.taken()
        return found, arrived

    def measured(self, prompt: Prefill | None) -> Gaps:
        """Return the gaps while ``prompt`` goes to the first worker, and how long that took."""
        self.turns(AROUND_S)
        self.taken()
        began = time.monotonic()
        if prompt is not None:
            self.channel.send(b"w0", prompt)
        arrived, found = 0.0, dict[str, float]()
        while prompt is not None and arrived < began:
            self.turns(AROUND_S)
            more, arrived = self.taken()
            found = {name: max(gap, found.get(name, 0.0)) for name, gap in more.items()}
        self.turns(AROUND_S)
        more, _ = self.taken()
        found = {name: max(gap, found.get(name, 0.0)) for name, gap in more.items()}
        return found | {"Prefill": max(0.0, arrived - began)}

    def close(self) -> None:
        for result in self._results:
            result.send(False)
        for worker in self._workers:
            worker.join()
        self.channel.close()


def hello_of(number: int, *, joins: bool) -> Hello:
    """Return a worker's introduction."""
    model = ModelIdentity(
        kv_name="m", dtype="float32", block_size=16, cache_map=states(1, 4096), block_bytes=4096
    )
    return Hello(
        worker_id=f"w{number}",
        incarnation=1,
        role="prefill",
        host="h",
        pid=2,
        model=model,
        max_model_len=10,
        vocab_size=20,
        num_blocks=4,
        max_num_seqs=8,
        max_batch_tokens=9,
        joins_frames=joins,
    )


def prefill(mib: int) -> Prefill:
    """Return a Prefill with as many MiB of pixels, in images of up to IMAGE_MIB."""
    height, width = min(mib, IMAGE_MIB) * 512, 683  # 1 MiB has 512 rows
    count = -(-mib // IMAGE_MIB)
    images = []
    for number in range(count):
        pixels = random.Random(number).randbytes(3 * height * width)
        name = image_name(height, width, pixels)
        images.append(Image(first=number, num_tokens=1, height=height, width=width, pixels=pixels, name=name))
    spec = RequestSpec(
        request_id="r",
        epoch=1,
        dispatch=1,
        coordinator=1,
        token_ids=u32(range(count + 1)),
        num_prompt_tokens=count + 1,
        sampling=SamplingParams(max_tokens=1),
        deadline_s=600.0,
    )
    peer = Peer(worker_id="w1", incarnation=1, address="tcp://127.0.0.1:1")
    return Prefill(spec=spec, decode=peer, images=tuple(images))


def measured(*, joins: bool) -> dict[str, Gaps]:
    """Return the gaps by size, in milliseconds."""
    coordinator, rows = Coordinator(joins=joins), dict[str, Gaps]()
    try:
        for mib in SIZES_MIB:
            prompt = prefill(mib) if mib else None
            rounds = [coordinator.measured(prompt) for _ in range(ROUNDS)]
            rows[f"{mib} MiB"] = {
                name: round(1e3 * statistics.median(one[name] for one in rounds), 1) for name in rounds[0]
            }
            print(f"{mib} MiB", json.dumps(rows[f"{mib} MiB"]), flush=True)
    finally:
        coordinator.close()
    return rows


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    arguments = parser.parse_args()
    found = {arm: measured(joins=joins) for arm, joins in ARMS.items()}
    write_record(arguments.json, {"environment": environment(), "ms": found})


if __name__ == "__main__":
    main()
