"""GET /openapi.json: the API as the code checks it. The schemas of the request bodies are those that validate
them."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..batch.routes import MAX_FILES_PAGE, MAX_PAGE, BatchRequest
from ..dialects.messages_body import CountTokensRequest, MessagesRequest
from ..dialects.ollama import ShowRequest
from ..dialects.ollama_body import OllamaChatRequest, OllamaGenerateRequest
from ..dialects.ollama_embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from ..dialects.responses_body import CountInputRequest, ResponsesRequest
from ..generate.bodies.chat import ChatCompletionRequest
from ..generate.bodies.completion import CompletionRequest
from ..generate.bodies.embedding import EmbeddingRequest
from ..generate.bodies.rerank import RerankRequest, ScoreRequest
from ..generate.rerank_prompts import PROMPT_BODIES
from ..generate.token_pages import DetokenizeRequest, TokenizeRequest
from .openapi_answers import (
    BATCH_SCHEMAS,
    COUNT,
    EVENTS,
    JSON,
    OF_BODIES,
    OF_GENERATION,
    OF_OPERATORS,
    SCHEMAS,
    STRING,
    TEXT,
    array,
    by_page,
    content,
    get,
    in_path,
    operation,
    page,
    query,
    record,
    reference,
)

COUNTS = "Number of tokens of the prompt of such a request."
POSTS: dict[str, tuple[type[BaseModel], str, str]] = {  # body, answer, text
    "/v1/completions": (
        CompletionRequest,
        "Completion",
        "Complete a prompt; with `stream` true as server-sent events: CompletionChunk, then [DONE].",
    ),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        "ChatCompletion",
        "Answer a conversation; with `stream` true as server-sent events: ChatCompletionChunk, then [DONE].",
    ),
    "/v1/embeddings": (EmbeddingRequest, "Embeddings", "The vectors of one or several texts."),
    "/v1/rerank": (RerankRequest, "Ranking", "Documents by their scores for a query, the best first."),
    "/v1/score": (ScoreRequest, "Scores", "Scores of texts for others."),
    "/v1/responses": (
        ResponsesRequest,
        "Response",
        "Answer a conversation as OpenAI's Responses API does; with `stream` true as that API's events.",
    ),
    "/v1/responses/input_tokens": (CountInputRequest, "TokenCount", COUNTS),
    "/v1/messages": (
        MessagesRequest,
        "MessagesAnswer",
        "Answer a conversation as Anthropic's API does; with `stream` true as that API's events.",
    ),
    "/v1/messages/count_tokens": (CountTokensRequest, "TokenCount", COUNTS),
    "/tokenize": (TokenizeRequest, "Tokens", "Token ids of a text or of messages."),
    "/v1/tokenize": (TokenizeRequest, "Tokens", "As /tokenize."),
    "/detokenize": (DetokenizeRequest, "Text", "Text of token ids."),
    "/v1/detokenize": (DetokenizeRequest, "Text", "As /detokenize."),
}


def document(*, batches: bool = False, ollama: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1, JSON-ready. ``batches``: whether this server keeps any. ``ollama``: whether it speaks
    Ollama's API."""
    bodies = [kind for kind, *_ in POSTS.values()] + ([BatchRequest] if batches else [])
    bodies += OLLAMA_BODIES if ollama else []
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in bodies], ref_template="#/components/schemas/{model}"
    )
    posts = {path: {"post": _post(path, *post)} for path, post in POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "splitserve", "version": importlib.metadata.version("splitserve")},
        "security": [{}, {"key": []}],
        "paths": {
            **posts,
            "/invocations": {"post": _invocations()},
            **_gets(),
            **_responses(),
            **(batch_paths() if batches else {}),
            **(ollama_paths() if ollama else {}),
        },
        "components": {
            "schemas": {
                **schemas["$defs"],
                **SCHEMAS,
                **(BATCH_SCHEMAS if batches else {}),
                **(OLLAMA_SCHEMAS if ollama else {}),
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where the server asks for keys."}
            },
        },
    }


OF_A_MODEL = {"parameters": [query("model", {"type": "string"})]}


