"""Ollama's API in /openapi.json, where it is spoken."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ..dialects.ollama import ShowRequest
from ..dialects.ollama_body import OllamaChatRequest, OllamaGenerateRequest
from ..dialects.ollama_embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from .openapi_answers import COUNT, STRING, array, record
from .openapi_parts import JSON, OF_BODIES, OF_GENERATION, content, get, operation, reference

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
        "/api/chat": _post(
            OllamaChatRequest,
            "OllamaChat",
            "Answer a conversation as Ollama does: lines of OllamaChat, or one with `stream` false.",
            *OF_GENERATION,
            lines=True,
        ),
        "/api/generate": _post(
            OllamaGenerateRequest,
            "OllamaText",
            "Answer a prompt as Ollama does: lines of OllamaText, or one with `stream` false.",
            *OF_GENERATION,
            lines=True,
        ),
        "/api/embed": _post(
            OllamaEmbedRequest, "OllamaVectors", "The vectors of one or several texts.", *OF_GENERATION
        ),
        "/api/embeddings": _post(
            OllamaEmbeddingsRequest, "OllamaVector", "The vector of a text.", *OF_GENERATION
        ),
        "/api/show": _post(
            ShowRequest, "OllamaModel", "The model's context, template and abilities.", *OF_BODIES
        ),
        "/api/tags": _get("The model that is served.", content("OllamaModels")),
        "/api/ps": _get("The same, as loaded.", content("OllamaModels")),
        "/api/version": _get("The version of Ollama whose API this is.", {JSON: {}}),
    }


def _post(kind: type[BaseModel], answer: str, text: str, *errors: str, lines: bool = False) -> dict[str, Any]:
    good = {**content(answer), **({LINES: {}} if lines else {})}
    body = JSON, reference(kind.__name__)
    return {"post": operation(text, good, *errors, body=body, error="OllamaError")}


def _get(summary: str, good: dict[str, Any]) -> dict[str, Any]:
    return get(summary, good, "401", error="OllamaError")
