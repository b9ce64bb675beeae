"""Schemas of answers for /openapi.json, by name. What a client may send is checked by models, whose schemas
these stand beside."""

from __future__ import annotations

from typing import Any

from ..batch.store import OPEN
from ..generate.plan import CLASS_TIERS

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
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


def operation(
    summary: str,
    content: dict[str, Any],
    *errors: str,
    body: tuple[str, dict[str, Any]] | None = None,
    error: str = "Error",
) -> dict[str, Any]:
    """``body``: its media type and schema, where there is one. ``error``: the schema of its errors."""
    refusal = {JSON: {"schema": reference(error)}}
    responses = {"200": {"description": "OK", "content": content}}
    responses |= {status: {"description": ERRORS[status], "content": refusal} for status in errors}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        media, schema = body
        operation["requestBody"] = {"required": True, "content": {media: {"schema": schema}}}
    return operation


def get(
    summary: str, content: dict[str, Any], *errors: str, error: str = "Error"
) -> dict[str, dict[str, Any]]:
    """Return the GET of a path; see ``operation``."""
    return {"get": operation(summary, content, *errors, error=error)}


def in_path(name: str) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def by_page(most: int) -> list[dict[str, Any]]:
    return [
        query("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        query("after", {"type": "string"}),
    ]


def page(name: str) -> dict[str, Any]:
    """Return the content of a list, newest first."""
    ends = {"first_id": STRING_OR_NULL, "last_id": STRING_OR_NULL}
    listed = {"object": {"const": "list"}, "data": array(reference(name)), **ends}
    return {JSON: {"schema": record(**listed, has_more={"type": "boolean"})}}


def content(name: str) -> dict[str, Any]:
    return {JSON: {"schema": reference(name)}}


def reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
STRING: dict[str, Any] = {"type": "string"}
STRING_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}
INTEGER: dict[str, Any] = {"type": "integer"}
LOGPROB: dict[str, Any] = {"type": "number", "minimum": -9999}
REASONS = ["stop", "length", "tool_calls", "function_call", "timeout"]


def record(optional: dict[str, Any] | None = None, /, **required: Any) -> dict[str, Any]:
    """An object with these properties; there may be others."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def array(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_USAGE = record(
    {
        "prompt_tokens_details": record(cached_tokens=COUNT),
        "completion_tokens_details": record(reasoning_tokens=COUNT),
        "splitserve": {"type": "object", "description": "Seconds by stage."},
    },
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
)
_TIER = {"enum": sorted(set(CLASS_TIERS.values()))}
_IDS = {"token_ids": array(COUNT), "prompt_token_ids": array(COUNT)}

_TEXT_LOGPROBS = record(
    tokens=array(STRING),
    token_logprobs=array(or_null(LOGPROB)),
    top_logprobs=array(or_null({"type": "object", "additionalProperties": LOGPROB})),
    text_offset=array(COUNT),
)
_TOKEN = {
    "token": STRING,
    "logprob": LOGPROB,
    "bytes": array({"type": "integer", "minimum": 0, "maximum": 255}),
}
_CHAT_LOGPROBS = record(
    content=array(record(**_TOKEN, top_logprobs=array(record(**_TOKEN)))), refusal={"type": "null"}
)

_CALLED = record(name=STRING, arguments=STRING)
_CALL = record(id=STRING, type={"const": "function"}, function=_CALLED)
_MESSAGE = record(
    {
        "reasoning_content": STRING,
        "reasoning": STRING,
        "tool_calls": array(_CALL, minItems=1),
        "function_call": _CALLED,
    },
    role={"const": "assistant"},
    content=STRING_OR_NULL,
    refusal={"type": "null"},
)
_PART_OF_CALLED = record({"name": STRING, "arguments": STRING})
_PART_OF_CALL = record(
    {"id": STRING, "type": {"const": "function"}, "function": _PART_OF_CALLED}, index=COUNT
)
_DELTA = record(
    {
        "role": {"const": "assistant"},
        "content": STRING,
        "reasoning_content": STRING,
        "reasoning": STRING,
        "tool_calls": array(_PART_OF_CALL, minItems=1),
        "function_call": _PART_OF_CALLED,
    }
)


def _answer(
    kind: str, choices: dict[str, Any], usage: dict[str, Any], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    required = {
        "id": STRING,
        "object": {"const": kind},
        "created": INTEGER,
        "model": STRING,
        "choices": choices,
        **usage,
    }
    return record({"service_tier": _TIER, **(more or {})}, **required)


def _whole(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    item = record(_IDS, index=COUNT, finish_reason={"enum": REASONS}, **choice)
    return _answer(kind, array(item, minItems=1), {"usage": _USAGE})


def _chunk(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The last one has no choices where usage was asked for. "error" ends a choice that could not be
    finished."""
    item = record(_IDS, index=COUNT, finish_reason={"enum": [*REASONS, "error", None]}, **choice)
    return _answer(kind, array(item), {}, {"usage": or_null(_USAGE), "obfuscation": STRING})


