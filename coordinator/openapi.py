"""GET /openapi.json: the API as the code checks it. The schemas of the request bodies are those that validate them."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .batch.routes import BatchRequest
from .bodies.chat import ChatCompletionRequest
from .bodies.completion import CompletionRequest
from .bodies.tokens import DetokenizeRequest, TokenizeRequest

POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Complete a prompt; with `stream` true as server-sent events."),
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation; with `stream` true as server-sent events."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
GETS = {
    "/v1/models": ("The model that is served.", JSON),
    "/health": ("200 while the process lives.", JSON),
    "/ready": ("200 once a request has passed prefill, handoff and decode, and workers of both roles are here; else 503.", JSON),
    "/metrics": ("Prometheus metrics.", TEXT),
    "/debug/state": ("Every worker with its role, blocks and requests.", JSON),
    "/openapi.json": ("This.", JSON),
}
ERRORS = {
    "400": "The request is wrong: `param` names the field.",
    "401": "The API key is missing, unknown, or opens no more. Only where the server asks for keys.",
    "404": "There is no such model, file or batch.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too much is waiting, or a limit of the key or its tenant is reached; see Retry-After.",
    "503": "No workers can serve it now; see Retry-After.",
    "504": "The request's deadline has passed.",
}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    count = {"type": "integer", "minimum": 0}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    reasons = {"enum": ["stop", "length", "tool_calls"]}
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", "logprobs", *choice],
                    "properties": {"index": count, "finish_reason": reasons, **choice},
                },
            },
            "usage": {"type": "object", "required": list(names), "properties": dict.fromkeys(names, count)},
        },
    }


_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "reasoning_content": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object", "required": ["id", "type", "function"]}},
    },
}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": _answer("text_completion", {"text": {"type": "string"}}),
    "/v1/chat/completions": _answer("chat.completion", {"message": _MESSAGE}),
    "/tokenize": {"type": "object", "required": ["count", "max_model_len", "tokens"]},
    "/detokenize": {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
}


def document(*, batches: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1, JSON-ready. ``batches``: whether this server keeps any."""
    bodies = [kind for kind, _ in POSTS.values()] + ([BatchRequest] if batches else [])
    _, schemas = models_json_schema([(kind, "validation") for kind in bodies], ref_template="#/components/schemas/{model}")
    gets: dict[str, Any] = {
        path: {"get": {"summary": text, "responses": {"200": _good({media: {}})}}} for path, (text, media) in GETS.items()
    }
    gets["/ready"]["get"]["responses"]["503"] = _errors("503")["503"]
    posts = {path: {"post": _post(path, kind, text)} for path, (kind, text) in POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "splitserve", "version": importlib.metadata.version("splitserve")},
        "paths": {**posts, **gets, **(batch_paths() if batches else {})},
        "components": {"schemas": {**schemas["$defs"], "Error": ERROR_SCHEMA}},
    }


def batch_paths() -> dict[str, Any]:
    """/v1/files and /v1/batches."""
    one = {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]}
    parts = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    upload = {"type": "object", "required": ["file", "purpose"], "properties": parts}
    bare, json = {"400": _errors("400")["400"]}, {JSON: {"schema": {"type": "object", "required": ["object"]}}}

    def method(summary: str, content: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return {"summary": summary, "responses": {"200": _good(content or json), **_errors("400", "404", "413")}, **more}

    lists = {"summary": "Newest first, by page.", "responses": {"200": _good(json), **bare}}
    return {
        "/v1/files": {
            "post": method("Upload the requests of a batch.", requestBody=_body("multipart/form-data", upload)),
            "get": lists,
        },
        "/v1/files/{id}": {**one, "get": method("A file, without its content."), "delete": method("Delete a file.")},
        "/v1/files/{id}/content": {**one, "get": method("A file's content.", {"application/octet-stream": {}})},
        "/v1/batches": {"post": method("Run a file's requests.", requestBody=_body(JSON, _reference("BatchRequest"))), "get": lists},
        "/v1/batches/{id}": {**one, "get": method("A batch and how far it is.")},
        "/v1/batches/{id}/cancel": {**one, "post": method("Run no more of its requests.")},
    }


def _post(path: str, kind: type[BaseModel], text: str) -> dict[str, Any]:
    generates = path.startswith("/v1/")
    good: dict[str, Any] = {JSON: {"schema": ANSWERS[path]}, **({EVENTS: {}} if generates else {})}
    answers = {"200": _good(good), **_errors(*(status for status in ERRORS if generates or status < "429"))}
    return {"summary": text, "requestBody": _body(JSON, _reference(kind.__name__)), "responses": answers}


def _good(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "OK", "content": content}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {JSON: {"schema": _reference("Error")}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def _body(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {media: {"schema": schema}}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
