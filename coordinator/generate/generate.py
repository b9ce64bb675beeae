"""The two endpoints that generate: from a complete call to its submission.

A short prompt is tokenized with the next turn of the loop, a long one on a thread, a large body is parsed and tokenized in a process of its
own; before these two the limits of its key are asked. All that follows is pushed by the dispatcher through the exchange.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from time import monotonic
from typing import Any, TypeVar

from ...transport.process.otel import RequestTrace, Tracing
from ..errors import ApiError, InternalError, InvalidRequest, MethodNotAllowed, no_workers
from ..http.access.access import Access
from ..http.access.forwarded import TrustedProxies
from ..http.body import ClientGone
from ..http.call import JSON, Answering, Call, Endpoint
from ..http.limits import LARGE_BODY_BYTES, HttpLimits
from ..http.overload import Overload
from ..lifecycle.request import Dispatcher, PriorityClass, Request
from ..metrics.body_log import NAME as BODY_LOG
from ..metrics.body_log import BodyLog
from ..metrics.metrics import Metrics
from ..metrics.token_times import TimedSink
from ..tenants.buckets import Shortage
from ..tenants.limiter import Admission, Answer, estimated_tokens, headers_of, refusal_of
from ..tenants.limits import Account
from ..tenants.tenancy import Tenancy
from ..text.served_model import ServedModel
from .bodies.completion import CompletionRequest
from .bodies.service_tier import TOLD, class_in_force
from .bodies.timeouts import HEADER, on_timeout_of, timeout_of
from .bodies.unknown_fields import UnknownFields
from .chat_reading import has_grammar, read_as_chat
from .choice import ChoiceOptions
from .exchange import ExchangeOptions, HttpExchange
from .formats import ChatFormat, CompletionFormat, Format
from .prompts import is_long, num_choices, prompts_of
from .reader.body_reader import BodyReader
from .reader.prompt_reading import Inputs, PromptReader, parse
from .reader.reader_process import Read
from .sampling_params import GenerateRequest, for_choice, is_ranked, num_logprobs, sampling_of

STEMS: dict[Endpoint, str] = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl"}
"""What requests' ids begin with."""
SWEEP_EVERY_S = 1.0
OVERDUE_S = 5.0
"""What ends a request at its deadline has this long before its response is ended without it."""
MAX_PER_TURN = 32
"""Requests that are looked at before streams are served again: some milliseconds."""
MANY_CHOICES = 64
"""No more of one request are made in one turn: 4096 take 25 ms."""
logger = logging.getLogger(__name__)
T = TypeVar("T")


