"""One HTTP request for tokens: its choices, its response, its end.

A stream's headers go out with its first text, or after a silence: until then a refusal is an HTTP error like
any other. An error after that ends each unfinished choice with ``finish_reason: "error"``, followed by one
event that holds the error and by ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import Protocol

from ...transport.process.otel import RequestTrace
from ..errors import ApiError, DeadlineExceeded, Headers, InternalError, from_ended
from ..http.call import JSON, Answering
from ..lifecycle.request import Ended, Request, Sink
from ..lifecycle.time_ledger import server_timing
from ..metrics.trace_log import TimedSink
from ..serving import Serving
from ..tenants.limits import salt_of
from ..tenants.tenancy import Admission
from .accounting import Accounting
from .choice import Choice, best_of
from .formats import COMMENT, DONE, STREAM_HEADERS, Silence, error_event
from .parsed_choice import ParsedChoice
from .plan import MANY_CHOICES, RequestPlan
from .prompt_formats import format_of
from .resumption import IdempotencyKey, resumable_stream

MAX_PER_TURN = 64
"""Sequences that are submitted or cancelled before streams are served again: some milliseconds."""
_log = logging.getLogger(__name__)


class Service(Protocol):
    """The service that an exchange belongs to."""

    times_tokens: bool

    def done(self, exchange: HttpExchange) -> None:
        """Take note, once, that the response is over and nothing runs for it any more."""


class HttpExchange:
    """Everything between a plan and the last byte of its answer. Runs on the event loop's thread."""

    def __init__(
        self,
        service: Service,
        serving: Serving,
        call: Answering,
        plan: RequestPlan,
        id: str,
        arrival: float,
        trace: RequestTrace | None = None,
        client_id: str = "",
        key: IdempotencyKey | None = None,
    ) -> None:
        """``arrival``: monotonic seconds. ``client_id``: the client's name for it, which the answer has."""
        self.id, self.plan, self.serving = id, plan, serving
        shown = f"{id.partition('-')[0]}-{client_id}" if client_id else id
        self.form = format_of(plan, shown, serving.model)
        self.itl, self.tokenizer = serving.metrics.itl, serving.model.tokenizer
        self.choices: list[Choice] = []
        self._key, self._resumable = key, resumable_stream(key, plan, self, call.write)
        self.write: Callable[[bytes], None] = self._resumable.write if self._resumable else call.write
        self.deadline, self._silence = arrival + plan.timeout_s, Silence(arrival)
        self.more_headers: Headers = []
        self.admission: Admission | None = None
        self.account = Accounting(id, plan, call, arrival, self.choices)
        self.usage_so_far = self.account.usage_so_far
        self._service, self._call, self._trace = service, call, trace
        self._dispatcher, self._metrics = serving.dispatcher, serving.metrics
        self._loop = asyncio.get_running_loop()
        self._num_open = self._num_running = 0  # choices that have not ended; of these, with the dispatcher
        self._finished: set[int] = set()  # choices whose last chunk was written
        self._begun = self._closed = False
        self._id_header = (b"x-request-id", (client_id or id).encode())
        self._over = self._reported = False  # its response is complete or not wanted; the service knows it
        self.requests: list[Request] = []  # made, and not submitted

    def submit(self) -> None:
        """Submit the requests, some with each turn of the loop. A refusal of one ends the exchange."""
        room = max(0, min(MAX_PER_TURN, self.plan.max_running - self._num_running))
        now, self.requests = self.requests[:room], self.requests[room:]
        for request in now:
            if not self._over:
                self._num_running += 1
                self._dispatcher.submit(request)
        if self.requests and now and not self._over:
            self._loop.call_soon(self.submit)
        self._look_if_done()

    def discard(self) -> None:
        """Free requests and choices before any was submitted."""
        self.requests.clear()
        self.choices.clear()

    def make_requests(self) -> None:
        """Make up to MANY_CHOICES more choices, and the requests behind them."""
        plan, first = self.plan, len(self.choices)
        for number in range(first, min(first + MANY_CHOICES, plan.num_choices)):
            self.requests.append(self._make_request(number, *divmod(number, plan.num_candidates)))

    def _make_request(self, number: int, prompt_number: int, candidate: int) -> Request:
        plan, account, prompt = self.plan, self._call.account, self.plan.prompts[prompt_number]
        kind = Choice if plan.reading is None else ParsedChoice
        choice = kind(self, number, prompt, f"{self.id}-{number}")
        self.choices.append(choice)
        self._num_open += 1
        sink: Sink = choice if self._resumable is None else self._resumable.around(choice)
        request = Request(
            request_id=choice.request_id,
            prompt_token_ids=prompt.token_ids,
            images=prompt.images,
            sampling=plan.sampling_of(prompt_number, candidate),
            sink=TimedSink(sink) if self._service.times_tokens else sink,
            arrival=self.account.arrival,
            deadline=self.deadline,
            priority=plan.priority,
            adapter=plan.adapter,
            adapter_name=plan.adapter_name,
            tenant=account.tenant,
            priority_class=plan.priority_class,
            salt=salt_of(account.salt, plan.cache_salt),
            session=plan.session,
            prompt_logprobs=plan.most_prompt_logprobs,
            embeds=plan.prompt_form is not None,
            logits_of=() if plan.prompt_form is None else plan.prompt_form.logits_of,
            traceparent=self._trace.traceparent if self._trace is not None else "",
        )
        return request if self._key is None else self._key.applied(request, number, plan.seed)

    def begin(self, *, anyway: bool = False) -> None:
        """See ``Exchange``. Unless ``anyway``, a resumed stream begins with what its client lacks."""
        is_muted = self._resumable is not None and self._resumable.is_muted
        if not self._begun and (anyway or not is_muted):
            self._begun = True
            self._call.start(200, [*STREAM_HEADERS, self._id_header, *self.more_headers])

    def keep_alive(self, now: float, by: float) -> None:
        """Send what a silent stream needs ``by`` then; monotonic seconds."""
        if self._over or not self.plan.streamed:
            pass
        elif not self._begun and self._silence.headers_due(by):
            self.begin(anyway=True)
        elif self._begun and self._silence.comment_due(now, by, (c.last_write for c in self.choices)):
            self._call.write(COMMENT)

    def stop_met(self, choice: Choice) -> None:
        # not from within the dispatcher's own call
        self._loop.call_soon(self._dispatcher.cancel, choice.request_id)

    def choice_ended(self, choice: Choice, ended: Ended) -> None:
        self._num_open, self._num_running = self._num_open - 1, self._num_running - 1
        now, arrival = monotonic(), self.account.arrival
        self.account.choice_ended(ended, now)
        num_tokens, count = (len(choice.prompt.token_ids), choice.num_tokens), self._metrics.sequence_ended
        self._metrics.failures.call("metrics", count, ended, *num_tokens, arrival, choice.first_token_at, now)
        if self._over:
            self._look_if_done()
            return
        if self.requests and self._num_running < self.plan.max_running < self.plan.num_choices:
            self._loop.call_soon(self.submit)
        try:
            self._answer(choice, ended)
        except Exception:
            _log.exception("%s: the end of its answer cannot be written", self.id)
            self.fail(InternalError(f"Internal error; the server's log says more under {self.id}."))

    def _answer(self, choice: Choice, ended: Ended) -> None:
        """Write a choice's end, as far as the response shows it now."""
        if ended.error == "deadline" and self.plan.on_timeout != "error":
            choice.timed_out = self.plan.on_timeout
        late = any(choice.timed_out for choice in self.choices)
        if late and not self.account.num_output_tokens() and self._num_open:
            # another choice may have a token yet: then this one ends as it is, and else all of it is a 504
            return
        if ended.error is not None and not (choice.timed_out and self.account.num_output_tokens()):
            error = from_ended(ended)
            if error.status >= 500:
                tenant = self._call.account.tenant
                fields = {"fields": {"request_id": self.id, "status": str(error.status), "tenant": tenant}}
                _log.warning("%s ends with %d: %s", self.id, error.status, error.message, extra=fields)
            self.fail(error)
        elif choice.finish_reason() is None:
            self.fail(InternalError("The request was cancelled on the server."))
        elif self.plan.streamed:
            self.begin(anyway=True)
            self._write_chunks(b"".join(self._last_chunks()))
        elif not self._num_open:
            self._respond_whole()

    def fail(self, error: ApiError, *, stopping: bool = False) -> None:
        """End the response and its requests; with the coordinator, not those of an idempotency key."""
        if self._over:
            return
        self._end(str(error.status))
        if self._begun:
            chunks = b"".join(self._last_chunks(broken_off=True))
            self._call.finish(chunks + error_event(error.body()) + DONE)
        else:
            self._metrics.refused(error)
            timing = server_timing(*self.account.close())
            headers = [JSON, self._id_header, *self.more_headers, (b"server-timing", timing)]
            self._call.respond(error.status, [*headers, *error.headers()], error.body())
        if not (stopping and self._key):
            self._loop.call_soon(self._cancel_rest)  # not from within the dispatcher's own call

    def _last_chunks(self, *, broken_off: bool = False) -> Iterator[bytes]:
        """Yield the last chunk of each choice that has ended, once; of all unfinished ones if broken off.

        If a choice's own text is what has failed, a broken off response leaves its last chunk out.
        """
        for choice in self.choices:
            if choice.index in self._finished:
                continue
            reason = choice.finish_reason() if choice.ended is not None else None
            if not broken_off and reason is not None:
                self._finished.add(choice.index)
                yield choice.last_chunk(reason)
            elif broken_off:
                try:
                    yield choice.last_chunk("error")
                except Exception:
                    _log.exception("%s: choice %d cannot write its last chunk", self.id, choice.index)

    def overdue(self) -> None:
        """End it, though the dispatcher has not: its deadline has passed. It counts as running no more."""
        if not self._over:
            _log.error("%s: the lifecycle did not end it at its deadline; it is ended now", self.id)
            self.fail(DeadlineExceeded("The request did not finish before its deadline."))
        self._num_running = 0
        self._look_if_done()

    def client_gone(self, *, too_slow: bool = False) -> None:
        """See ``Responder``; nothing happens if the response was complete."""
        if too_slow:
            fields = {"request_id": self.id}
            _log.warning("a client reads its stream too slowly and is cut off", extra={"fields": fields})
        if self._over:
            return
        self._end("too_slow" if too_slow else "cancelled")
        if too_slow:
            self._loop.call_soon(self._cancel_rest)
        else:
            self._cancel_rest()

    def let_go(self) -> None:
        """Free exchange and choices once the response is complete, without waiting for the collector."""
        record = self.account.record(monotonic(), self._trace)
        self._metrics.failures.call("metrics", self._metrics.request_closed, record)
        self._closed = True
        self._look_if_done()
        if not self._num_open:
            self.choices.clear()

    def _cancel_rest(self, first: int = 0) -> None:
        """Some with each turn of the loop, as ``submit``."""
        for choice in self.choices[first : first + MAX_PER_TURN]:
            if choice.ended is None:
                self._dispatcher.cancel(choice.request_id)
        if len(self.choices) > first + MAX_PER_TURN:
            self._loop.call_soon(self._cancel_rest, first + MAX_PER_TURN)

    def _write_chunks(self, chunks: bytes) -> None:
        if self._num_open:
            self.write(chunks)
            return
        if self.plan.include_usage:
            chunks += self.form.usage_chunk(self.account.usage(self.account.close()[0]))
        self._end("200")
        self._call.finish((chunks if self._resumable is None else self._resumable.ending(chunks)) + DONE)

    def _respond_whole(self) -> None:
        chosen = self.choices if self.plan.num_best is None else best_of(self.choices, self.plan.num_best)
        results = [choice.result(choice.finish_reason() or "error") for choice in chosen]
        if self.plan.num_best is not None:
            results = [replace(result, index=index) for index, result in enumerate(results)]
        stages, total = self.account.close()
        body = self.form.response(results, self.account.usage(stages))
        self._end("200")
        timing = server_timing(stages, total)
        self._call.respond(200, [JSON, self._id_header, *self.more_headers, (b"server-timing", timing)], body)

    def _end(self, status: str) -> None:
        self._over = True
        self.account.status = status
        self._metrics.request_ended(self.plan.endpoint, status, self.plan.adapter_name)

    def _look_if_done(self) -> None:
        if self._closed and self._num_running <= 0 and not self._reported:  # negative: see ``overdue``
            self._reported = True
            self._metrics.prompts_done(self.plan.num_prompt_tokens, self.account.num_cached())
            self._service.done(self)
