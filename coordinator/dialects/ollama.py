"""Ollama's API, behind --ollama: /api/chat and /api/generate over chat completions, and what names the model.

Their streams are lines of JSON: one for each part, the last with counts. https://docs.ollama.com/api
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import ApiError
from ..generate.api import GenerationApi
from ..generate.bodies.fields import Body
from ..http.answers import json_response
from ..http.body import check_is_own
from ..http.call import Endpoint
from ..text.served_model import ServedModel
from .chat_stream import object_of
from .ollama_body import LATEST, OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from .ollama_cards import capabilities, card, details
from .ollama_embed import EmbedRoutes
from .routes import CHAT, Dialect, Event, Framing

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is: clients compare it to decide what they may send."""
COMPLETIONS: Endpoint = "/v1/completions"
NEVER = "9999-12-31T23:59:59Z"
CHAT_PARAMS = {"max_completion_tokens": "options.num_predict", "response_format": "format"}
"""A chat's fields that have another name here."""
DONE_REASONS = {"length": "length", "timeout": "length"}
"""By the finish reason of a chat; stop for all others."""


class ShowRequest(Body):
    """POST /api/show."""

    model: Annotated[str, Field(max_length=512)]
    name: Annotated[str, Field(max_length=512)] | None = None
    """What older clients call ``model``."""
    verbose: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"model": value["name"], **value} if isinstance(value, dict) and "name" in value else value


class OllamaRoutes:
    """Answers chats and prompts, and describes the models."""

    def __init__(self, generation: GenerationApi) -> None:
        framing = Framing("application/x-ndjson", lines_of, check_is_own)
        self._dialect = Dialect(generation, CHAT_PARAMS, framing)
        self._servings = generation.servings

    def routes(self) -> list[Route]:
        return [
            Route("/api/chat", self._chat, methods=["POST"]),
            Route("/api/generate", self._generate, methods=["POST"]),
            *EmbedRoutes(self._dialect).routes(),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._loaded),
            Route("/api/version", self._version),
        ]

    async def _chat(self, request: Request) -> Response:
        asked = await self._dialect.read(request, OllamaChatRequest)
        answer = self._answer(asked, generates=False)
        if not asked.messages:
            return self._load(asked, answer)
        return await self._respond(request, asked, self._bounded(request, asked), answer)

    async def _generate(self, request: Request) -> Response:
        asked = await self._dialect.read(request, OllamaGenerateRequest)
        answer = self._answer(asked, generates=True)
        if not asked.prompt and not asked.images:
            return self._load(asked, answer)
        body = await self._raw(request, asked) if asked.raw else self._bounded(request, asked)
        return await self._respond(request, asked, body, answer)

    async def _respond(
        self, request: Request, asked: OllamaRequest, body: dict[str, Any], answer: OllamaAnswer
    ) -> Response:
        stream = await self._dialect.begin(request, body, COMPLETIONS if "prompt" in body else CHAT)
        return await self._dialect.respond(request, stream, answer, streamed=asked.stream is not False)

    def _answer(self, asked: OllamaRequest, *, generates: bool) -> OllamaAnswer:
        is_route = asked.model.removesuffix(LATEST) in self._servings.models.routes
        return OllamaAnswer(asked.model, is_route=is_route, generates=generates)

    def _load(self, asked: OllamaRequest, answer: OllamaAnswer) -> Response:
        """Answer a request that only wants the model loaded."""
        self._model(asked.model)
        return json_response(answer.loaded())

    def _bounded(self, request: Request, asked: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
        """Return a chat's body without a bound of new tokens that no answer reaches: Ollama takes any
        number."""
        chat = asked.for_chat()
        with suppress(ApiError):  # a name that is unknown is refused, and counted, where it is asked
            most = chat["max_completion_tokens"] or 0
            if most and most >= self._dialect.model_of(request, chat).max_model_len:
                chat["max_completion_tokens"] = None
        return chat

    async def _raw(self, request: Request, asked: OllamaGenerateRequest) -> dict[str, Any]:
        """Return a completion's body: up to the context's end where the client gives no bound."""
        body = asked.for_completion()
        token_ids = await self._dialect.prompt_ids(request, body, COMPLETIONS)
        model = self._dialect.model_of(request, body, COMPLETIONS)
        room = model.max_model_len - len(token_ids)
        is_route = body["model"] in self._servings.models.routes  # another of its models may be the one
        prompt = body["prompt"] if is_route else token_ids
        return {**body, "prompt": prompt, "max_tokens": min(body["max_tokens"] or room, room)}

    async def _show(self, request: Request) -> Response:
        asked = await self._dialect.read(request, ShowRequest)
        model = self._model(asked.model)
        family, defaults = model.architecture, model.defaults
        sampling = {
            "temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p,
            "min_p": defaults.min_p, "repeat_penalty": defaults.repetition_penalty,
        }  # fmt: skip
        info = {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": model.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
        }
        return json_response(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
                "template": model.template_source,
                "details": details(model, asked.model.removesuffix(LATEST)),
                "model_info": info,
                "capabilities": capabilities(model),
                "modified_at": card(model, model.name)["modified_at"],
            }
        )

    async def _tags(self, request: Request) -> Response:
        listed = self._servings.models.listed()
        return json_response({"models": [card(model, name) for name, model in listed]})

    async def _loaded(self, request: Request) -> Response:
        ready = {one.model.name for one in self._servings.all if one.dispatcher.ready()}
        more = {"expires_at": NEVER, "size_vram": 0}
        loaded = [
            {**card(model, name), **more, "context_length": model.max_model_len}
            for name, model in self._servings.models.listed()
            if model.name in ready
        ]
        return json_response({"models": loaded})

    async def _version(self, request: Request) -> Response:
        return json_response({"version": API_VERSION})

    def _model(self, name: str) -> ServedModel:
        """Raises NotFound."""
        return self._servings.models.of(name.removesuffix(LATEST))


