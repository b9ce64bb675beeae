"""Shadows: copies of a route's requests, whose answers reach no client and are compared with the first ones.

A copy is made of sequences, not of an HTTP request: it has the first's tokens and sampling, also the seed,
and the lowest priority. It is of no tenant, and is dropped where its model cannot begin it at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from time import monotonic

from ...transport.messages.messages import TokenLogprobs
from ..lifecycle.request import Ended, Request, Sink
from ..listeners import ListenerFailures
from ..metrics.route_collector import RouteCounts
from ..metrics.trace_log import TimedSink
from ..serving import Serving, Servings
from .comparison import COPY, CUT, FIRST, Comparison, Result
from .exchange import HttpExchange

MAX_RUNNING = 64
"""Sequences of all routes. What one answer is ahead of the other is kept: 4 bytes for each token."""
MAX_PROMPT_BYTES = 128 << 20
"""Bound of all copies' prompts with their images, which a slow copy keeps after the first's end."""
LOG_EVERY_S = 10.0
PREFIX = "shadow-"
NAME = "shadows"
_log = logging.getLogger(__name__)


class Shadows:
    """Begins copies, and counts how they compare."""

    def __init__(self, servings: Servings, counts: RouteCounts, failures: ListenerFailures) -> None:
        self.failures = failures
        self._servings, self._counts = servings, counts
        self._running: set[_Shadow] = set()
        self._quiet_until = float("-inf")

    def begin(self, exchange: HttpExchange) -> None:
        """Copy an exchange whose requests are about to be submitted, if its route wants that."""
        plan, models = exchange.plan, self._servings.models
        route = models.routes.get(plan.route)
        if route is None or not route.shadow or route.shadow == plan.model or plan.model not in route.targets:
            return
        if not (
            plan.prompt_form is None and plan.max_tokens and random.random() * 100 < route.shadow_percent
        ):
            return
        num_running = sum(shadow.num_sequences for shadow in self._running)
        num_bytes = sum(shadow.num_prompt_bytes for shadow in self._running)
        if (
            num_running + plan.num_choices > MAX_RUNNING
            or num_bytes + plan.num_prompt_bytes > MAX_PROMPT_BYTES
        ):
            self._counts.shadows[plan.route, "dropped"] += 1
            return
        shadow = _Shadow(self, exchange, self._servings.of(route.shadow))
        self._running.add(shadow)
        asyncio.get_running_loop().call_soon(shadow.submit)

    def over(self, shadow: _Shadow, result: Result, position: int) -> None:
        """Count and log a copy."""
        self._running.discard(shadow)
        self._counts.shadowed(shadow.route, result, position)
        if result == "different" and (now := monotonic()) >= self._quiet_until:
            self._quiet_until = now + LOG_EVERY_S
            first, copy = shadow.first_id, f"{PREFIX}{shadow.first_id}"
            _log.info(
                "route %s: the answers of %s (%s) and %s (%s) differ from token %d on; one such line in %g s",
                *(shadow.route, shadow.first_model, first, shadow.serving.model.name, copy, position),
                LOG_EVERY_S,
                extra={"fields": {"request_id": first, "shadow_request_id": copy}},
            )

    def stop(self) -> None:
        """Drop all that run."""
        for shadow in list(self._running):
            shadow.conclude("dropped")


class _Shadow:
    """The copy of one exchange."""

    def __init__(self, shadows: Shadows, exchange: HttpExchange, serving: Serving) -> None:
        self.failures, self.serving = shadows.failures, serving
        self.route, self.first_model = exchange.plan.route, exchange.plan.model
        self.first_id, self.num_sequences = exchange.id, len(exchange.requests)
        self.num_prompt_bytes = exchange.plan.num_prompt_bytes
        self._shadows = shadows
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._unknown = self.num_sequences  # sequences that are not known to be the same
        self._copies = [_Copy(self, request) for request in exchange.requests]

    def submit(self) -> None:
        """Submit the copies. Where one would have to wait, all are dropped."""
        for copy in self._copies:
            if self._over:
                return
            copy.is_running = True
            self.serving.dispatcher.submit(copy.request)
            if copy.is_running and copy.request.state == "queue":
                self.conclude("dropped")

    def found(self, copy: _Copy, result: Result) -> None:
        """Take one sequence's result."""
        if result == "same":
            self._unknown -= 1
            if self._unknown:
                return
        self.conclude(result, copy.comparison.position)

    def conclude(self, result: Result, position: int = 0) -> None:
        """End, once, with all that still runs."""
        if not self._over:
            self._over = True
            for copy in self._copies:
                copy.cancel()
            self._copies = []
            self._shadows.over(self, result, position)

    def cancel(self, request_id: str) -> None:
        """Cancel a sequence, but not from within the dispatcher's own call."""
        self._loop.call_soon(self.serving.dispatcher.cancel, request_id)


class _Copy:
    """The copy of one sequence: the ``Sink`` of its tokens."""

    def __init__(self, shadow: _Shadow, first: Request) -> None:
        self.comparison = Comparison()
        self.is_running = False
        self._shadow = shadow
        self._reported = False
        self.request = Request(
            request_id=f"{PREFIX}{first.request_id}",
            prompt_token_ids=first.prompt_token_ids,
            images=first.images,
            sampling=first.sampling,
            sink=self,
            arrival=monotonic(),
            deadline=first.deadline,
            priority_class="batch",
            is_copy=True,
            salt=first.salt,
            session=first.session,
        )
        watched = _Watched(first.sink, self, shadow.failures)
        first.sink = TimedSink(watched) if isinstance(first.sink, TimedSink) else watched

    def push(self, token_id: int, logprobs: object) -> None:
        self.comparison.push(COPY, token_id)
        self._look()

    def push_prompt_logprobs(self, logprobs: object) -> None: ...

    def flush(self) -> None: ...

    def end(self, ended: Ended) -> None:
        self.is_running = False
        if ended.error is not None:
            self._report("dropped" if ended.error in ("overloaded", "unavailable") else "failed")
        elif ended.finish_reason is not None:
            self.comparison.end(COPY, ended.finish_reason)
            self._look()

    def push_first(self, token_id: int) -> None:
        """Take a token of the first answer."""
        self.comparison.push(FIRST, token_id)
        self._look()

    def end_first(self, ended: Ended) -> None:
        """Take the first answer's end: nothing can be compared with one that has failed."""
        if ended.error is not None:
            self._report("dropped")
        else:
            self.comparison.end(FIRST, ended.finish_reason or CUT)
            self._look()

    def cancel(self) -> None:
        """Free the request, if it runs."""
        if self.is_running:
            self.is_running = False
            self._shadow.cancel(self.request.request_id)

    def _look(self) -> None:
        if self.comparison.result is not None:
            self._report(self.comparison.result)

    def _report(self, result: Result) -> None:
        if not self._reported:
            self._reported = True
            self._shadow.found(self, result)


class _Watched:
    """A first answer's ``Sink``, which hands all on, and its tokens to the copy, too."""

    def __init__(self, sink: Sink, copy: _Copy, failures: ListenerFailures) -> None:
        self._sink, self._copy, self._failures = sink, copy, failures
        self.flush, self.push_prompt_logprobs = sink.flush, sink.push_prompt_logprobs

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._sink.push(token_id, logprobs)
        self._failures.call(NAME, self._copy.push_first, token_id)

    def end(self, ended: Ended) -> None:
        self._sink.end(ended)
        self._failures.call(NAME, self._copy.end_first, ended)
