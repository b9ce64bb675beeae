"""What operations of /openapi.json are made of."""

from __future__ import annotations

from typing import Any

from .openapi_answers import STRING_OR_NULL, array, record

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
