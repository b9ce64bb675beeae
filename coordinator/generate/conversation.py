"""The conversation that a request belongs to, and the model that its route has for it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from zlib import crc32

from ..text.model_route import ModelRoute
from ..text.served_model import ServedModel, ServedModels
from .bodies.chat import ChatCompletionRequest
from .bodies.messages import Message
from .bodies.rerank import ScoringFields
from .prompts import GenerateRequest
from .rerank_prompts import PromptRequest
from .token_pages import DetokenizeRequest, TokenizeRequest

SESSION_HEADER, LAST_ID_HEADER = b"x-session-id", b"last-event-id"
BEGINNING = 1024
"""Characters, or token ids, of a prompt by which its conversation is known."""
AskedRequest = GenerateRequest | PromptRequest


def header_of(headers: Mapping[bytes, bytes], name: bytes) -> str:
    """Return a header as text; empty: it is not there."""
    return headers.get(name, b"").decode("latin-1")


def session_of(request: GenerateRequest, headers: Mapping[bytes, bytes]) -> str:
    """Return the session that the client names; empty: none."""
    return header_of(headers, SESSION_HEADER)[:512] or request.prompt_cache_key or request.user or ""


def model_mark(name: str) -> bytes:
    """Return what ends the ids of events that this model answered to a route's name."""
    return b"@%08x" % crc32(name.encode(errors="surrogatepass"))


def decide(
    models: ServedModels, request: AskedRequest, headers: Mapping[bytes, bytes], prefers: str = ""
) -> str:
    """Put the model of this request in the place of its route's name, which is returned; empty: it names no
    route. What has begun goes on with its model alone. ``prefers``: see ``ModelRoute.order``. Raises
    Unavailable or Overloaded."""
    name = request.model
    if name is None or (route := models.routes.get(name)) is None:
        return ""
    seen = headers.get(LAST_ID_HEADER, b"")
    for each in (*route.shares, *route.fallbacks):
        if seen.endswith(model_mark(each)):
            route = ModelRoute(name, {each: 1})
    model, refusal = models.chosen(route, key_of(request, headers), prefers)
    request.model = model.name
    if refusal is not None:
        raise refusal
    return name


def model_for(
    models: ServedModels, request: AskedRequest, headers: Mapping[bytes, bytes], prefers: str = ""
) -> ServedModel:
    """Return the model of a request that is only looked at: see ``decide``. Raises as ``ServedModels.of``."""
    if request.model is not None and (route := models.routes.get(request.model)) is not None:
        return models.chosen(route, key_of(request, headers), prefers)[0]
    return models.of(request.model)


def page_model(models: ServedModels, asked: TokenizeRequest | DetokenizeRequest) -> ServedModel:
    """Return the model whose tokenizer is asked for: of a route's, the conversation's. Raises as
    ``ServedModels.of``."""
    route = models.routes.get(asked.model or "")
    if route is None or isinstance(asked, DetokenizeRequest):
        return models.of(asked.model)
    key = prompt_key([asked.prompt]) if asked.prompt is not None else chat_key(asked.messages or [])
    return models.chosen(route, key)[0]


def key_of(request: AskedRequest, headers: Mapping[bytes, bytes]) -> str:
    """Return the key of the request's conversation: its session, else how it begins."""
    if isinstance(request, PromptRequest):
        prompts = ["".join(request.pairs[0])] if isinstance(request, ScoringFields) else request.input
        return header_of(headers, SESSION_HEADER) or request.user or prompt_key(prompts)
    if session := session_of(request, headers):
        return session
    if isinstance(request, ChatCompletionRequest):
        return chat_key(request.messages)
    return prompt_key(request.prompt)


def chat_key(messages: list[Message]) -> str:
    """Return a digest of the messages up to the first of the user."""
    digest = blake2b(digest_size=16)
    for message in messages:
        digest.update(f"\0{message.role}\0{message.text}".encode(errors="surrogatepass"))
        if message.role == "user":
            break
    return digest.hexdigest()


def prompt_key(prompts: list[str] | list[list[int]]) -> str:
    """Return the beginning of the first prompt."""
    first = prompts[0][:BEGINNING]
    return first if isinstance(first, str) else " ".join(map(str, first))