async def lines_of(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Yield the events as lines of JSON."""
    async for event in events:
        yield orjson.dumps(event) + b"\n"


class OllamaAnswer:
    """One answer. ``feed`` takes the chunks of the chat or the completion behind it."""

    def __init__(self, model: str, *, generates: bool, is_route: bool = False) -> None:
        """``model``: the name that the client gave; if it is a route's, answers have that of the route's
        model. ``generates``: in the form of /api/generate."""
        self._model, self._is_route, self._generates = model, is_route, generates
        self._text, self._thought = list[str](), list[str]()
        self._calls: list[dict[str, Any]] = []
        self._growing: dict[str, Any] | None = None  # a call whose arguments still come, as text
        self._logprobs: list[dict[str, Any]] = []
        self._usage: dict[str, Any] = {}
        self._reason = "stop"

    def feed(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the parts of one chunk."""
        self._model = chunk["model"] if self._is_route else self._model
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            calls = [done for call in delta.get("tool_calls", ()) if (done := self._call(call)) is not None]
            text, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
            logprobs = [_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ()]
            self._text.append(text)
            self._thought.append(thought)
            self._logprobs += logprobs
            if text or thought or calls or logprobs:
                yield {**self._part(text, thought, calls, logprobs), "done": False}
            if (reason := choice["finish_reason"]) is not None:
                self._reason = DONE_REASONS.get(reason, "stop")

    def finish(self) -> Iterator[Event]:
        """Yield the last parts."""
        if (call := self._close_call()) is not None:
            yield {**self._part("", "", [call], []), "done": False}
        yield {**self._part("", "", [], []), **self._end()}

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the error that breaks it off."""
        yield {"error": error.message}

    def pause(self) -> Iterator[Event]:
        """Yield nothing: clients parse every line."""
        return iter(())

    def whole(self) -> Event:
        """See ``Answer``."""
        text, thought = "".join(self._text), "".join(self._thought)
        return {**self._part(text, thought, self._calls, self._logprobs), **self._end()}

    def loaded(self) -> Event:
        """Return the answer to a request without a prompt: the model is loaded."""
        return {**self._part("", "", [], []), "done": True, "done_reason": "load"}

    def _part(
        self, text: str, thought: str, calls: list[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> Event:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._model, "created_at": now}
        more = {"logprobs": logprobs} if logprobs else {}
        thinking = {"thinking": thought} if thought else {}
        if self._generates:
            return {**head, "response": text, **thinking, **more}
        message = {
            "role": "assistant",
            "content": text,
            **thinking,
            **({"tool_calls": calls} if calls else {}),
        }
        return {**head, "message": message, **more}

    def _end(self) -> Event:
        usage = self._usage
        stages = {name: s for name, s in usage.get("splitserve", {}).items() if name.endswith("_s")}
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(sum(stages.values())),
            "load_duration": 0,  # the model is loaded before it is served
            "prompt_eval_count": usage.get("prompt_tokens", 0),
            "prompt_eval_duration": _ns(stages.get("prefill_s", 0.0)),
            "eval_count": usage.get("completion_tokens", 0),
            "eval_duration": _ns(stages.get("handoff_s", 0.0) + stages.get("decode_s", 0.0)),
        }

    def _call(self, part: dict[str, Any]) -> dict[str, Any] | None:
        """Take a part of a call. Return the call before it, if that is whole now: calls come in one piece."""
        done, function = None, part["function"]
        if "name" in function:
            done = self._close_call()
            self._growing = {"id": part["id"], "name": function["name"], "arguments": ""}
        if self._growing is not None:
            self._growing["arguments"] += function.get("arguments") or ""
        return done

    def _close_call(self) -> dict[str, Any] | None:
        if (call := self._growing) is None:
            return None
        self._growing = None
        arguments = object_of(call["arguments"])
        function = {"index": len(self._calls), "name": call["name"], "arguments": arguments}
        self._calls.append({"id": call["id"], "function": function})
        return self._calls[-1]


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log probability without fields that Ollama does not have."""
    top = [{name: each[name] for name in ("token", "logprob", "bytes")} for each in entry["top_logprobs"]]
    return {**{name: entry[name] for name in ("token", "logprob", "bytes")}, "top_logprobs": top}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
