"""Measures how long a worker takes to change its role in place: the real workers of both roles, over a model that is loaded."""

from __future__ import annotations

import statistics
import time

from ...decode.settings import DecodeSettings
from ...decode.worker import DecodeWorker
from ...engine.cache.block_manager import BlockManager
from ...engine.worker_model import WorkerModel
from ...prefill.settings import PrefillSettings
from ...prefill.worker import PrefillWorker
from ...transport.channels.channels import RouterChannel
from ...transport.channels.incarnation import incarnations
from ...transport.messages.messages import FROM_WORKER, Hello
from ...worker.role_host import RoleHost
from ..errors import ProfilingError

FLIPS = 10
"""Half of them each way."""
HEARD_S = 30.0
RECEIVE_LIMIT = 64


def measure_flip(model: WorkerModel, prefill: PrefillSettings, decode: DecodeSettings, num_flips: int = FLIPS) -> float:
    """Seconds from when a worker is to be of the other role until its hello in that role has been heard, beside the worker that it was:
    the median of the slower way. The settings use no key; whatever coordinator they name, only a channel made here hears of the workers.
    Raises ProfilingError."""
    host = RoleHost("profiled", BlockManager(len(model.pool)), lambda _: False, incarnations())
    listening = RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER)
    workers: list[PrefillWorker | DecodeWorker] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    try:
        for number in range(num_flips + 1):  # the first one begins, and flips from nothing
            named = {"coordinator": listening.address, "name": f"{host.process}-{number}"}
            began = time.perf_counter()
            if number % 2:
                workers.append(DecodeWorker(decode.model_copy(update=named), model, None, None, host))
            else:
                workers.append(PrefillWorker(prefill.model_copy(update=named), model, None, host))
            _until_hello(workers[-1], named["name"], listening)
            if number:
                seconds[number % 2].append(time.perf_counter() - began)
                workers.pop(0).close()
    finally:
        for worker in workers:
            worker.close()
        listening.close()
    return max(statistics.median(times) for times in seconds if times)


def _until_hello(worker: PrefillWorker | DecodeWorker, name: str, listening: RouterChannel) -> None:
    end = time.perf_counter() + HEARD_S
    while time.perf_counter() < end:
        worker.turn(0.0)
        if any(isinstance(message, Hello) and message.worker_id == name for _, message in listening.receive(RECEIVE_LIMIT)):
            return
    raise ProfilingError(f"a worker that changed its role was not heard of within {HEARD_S:g} s")