def _of_prompts(**fields: dict[str, Any]) -> dict[str, Any]:
    """An answer without tokens."""
    more = {"prompt_tokens_details": record(cached_tokens=COUNT), "splitserve": _OBJECT}
    usage = record(more, prompt_tokens=COUNT, total_tokens=COUNT)
    return record({"service_tier": _TIER}, **fields, model=STRING, usage=usage)


_LIST = {"id": STRING, "object": {"const": "list"}, "created": INTEGER}
_OBJECT, _SCORE = {"type": "object"}, {"type": "number"}
_RESULT = record({"document": record(text=STRING)}, index=COUNT, relevance_score=_SCORE)
_VECTOR = {"anyOf": [array({"type": "number"}, minItems=1), {**STRING, "contentEncoding": "base64"}]}
_MODEL = record(
    id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, max_model_len=COUNT, root=STRING,
    parent=STRING_OR_NULL,
)  # fmt: skip
_TEXT = {"text": STRING, "logprobs": or_null(_TEXT_LOGPROBS)}
_CHAT = {"logprobs": or_null(_CHAT_LOGPROBS)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": record(error=record(message=STRING, type=STRING, param=STRING_OR_NULL, code=STRING_OR_NULL)),
    "Completion": _whole("text_completion", _TEXT),
    "CompletionChunk": _chunk("text_completion", _TEXT),
    "ChatCompletion": _whole("chat.completion", {"message": _MESSAGE, **_CHAT}),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", {"delta": _DELTA, **_CHAT}),
    "Embeddings": _of_prompts(
        object={"const": "list"},
        data=array(record(object={"const": "embedding"}, index=COUNT, embedding=_VECTOR), minItems=1),
    ),
    "Ranking": _of_prompts(id=STRING, results=array(_RESULT)),
    "Scores": _of_prompts(
        **_LIST, data=array(record(index=COUNT, object={"const": "score"}, score=_SCORE), minItems=1)
    ),
    "Response": record(
        id=STRING,
        object={"const": "response"},
        created_at=INTEGER,
        status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        model=STRING,
        output=array(record(id=STRING, type={"enum": ["message", "reasoning", "function_call"]})),
        usage={"type": ["object", "null"]},
        error={"type": ["object", "null"]},
        previous_response_id=STRING_OR_NULL,
    ),
    "DeletedResponse": record(id=STRING, object={"const": "response"}, deleted={"const": True}),
    "MessagesAnswer": record(
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content=array(record(type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=STRING_OR_NULL,
        usage=record(
            input_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            output_tokens=COUNT,
        ),
    ),
    "TokenCount": record(input_tokens=COUNT),
    "MessagesError": record(type={"const": "error"}, error=record(type=STRING, message=STRING)),
    "Tokens": record(
        {"token_strs": or_null(array(STRING_OR_NULL))}, count=COUNT, max_model_len=COUNT, tokens=array(COUNT)
    ),
    "Text": record(prompt=STRING),
    "Properties": record(
        default_generation_settings=record(n_ctx=COUNT, params=_OBJECT),
        total_slots=COUNT,
        model_alias=STRING,
        model_path=STRING,
        modalities=_OBJECT,
        chat_template=STRING,
        bos_token=STRING,
        eos_token=STRING,
        build_info=STRING,
    ),
    "Load": record(server_load=COUNT, waiting=COUNT, running=COUNT),
    "ServerInfo": record(
        version=STRING, model=STRING, max_model_len=COUNT, workers=_OBJECT, settings=_OBJECT
    ),
    "Models": record(object={"const": "list"}, data=array(_MODEL)),
    "Model": _MODEL,
}
BATCH_SCHEMAS: dict[str, dict[str, Any]] = {
    "File": record(
        id=STRING,
        object={"const": "file"},
        bytes=COUNT,
        created_at=INTEGER,
        filename=STRING,
        purpose={"enum": ["batch", "batch_output"]},
    ),
    "DeletedFile": record(id=STRING, object={"const": "file"}, deleted={"const": True}),
    "Batch": record(
        id=STRING,
        object={"const": "batch"},
        endpoint=STRING,
        input_file_id=STRING,
        created_at=INTEGER,
        status={"enum": [*OPEN, "failed", "completed", "expired", "cancelled"]},
        request_counts=record(total=COUNT, completed=COUNT, failed=COUNT),
        usage=record(
            input_tokens=COUNT,
            input_tokens_details=record(cached_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=record(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        ),
        output_file_id=STRING_OR_NULL,
        error_file_id=STRING_OR_NULL,
    ),
}
