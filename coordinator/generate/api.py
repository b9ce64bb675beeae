"""The endpoints that generate, and the one for embeddings: from a complete call to its submission.

    arrived -> parse -> plan -> open an exchange -> admit -> submit

From there the dispatcher pushes tokens through the exchange. A short prompt is planned with the next turn of
the event loop; costly.py plans the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ...transport.process.otel import Tracing
from ..errors import ApiError, InternalError, MethodNotAllowed, Overloaded, WrongField
from ..http.access.access import Access
from ..http.access.forwarded import TrustedProxies
from ..http.body import ClientGone
from ..http.call import JSON, Answering, Call
from ..http.limits import LARGE_BODY_BYTES, HttpLimits
from ..http.overload import Overload
from ..metrics.body_log import NAME as BODY_LOG
from ..metrics.body_log import BodyLog
from ..metrics.metrics import Metrics
from ..metrics.request_trace import begin_trace
from ..metrics.route_collector import RouteCounts
from ..serving import Servings
from ..tenants.buckets import Shortage
from ..tenants.limits import Account
from ..tenants.tenancy import Admission, Tenancy, estimated_tokens, headers_of, refusal_of
from .arrivals import Arrivals
from .bodies.fields import UnknownFields
from .conversation import AskedRequest, decide
from .costly import CostlyPlanner, Known
from .exchange import HttpExchange
from .plan import Planner, RequestPlan, parse
from .reader.body_reader import BodyReader
from .request_ids import HEADER, RequestIds, client_id
from .resumption import IdempotencyKey
from .shadows import NAME as SHADOWS
from .shadows import Shadows

if TYPE_CHECKING:
    from ..images.fetching import ImageFetcher

SWEEP_EVERY_S = 1.0
OVERDUE_S = 5.0
"""Seconds after its deadline at which a response is ended here, should the lifecycle have failed to."""
TOO_MANY_PROMPTS = (
    "The prompts of the requests that wait and run take as much memory as they may (it grows with "
    "--max-body-mib); try again soon."
)
_log = logging.getLogger(__name__)
T = TypeVar("T")
_Asked = AskedRequest | RequestPlan | None


class GenerationApi:
    """Takes calls in, plans and submits them: a ``CallHandler``, and the ``Service`` of its exchanges."""

    def __init__(
        self,
        servings: Servings,
        limits: HttpLimits,
        tenancy: Tenancy | None = None,
        overload: Overload | None = None,
        access: Access | None = None,
        proxies: TrustedProxies | None = None,
        bodies: BodyLog | None = None,
        tracing: Tracing | None = None,
        times_tokens: bool = False,
        images: ImageFetcher | None = None,
    ) -> None:
        """``times_tokens``: note when each token came, for the trace file."""
        self.servings, self.models, self.limits = servings, servings.models, limits
        self.metrics = servings.first.metrics  # also of requests whose model is not known yet
        self.access, self.proxies = access or Access(), proxies or TrustedProxies()
        self.overload, self._tenancy = overload or Overload(), tenancy or Tenancy()
        self.bodies, self.tracing, self.times_tokens = bodies, tracing, times_tokens
        self.reader = BodyReader(self.models, limits, self.overload)
        self.open: dict[Call, HttpExchange] = {}
        self.refusal: ApiError | None = None  # the answer to every new request; None: they are served
        self.directory = self._tenancy.directory
        self._unknown = UnknownFields()
        self._planners = {model.name: Planner(model, limits) for model in self.models.all}
        self._costly = CostlyPlanner(self.reader, self._tenancy.limiter, images)
        self.preparing: set[asyncio.Task[None]] = set()
        self._ids = RequestIds()
        self.handle = Arrivals(self._handle_arrived).add
        self.route_counts = RouteCounts()
        self.shadows = Shadows(servings, self.route_counts, self.metrics.failures)
        self._sweep: asyncio.TimerHandle | None = None  # set while anything is open

    def opened(self, call: Call) -> None:
        self.metrics.num_open += 1

    def account_of(self, call: Call) -> Account:
        return self._tenancy.directory.account(call.headers.get(b"authorization", b""))

    def refuse(self, call: Call, error: ApiError, id: str = "", metrics: Metrics | None = None) -> None:
        """Answer with an error as the whole response, under this id or a new one; ``metrics``: its model."""
        named = client_id(call.headers)
        id = id or self._ids.new(call.endpoint, named)
        counted = metrics or self.metrics
        counted.request_ended(call.endpoint, str(error.status))
        counted.refused(error)
        if self.bodies is not None:
            self.metrics.failures.call(BODY_LOG, self.bodies.refused, call, id, error.status, error.body())
        header = HEADER, (named or id).encode()
        call.respond(error.status, [JSON, header, *error.headers()], error.body())

    def closed(self, call: Call) -> None:
        call.responder = None
        exchange = self.open.pop(call, None)
        (self if exchange is None else exchange.serving).metrics.num_open -= 1
        if self.bodies is not None:
            named = (exchange.id, exchange.account.status) if exchange is not None else ()
            self.metrics.failures.call(BODY_LOG, self.bodies.closed, call, *named)
        if exchange is not None:
            exchange.let_go()
        elif call.gone:
            self.metrics.request_ended(call.endpoint, "cancelled")  # there is no exchange yet that counts it

    def _handle_arrived(self, arrived: list[tuple[Call, float]]) -> None:
        """Take all calls through one stage before the next: with warm caches that saves a third of the
        time. A route's go one by one, for each may take the last room of a model."""
        parsed = [(c, r, at) for c, at in arrived if (r := self._stage(c, None, self._parse, c, at))]
        if routes := self.models.routes:
            alone = [each for each in parsed if each[1].model in routes]
            parsed = [each for each in parsed if each[1].model not in routes]
            for each in alone:
                self._submit([each])
        self._submit(parsed)

    def _submit(self, parsed: list[tuple[Call, AskedRequest, float]]) -> None:
        planned = [
            (c, plan, at)
            for c, asked, at in parsed
            if (plan := self._stage(c, asked, self._plan, c, asked, at)) is not None
        ]
        opened = [(call, self._stage(call, plan, self._open, call, plan, at)) for call, plan, at in planned]
        for call, exchange in opened:
            if exchange is not None:
                self._stage(call, exchange.plan, self._admit, call, exchange)

    def _stage(self, call: Call, asked: _Asked, work: Callable[..., T], *inputs: Any) -> T | None:
        """Return what ``work`` makes of the inputs; None if the client has gone or the call was refused."""
        if call.gone:
            return None
        try:
            return work(*inputs)
        except Exception as error:
            self._failed(call, error, asked)
            return None

    def _parse(self, call: Call, arrival: float) -> AskedRequest | None:
        """Validate the body. Return None if it is large: then the reader process does it."""
        if call.method != "POST":
            raise MethodNotAllowed(f"{call.endpoint} takes POST, not {call.method}.", "POST")
        if self.refusal is not None:
            raise self.refusal
        if len(call.body) > LARGE_BODY_BYTES:
            self._set_aside(call, None, arrival)
            return None
        return parse(call.endpoint, call.body)

    def _plan(self, call: Call, request: AskedRequest, arrival: float) -> RequestPlan | None:
        """Return None if planning takes long: then a thread does it."""
        route = decide(self.models, request, call.headers, call.prefers) if self.models.routes else ""
        (serving := self.servings.of(request.model)).require_workers()
        planner = self._planners[serving.model.name]
        if planner.is_quick(request):
            plan = planner.plan(request, call.headers, call.account.priority_class)
            return plan._replace(route=route) if route else plan
        self._set_aside(call, (request, planner, route), arrival)
        return None

    def _set_aside(self, call: Call, known: Known | None, arrival: float) -> None:
        """Plan a costly request aside, then submit it. ``known``: see ``CostlyPlanner.plan``."""
        task = asyncio.get_running_loop().create_task(self._prepare_aside(call, known, arrival))
        self.preparing.add(task)
        task.add_done_callback(self.preparing.discard)

    async def _prepare_aside(self, call: Call, known: Known | None, arrival: float) -> None:
        limiter = self._tenancy.limiter
        asked: _Asked = None if known is None else known[0]
        try:
            plan, admission = await self._costly.plan(call, known)
            asked = plan
            try:
                if known is None:
                    self.servings.of(plan.model).require_workers(plan.route)
                if call.gone:
                    raise ClientGone
                exchange = self._open(call, plan, arrival)
                while len(exchange.choices) < plan.num_choices:
                    await asyncio.sleep(0)
                    exchange.make_requests()
            except BaseException:
                limiter.settle(admission, 0)
                raise
            limiter.correct(admission, _estimate(plan), lambda answer: self._answered(call, exchange, answer))
        except ClientGone:
            pass  # ``closed`` has counted it
        except Exception as error:
            if not call.gone:
                self._failed(call, error, asked)

    def _failed(self, call: Call, error: Exception, asked: _Asked) -> None:
        id = self._ids.new(call.endpoint, client_id(call.headers))
        if not isinstance(error, ApiError):
            fields = {"fields": {"request_id": id}}
            _log.error("%s: a request to %s failed", id, call.endpoint, exc_info=error, extra=fields)
            error = InternalError(f"Internal error; the server's log says more under {id}.")
        self.refuse(call, error, id, self.servings.metrics_of(None if asked is None else asked.model))

    def _open(self, call: Call, plan: RequestPlan, arrival: float) -> HttpExchange:
        """Make the exchange with its first choices: all of them, if the plan is a quick one."""
        if plan.num_choices > (most := self.limits.max_choices):
            asked = f"{len(plan.prompts)} prompts times n (or best_of) are {plan.num_choices} choices"
            raise WrongField("n", f"{asked}; at most {most} are allowed")
        if plan.unknown_fields:
            self._unknown.note(plan.unknown_fields)
        serving, key = self.servings.of(plan.model), IdempotencyKey.of(call)
        plan = plan._replace(adapter=serving.model.adapter(plan.model))
        named = plan.request_id or client_id(call.headers)
        id, trace = self._ids.new(plan.endpoint, named), None
        if self.tracing is not None:
            trace = begin_trace(self.tracing, call.endpoint, call.headers, arrival, self.metrics.failures)
        answering: Answering = call if self.bodies is None else self.bodies.record(call)
        call.drop_body()
        exchange = HttpExchange(self, serving, answering, plan, id, arrival, trace, named, key)
        exchange.make_requests()
        return exchange

    def _admit(self, call: Call, exchange: HttpExchange) -> None:
        tokens = _estimate(exchange.plan)
        self._tenancy.limiter.admit(
            call.account, tokens, lambda answer: self._answered(call, exchange, answer)
        )

    def _answered(self, call: Call, exchange: HttpExchange, answer: Admission | Shortage) -> None:
        """Submit or refuse the request, as its key's limits have answered."""
        if isinstance(answer, Shortage):
            exchange.discard()
            self.refuse(call, refusal_of(answer), metrics=exchange.serving.metrics)
        elif call.gone or not self.overload.take("prompt_bytes", exchange.plan.num_prompt_bytes):
            exchange.discard()
            self._tenancy.limiter.settle(answer, 0)
            if not call.gone:
                overloaded = Overloaded(TOO_MANY_PROMPTS, retry_after_s=1)
                self.refuse(call, overloaded, metrics=exchange.serving.metrics)
        else:
            exchange.admission, exchange.more_headers = answer, headers_of(answer.room)
            call.responder = self.open[call] = exchange
            self.metrics.num_open -= 1
            exchange.serving.metrics.num_open += 1
            if route := exchange.plan.route:
                self.route_counts.requests[route, exchange.plan.model] += 1
                self.metrics.failures.call(SHADOWS, self.shadows.begin, exchange)
            if self._sweep is None:
                self._sweep = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._look_after_open)
            if (meter := self._tenancy.meter) is not None:
                self.metrics.failures.call("usage", lambda: meter.began(exchange.account.billing_begun()))
            exchange.submit()

    def _look_after_open(self) -> None:
        """Keep silent streams alive. End every response whose deadline has passed: the last defence against a
        forgotten request."""
        self._sweep = None
        if self.open:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._look_after_open)
        now = monotonic()
        for exchange in list(self.open.values()):
            if exchange.deadline < now - OVERDUE_S:
                exchange.overdue()
            else:
                exchange.keep_alive(now, now + SWEEP_EVERY_S)

    def done(self, exchange: HttpExchange) -> None:
        """See ``Service``: replace the estimate of its tokens by their number, and bill it."""
        self.overload.give_back("prompt_bytes", exchange.plan.num_prompt_bytes)
        if (admission := exchange.admission) is not None:
            failures, meter, account = self.metrics.failures, self._tenancy.meter, exchange.account
            failures.call(
                "limits", lambda: self._tenancy.limiter.settle(admission, account.num_used_tokens())
            )
            if meter is not None:
                failures.call("usage", lambda: meter.ended(account.billing()))


def _estimate(plan: RequestPlan) -> int:
    """Return the tokens that a request is taken to use before it has ended."""
    return estimated_tokens(plan.num_prompt_tokens, plan.max_tokens, plan.num_choices)