def _gets() -> dict[str, Any]:
    ready = (
        "200 once a request has passed prefill, handoff and decode, workers of both roles are here, "
        "and the last requests did not all fail in one stage; else 503."
    )
    return {
        "/v1/models": get("The models that are served.", content("Models"), "401"),
        "/v1/models/{model}": in_path("model") | get("One, by its name.", content("Model"), "401", "404"),
        "/health": get(
            "200 while the process serves; `status` is ok or degraded, `checks` say why.", {JSON: {}}
        ),
        "/v1/health": get("As /health.", {JSON: {}}),
        "/ping": get("The same, without content.", {}) | {"post": operation("The same by POST.", {})},
        "/version": get("The version of splitserve.", {JSON: {}}),
        "/ready": OF_A_MODEL | get(ready, {JSON: {}}, "404", "503"),
        "/metrics": get("Prometheus metrics.", {TEXT: {}}, *OF_OPERATORS),
        "/debug/state": OF_A_MODEL
        | get("Every worker with its role, blocks and requests.", {JSON: {}}, "404", *OF_OPERATORS),
        "/load": get("Requests that are open, waiting, running.", content("Load"), *OF_OPERATORS),
        "/server_info": OF_A_MODEL
        | get("Version, settings and workers.", content("ServerInfo"), "404", *OF_OPERATORS),
        "/props": OF_A_MODEL | get("Context and sampling defaults.", content("Properties"), "401", "404"),
        "/tokenizer_info": OF_A_MODEL
        | get("The tokenizer's configuration, with the chat template.", {JSON: {}}, "401", "404"),
        "/openapi.json": get("This.", {JSON: {}}),
        "/docs": get("This as a page.", {"text/html": {}}),
    }


def _responses() -> dict[str, Any]:
    """Stored responses, by id."""
    one, response, path = in_path("id"), content("Response"), "/v1/responses/{id}"
    found = ("400", "401", "404")
    return {
        path: {
            **one,
            **get("A stored response; with `stream=true` its events.", response, *found),
            "delete": operation("Delete it.", content("DeletedResponse"), *found),
        },
        f"{path}/cancel": one | {"post": operation("End one that runs in the background.", response, *found)},
        f"{path}/input_items": one | get("What it answers.", {JSON: {}}, *found),
    }


def batch_paths() -> dict[str, Any]:
    """/v1/files and /v1/batches."""
    parts = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    upload = {"type": "object", "required": ["file", "purpose"], "properties": parts}
    one, file, batch = in_path("id"), content("File"), content("Batch")
    found = ("401", "404")
    order = query("order", {"enum": ["asc", "desc"], "default": "desc"})
    return {
        "/v1/files": {
            "post": operation(
                "Upload the requests of a batch.", file, *OF_BODIES, body=("multipart/form-data", upload)
            ),
            "get": {
                **operation("Newest first, by page.", page("File"), "400", "401"),
                "parameters": [*by_page(MAX_FILES_PAGE), order, query("purpose", {"type": "string"})],
            },
        },
        "/v1/files/{id}": {
            **one,
            **get("A file, without its content.", file, *found),
            "delete": operation("Delete a file.", content("DeletedFile"), *found),
        },
        "/v1/files/{id}/content": one | get("A file's content.", {"application/octet-stream": {}}, *found),
        "/v1/batches": {
            "post": operation(
                "Run a file's requests.", batch, *OF_BODIES, body=(JSON, reference("BatchRequest"))
            ),
            "get": {
                **operation("Newest first, by page.", page("Batch"), "400", "401"),
                "parameters": by_page(MAX_PAGE),
            },
        },
        "/v1/batches/{id}": one | get("A batch and how far it is.", batch, *found),
        "/v1/batches/{id}/cancel": one
        | {"post": operation("Run no more of its requests.", batch, "400", *found)},
    }


def _invocations() -> dict[str, Any]:
    """POST /invocations: either of two bodies, answered as at its own path."""
    kinds = ("ChatCompletionRequest", "CompletionRequest"), ("ChatCompletion", "Completion")
    asked, answer = ({"anyOf": [reference(name) for name in names]} for names in kinds)
    text = "As SageMaker asks: a chat completion where the body has `messages`, else a completion."
    return operation(text, {JSON: {"schema": answer}, EVENTS: {}}, *OF_GENERATION, body=(JSON, asked))