class GenerationApi:
    """Takes requests in, has them read, submits them: a ``CallHandler``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        limits: HttpLimits,
        metrics: Metrics,
        tenancy: Tenancy | None = None,
        overload: Overload | None = None,
        access: Access | None = None,
        proxies: TrustedProxies | None = None,
        bodies: BodyLog | None = None,
        tracing: Tracing | None = None,
        times_tokens: bool = False,
    ) -> None:
        """``access``: which names of this host and which origins requests may come under; ``bodies``: the log of
        requests and answers; ``times_tokens``: note when each token came, for the trace file."""
        self.limits = limits
        self.access = access or Access()
        self.proxies = proxies or TrustedProxies()
        self.overload = overload or Overload()
        self.reader = BodyReader(model, self.overload)
        self._tenancy = tenancy or Tenancy()
        self.open: dict[Call, HttpExchange] = {}
        self.refusal: ApiError | None = None
        """Set while no new request is taken."""
        self.bodies = bodies
        self.times_tokens = times_tokens
        self.tracing = tracing
        self._dispatcher = dispatcher
        self._model = model
        self._metrics = metrics
        self._unknown = UnknownFields()
        self._prompts = PromptReader(model)
        self._preparing: set[asyncio.Task[None]] = set()
        self._id_stem = secrets.token_hex(10)  # of this process; requests are numbered
        self._num_requests = 0
        self._arrived: list[tuple[Call, float]] = []  # complete, and not looked at yet; since when: monotonic seconds
        self._sweep: asyncio.TimerHandle | None = None  # while anything is open

    def opened(self, call: Call) -> None:
        self._metrics.num_open += 1

    def account_of(self, call: Call) -> Account:
        return self._tenancy.directory.account(call.headers.get(b"authorization", b""))

    def handle(self, call: Call) -> None:
        """With the next turn of the loop, together with all others that have come by then."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._handle_arrived)
        self._arrived.append((call, monotonic()))

    def refuse(self, call: Call, error: ApiError, id: str = "") -> None:
        """An error as the whole response, under this id or a new one."""
        id = id or self._new_id(STEMS[call.endpoint])
        self._metrics.request_ended(call.endpoint, str(error.status))
        self._metrics.refused(error)
        if self.bodies is not None:
            self._metrics.failures.call(BODY_LOG, self.bodies.refused, call, id, error.status, error.body())
        call.respond(error.status, [JSON, (b"x-request-id", id.encode()), *error.headers()], error.body())

    def closed(self, call: Call) -> None:
        self._metrics.num_open -= 1
        call.responder = None
        exchange = self.open.pop(call, None)
        if self.bodies is not None:
            named = (exchange.id, exchange.status) if exchange is not None else ()
            self._metrics.failures.call(BODY_LOG, self.bodies.closed, call, *named)
        if exchange is not None:
            exchange.let_go()
        elif call.gone:
            self._metrics.request_ended(call.endpoint, "cancelled")  # before there was an exchange to say so

    def _handle_arrived(self) -> None:
        """One stage for all of them before the next: what a stage's code needs is then in the processor's caches, for all but the first.
        Where many come at once that saves a third of the time."""
        arrived = self._next_arrived()
        parsed = [(call, request, at) for call, at in arrived if (request := self._stage(call, self._parse, call, at)) is not None]
        prepared = [
            (call, request, inputs, at)
            for call, request, at in parsed
            if (inputs := self._stage(call, self._prepare_here, call, request, at)) is not None
        ]
        made = [
            (call, *both)
            for call, request, inputs, at in prepared
            if (both := self._stage(call, self._whole_exchange, call, request, inputs, at)) is not None
        ]
        for call, requests, exchange in made:
            self._stage(call, self._admit, call, requests, exchange)

    def _next_arrived(self) -> list[tuple[Call, float]]:
        """As many as one turn of the loop may take: streams are served between two."""
        count = num_bytes = 0
        for call, _ in self._arrived[:MAX_PER_TURN]:
            if count and num_bytes + len(call.body) > LARGE_BODY_BYTES:
                break
            count, num_bytes = count + 1, num_bytes + len(call.body)
        arrived, self._arrived = self._arrived[:count], self._arrived[count:]
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._handle_arrived)
        return arrived

    def _stage(self, call: Call, work: Callable[..., T], *inputs: Any) -> T | None:
        """What ``work`` makes of the inputs; None where the client has gone, or the call was refused."""
        if call.gone:
            return None
        try:
            return work(*inputs)
        except Exception as error:
            self._failed(call, error)
            return None

    def _parse(self, call: Call, arrival: float) -> GenerateRequest | None:
        """None where another process does it, and the request goes on from there."""
        if call.method != "POST":
            raise MethodNotAllowed(f"{call.endpoint} takes POST, not {call.method}.", "POST")
        if self.refusal is not None:
            raise self.refusal
        if len(call.body) > LARGE_BODY_BYTES:
            self._spawn(call, self._prepare_aside(call, None, arrival))
            return None
        request = parse(call.endpoint, call.body)
        self._unknown.note(request.unknown_fields())
        self._check(request)
        return request

    def _check(self, request: GenerateRequest) -> None:
        self._model.check_name(request.model)
        if gap := self._dispatcher.gap():
            raise no_workers(gap)

    def _prepare_here(self, call: Call, request: GenerateRequest, arrival: float) -> Inputs | None:
        """None where that takes long: a thread does it, and the request goes on from there."""
        if not is_long(request) and not has_grammar(request) and num_choices(request) <= MANY_CHOICES:
            return Inputs(prompts_of(request, self._model))
        self._spawn(call, self._prepare_aside(call, request, arrival))
        return None

    async def _prepare_aside(self, call: Call, request: GenerateRequest | None, arrival: float) -> None:
        """A request whose preparation is costly: its key's limits are asked before. ``request``: None where it has not been parsed."""
        limiter = self._tenancy.limiter
        admission = await self._asked(lambda answer: limiter.admit(call.account, 1, answer))
        try:
            if request is not None:
                known = request
                inputs = await self._model.tokenizer.aside(lambda: self._prompts.prepare(known))
            else:
                read: Read = await self.reader.read("generate", call.body, call.endpoint)
                request, inputs = read.request, read.inputs()
                self._unknown.note(read.unknown)
                self._check(request)
            if call.gone:
                raise ClientGone
            sequences, exchange = self._exchange(call, request, inputs, arrival)
            requests: list[Request] = []
            for sequence in sequences:
                requests.append(sequence)
                if len(requests) % MANY_CHOICES == 0:
                    await asyncio.sleep(0)
        except BaseException:
            limiter.settle(admission, 0)
            raise
        limiter.correct(admission, _estimate(requests, exchange), lambda answer: self._answered(call, exchange, requests, answer))

    async def _asked(self, ask: Callable[[Answer], None]) -> Admission:
        """What a limiter answers. Raises RateLimited."""
        answer: asyncio.Future[Admission | Shortage] = asyncio.get_running_loop().create_future()
        ask(answer.set_result)
        if isinstance(found := await answer, Shortage):
            raise refusal_of(found)
        return found

    def _spawn(self, call: Call, work: Coroutine[None, None, None]) -> None:
        async def stage() -> None:
            try:
                await work
            except ClientGone:
                pass  # ``closed`` has booked it
            except Exception as error:
                if not call.gone:
                    self._failed(call, error)

        task = asyncio.get_running_loop().create_task(stage())
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def _failed(self, call: Call, error: Exception) -> None:
        id = self._new_id(STEMS[call.endpoint])
        if not isinstance(error, ApiError):
            logger.error("%s: a request to %s failed", id, call.endpoint, exc_info=error, extra={"fields": {"request_id": id}})
            error = InternalError(f"Internal error; the server's log says more under {id}.")
        self.refuse(call, error, id)

    def _admit(self, call: Call, requests: list[Request], exchange: HttpExchange) -> None:
        tokens = _estimate(requests, exchange)
        self._tenancy.limiter.admit(call.account, tokens, lambda answer: self._answered(call, exchange, requests, answer))

    def _answered(self, call: Call, exchange: HttpExchange, requests: list[Request], answer: Admission | Shortage) -> None:
        """The limits have been asked: at once, or while the client waited."""
        if isinstance(answer, Shortage):
            exchange.choices.clear()
            self.refuse(call, refusal_of(answer))
        elif call.gone:
            exchange.choices.clear()
            self._tenancy.limiter.settle(answer, 0)
        else:
            exchange.admission, exchange.more_headers = answer, headers_of(answer.room)
            call.responder = self.open[call] = exchange
            if self._sweep is None:
                self._sweep = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._end_overdue)
            if (meter := self._tenancy.meter) is not None:
                self._metrics.failures.call("usage", lambda: meter.began(exchange.usage_begun()))
            exchange.submit(requests)

    def _end_overdue(self) -> None:
        """The last line of defence: a response ends soon after its deadline, whatever the dispatcher has forgotten."""
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._end_overdue) if self.open else None
        latest = monotonic() - OVERDUE_S
        for exchange in [exchange for exchange in self.open.values() if exchange.deadline < latest]:
            exchange.overdue()

    def _done(self, exchange: HttpExchange) -> None:
        """Nothing of it runs any more: what was taken by estimate is set right, and what was used is written down."""
        if (admission := exchange.admission) is not None:
            failures, meter = self._metrics.failures, self._tenancy.meter
            failures.call("limits", lambda: self._tenancy.limiter.settle(admission, exchange.num_used_tokens()))
            if meter is not None:
                failures.call("usage", lambda: meter.ended(exchange.usage_record()))

    def _whole_exchange(
        self, call: Call, request: GenerateRequest, inputs: Inputs, arrival: float
    ) -> tuple[list[Request], HttpExchange]:
        """The exchange and its sequences, one for each choice."""
        sequences, exchange = self._exchange(call, request, inputs, arrival)
        return list(sequences), exchange

    def _exchange(
        self, call: Call, request: GenerateRequest, inputs: Inputs, arrival: float
    ) -> tuple[Iterator[Request], HttpExchange]:
        """The exchange and its sequences, one for each choice, each made when it is asked for."""
        n, prompts = request.num_candidates, inputs.prompts
        if len(prompts) * n > self.limits.max_choices:
            most = self.limits.max_choices
            message = f"n: {len(prompts)} prompts times n (or best_of) are {len(prompts) * n} choices; at most {most} are allowed"
            raise InvalidRequest(message, param="n")
        samplings = [sampling_of(request, self._model, len(prompt.token_ids), inputs.grammar) for prompt in prompts]
        id = self._new_id(STEMS[call.endpoint])
        best = (request.n or 1) if is_ranked(request) else None
        trace = self._begin_trace(call, arrival)
        account = call.account
        priority_class = class_in_force(request.service_tier, account.priority_class)
        deadline = arrival + timeout_of(request.timeout, call.headers, self.limits.request_timeout_s)
        on_timeout = on_timeout_of(
            request.on_timeout,
            call.headers,
            has_timeout=request.timeout is not None or HEADER in call.headers,
            deadline_error=self.limits.deadline_error,
        )
        options = ExchangeOptions(
            id, call.endpoint, arrival, deadline, on_timeout, request.include_usage, priority_class, self._done, best, trace
        )
        choice_options = self._choice_options(request, self._format(call.endpoint, id, request, priority_class))
        choice_options = read_as_chat(choice_options, request, self._model)
        answering: Answering = call if self.bodies is None else self.bodies.record(call)
        call.drop_body()
        exchange = HttpExchange(answering, self._dispatcher, self._metrics, options, choice_options)
        session = call.headers.get(b"x-session-id", b"").decode("latin-1")[:512] or request.prompt_cache_key or request.user or ""
        sequences = (
            Request(
                request_id=choice.request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=for_choice(sampling, request.seed, number),
                sink=TimedSink(choice) if self.times_tokens else choice,
                arrival=arrival,
                deadline=deadline,
                priority=request.priority or 0,
                tenant=account.tenant,
                priority_class=priority_class,
                salt=account.salt,
                session=session,
                prompt_logprobs=num_logprobs(request) if choice_options.echo else None,
                traceparent=trace.traceparent if trace is not None else "",
            )
            for prompt, sampling in zip(prompts, samplings, strict=True)
            for number in range(n)
            for choice in (exchange.add_choice(prompt),)
        )
        return sequences, exchange

    def _begin_trace(self, call: Call, arrival: float) -> RequestTrace | None:
        if self.tracing is None:
            return None
        context = {name: call.headers.get(name.encode(), b"").decode("latin-1") for name in ("traceparent", "tracestate")}
        try:
            return self.tracing.begin(f"POST {call.endpoint}", {name: value for name, value in context.items() if value}, arrival)
        except Exception as error:  # whatever a library of others raises
            self._metrics.failures.note("tracing", error)
            return None

    def _new_id(self, kind: str) -> str:
        self._num_requests += 1
        return f"{kind}-{self._id_stem}{self._num_requests:012x}"

    def _choice_options(self, request: GenerateRequest, form: Format) -> ChoiceOptions:
        return ChoiceOptions(
            form=form,
            itl=self._metrics.itl,
            detokenizer_of=self._model.tokenizer.detokenizer,
            streamed=bool(request.stream),
            stop=request.stop,
            min_tokens=request.min_tokens or 0,
            logprobs=num_logprobs(request) is not None,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            usage_on_every_chunk=request.usage_on_every_chunk,
            padded=request.obfuscated,
            token_ids=bool(request.return_token_ids),
            ranked=is_ranked(request),
        )

    def _format(self, endpoint: Endpoint, id: str, request: GenerateRequest, priority_class: PriorityClass) -> Format:
        kind = ChatFormat if endpoint == "/v1/chat/completions" else CompletionFormat
        tier = TOLD[priority_class] if request.service_tier else None
        return kind(id, int(time.time()), self._model.name, self._model.tokenizer, request.include_usage, tier, padded=request.obfuscated)


def _estimate(requests: Sequence[Request], exchange: HttpExchange) -> int:
    """Tokens that they are taken to use."""
    return estimated_tokens(exchange.num_prompt_tokens, max([r.sampling.max_tokens for r in requests]), len(requests))
