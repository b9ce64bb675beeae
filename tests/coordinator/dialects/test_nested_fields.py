"""Every field at any depth of OpenAI's and Anthropic's published descriptions is honoured, refused, or on a
short list with the reason.

The descriptions are those of their own clients. The walk puts each object and each of its fields into a body:
one that is taken must be known, or listed here with the reason why it is ignored; a new one fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any, Literal, Required, get_args, get_origin, get_type_hints

import orjson
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import input_token_count_params as openai_counts
from openai.types.responses import response_create_params as responses
from typing_extensions import is_typeddict

from splitserve.coordinator.dialects import messages_body, responses_body, responses_tools
from splitserve.coordinator.dialects.messages_body import CountTokensRequest, MessagesRequest
from splitserve.coordinator.dialects.responses_body import CountInputRequest, ResponsesRequest
from splitserve.coordinator.dialects.responses_items import items_of
from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.bodies.fields import IGNORED as OF_CHAT
from splitserve.coordinator.generate.bodies.fields import Body
from splitserve.coordinator.generate.plan import parse
from splitserve.coordinator.validation import validated

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
CHAT: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOL: Any = {"type": "function", "name": "f", "parameters": SCHEMA}
CLAUDE: Any = {"name": "f", "input_schema": SCHEMA}
Fields = dict[str, Any]
Check = Callable[[Fields], list[str]]


def check_chat(body: Fields) -> list[str]:
    return parse("/v1/chat/completions", orjson.dumps(body)).unknown_fields()


def check_completion(body: Fields) -> list[str]:
    return parse("/v1/completions", orjson.dumps(body)).unknown_fields()


def check_responses(body: Fields, kind: type[CountInputRequest] = ResponsesRequest) -> list[str]:
    asked = validated(kind, orjson.dumps(body))
    items = [item for item in items_of(asked.input or "Hi") if item["type"] != "item_reference"]
    chat = asked.for_chat([*items, *items_of("Hi")])
    check_chat({name: value for name, value in chat.items() if value is not None})
    return asked.unknown_fields()


def check_messages(body: Fields, kind: type[CountTokensRequest] = MessagesRequest) -> list[str]:
    asked = validated(kind, orjson.dumps(body))
    check_chat(asked.for_chat())
    return asked.unknown_fields()


# anthropic takes 3 s to import, in every process that collects this file
DESCRIBED: dict[str, tuple[Any, Fields, Check]] = {
    "chat": (
        chats.CompletionCreateParamsStreaming,
        {"messages": [USER], "stream": True, "tools": [CHAT]},
        check_chat,
    ),
    "completions": (
        completions.CompletionCreateParamsStreaming, {"prompt": "Hi", "stream": True}, check_completion
    ),
    "responses": (
        responses.ResponseCreateParamsStreaming, {"input": "Hi", "tools": [TOOL]}, check_responses
    ),
    "input_tokens": (
        openai_counts.InputTokenCountParams,
        {"input": "Hi", "tools": [TOOL]},
        lambda body: check_responses(body, CountInputRequest),
    ),
    "messages": (
        "anthropic.types.message_create_params:MessageCreateParamsStreaming",
        {"messages": [USER], "max_tokens": 5, "tools": [CLAUDE]},
        check_messages,
    ),
    "count_tokens": (
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
        {"messages": [USER], "tools": [CLAUDE]},
        lambda body: check_messages(body, CountTokensRequest),
    ),
}  # fmt: skip
IGNORED = {
    **OF_CHAT,
    **responses_body.IGNORED,
    **responses_tools.IGNORED_OF_TOOLS,
    **messages_body.IGNORED,
    "prompt_cache_breakpoint": "what a cache keeps",
    "phase": "which of the assistant's texts was its last",
    "status": "of an item that an answer had",
    "caller": "what has made a call: the model itself",
    "toolset_name": "of tools that the service runs",
    "annotations": "what an answer's text refers to",
    "logprobs": "of an answer's text",
    "citations": "what a text refers to",
    "summary": "of a thought, beside the whole of it",
    "signature": "of a thought, which is not signed here",
}
"""By name: what it is about, which is why it cannot change an answer."""
READ = {
    *("type", "role", "id", "text", "refusal", "content", "output", "input", "name", "namespace", "call_id"),
    *("arguments", "encrypted_content", "thinking", "data", "tool_use_id", "is_error", "format", "mode"),
    *("definition", "syntax", "function", "allowed_tools", "grammar", "json_schema", "schema", "description"),
    *("properties", "required", "tools", "strict", "parameters", "async", "allowed_callers", "verbosity"),
    *("image_url", "url", "detail", "source", "media_type", "transformations", "oversized_image"),
}
"""Fields of objects that are checked by functions, which have no list of known fields."""
SAMPLES: Fields = {
    **dict.fromkeys(("image_url", "url"), "data:image/png;base64,eA=="),
    **dict.fromkeys(("parameters", "schema", "input_schema"), SCHEMA),
    "name": "f",
    "arguments": "{}",
    "definition": "a",
    "json_schema": {"name": "f", "schema": SCHEMA},
    "tools": [{"type": "function", "name": "f", "function": {"name": "f"}}],
}
"""Values of fields where not any value of their type is taken."""


def sample(kind: Any) -> Any:
    """Return a value of this type: of an object what it must have."""
    if is_typeddict(kind):
        needed = [
            name
            for name, each in get_type_hints(kind, include_extras=True).items()
            if get_origin(each) is Required or name == "call_id"
        ]
        return {name: value_of(name, get_type_hints(kind)[name]) for name in needed}
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) in (list, Iterable, Sequence):
        return [sample(get_args(kind)[0])]
    if given := [each for each in get_args(kind) if each is not type(None)]:
        return {} if get_origin(kind) is dict else sample(str if str in given else given[0])
    return {str: "x", bool: True, int: 1, float: 0.5}.get(kind, {})


def value_of(name: str, kind: Any) -> Any:
    return SAMPLES.get(name, sample(kind)) if get_origin(kind) is not Literal else sample(kind)


def objects_in(kind: Any, listed: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the objects that a field may hold, each with whether they come in a list."""
    if is_typeddict(kind):
        yield kind, listed
    for each in get_args(kind) if get_origin(kind) is not dict else ():
        yield from objects_in(each, listed or get_origin(kind) in (list, Iterable, Sequence))


