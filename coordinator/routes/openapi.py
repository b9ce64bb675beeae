"""GET /openapi.json: the API as the code checks it. The schemas of the request bodies are those that validate
them."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..batch.routes import MAX_FILES_PAGE, MAX_PAGE, BatchRequest
from ..dialects.messages_body import CountTokensRequest, MessagesRequest
from ..dialects.responses_body import CountInputRequest, ResponsesRequest
from ..generate.bodies.chat import ChatCompletionRequest
from ..generate.bodies.completion import CompletionRequest
from ..generate.token_pages import DetokenizeRequest, TokenizeRequest
from . import openapi_answers as answers

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (
        CompletionRequest,
        "Complete a prompt; with `stream` true as server-sent events: CompletionChunk, then [DONE].",
    ),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        "Answer a conversation; with `stream` true as server-sent events: ChatCompletionChunk, then [DONE].",
    ),
    "/v1/responses": (
        ResponsesRequest,
        "Answer a conversation as OpenAI's Responses API does; with `stream` true as that API's events.",
    ),
    "/v1/responses/input_tokens": (CountInputRequest, "Number of tokens of the prompt of such a request."),
    "/v1/messages": (
        MessagesRequest,
        "Answer a conversation as Anthropic's API does; with `stream` true as that API's events.",
    ),
    "/v1/messages/count_tokens": (CountTokensRequest, "Number of tokens of the prompt of such a request."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages."),
    "/v1/tokenize": (TokenizeRequest, "As /tokenize."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
    "/v1/detokenize": (DetokenizeRequest, "As /detokenize."),
}
ANSWERS = {
    "/v1/completions": "Completion",
    "/v1/chat/completions": "ChatCompletion",
    "/v1/responses": "Response",
    "/v1/responses/input_tokens": "TokenCount",
    "/v1/messages": "MessagesAnswer",
    "/v1/messages/count_tokens": "TokenCount",
    "/tokenize": "Tokens",
    "/v1/tokenize": "Tokens",
    "/detokenize": "Text",
    "/v1/detokenize": "Text",
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": answers.ERROR,
    "Completion": answers.COMPLETION,
    "CompletionChunk": answers.COMPLETION_CHUNK,
    "ChatCompletion": answers.CHAT_COMPLETION,
    "ChatCompletionChunk": answers.CHAT_COMPLETION_CHUNK,
    "Response": answers.RESPONSE,
    "DeletedResponse": answers.DELETED_RESPONSE,
    "MessagesAnswer": answers.MESSAGE,
    "TokenCount": answers.TOKEN_COUNT,
    "MessagesError": answers.MESSAGES_ERROR,
    "Tokens": answers.TOKENS,
    "Text": answers.TEXT,
    "Properties": answers.PROPERTIES,
    "Load": answers.LOAD,
    "ServerInfo": answers.SERVER_INFO,
    "Models": answers.MODELS,
    "Model": answers.MODEL,
}
BATCH_SCHEMAS = {"File": answers.FILE, "DeletedFile": answers.DELETED, "Batch": answers.BATCH}
ERRORS = {
    "400": "The request is wrong: `param` names the field.",
    "401": "The API key is missing, unknown, or opens no more. Only where the server asks for keys.",
    "403": "For operators: ask from this host, or with the admin key. Only where the server asks for keys.",
    "404": "There is no such model, file or batch.",
    "408": "Not all of the request came in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too much is waiting, or a limit of the key or its tenant is reached; see Retry-After.",
    "500": "A fault of the server's; its log says more.",
    "503": "No workers can serve it now; see Retry-After.",
    "504": "The request's deadline has passed.",
}
OF_BODIES = ("400", "401", "404", "408", "413", "415")
OF_GENERATION = (*OF_BODIES, "429", "500", "503", "504")
OF_OPERATORS = ("401", "403")


def document(*, batches: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1, JSON-ready. ``batches``: whether this server keeps any."""
    bodies = [kind for kind, _ in POSTS.values()] + ([BatchRequest] if batches else [])
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in bodies], ref_template="#/components/schemas/{model}"
    )
    posts = {path: {"post": _post(path, kind, text)} for path, (kind, text) in POSTS.items()}
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
        },
        "components": {
            "schemas": {**schemas["$defs"], **SCHEMAS, **(BATCH_SCHEMAS if batches else {})},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where the server asks for keys."}
            },
        },
    }


