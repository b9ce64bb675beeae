"""GET /openapi.json: the API as the code checks it. The schemas of the request bodies are those that validate them."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .api_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Complete a prompt; with `stream` true as server-sent events."),
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation; with `stream` true as server-sent events."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
GETS = {
    "/v1/models": "The model that is served.",
    "/health": "200 while the process lives.",
    "/ready": "200 once a request has passed prefill, handoff and decode, and workers of both roles are here; else 503.",
    "/metrics": "Prometheus metrics.",
    "/debug/state": "Every worker with its role, blocks and requests.",
    "/openapi.json": "This.",
}
ERRORS = {
    "400": "The request is wrong: `param` names the field.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too much is waiting; see Retry-After.",
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


def document() -> dict[str, Any]:
    """OpenAPI 3.1, JSON-ready."""
    kinds = [(kind, "validation") for kind, _ in POSTS.values()]
    _, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    gets = {path: {"get": {"summary": text, "responses": {"200": {"description": "OK"}}}} for path, text in GETS.items()}
    posts = {path: {"post": _post(kind, text, generates=path.startswith("/v1/"))} for path, (kind, text) in POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "splitserve", "version": importlib.metadata.version("splitserve")},
        "paths": {**posts, **gets},
        "components": {"schemas": {**schemas["$defs"], "Error": ERROR_SCHEMA}},
    }


def _post(kind: type[BaseModel], text: str, *, generates: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers: dict[str, Any] = {"200": {"description": "OK"}}
    answers |= {status: {"description": why, "content": error} for status, why in ERRORS.items() if generates or status < "429"}
    return {"summary": text, "requestBody": {"required": True, "content": content}, "responses": answers}