def _post(path: str, kind: type[BaseModel], answer: str, text: str) -> dict[str, Any]:
    generates = path.startswith("/v1/") and "tokenize" not in path
    streams = generates and path not in PROMPT_BODIES
    good: dict[str, Any] = {**content(answer), **({EVENTS: {}} if streams else {})}
    errors = OF_GENERATION if generates else OF_BODIES
    shape = "MessagesError" if path.startswith("/v1/messages") else "Error"
    return operation(text, good, *errors, body=(JSON, reference(kind.__name__)), error=shape)


LINES = "application/x-ndjson"
OLLAMA_BODIES: list[type[BaseModel]] = [
    OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest, ShowRequest,
]  # fmt: skip
_HEAD = {"model": STRING, "created_at": STRING, "done": {"type": "boolean"}}
_ENDS = {
    "done_reason": {"enum": ["stop", "length", "load"]},
    **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"), COUNT),
    **dict.fromkeys(("prompt_eval_count", "eval_count"), COUNT),
    "logprobs": array({"type": "object"}),
}
_CALL = record(function=record(name=STRING, arguments={"type": "object"}))
_MESSAGE = record(
    {"thinking": STRING, "tool_calls": array(_CALL)}, role={"const": "assistant"}, content=STRING
)
_VECTOR = array({"type": "number"})
_DETAILS = record(family=STRING, format=STRING)
_CARD = record(name=STRING, model=STRING, size=COUNT, digest=STRING, details=_DETAILS)
OLLAMA_SCHEMAS: dict[str, dict[str, Any]] = {
    "OllamaError": record(error=STRING),
    "OllamaChat": record(_ENDS, **_HEAD, message=_MESSAGE),
    "OllamaText": record({"thinking": STRING, **_ENDS}, **_HEAD, response=STRING),
    "OllamaVectors": record(
        dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), COUNT),
        model=STRING,
        embeddings=array(_VECTOR),
    ),
    "OllamaVector": record(embedding=_VECTOR),
    "OllamaModels": record(models=array(_CARD)),
    "OllamaModel": record(
        {"template": STRING, "parameters": STRING},
        details=_DETAILS,
        model_info={"type": "object"},
        capabilities=array(STRING),
    ),
}


def ollama_paths() -> dict[str, Any]:
    """/api/..."""
    return {
        "/api/chat": _ollama_post(
            OllamaChatRequest,
            "OllamaChat",
            "Answer a conversation as Ollama does: lines of OllamaChat, or one with `stream` false.",
            *OF_GENERATION,
            lines=True,
        ),
        "/api/generate": _ollama_post(
            OllamaGenerateRequest,
            "OllamaText",
            "Answer a prompt as Ollama does: lines of OllamaText, or one with `stream` false.",
            *OF_GENERATION,
            lines=True,
        ),
        "/api/embed": _ollama_post(
            OllamaEmbedRequest, "OllamaVectors", "The vectors of one or several texts.", *OF_GENERATION
        ),
        "/api/embeddings": _ollama_post(
            OllamaEmbeddingsRequest, "OllamaVector", "The vector of a text.", *OF_GENERATION
        ),
        "/api/show": _ollama_post(
            ShowRequest, "OllamaModel", "The model's context, template and abilities.", *OF_BODIES
        ),
        "/api/tags": _ollama_get("The model that is served.", content("OllamaModels")),
        "/api/ps": _ollama_get("The same, as loaded.", content("OllamaModels")),
        "/api/version": _ollama_get("The version of Ollama whose API this is.", {JSON: {}}),
    }


def _ollama_post(
    kind: type[BaseModel], answer: str, text: str, *errors: str, lines: bool = False
) -> dict[str, Any]:
    good = {**content(answer), **({LINES: {}} if lines else {})}
    body = JSON, reference(kind.__name__)
    return {"post": operation(text, good, *errors, body=body, error="OllamaError")}


def _ollama_get(summary: str, good: dict[str, Any]) -> dict[str, Any]:
    return get(summary, good, "401", error="OllamaError")