def _gets() -> dict[str, Any]:
    ready = (
        "200 once a request has passed prefill, handoff and decode, workers of both roles are here, "
        "and the last requests did not all fail in one stage; else 503."
    )
    return {
        "/v1/models": {"get": _operation("The model that is served.", _json("Models"), "401")},
        "/v1/models/{model}": {
            **_in_path("model"),
            "get": _operation("The same, by its name.", _json("Model"), "401", "404"),
        },
        "/health": {
            "get": _operation(
                "200 while the process serves; `status` is ok or degraded, `checks` say why.", {JSON: {}}
            )
        },
        "/v1/health": {"get": _operation("As /health.", {JSON: {}})},
        "/ping": {
            "get": _operation("The same, without content.", {}),
            "post": _operation("The same, for those who ask so.", {}),
        },
        "/version": {"get": _operation("The version of splitserve.", {JSON: {}})},
        "/ready": {"get": _operation(ready, {JSON: {}}, "503")},
        "/metrics": {"get": _operation("Prometheus metrics.", {TEXT: {}}, *OF_OPERATORS)},
        "/debug/state": {
            "get": _operation("Every worker with its role, blocks and requests.", {JSON: {}}, *OF_OPERATORS)
        },
        "/load": {
            "get": _operation("Requests that are open, waiting, running.", _json("Load"), *OF_OPERATORS)
        },
        "/server_info": {
            "get": _operation("Version, settings and workers.", _json("ServerInfo"), *OF_OPERATORS)
        },
        "/props": {"get": _operation("Context and sampling defaults.", _json("Properties"), "401")},
        "/tokenizer_info": {
            "get": _operation("The tokenizer's configuration, with the chat template.", {JSON: {}}, "401")
        },
        "/openapi.json": {"get": _operation("This.", {JSON: {}})},
        "/docs": {"get": _operation("This as a page.", {"text/html": {}})},
    }


def _responses() -> dict[str, Any]:
    """Stored responses, by id."""
    one, response, path = _in_path("id"), _json("Response"), "/v1/responses/{id}"
    found = ("400", "401", "404")
    return {
        path: {
            **one,
            "get": _operation("A stored response; with `stream=true` its events.", response, *found),
            "delete": _operation("Delete it.", _json("DeletedResponse"), *found),
        },
        f"{path}/cancel": {
            **one,
            "post": _operation("End one that runs in the background.", response, *found),
        },
        f"{path}/input_items": {**one, "get": _operation("What it answers.", {JSON: {}}, *found)},
    }


def batch_paths() -> dict[str, Any]:
    """/v1/files and /v1/batches."""
    parts = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
    upload = {"type": "object", "required": ["file", "purpose"], "properties": parts}
    one, file, batch = _in_path("id"), _json("File"), _json("Batch")
    found = ("401", "404")
    order = _query("order", {"enum": ["asc", "desc"], "default": "desc"})
    return {
        "/v1/files": {
            "post": _operation(
                "Upload the requests of a batch.", file, *OF_BODIES, body=("multipart/form-data", upload)
            ),
            "get": {
                **_operation("Newest first, by page.", _page("File"), "400", "401"),
                "parameters": [*_by_page(MAX_FILES_PAGE), order, _query("purpose", {"type": "string"})],
            },
        },
        "/v1/files/{id}": {
            **one,
            "get": _operation("A file, without its content.", file, *found),
            "delete": _operation("Delete a file.", _json("DeletedFile"), *found),
        },
        "/v1/files/{id}/content": {
            **one,
            "get": _operation("A file's content.", {"application/octet-stream": {}}, *found),
        },
        "/v1/batches": {
            "post": _operation(
                "Run a file's requests.", batch, *OF_BODIES, body=(JSON, _reference("BatchRequest"))
            ),
            "get": {
                **_operation("Newest first, by page.", _page("Batch"), "400", "401"),
                "parameters": _by_page(MAX_PAGE),
            },
        },
        "/v1/batches/{id}": {**one, "get": _operation("A batch and how far it is.", batch, *found)},
        "/v1/batches/{id}/cancel": {
            **one,
            "post": _operation("Run no more of its requests.", batch, "400", *found),
        },
    }


def _invocations() -> dict[str, Any]:
    """POST /invocations: either of two bodies, answered as at its own path."""
    kinds = ("ChatCompletionRequest", "CompletionRequest"), ("ChatCompletion", "Completion")
    asked, answer = ({"anyOf": [_reference(name) for name in names]} for names in kinds)
    text = "As SageMaker asks: a chat completion where the body has `messages`, else a completion."
    return _operation(text, {JSON: {"schema": answer}, EVENTS: {}}, *OF_GENERATION, body=(JSON, asked))


def _post(path: str, kind: type[BaseModel], text: str) -> dict[str, Any]:
    generates = path.startswith("/v1/") and "tokenize" not in path
    good: dict[str, Any] = {**_json(ANSWERS[path]), **({EVENTS: {}} if generates else {})}
    errors = OF_GENERATION if generates else OF_BODIES
    shape = "MessagesError" if path.startswith("/v1/messages") else "Error"
    return _operation(text, good, *errors, body=(JSON, _reference(kind.__name__)), error=shape)


def _operation(
    summary: str,
    content: dict[str, Any],
    *errors: str,
    body: tuple[str, dict[str, Any]] | None = None,
    error: str = "Error",
) -> dict[str, Any]:
    """``body``: its media type and schema, where there is one. ``error``: the schema of its errors."""
    refusal = {JSON: {"schema": _reference(error)}}
    responses = {"200": {"description": "OK", "content": content}}
    responses |= {status: {"description": ERRORS[status], "content": refusal} for status in errors}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        media, schema = body
        operation["requestBody"] = {"required": True, "content": {media: {"schema": schema}}}
    return operation


def _in_path(name: str) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _by_page(most: int) -> list[dict[str, Any]]:
    return [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        _query("after", {"type": "string"}),
    ]


def _page(name: str) -> dict[str, Any]:
    return {JSON: {"schema": answers.page(_reference(name))}}


def _json(name: str) -> dict[str, Any]:
    return {JSON: {"schema": _reference(name)}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