class Walk:
    """Through all objects of one description that are taken."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self.seen: set[Any] = set()
        self.refused: list[str] = []
        self.silent: list[str] = []  # neither honoured nor refused nor listed

    def into(self, kind: Any, whole: Fields, wrap: Callable[[Any], Fields], path: str) -> None:
        """Visit an object. ``whole``: of this kind; ``wrap``: puts one into a body."""
        if kind in self.seen or whole.get("type") in responses_tools.HOSTED:
            return
        if self._unknown(wrap(whole)) is None:
            self.refused.append(path)
            return
        self.seen.add(kind)
        for name, inner in get_type_hints(kind).items():
            self._field(name, {**whole, name: value_of(name, inner)}, wrap, f"{path}.{name}")
            for each, listed in objects_in(inner) if name not in IGNORED else ():

                def around(value: Any, name: str = name, listed: bool = listed) -> Fields:
                    return wrap({**whole, name: [value] if listed else value})

                self.into(each, sample(each), around, f"{path}.{name}({each.__name__})")

    def _field(self, name: str, changed: Fields, wrap: Callable[[Any], Fields], path: str) -> None:
        unknown = self._unknown(wrap(changed))
        if unknown is None or name in IGNORED:
            return
        if name in {each.rpartition(".")[2] for each in unknown} or name not in READ | KNOWN:
            self.silent.append(path)

    def _unknown(self, body: Fields) -> list[str] | None:
        """Return what is unknown in a body; None if it is refused."""
        try:
            return self._check(body)
        except InvalidRequest:
            return None


def all_bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        yield each
        yield from all_bodies(each)


KNOWN = {field.alias or name for body in all_bodies() for name, field in body.model_fields.items()}


@pytest.mark.parametrize("described", DESCRIBED)
def test_every_field_at_any_depth_has_its_place(described: str) -> None:
    kind, body, check = DESCRIBED[described]
    if isinstance(kind, str):
        kind = resolve_name(kind)
    walk = Walk(check)
    walk.into(kind, body, lambda value: value, described)
    assert not walk.silent
    least = {"completions": 2}.get(described, 20)
    assert len(walk.seen) >= least, [each.__name__ for each in walk.seen]
    assert walk.refused or described == "completions"
