"""One HTTP request for tokens: its choices, its response, its end.

A stream's headers go out with its first text: until then a refusal is an HTTP error like any other. An error after that ends each
unfinished choice with ``finish_reason: "error"``, followed by one event that holds the error and by ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Any, NamedTuple

from ...transport.process.otel import RequestTrace
from ..errors import ApiError, DeadlineExceeded, Headers, InternalError, from_ended
from ..http.call import JSON, Answering
from ..lifecycle.request import Dispatcher, Ended, PriorityClass, Request
from ..lifecycle.time_ledger import NAMES, Stages, TimeLedger, server_timing
from ..metrics.metrics import Metrics
from ..metrics.request_record import RequestRecord
from ..tenants.limiter import Admission
from ..tenants.usage_record import UsageRecord
from .bodies.timeouts import OnTimeout
from .choice import Choice, ChoiceOptions
from .formats import DONE, Usage, error_event
from .parsed_choice import ParsedChoice
from .prompts import Prompt

MAX_PER_TURN = 64
"""Sequences that are submitted or cancelled before streams are served again: some milliseconds."""
logger = logging.getLogger(__name__)
_USAGE_KEYS = [f"{name}_s" for name in NAMES]


class ExchangeOptions(NamedTuple):
    """What is fixed before the first choice exists."""

    id: str
    endpoint: str
    arrival: float  # monotonic seconds
    deadline: float  # monotonic seconds
    on_timeout: OnTimeout
    include_usage: bool
    priority_class: PriorityClass
    done: Callable[[HttpExchange], None] | None = None
    """Called once, when the response is complete or its client gone, and nothing runs for it any more."""
    best: int | None = None
    """Of each prompt's choices so many are given back, the likeliest; None: all, in order."""
    trace: RequestTrace | None = None


