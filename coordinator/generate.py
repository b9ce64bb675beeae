"""The two endpoints that generate: a plain ASGI application, since each token of each stream passes here.

The handler's own task sleeps from the submission until the response is complete or the client has gone; everything between is
pushed by the dispatcher through the exchange.
"""

from __future__ import annotations

import logging
import secrets
import time
from time import monotonic
from typing import Literal

from pydantic import ValidationError

from .api_types import ChatCompletionRequest, CompletionRequest
from .body import ClientGone, read_body
from .channel import Headers, PushChannel, Receive, Scope, Send
from .choice import ChoiceOptions
from .errors import ApiError, InternalError, InvalidRequest, MethodNotAllowed, NotFound, from_validation, no_workers
from .exchange import JSON, ExchangeOptions, HttpExchange
from .formats import ChatFormat, CompletionFormat, Format
from .limits import HttpLimits
from .metrics import Metrics
from .prompts import Prompt, prompts_of
from .request import Dispatcher, GenerationRequest
from .sampling_params import GenerateRequest, for_choice, num_logprobs, sampling_of
from .served_model import ServedModel
from .timeouts import timeout_of
from .unknown_fields import UnknownFields

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
logger = logging.getLogger(__name__)


class GenerationApi:
    """Parses, validates, tokenizes, submits."""

    def __init__(self, dispatcher: Dispatcher, model: ServedModel, limits: HttpLimits, metrics: Metrics) -> None:
        self.open: set[HttpExchange] = set()
        self.refusal: ApiError | None = None
        """Set while no new request is taken."""
        self._dispatcher = dispatcher
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._unknown = UnknownFields()
        self._id_stem = secrets.token_hex(10)  # of this process; requests are numbered
        self._num_requests = 0

    async def __call__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = monotonic()
        self._metrics.num_open += 1
        try:
            request = await self._parse(endpoint, scope, receive)
            prompts = await self._prompts(request)
            requests, exchange = self._exchange(endpoint, request, prompts, arrival, scope, send)
        except ApiError as error:
            self._metrics.request_ended(endpoint, str(error.status))
            await send_error(send, error)
        except ClientGone:
            self._metrics.request_ended(endpoint, "cancelled")
        except Exception:
            logger.exception("a request to %s failed", endpoint)
            self._metrics.request_ended(endpoint, "500")
            await send_error(send, InternalError("Internal error; the server's log says more."))
        else:
            await self._run(exchange, requests, receive)
        finally:
            self._metrics.num_open -= 1

    async def _run(self, exchange: HttpExchange, requests: list[GenerationRequest], receive: Receive) -> None:
        self.open.add(exchange)
        try:
            exchange.submit(requests)
            while (await receive())["type"] != "http.disconnect":  # also says that the response is complete
                pass
        finally:
            exchange.client_gone()
            self.open.discard(exchange)

    async def _parse(self, endpoint: Endpoint, scope: Scope, receive: Receive) -> GenerateRequest:
        if scope["method"] != "POST":
            raise MethodNotAllowed(f"{endpoint} takes POST, not {scope['method']}.", "POST")
        if self.refusal is not None:
            raise self.refusal
        body = await read_body(scope["headers"], receive, self._limits.max_body_bytes)
        kind = ChatCompletionRequest if endpoint == "/v1/chat/completions" else CompletionRequest
        try:
            request: GenerateRequest = kind.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from error
        self._unknown.note(request.unknown_fields())
        check_model(request.model, self._model)
        if gap := self._dispatcher.gap():
            raise no_workers(gap)
        return request

    async def _prompts(self, request: GenerateRequest) -> list[Prompt]:
        prompts = await prompts_of(request, self._model)
        num_choices = len(prompts) * (request.n or 1)
        if num_choices > self._limits.max_choices:
            message = f"n: {len(prompts)} prompts times n are {num_choices} choices; at most {self._limits.max_choices} are allowed"
            raise InvalidRequest(message, param="n")
        return prompts

    def _exchange(
        self, endpoint: Endpoint, request: GenerateRequest, prompts: list[Prompt], arrival: float, scope: Scope, send: Send
    ) -> tuple[list[GenerationRequest], HttpExchange]:
        """The exchange and its sequences, one for each choice."""
        samplings = [sampling_of(request, self._model, len(prompt.token_ids)) for prompt in prompts]
        id = self._new_id("chatcmpl" if endpoint == "/v1/chat/completions" else "cmpl")
        options = ExchangeOptions(id, endpoint, arrival, request.include_usage)
        channel = PushChannel(send, max_buffered_bytes=self._limits.max_buffered_bytes, cut_off=lambda: _cut_off(exchange, scope))
        choice_options = self._choice_options(request, self._format(endpoint, id, request.include_usage))
        exchange = HttpExchange(channel, self._dispatcher, self._metrics, options, choice_options)
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        timeout_s = timeout_of(request.timeout, scope["headers"], self._limits.request_timeout_s)
        requests = [
            GenerationRequest(
                request_id=choice.request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=for_choice(sampling, request.seed, number),
                sink=choice,
                arrival=arrival,
                deadline=arrival + timeout_s,
                priority=request.priority or 0,
                session=_session(scope["headers"]) or request.user or "",
                prompt_logprobs=num_logprobs(request) if echo else None,
            )
            for prompt, sampling in zip(prompts, samplings, strict=True)
            for number in range(request.n or 1)
            for choice in (exchange.add_choice(prompt),)
        ]
        return requests, exchange

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
        )

    def _format(self, endpoint: Endpoint, id: str, include_usage: bool) -> Format:
        kind = ChatFormat if endpoint == "/v1/chat/completions" else CompletionFormat
        return kind(id, int(time.time()), self._model.name, self._model.tokenizer, include_usage)


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises NotFound. A request that names no model means the one there is."""
    if name is not None and name != model.name:
        raise NotFound(f"The model {name!r} does not exist; this server has {model.name!r}.", param="model", code="model_not_found")


async def send_error(send: Send, error: ApiError) -> None:
    """An error as the whole response."""
    body = error.body()
    headers: Headers = [JSON, (b"content-length", str(len(body)).encode()), *error.headers()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _session(headers: Headers) -> str:
    """Requests of one session like to meet the same workers."""
    return next((value.decode("latin-1")[:512] for name, value in headers if name == b"x-session-id"), "")


def _cut_off(exchange: HttpExchange, scope: Scope) -> None:
    logger.warning("a client reads its stream too slowly and is cut off")
    exchange.client_too_slow()
    abort = scope.get("extensions", {}).get("splitserve.abort")
    if abort is not None:
        abort()
