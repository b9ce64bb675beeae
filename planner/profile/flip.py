"""Measures how long a worker takes to change its role in place: the real worker, over a model that is
loaded."""

from __future__ import annotations

import statistics
import time

from ...engine.worker_model import WorkerModel
from ...transport.channels.channels import RouterChannel
from ...transport.messages.messages import FROM_WORKER, Hello, Role
from ...worker.live_parts import live_parts
from ...worker.loop import Worker
from ...worker.parts import WorkerParts
from ...worker.settings import FlexibleSettings
from ..errors import ProfilingError

FLIPS = 10
"""Half of them each way."""
HEARD_S = 30.0
RECEIVE_LIMIT = 64


def measure_flip(model: WorkerModel, settings: FlexibleSettings, num_flips: int = FLIPS) -> float:
    """Return the seconds that a change of role takes: the median of the slower way.

    A change is timed from its order until the hello of the new role has arrived, beside the role that was.
    The settings use no key; whatever coordinator they name, only a channel made here receives from the
    worker. Raises ProfilingError.
    """
    listening = RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER)
    named = {"coordinator": listening.address, "name": "profiled", "start_as": "prefill"}
    settings = settings.model_copy(update=named)
    parts = live_parts(settings, model)
    worker = Worker(settings, parts)
    seconds: dict[Role, list[float]] = {"prefill": [], "decode": []}
    roles: tuple[Role, Role] = ("prefill", "decode")
    try:
        _until_hello(worker, parts, "prefill", listening)
        for number in range(num_flips):
            before, after = roles[number % 2], roles[(number + 1) % 2]
            began = time.perf_counter()
            worker.begin(after)
            _until_hello(worker, parts, after, listening)
            seconds[after].append(time.perf_counter() - began)
            worker.end(before)
    finally:
        worker.close()
        listening.close()
    return max(statistics.median(times) for times in seconds.values() if times)


def _until_hello(worker: Worker, parts: WorkerParts, role: Role, listening: RouterChannel) -> None:
    incarnation, end = worker.roles[role].links.incarnation, time.perf_counter() + HEARD_S
    while time.perf_counter() < end:
        worker.turn(parts.wait(0.0), parts.clock.now())
        for _, message in listening.receive(RECEIVE_LIMIT):
            if isinstance(message, Hello) and message.incarnation == incarnation:
                return
    raise ProfilingError(f"a worker that changed its role was not heard of within {HEARD_S:g} s")
