"""Readiness is proved: small requests go down the whole path until one has passed it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ..transport.messages.messages import SamplingParams
from .dispatcher import ClosedSink
from .lifecycle.request import Request
from .socket_dispatcher import SocketDispatcher

PROBE_TOKENS = 4
PROBE_S = 10.0
_log = logging.getLogger(__name__)


class ProbeSink(ClosedSink):
    """Set ``done`` when the probe ends."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    def end(self, ended: object) -> None:
        self.done.set()


async def prove(
    dispatcher: SocketDispatcher, incarnation: int, of_model: str = "", every_s: float = 0.25
) -> None:
    """Send probes while the system is not ready; ``incarnation``: the coordinator's. Runs until it is
    cancelled. ``of_model``: for the log."""
    number, was_ready = 0, False
    while True:
        if (ready := dispatcher.ready()) != was_ready:
            was_ready = ready
            if ready:
                _log.info("ready%s: a request has gone prefill, handoff and decode", of_model)
            else:
                _log.warning("not ready%s: %s", of_model, dispatcher.gap() or dispatcher.failing())
        if not ready and not dispatcher.gap():
            number += 1
            request, sink = _probe(incarnation, number)
            dispatcher.submit(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await sink.done.wait()
            dispatcher.cancel(request.request_id)
        await asyncio.sleep(every_s)


def _probe(incarnation: int, number: int) -> tuple[Request, ProbeSink]:
    """Make a request that passes prefill, handoff and decode, whatever the model answers."""
    now, sink = time.monotonic(), ProbeSink()
    sampling = SamplingParams(max_tokens=2, min_tokens=2, temperature=0.0, ignore_eos=True)
    name = f"probe-{incarnation:x}-{number}"
    return Request(name, [0] * PROBE_TOKENS, sampling, sink, now, now + PROBE_S, salt=b"probe"), sink