class HttpExchange:
    """Everything between the parsed request and the last byte. All of it runs on the event loop's thread."""

    def __init__(
        self, call: Answering, dispatcher: Dispatcher, metrics: Metrics, options: ExchangeOptions, choice_options: ChoiceOptions
    ) -> None:
        self.choices: list[Choice] = []
        self.write = call.write
        self._call = call
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._failures = metrics.failures
        self._options = options
        self._choice_options = choice_options
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self._num_open = 0  # choices that have not ended
        self._finished: set[int] = set()  # choices whose last chunk was written
        self._num_running = 0  # of these, with the dispatcher
        self.num_prompt_tokens = 0  # of each prompt once, however many choices it has
        self.deadline = options.deadline
        self._done = options.done
        self._closed = False
        self.more_headers: Headers = []
        self.admission: Admission | None = None
        self._over = False  # the response is complete, or nobody waits for it
        self._status = ""  # as it is counted
        self._last: Ended | None = None  # of the choice that ended last
        self._ledger = TimeLedger("parse", options.arrival)

    @property
    def id(self) -> str:
        return self._options.id

    @property
    def status(self) -> str:
        """As it is counted; empty while it runs."""
        return self._status

    def add_choice(self, prompt: Prompt) -> Choice:
        """The next choice; all are added before any is submitted, those of one prompt together."""
        index = len(self.choices)
        options, request_id = self._choice_options, f"{self._options.id}-{index}"
        if options.parser_of is None:
            choice = Choice(self, options, index, prompt, request_id)
        else:
            choice = ParsedChoice(self, options, index, prompt, request_id, options.parser_of(prompt))
        if not self.choices or self.choices[-1].prompt is not prompt:
            self.num_prompt_tokens += len(prompt.token_ids)
        self.choices.append(choice)
        self._num_open += 1
        return choice

    def submit(self, requests: Sequence[Request]) -> None:
        """One request a choice, some with each turn of the loop: there may be thousands. A refusal of one ends the exchange."""
        for request in requests[:MAX_PER_TURN]:
            if not self._over:
                self._num_running += 1
                self._dispatcher.submit(request)
        if len(requests) > MAX_PER_TURN and not self._over:
            self._loop.call_soon(self.submit, requests[MAX_PER_TURN:])
        self._look_if_done()

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            self._call.start(200, headers + self._id_header())

    def usage_so_far(self) -> Usage:
        num_prompt, num_output = self.num_prompt_tokens, self._num_output_tokens()
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}

    def usage_begun(self) -> UsageRecord:
        """For billing: what is known when it begins."""
        account, options = self._call.account, self._options
        names = (account.tenant, account.key, self._metrics.model_name, options.endpoint, options.priority_class)
        return UsageRecord(options.id, time(), *names, "", self.num_prompt_tokens)

    def usage_record(self) -> UsageRecord:
        """For billing: as it stands now."""
        now, account, used, stages = monotonic(), self._call.account, self.usage_so_far(), self._ledger.stages()
        return UsageRecord(
            id=self._options.id,
            started=time() - (now - self._options.arrival),
            tenant=account.tenant,
            key=account.key,
            model=self._metrics.model_name,
            endpoint=self._options.endpoint,
            priority_class=self._options.priority_class,
            status=self._status,
            prompt_tokens=used["prompt_tokens"],
            cached_tokens=self._num_cached(),
            completion_tokens=used["completion_tokens"],
            kv_byte_seconds=sum(choice.ended.kv_byte_seconds() for choice in self.choices if choice.ended is not None),
            parse_s=stages.parse,
            queue_s=stages.queue,
            prefill_s=stages.prefill,
            handoff_s=stages.handoff,
            decode_s=stages.decode,
            stream_s=stages.coordinator + stages.stream,
        )

    def num_used_tokens(self) -> int:
        """Prompts and answers, for limits; 0 where the server gave nothing for the prompt."""
        num_output = self._num_output_tokens()
        return self.num_prompt_tokens + num_output if num_output or self._status in ("200", "cancelled", "too_slow") else 0

    def stop_met(self, choice: Choice) -> None:
        self._loop.call_soon(self._dispatcher.cancel, choice.request_id)  # not from within the dispatcher's own call

    def choice_ended(self, choice: Choice, ended: Ended) -> None:
        self._num_open -= 1
        self._num_running -= 1
        now, self._last = monotonic(), ended
        if ended.ledger is not None:
            self._ledger = ended.ledger
            self._ledger.enter("stream", now)
        num_prompt = len(choice.prompt.token_ids)
        count = self._metrics.sequence_ended
        self._failures.call("metrics", count, ended, num_prompt, choice.num_tokens, self._options.arrival, choice.first_token_at, now)
        if self._over:
            self._look_if_done()
            return
        try:
            self._answer(choice, ended)
        except Exception:
            logger.exception("%s: the end of its answer cannot be written", self._options.id)
            self.fail(InternalError(f"Internal error; the server's log says more under {self._options.id}."))

    def _answer(self, choice: Choice, ended: Ended) -> None:
        """What the client is to have of it now."""
        if ended.error == "deadline" and self._options.on_timeout != "error":
            choice.timed_out = self._options.on_timeout
        late = any(choice.timed_out for choice in self.choices)
        if late and not self._num_output_tokens() and self._num_open:
            return  # another choice may have a token yet: then this one ends as it is, and else all of it is a 504
        if ended.error is not None and not (choice.timed_out and self._num_output_tokens()):
            error = from_ended(ended)
            if error.status >= 500:
                logger.warning("%s ends with %d: %s", self._options.id, error.status, error.message, extra={"fields": self._named(error)})
            self.fail(error)
        elif choice.finish_reason() is None:
            self.fail(InternalError("The request was cancelled on the server."))
        elif self._choice_options.streamed:
            self.begin()
            self._write_chunks(b"".join(map(self._last_chunk, self.choices)))
        elif not self._num_open:
            self._respond_whole()

    def fail(self, error: ApiError) -> None:
        """Ends the response with an error, and what still runs for it."""
        if self._over:
            return
        self._end(str(error.status))
        if self._begun:
            unfinished = [choice for choice in self.choices if choice.index not in self._finished]
            chunks = b"".join(map(self._broken_off, unfinished))
            self._call.finish(chunks + error_event(error.body()) + self._closing())
        else:
            self._metrics.refused(error)
            self._respond(error.status, error.body(), error.headers(), server_timing(*self._close()))
        self._loop.call_soon(self._cancel_rest)  # not from within the dispatcher's own call

    def _last_chunk(self, choice: Choice) -> bytes:
        """Of a choice that has ended; once."""
        reason = choice.finish_reason() if choice.ended is not None else None
        if reason is None or choice.index in self._finished:
            return b""
        self._finished.add(choice.index)
        return choice.last_chunk(reason)

    def _broken_off(self, choice: Choice) -> bytes:
        """Its last chunk; nothing where its own text is what has failed."""
        try:
            return choice.last_chunk("error")
        except Exception:
            logger.exception("%s: choice %d cannot write its last chunk", self._options.id, choice.index)
            return b""

    def overdue(self) -> None:
        """Its deadline has passed and nobody has ended it, by a defect of ours: it ends all the same, and counts as run no more."""
        if not self._over:
            logger.error("%s: not ended at its deadline by what should have; it is ended now", self._options.id)
            self.fail(DeadlineExceeded("The request did not finish before its deadline."))
        self._num_running = 0
        self._look_if_done()

    def client_gone(self) -> None:
        """The connection has ended; nothing happens if the response was complete."""
        if not self._over:
            self._end("cancelled")
            self._cancel_rest()

    def client_too_slow(self) -> None:
        """Called from within a write."""
        logger.warning("a client reads its stream too slowly and is cut off", extra={"fields": {"request_id": self._options.id}})
        if not self._over:
            self._end("too_slow")
            self._loop.call_soon(self._cancel_rest)

    def let_go(self) -> None:
        """The response is complete: exchange and choices are freed at once, without waiting for the collector of cycles."""
        self._failures.call("metrics", self._metrics.request_closed, self._record(monotonic()))
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
        if self._options.include_usage:
            chunks += self._choice_options.form.usage_chunk(self._usage(self._close()[0]))
        chunks += self._closing()
        self._end("200")
        self._call.finish(chunks)

    def _respond_whole(self) -> None:
        chosen = self.choices if self._options.best is None else _best(self.choices, self._options.best)
        results = [choice.result(choice.finish_reason() or "error") for choice in chosen]
        if self._options.best is not None:
            results = [replace(result, index=index) for index, result in enumerate(results)]
        stages, total = self._close()
        body = self._choice_options.form.response(results, self._usage(stages))
        self._end("200")
        self._respond(200, body, [], server_timing(stages, total))

    def _respond(self, status: int, body: bytes, headers: Headers, timing: bytes) -> None:
        self._call.respond(status, [JSON, *self._id_header(), (b"server-timing", timing), *headers], body)

    def _end(self, status: str) -> None:
        self._over = True
        self._status = status
        self._metrics.request_ended(self._options.endpoint, status)

    def _look_if_done(self) -> None:
        if self._closed and not self._num_running and self._done is not None:
            done, self._done = self._done, None
            self._metrics.prompts_done(self.usage_so_far()["prompt_tokens"], self._num_cached())
            done(self)

    def _named(self, error: ApiError) -> dict[str, object]:
        return {"request_id": self._options.id, "status": str(error.status), "tenant": self._call.account.tenant}

    def _id_header(self) -> Headers:
        return [(b"x-request-id", self._options.id.encode()), *self.more_headers]

    def _num_output_tokens(self) -> int:
        return self.choices[0].num_tokens if len(self.choices) == 1 else sum([choice.num_tokens for choice in self.choices])

    def _usage(self, stages: Stages) -> dict[str, Any]:
        """Tokens, and under ``splitserve`` where the time of the slowest choice went."""
        num_cached = self._num_cached()
        return {
            **self.usage_so_far(),
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": sum([choice.num_reasoning_tokens for choice in self.choices])},
            "splitserve": self._account(stages, num_cached),
        }

    def _num_cached(self) -> int:
        """Choices of one prompt share it: what was cached before the first of them counts."""
        if len(self.choices) == 1:  # mostly
            ended = self.choices[0].ended
            return ended.num_cached_tokens if ended is not None else 0
        cached: dict[int, int] = {}
        for choice in self.choices:
            if choice.ended is not None:
                cached[id(choice.prompt)] = min(cached.get(id(choice.prompt), 1 << 62), choice.ended.num_cached_tokens)
        return sum(cached.values())

    def _account(self, stages: Stages, num_cached: int) -> dict[str, float]:
        """Seconds by stage; ``timed_out`` where a deadline has cut a choice."""
        assert self._last is not None
        return {
            **{key: round(seconds, 6) for key, seconds in zip(_USAGE_KEYS, stages, strict=True)},
            "cached_tokens": num_cached,
            "dispatches": self._last.num_dispatches,
            **({"timed_out": True} if any(choice.timed_out for choice in self.choices) else {}),
        }

    def _close(self) -> tuple[Stages, float]:
        """Where the time went until now, and all of it: by the clock and not from the stages, with which it must agree."""
        now = monotonic()
        self._ledger.close(now)
        return self._ledger.stages(), now - self._options.arrival

    def _closing(self) -> bytes:
        """How a stream ends. Clients of server-sent events skip the comment."""
        return b": server-timing %b\n\n%b" % (server_timing(*self._close()), DONE)

    def _record(self, now: float) -> RequestRecord:
        self._ledger.close(now)
        ended = self._last or Ended()
        return RequestRecord(
            id=self._options.id,
            endpoint=self._options.endpoint,
            status=self._status,
            ledger=self._ledger,
            stages=self._ledger.stages(),
            first_token_at=min([c.first_token_at for c in self.choices if c.first_token_at], default=0.0),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self._num_cached(),
            num_output_tokens=self._num_output_tokens(),
            num_dispatches=ended.num_dispatches,
            prefill_worker=ended.prefill_worker,
            decode_worker=ended.decode_worker,
            tenant=self._call.account.tenant,
            trace=self._options.trace,
            client=self._call.client,
            priority_class=self._options.priority_class,
        )


def _best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """The ``n`` likeliest by token of each prompt's, best first."""
    by_prompt: dict[int, list[Choice]] = {}
    for choice in choices:
        by_prompt.setdefault(id(choice.prompt), []).append(choice)
    return [best for group in by_prompt.values() for best in sorted(group, key=lambda c: (not c.num_tokens, -c.mean_logprob))[:n]]
